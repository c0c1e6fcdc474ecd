"""Settings every test shares."""

import os
import sys
import tempfile
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

import pytest
import torch

pytest_plugins = ["rank_pool"]

# Two threads are 2 to 100 times slower than one for models this small on a busy machine.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def forget_modules_written_by_the_test() -> Iterator[None]:
    """Several tests write a `my_rewards.py` of their own; the next must not get the last one's."""
    yield
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None) or ""
        if path.startswith(tempfile.gettempdir()) and "pytest-of-" in path:
            del sys.modules[name]
