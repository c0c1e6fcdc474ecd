"""The inputs that the reference numbers in `tests/golden` were computed on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

GOLDEN = Path(__file__).parent / "golden"


@dataclass(frozen=True)
class GoldenTensors:
    """One layout's draws; velocities v_old and v_ref lie near v."""

    x: Tensor
    v: Tensor
    v_old: Tensor
    v_ref: Tensor
    x0: Tensor
    z: Tensor

    def next_latents(self, sigma: Tensor, sigma_next: Tensor) -> Tensor:
        """The state after the step that log-probs are asked of; sigmas are scalars."""
        dt = sigma_next - sigma
        return self.x + dt * self.v + 0.7 * (-dt).sqrt() * self.z


def golden_tensors() -> dict[str, GoldenTensors]:
    """`img` [2, 4, 8, 8] and `packed` [2, 16, 64]."""
    random = np.random.RandomState(0)
    layouts = {}
    for layout, shape in (("img", (2, 4, 8, 8)), ("packed", (2, 16, 64))):
        x, v, v_old, v_ref, x0, z = (
            torch.from_numpy(random.standard_normal(shape).astype(np.float32)) for _ in range(6)
        )
        layouts[layout] = GoldenTensors(x, v, v + 0.05 * v_old, v + 0.10 * v_ref, x0, z)
    return layouts


def golden(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / name).read_text())
