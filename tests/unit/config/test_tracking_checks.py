"""A tracker whose package is missing is a problem of the configuration."""

from __future__ import annotations

import importlib.util

import pytest
from builders import run_config

from unirl.config.tracking_checks import tracker_packages


@pytest.mark.parametrize("package", ["tensorboard", "trackio"])
def test_a_missing_package_is_named_with_the_extra_to_install(
    monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    key = f"logging.report_to_{package}"
    config = run_config({key: True})
    assert list(tracker_packages(config)) == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (problem,) = tracker_packages(config)
    assert problem.key == key
    assert f"unirl[{package}]" in problem.message
    assert list(tracker_packages(run_config({}))) == []
