"""The runs of a page with the names and colours they go by, and which of them are the same but for
their seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from unirl.report.outcome import Outcome, outcome_of
from unirl.report.reading import RunFiles
from unirl.report.settings import learns_the_same

NUM_COLOURS = 6


@dataclass(frozen=True)
class ShownRun:
    files: RunFiles
    outcome: Outcome
    label: str
    """Its name, with its folder where two have the same."""
    colour: int
    """Of its family."""
    dashed: bool = False
    """Whether all colours are taken already."""


@dataclass(frozen=True)
class Family:
    """Runs that differ in their seed only, often a single one."""

    label: str
    runs: tuple[ShownRun, ...]

    @property
    def unit(self) -> str:
        """What its runs are: a run that was repeated is not another seed."""
        return _unit([run.files for run in self.runs])

    @property
    def colour(self) -> int:
        return self.runs[0].colour

    @property
    def dashed(self) -> bool:
        return self.runs[0].dashed


def families(runs: Sequence[RunFiles]) -> list[Family]:
    """Runs grouped by what they learn, in order of their first one."""
    groups: list[list[RunFiles]] = []
    for run in runs:
        for group in groups:
            if learns_the_same(group[0], run):
                group.append(run)
                break
        else:
            groups.append([run])
    labels = _labels(runs)
    return [
        _family([(run, labels[run.path]) for run in group], place)
        for place, group in enumerate(groups)
    ]


def _family(group: Sequence[tuple[RunFiles, str]], place: int) -> Family:
    colour, dashed = place % NUM_COLOURS, place >= NUM_COLOURS
    runs = tuple(ShownRun(run, outcome_of(run), label, colour, dashed) for run, label in group)
    return Family(_family_label([run.label for run in runs], _unit([f for f, _ in group])), runs)


def _unit(runs: Sequence[RunFiles]) -> str:
    distinct = {run.config.get("seed") for run in runs}
    return "seeds" if len(distinct) == len(runs) else "runs"


def _family_label(labels: Sequence[str], unit: str) -> str:
    """What the names begin with, or the first of them."""
    if len(labels) == 1:
        return labels[0]
    shared = "".join(
        letters[0]
        for letters in takewhile(lambda at: len(set(at)) == 1, zip(*labels, strict=False))
    ).rstrip("-_. ")
    return f"{shared or labels[0] + ' and others'}, {len(labels)} {unit}"


def _labels(runs: Sequence[RunFiles]) -> dict[Path, str]:
    names = [run.name for run in runs]
    return {
        run.path: name if names.count(name) == 1 else f"{name} ({run.path.parent.name})"
        for name, run in zip(names, runs, strict=True)
    }
