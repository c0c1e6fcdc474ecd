"""What can be wrong with trackers before any of them starts."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from unirl.config.problem import Problem
from unirl.config.schema import RunConfig


def tracker_packages(config: RunConfig) -> Iterator[Problem]:
    asked = {
        "tensorboard": config.logging.report_to_tensorboard,
        "trackio": config.logging.report_to_trackio,
    }
    for package, is_asked in asked.items():
        if is_asked and importlib.util.find_spec(package) is None:
            key = f"logging.report_to_{package}"
            yield Problem(
                key,
                f"is true, which needs {package}: not installed. Install it with "
                f"pip install 'unirl[{package}]', or set {key}=false.",
            )
