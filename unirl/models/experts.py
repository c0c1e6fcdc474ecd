"""Two denoising networks behind one call, each for its own noise levels (Wan 2.2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class NoiseLevelExperts(nn.Module):
    """`transformer` answers rows at or above the boundary, `transformer_2` those below.

    Both run in every call, because ranks whose rows are of different phases must still gather the
    same shards and reduce the same gradients: a network without rows is asked about one patch,
    and its answer counts 0 times.
    """

    def __init__(self, high: nn.Module, low: nn.Module, boundary: float) -> None:
        """boundary: a timestep."""
        super().__init__()
        self.transformer = high
        self.transformer_2 = low
        self.boundary = boundary

    def forward(
        self, hidden_states: Tensor, timestep: Tensor, *, return_dict: bool, **conditions: Tensor
    ) -> tuple[Tensor]:
        """([B, C, f, h, w],) for hidden_states [B, C', f, h, w], timestep [B] and conditions of B
        rows."""
        # Through Python numbers: each network gets a batch whose size is known.
        is_high = [time >= self.boundary for time in timestep.tolist()]
        inputs = {"hidden_states": hidden_states, "timestep": timestep, **conditions}
        if all(is_high) or not any(is_high):
            asked, idle = self.transformer, self.transformer_2
            if not is_high[0]:
                asked, idle = idle, asked
            (answer,) = asked(**inputs, return_dict=return_dict)
            return (answer + _nothing(idle, inputs),)
        return (self._both(is_high, inputs),)

    def _both(self, is_high: list[bool], inputs: dict[str, Tensor]) -> Tensor:
        high = [row for row, wanted in enumerate(is_high) if wanted]
        low = [row for row, wanted in enumerate(is_high) if not wanted]
        (of_high,) = self.transformer(**_rows(inputs, high), return_dict=False)
        (of_low,) = self.transformer_2(**_rows(inputs, low), return_dict=False)
        order = torch.tensor([*high, *low], device=of_high.device).argsort()
        return torch.cat([of_high, of_low])[order]


def _rows(inputs: dict[str, Tensor], rows: list[int]) -> dict[str, Tensor]:
    index = torch.tensor(rows, device=inputs["timestep"].device)
    return {name: tensor[index] for name, tensor in inputs.items()}


def _nothing(network: Any, inputs: dict[str, Tensor]) -> Tensor:
    """[] 0, by way of the network: its weights get gradients of 0 where others' do."""
    frames, height, width = network.config["patch_size"]
    one = _rows(inputs, [0])
    one["hidden_states"] = one["hidden_states"][:, :, :frames, :height, :width]
    (answer,) = network(**one, return_dict=False)
    return 0 * answer.sum()
