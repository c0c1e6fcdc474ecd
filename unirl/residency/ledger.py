"""Bytes on the device and on the host: who holds how much, the peak, and the budget."""

from __future__ import annotations

from collections.abc import Iterable

from unirl.core.components import Movable
from unirl.core.errors import ResidencyError
from unirl.residency.problem import size_text


class Ledger:
    """Accounts of both memories, read off the components whenever something moves.

    Components that share a host copy hold it once. Activations and workspace are not accounted.
    """

    def __init__(self, budget_bytes: int | None) -> None:
        """`budget_bytes`: what components may take on the device in all; None: no limit."""
        self._budget_bytes = budget_bytes
        self._device: dict[str, int] = {}
        self._host: dict[str, int] = {}
        self.peak_device_bytes = 0

    @property
    def device_bytes(self) -> int:
        return sum(self._device.values())

    @property
    def host_bytes(self) -> int:
        return sum(self._host.values())

    def read(self, parts: Iterable[Movable]) -> None:
        """Take every component's bytes as they are now: moments, for one, grow in a step."""
        self._device.clear()
        self._host.clear()
        for part in parts:
            self.update(part)

    def update(self, part: Movable) -> None:
        """Take one component's bytes as they are now."""
        self._device[part.name] = part.num_bytes() if part.is_resident else 0
        self._host[part.host_key] = max(part.host_bytes(), self._host.get(part.host_key, 0))
        self.peak_device_bytes = max(self.peak_device_bytes, self.device_bytes)

    def expect(self, part: Movable) -> None:
        """Count a component that is on its way onto the device as if it were there."""
        self._device[part.name] = part.num_bytes()
        self.peak_device_bytes = max(self.peak_device_bytes, self.device_bytes)

    def has_room(self, parts: Iterable[Movable], within_bytes: int | None = None) -> bool:
        """Whether these parts fit beside what is on the device; `within_bytes`: a tighter limit."""
        wanted = self.device_bytes + sum(part.num_bytes() for part in parts)
        limits = (self._budget_bytes, within_bytes)
        return all(limit is None or wanted <= limit for limit in limits)

    def require_room(self, part: Movable) -> None:
        """Raise ResidencyError when the part would not fit beside what is on the device."""
        if self.has_room([part]):
            return
        assert self._budget_bytes is not None
        largest = sorted(self._device.items(), key=lambda item: (-item[1], item[0]))[:3]
        held = ", ".join(f"{name} {size_text(num_bytes)}" for name, num_bytes in largest)
        raise ResidencyError(
            f"{part.name} needs {size_text(part.num_bytes())} beside "
            f"{size_text(self.device_bytes)} on the device, which is more than "
            f"device_budget_gib ({size_text(self._budget_bytes)}); the largest there: {held}. Park "
            "more (train_resident, rollout_resident, reward_resident), or raise device_budget_gib."
        )
