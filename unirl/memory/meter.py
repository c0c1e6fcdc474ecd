"""The GPU's own account of memory, per phase."""

from __future__ import annotations

import torch


class CudaMeter:
    """torch's allocator: what tensors of this process take, without the CUDA context."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def allocated_bytes(self) -> int | None:
        return torch.cuda.memory_allocated(self._device)

    def peak_bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated(self._device)
