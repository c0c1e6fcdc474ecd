"""Two denoising networks behind one call, each for its own noise levels (Wan 2.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class NoiseLevelExperts(nn.Module):
    """`transformer` answers rows at or above the boundary, `transformer_2` those below.

    Both run in every call and in this order, because ranks whose rows are of different phases must
    still gather the same shards and reduce the same gradients: a network without rows is asked
    about one patch, and its answer counts 0 times.
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
        inputs = {"hidden_states": hidden_states, "timestep": timestep, **conditions}
        # Through Python numbers: each network gets a batch whose size is known.
        is_high = [time >= self.boundary for time in timestep.tolist()]
        high = [row for row, wanted in enumerate(is_high) if wanted]
        low = [row for row, wanted in enumerate(is_high) if not wanted]
        of_high = _answer(self.transformer, inputs, high)
        of_low = _answer(self.transformer_2, inputs, low)
        if not high or not low:  # one of them is a plain 0
            return (of_high + of_low,)
        order = torch.tensor([*high, *low], device=of_high.device).argsort()
        return (torch.cat([of_high, of_low])[order],)


def _answer(network: Any, inputs: Mapping[str, Tensor], rows: Sequence[int]) -> Tensor:
    """[len(rows), C, f, h, w]; without rows a 0 by way of the network, so that its weights get
    gradients of 0 where others' do."""
    if not rows:
        frames, height, width = network.config["patch_size"]
        one = _select(inputs, [0])
        one["hidden_states"] = one["hidden_states"][:, :, :frames, :height, :width]
        (answer,) = network(**one, return_dict=False)
        return 0 * answer.sum()
    whole = len(rows) == len(inputs["timestep"])
    (answer,) = network(**(inputs if whole else _select(inputs, rows)), return_dict=False)
    return answer


def _select(inputs: Mapping[str, Tensor], rows: Sequence[int]) -> dict[str, Tensor]:
    index = torch.tensor(rows, device=inputs["timestep"].device)
    return {name: tensor[index] for name, tensor in inputs.items()}
