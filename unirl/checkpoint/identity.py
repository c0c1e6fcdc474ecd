"""What a run depends on beside its configuration: the files it reads and the code that runs."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import version

from unirl import __version__
from unirl.config.resources import resolve_path
from unirl.config.schema import RunConfig
from unirl.config.suites import asked_suites
from unirl.core.fingerprint import path_digest

PACKAGES = ("torch", "diffusers", "transformers", "peft")


def identity(config: RunConfig) -> dict[str, str]:
    """Digests of the files behind model.path and data, and versions of what computes with them."""
    files = {"model.path": config.model.path, "data.train": config.data.train}
    files |= {suite.key: suite.path for suite in asked_suites(config)}
    digests = {
        f"content of {key}": path_digest(resolve_path(path))[:16] for key, path in files.items()
    }
    versions = {f"{name} version": version(name) for name in PACKAGES}
    own = {"unirl version": __version__, "python version": platform.python_version()}
    return {**digests, **own, **versions}


def differences(saved: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """`what: old -> new` for everything that both know and that differs."""
    return [
        f"{name}: {saved[name]} -> {now[name]}"
        for name in saved
        if name in now and saved[name] != now[name]
    ]
