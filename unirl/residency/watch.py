"""Is what the ledger says also what the device says?

After each transition off the device its memory must really have come back, and what is allocated
beside the components must not grow from cycle to cycle. Both are measured where the device can be
asked, and told as warnings: the plan was wrong, or somebody keeps memory that was given up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from unirl.residency.policy import Role
from unirl.residency.problem import size_text
from unirl.residency.transition import Transition

logger = logging.getLogger("unirl.residency")

TOLERANCE = 0.98
"""Share of the promised bytes that must come back; allocators round."""
GROWTH_BYTES = 2**30


class DeviceWatch:
    """Compares moves and ledger with the device's own account."""

    def __init__(self, allocated_bytes: Callable[[], int | None]) -> None:
        """`allocated_bytes`: what all tensors of this process take now; None: nothing to ask."""
        self._allocated_bytes = allocated_bytes
        self._entries: dict[Role, int] = {}
        self._residues: dict[Role, int] = {}

    def before_move(self) -> int | None:
        return self._allocated_bytes()

    def after_moves(self, transitions: Sequence[Transition], before: int | None) -> None:
        """Warn, with both numbers, when offloads gave back less than they should have."""
        after = self._allocated_bytes()
        left = [transition for transition in transitions if not transition.to_device]
        if not left or before is None or after is None:
            return
        # What the host builds again may never have been on this device.
        moves = (move for transition in left for move in transition.moves if move.was_tensors)
        promised = sum(move.moved.touched_bytes for move in moves)
        if before - after < TOLERANCE * promised:
            logger.warning(
                "%s gave back %s of %s: somebody still holds the memory of weights that left",
                ", ".join(transition.text for transition in left),
                size_text(max(before - after, 0)),
                size_text(promised),
            )

    def entered(self, role: Role, held_bytes: int) -> None:
        """Warn when the memory beside the components grew since the role's second entry.

        The first entry of a role is not like the later ones: nothing was sampled or trained yet.
        """
        allocated = self._allocated_bytes()
        if allocated is None:
            return
        self._entries[role] = self._entries.get(role, 0) + 1
        residue = allocated - held_bytes
        if self._entries[role] <= 2:
            self._residues[role] = residue
        elif residue > self._residues[role] + GROWTH_BYTES:
            logger.warning(
                "memory beside the weights grew from %s to %s since an earlier %s phase: "
                "something is never freed",
                size_text(self._residues[role]),
                size_text(residue),
                role.value,
            )
            self._residues[role] = residue
