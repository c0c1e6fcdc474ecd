"""The page: every part of it, and the file it is written to.

Everything that comes from a run is escaped by the templates. The file needs nothing beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from unirl import __version__
from unirl.core.errors import UnirlError
from unirl.report.charts import Drawing
from unirl.report.costs import TimeUse, per_window, time_use
from unirl.report.health import Health, health
from unirl.report.learning import View, evaluation_title, views
from unirl.report.moves import Moves, moves
from unirl.report.numbers import plural
from unirl.report.pictures import Pictures, pictures
from unirl.report.reading import EvaluationChange, Finding, RunFiles, read_run
from unirl.report.settings import Setting, between, command, evaluated_differently, from_defaults
from unirl.report.shown import Family, ShownRun, families
from unirl.report.summary import Spread, Summary, spread_of, summarize
from unirl.report.target import GENERATOR, require_replaceable
from unirl.report.warnings import Warned, warned
from unirl.tracking.files import replacing

FILE_NAME = "report.html"


@dataclass(frozen=True)
class RunPart:
    """What is told of each run by itself."""

    summary: Summary
    findings: tuple[Finding, ...] | None
    moves: Moves
    warned: tuple[Warned, ...]
    notes: tuple[str, ...]
    command: str


@dataclass(frozen=True)
class Page:
    title: str
    generator: str
    runs: tuple[RunPart, ...]
    families: tuple[Family, ...]
    spreads: tuple[Spread, ...]
    evaluation: str
    """What the evaluations' reward is called."""
    evaluated_differently: tuple[str, ...]
    """Keys for which rewards of the runs cannot be compared."""
    views: tuple[View, ...]
    pictures: Pictures | str
    """Or why there are none."""
    health: Health
    time_uses: tuple[TimeUse, ...]
    per_window: Drawing | None
    settings: tuple[Setting, ...]

    @property
    def is_comparison(self) -> bool:
        return len(self.runs) > 1


def write_report(directories: Sequence[Path], output: Path | None = None) -> Path:
    """Write one page about these runs; returns where. None: report.html in the only run.

    Raises:
        UnirlError: a folder is no run, several runs have no output, the output is something else
            than a report, or the disk refused.
    """
    if output is None and len(directories) != 1:
        raise UnirlError(
            f"a report of {len(directories)} runs belongs to none of them. "
            "Say where it shall go: --output comparison.html."
        )
    path = output or directories[0].expanduser() / FILE_NAME
    runs = [read_run(directory) for directory in directories]
    require_replaceable(path)
    html = render(page_of(runs))
    with replacing(path, instead="name another file with --output") as temporary:
        temporary.write_text(html, encoding="utf-8")
    return path


def page_of(files: Sequence[RunFiles]) -> Page:
    """Runs that differ in their seed only come one after the other."""
    groups = families(files)
    runs = [run for group in groups for run in group.runs]
    only = runs[0] if len(runs) == 1 else None
    return Page(
        title=only.label if only else " · ".join(run.label for run in runs),
        generator=f"{GENERATOR} {__version__}",
        runs=tuple(_part(run) for run in runs),
        families=tuple(groups),
        spreads=tuple(found for group in groups if (found := spread_of(group))),
        evaluation=evaluation_title(files),
        evaluated_differently=tuple(evaluated_differently(files)),
        views=tuple(views(groups)),
        pictures=pictures(runs),
        health=health(runs),
        time_uses=tuple(use for run in runs if (use := time_use(run))),
        per_window=per_window(only) if only else None,
        settings=tuple(from_defaults(only.files) if only else between([r.files for r in runs])),
    )


def render(page: Page) -> str:
    environment = Environment(
        loader=PackageLoader("unirl.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {
        "percent": lambda fraction: f"{100 * fraction:.2f}%",
        "plural": plural,
        "spoken": _spoken,
        "read_out": _read_out,
        "facts": _facts(page),
    }
    return environment.get_template("page.html").render(page=page)


def _spoken(drawing: Drawing) -> str:
    """A chart in words, for who cannot see it."""
    lines = []
    for line in drawing.spoken:
        ends = dict.fromkeys(line.points[:1] + line.points[-1:])
        if ends:
            said = ", ".join(f"{point.value} at {point.x}" for point in ends)
            lines.append(f"{line.label}: {said}")
    return "; ".join(lines)


def _read_out(drawing: Drawing) -> list[dict[str, object]]:
    """What the page's script shows under the pointer."""
    return [
        {
            "label": line.label,
            "colour": line.colour,
            "xs": [point.place for point in line.points],
            "at": [point.x for point in line.points],
            "values": [point.value for point in line.points],
        }
        for line in drawing.spoken
    ]


@dataclass(frozen=True)
class _Facts:
    """Of several runs: names of those that differ, and what they have in common."""

    differing: tuple[str, ...]
    common: tuple[tuple[str, str], ...]


def _facts(page: Page) -> _Facts:
    every = [dict(run.summary.facts) for run in page.runs]
    names = dict.fromkeys(name for facts in every for name in facts)
    values = {name: {facts.get(name) for facts in every} for name in names}
    return _Facts(
        tuple(name for name in names if len(values[name]) > 1),
        tuple((name, every[0][name]) for name in names if len(values[name]) == 1),
    )


def _part(run: ShownRun) -> RunPart:
    return RunPart(
        summary=summarize(run),
        findings=run.files.findings,
        moves=moves(run.files),
        warned=tuple(warned(run.files)),
        notes=(*run.files.notes, *map(_told, run.files.evaluation_changes)),
        command=command(run.files),
    )


def _told(change: EvaluationChange) -> str:
    return f"{change.sentence} First and last, the change and the pictures are of those since then."
