"""What the notes of a simulated run, or the records of a real one, say about memory and traffic.

In go phases and lines of moves (see `trace`), out come peaks, bytes and seconds. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unirl.residency.directory import State
from unirl.residency.timeline import PhaseKind
from unirl.residency.transition import MoveRule

LOANS = ("optimizer step", "save")
"""Causes of moves that bring single components for a moment."""
DUPLEX = 1.4
"""How much more than one way alone a link carries with copies both ways: an A100 host on PCIe Gen4,
24 GB/s each way alone, was measured with 24 out beside 11 in. Never 2."""
Line = Mapping[str, Any]
"""A line of transitions.jsonl."""


@dataclass(frozen=True)
class PhaseNote:
    """One phase at work."""

    kind: PhaseKind
    rollout: int
    num_lines: int
    """Lines of moves written before it works."""
    device_bytes: Mapping[str, int]
    """What each component on the device takes there."""
    states: Mapping[str, State]
    """Where every component is that moves."""


@dataclass(frozen=True)
class Peak:
    """The fullest moment of a kind of phase."""

    note: PhaseNote
    workspace_bytes: int

    @property
    def kind(self) -> PhaseKind:
        return self.note.kind

    @property
    def total_bytes(self) -> int:
        return sum(self.note.device_bytes.values()) + self.workspace_bytes

    def largest(self, count: int) -> list[tuple[str, int]]:
        """The biggest holders of memory, the workspace among them."""
        holders = {**self.note.device_bytes, "workspace": self.workspace_bytes}
        return sorted(holders.items(), key=lambda item: (-item[1], item[0]))[:count]


@dataclass(frozen=True)
class Traffic:
    """Bytes that some moves copied each way, and freed without a copy."""

    onload_bytes: int
    offload_bytes: int
    dropped_bytes: int

    @property
    def moved_bytes(self) -> int:
        return self.onload_bytes + self.offload_bytes

    def seconds(self, onload_rate: float, offload_rate: float) -> float:
        """At these bytes per second, one way after the other."""
        return self.onload_bytes / onload_rate + self.offload_bytes / offload_rate

    def overlapped_seconds(self, onload_rate: float, offload_rate: float) -> float:
        """At these bytes per second, both ways at the same time."""
        inward, out = self.onload_bytes / onload_rate, self.offload_bytes / offload_rate
        return max(inward, out, (inward + out) / DUPLEX)


def peaks(notes: Iterable[PhaseNote], workspace: Mapping[PhaseKind, int]) -> list[Peak]:
    """The fullest moment of each kind of phase that occurs."""
    fullest: dict[PhaseKind, Peak] = {}
    for note in notes:
        peak = Peak(note, workspace.get(note.kind, 0))
        if note.kind not in fullest or peak.total_bytes > fullest[note.kind].total_bytes:
            fullest[note.kind] = peak
    return [fullest[kind] for kind in PhaseKind if kind in fullest]


def traffic(lines: Iterable[Line]) -> Traffic:
    onload = offload = dropped = 0
    for line in lines:
        if line["move"] == "onload":
            onload += line["moved_bytes"]
        else:
            offload += line["moved_bytes"]
        dropped += line["dropped_bytes"]
    return Traffic(onload, offload, dropped)


def steady_window(notes: Sequence[PhaseNote], lines: Sequence[Line]) -> list[Line]:
    """The moves of the dearest window that follows an optimizer step directly, without evaluation
    or save in between; of the last window where there is none such.

    Windows differ where weights are not pushed in each of them.
    """
    ends = [index for index, note in enumerate(notes) if note.kind is PhaseKind.TRAIN]
    plain = {PhaseKind.ROLLOUT, PhaseKind.REWARD, PhaseKind.TRAIN, PhaseKind.STEP}
    windows = [
        (first, last)
        for first, last in zip([-1, *ends], ends, strict=False)
        if {note.kind for note in notes[first + 1 : last + 1]} <= plain
    ]
    # The first window starts from another state: everything was built on the device.
    later = [window for window in windows if window[0] >= 0] or windows or [(-1, ends[-1])]

    def moves(first: int, last: int) -> Sequence[Line]:
        return lines[notes[first].num_lines if first >= 0 else 0 : notes[last].num_lines]

    return list(max((moves(*w) for w in reversed(later)), key=lambda m: traffic(m).moved_bytes))


def transitions(lines: Iterable[Line]) -> list[list[Line]]:
    """Lines grouped by the transition they belong to, in order."""
    grouped: dict[int, list[Line]] = {}
    for line in lines:
        grouped.setdefault(line["transition"], []).append(line)
    return list(grouped.values())


def handoffs(lines: Iterable[Line]) -> Iterator[list[Line]]:
    """Lines grouped by what was done at one time: a transition, or an overlapped handoff, whose
    last transition is the onload."""
    together: list[Line] = []
    for group in transitions(lines):
        together += group
        if not is_overlapped(group) or group[0]["move"] == "onload":
            yield together
            together = []
    if together:
        yield together


def is_overlapped(lines: Sequence[Line]) -> bool:
    """Whether what left and what came were copied at the same time."""
    return lines[0]["rule"] == MoveRule.OVERLAP.value


def seconds_of(lines: Sequence[Line], onload_rate: float, offload_rate: float) -> float:
    """Of moves, at these bytes per second."""
    return sum(
        traffic(group).overlapped_seconds(onload_rate, offload_rate)
        if is_overlapped(group)
        else traffic(group).seconds(onload_rate, offload_rate)
        for group in handoffs(lines)
    )


def transition_text(lines: Sequence[Line]) -> str:
    """`train offload`, as the log has it."""
    text = f"{lines[0]['role']} {lines[0]['move']}"
    return f"{text} ({lines[0]['cause']})" if lines[0]["cause"] in LOANS else text
