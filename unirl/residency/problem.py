"""What the search for the cheapest moves starts from: sizes, workspace, a budget and the keys.

Here is also what it cannot solve: a phase that does not fit although everything idle is parked that
may be. That is refused before anything loads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from unirl.core.errors import ConfigError
from unirl.residency.gaps import Part
from unirl.residency.policy import Role
from unirl.residency.timeline import PhaseKind

REMEDIES = {
    PhaseKind.ROLLOUT: "a smaller rollout.forward_batch_size",
    PhaseKind.REWARD: "fewer reward.scorers",
    PhaseKind.TRAIN: "a smaller stack.micro_batch_size, backend.activation_checkpointing=true",
    PhaseKind.STEP: "more devices (num_devices)",
    PhaseKind.EVALUATE_ROLLOUT: "a smaller eval_chunk_prompts",
    PhaseKind.EVALUATE_REWARD: "a smaller eval_chunk_prompts",
    PhaseKind.SAVE: "save_reads=host",
}
"""What makes a phase smaller that does not fit even when everything idle is parked."""


@dataclass(frozen=True)
class ResidencyProblem:
    """Everything that decides what fits and what moves."""

    parts: tuple[Part, ...]
    workspace: Mapping[PhaseKind, int]
    """Bytes beside the parts, for each kind of phase the run has: activations, caches, reserve."""
    budget_bytes: int
    explicit: Mapping[Role, bool | None]
    """The residency keys: true keeps the role's parts always, false parks them whenever idle, None
    leaves them to the search. A shared part is kept if one of its roles is, and parked only if all
    are."""
    kept_bytes: int = 0
    """Of the workspace, what lies there between phases too: recorded transitions."""

    @property
    def overlap_bytes(self) -> int:
        """What parts may take while some leave and others come."""
        return self.budget_bytes - self.kept_bytes

    def forced(self, part: Part) -> bool | None:
        """What the residency keys say about a part."""
        asked = {self.explicit[role] for role in part.roles}
        if True in asked:
            return True
        return None if None in asked else False

    def room(self, kind: PhaseKind) -> int:
        """Bytes free for idle parts in a phase of this kind."""
        needed = sum(part.num_bytes for part in self.parts if part.is_needed(kind))
        return self.budget_bytes - self.workspace[kind] - needed

    @property
    def fits(self) -> bool:
        """Whether every phase fits with everything idle parked that may be."""
        return all(sum(self._held(k).values()) <= self.budget_bytes for k in self.workspace)

    def require_fit(self) -> None:
        """Raise ConfigError unless every phase fits with everything idle parked that may be."""
        for kind in PhaseKind:
            if kind in self.workspace:
                self._require_fit(kind)

    def _require_fit(self, kind: PhaseKind) -> None:
        held = self._held(kind)
        if sum(held.values()) <= self.budget_bytes:
            return
        largest = sorted(held.items(), key=lambda item: (-item[1], item[0]))[:3]
        raise ConfigError(
            f"{kind.value} needs {size_text(sum(held.values()))} on the device, which has "
            f"{size_text(self.budget_bytes)}. The largest: "
            + ", ".join(f"{name} {size_text(num_bytes)}" for name, num_bytes in largest)
            + f". {self._advice(kind)} `unirl plan` shows all phases."
        )

    def _held(self, kind: PhaseKind) -> dict[str, int]:
        """What a phase holds at least: who works, who may not be parked, and the workspace."""
        held = {
            part.name: part.num_bytes
            for part in self.parts
            if part.is_needed(kind) or self.forced(part)
        }
        return held | {"workspace": self.workspace[kind]}

    def _advice(self, kind: PhaseKind) -> str:
        """The fewest pinned roles to release, largest first, or else how to shrink the phase."""
        if self.room(kind) < 0:
            return f"Use {REMEDIES[kind]} or a larger device (device_budget_gib)."
        relaxed, released = self, []
        while sum(relaxed._held(kind).values()) > self.budget_bytes:
            pinned = [role for role in Role if relaxed.explicit[role]]
            role = max(pinned, key=lambda role, now=relaxed: now._saved_by_release(role, kind))
            relaxed = relaxed._release(role)
            released.append(f"{role.value}_resident=false")
        return f"Set {' and '.join(released)}, or null to leave it to the search."

    def _saved_by_release(self, role: Role, kind: PhaseKind) -> int:
        return sum(self._held(kind).values()) - sum(self._release(role)._held(kind).values())

    def _release(self, role: Role) -> ResidencyProblem:
        return replace(self, explicit={**self.explicit, role: False})


def size_text(num_bytes: int) -> str:
    """GiB or, below one, MiB with one digit; KiB below a tenth of a MiB."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.1f} GiB"
    if num_bytes >= 2**20 / 10 or num_bytes == 0:
        return f"{num_bytes / 2**20:.1f} MiB"
    return f"{num_bytes / 2**10:.1f} KiB"
