"""Numbers as drawings: paths in a square of 1000 by 1000 that the page stretches to its width.

A drawing is made of paths and labels only; `templates/charts.html` says what they look like. Lines
keep their width and labels their size when a drawing is stretched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from unirl.report.numbers import figure
from unirl.report.scales import Scale, Tick
from unirl.report.thinning import kept_indices

SIZE = 1000
MOST_POINTS = 500
"""Of one line. A line of more is thinned, its peaks kept."""


@dataclass(frozen=True)
class Line:
    """One series of a chart."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    """As many; what is no number leaves a gap."""
    colour: int = 0
    lows: Sequence[float] = ()
    highs: Sequence[float] = ()
    """Where given, the spread around each value: a band, or whiskers with `dots`."""
    dots: bool = False
    dashed: bool = False
    pale: bool = False
    """In the background, behind a smoother line."""
    spoken: bool = True
    """Whether it has a place in the legend and in the read-out."""
    breaks: Sequence[float] = ()
    """Values of x from which on it measures something else: it is interrupted there, by a rule."""


@dataclass(frozen=True)
class Area:
    """A stacked layer between two lines."""

    label: str
    xs: Sequence[float]
    lows: Sequence[float]
    highs: Sequence[float]
    colour: int


@dataclass(frozen=True)
class Level:
    """A horizontal line at a value that means something."""

    label: str
    value: float


@dataclass(frozen=True)
class Point:
    """What is said where the pointer is."""

    place: int
    """From the left, in thousandths."""
    x: str
    value: str


@dataclass(frozen=True)
class DrawnLine:
    label: str
    colour: int
    path: str
    band: str
    whiskers: str
    dots: str
    dashed: bool
    pale: bool
    spoken: bool
    points: tuple[Point, ...]
    """For the read-out."""


@dataclass(frozen=True)
class Drawing:
    x_name: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    lines: tuple[DrawnLine, ...]
    areas: tuple[DrawnLine, ...] = ()
    levels: tuple[Tick, ...] = ()
    rules: tuple[int, ...] = ()
    """Vertical ones, from the left in thousandths."""
    num_left_out: int = 0
    """Values that are no numbers."""

    @property
    def spoken(self) -> list[DrawnLine]:
        return [line for line in (*self.areas, *self.lines) if line.spoken]


@dataclass(frozen=True)
class Titled:
    """A drawing with what is to be said about it."""

    title: str
    sentence: str
    drawing: Drawing
    value: str = ""
    """Beside the title: what it came to."""


@dataclass(frozen=True)
class Axis:
    """What a chart runs over."""

    name: str
    divisor: float = 1.0
    """Of the values, for the ticks' unit."""
    text: Callable[[float], str] = figure
    """A value in the read-out."""
    whole: bool = False
    """Whether only whole numbers have a meaning."""


def draw(
    lines: Sequence[Line],
    axis: Axis,
    *,
    x_scale: Scale | None = None,
    floor: float | None = None,
    from_zero: bool = False,
    levels: Sequence[Level] = (),
    most_points: int = MOST_POINTS,
    num_x_ticks: int = 6,
    num_y_ticks: int = 5,
    value_text: Callable[[float], str] = figure,
) -> Drawing:
    """Lines over one axis.

    `floor`: below this there is no margin. `from_zero`: 0 is shown, as sizes need it. `levels` far
    outside what the lines span are left out.
    """
    x_scale = x_scale or Scale.around(x for line in lines for x in line.xs)
    shown = [*_all_values(lines), *([0.0] if from_zero else [])]
    y_scale = Scale.around(shown, margin=0.06, floor=floor)
    y_scale, levels = _with_levels(y_scale, levels)
    return Drawing(
        x_name=axis.name,
        x_ticks=tuple(_x_ticks(x_scale, axis, num_x_ticks)),
        y_ticks=tuple(y_scale.ticks(num_y_ticks)),
        lines=tuple(
            _drawn(line, x_scale, y_scale, axis, most_points, value_text) for line in lines
        ),
        levels=tuple(Tick(y_scale.place(level.value), level.label) for level in levels),
        rules=tuple(_rules(lines, x_scale)),
        num_left_out=sum(not math.isfinite(y) for line in lines if line.spoken for y in line.ys),
    )


def draw_areas(
    areas: Sequence[Area], axis: Axis, value_text: Callable[[float], str] = figure
) -> Drawing:
    """Layers on top of each other, from 0; all over the same xs."""
    x_scale = Scale.around(x for area in areas for x in area.xs)
    y_scale = Scale.around([0.0, *(y for area in areas for y in area.highs)])
    drawn = []
    for area in areas:
        points = _points(area.xs, area.highs, x_scale, y_scale)
        spoken = [
            Point(x, axis.text(at), value_text(high - low))
            for (x, _), at, high, low in zip(points, area.xs, area.highs, area.lows, strict=True)
        ]
        below = _points(area.xs, area.lows, x_scale, y_scale)
        band = _path([*points, *reversed(below)]) + "z"
        drawn.append(
            DrawnLine(area.label, area.colour, "", band, "", "", False, False, True, tuple(spoken))
        )
    return Drawing(
        axis.name,
        tuple(_x_ticks(x_scale, axis, 6)),
        tuple(y_scale.ticks(4)),
        lines=(),
        areas=tuple(drawn),
    )


def _rules(lines: Sequence[Line], x_scale: Scale) -> list[int]:
    """A little before what they are about, so that they do not hide what stands there."""
    places = {round(SIZE * x_scale.place(x)) for line in lines for x in line.breaks}
    return sorted(place - 8 for place in places)


def _all_values(lines: Sequence[Line]) -> Iterable[float]:
    for line in lines:
        yield from line.ys
        yield from line.lows
        yield from line.highs


def _with_levels(scale: Scale, levels: Sequence[Level]) -> tuple[Scale, list[Level]]:
    """The axis grows towards a level that is near, at most to three times its length."""
    span = scale.high - scale.low
    near = [level for level in levels if scale.low - span < level.value < scale.high + span]
    low = min([scale.low, *(level.value - span * 0.06 for level in near)])
    high = max([scale.high, *(level.value + span * 0.06 for level in near)])
    return Scale(low, high), near


def _x_ticks(scale: Scale, axis: Axis, most: int) -> list[Tick]:
    return Scale(scale.low / axis.divisor, scale.high / axis.divisor).ticks(most, axis.whole)


def _drawn(
    line: Line,
    x_scale: Scale,
    y_scale: Scale,
    axis: Axis,
    most: int,
    value_text: Callable[[float], str],
) -> DrawnLine:
    kept = kept_indices(line.ys, most)
    xs, ys = ([values[place] for place in kept] for values in (line.xs, line.ys))
    points = _points(xs, ys, x_scale, y_scale)
    segments = list(_segments(points, xs, ys, line.breaks))
    spread = _spread(line, kept, x_scale, y_scale)
    return DrawnLine(
        line.label,
        line.colour,
        path=" ".join(_path(segment) for segment in segments),
        band="" if line.dots else spread,
        whiskers=spread if line.dots else "",
        # A lone point between gaps is no line, so it is drawn as a dot.
        dots=" ".join(
            f"M{x} {y}h0"
            for segment in segments
            for x, y in segment
            if line.dots or len(segment) == 1
        ),
        dashed=line.dashed,
        pale=line.pale,
        spoken=line.spoken,
        points=tuple(
            Point(points[number][0], axis.text(xs[number]), _read_out(line, place, value_text))
            for number, place in enumerate(kept)
            if math.isfinite(ys[number]) and line.spoken
        ),
    )


def _read_out(line: Line, place: int, value_text: Callable[[float], str]) -> str:
    """A value, with what it spreads to where that is known."""
    value = line.ys[place]
    if not line.lows or not math.isfinite(line.lows[place] + line.highs[place]):
        return value_text(value)
    low, high = line.lows[place], line.highs[place]
    half = (high - low) / 2
    if abs(high - value - half) <= 1e-3 * half:
        return f"{value_text(value)} ± {value_text(half)}"
    return f"{value_text(low)} to {value_text(high)}"


def _spread(line: Line, kept: Sequence[int], x_scale: Scale, y_scale: Scale) -> str:
    """A closed band, or vertical whiskers; places without a spread are left out."""
    if not line.lows:
        return ""
    finite = [
        place
        for place in kept
        if all(math.isfinite(values[place]) for values in (line.xs, line.lows, line.highs))
    ]
    xs = [line.xs[place] for place in finite]
    below, above = (
        _points(xs, [values[place] for place in finite], x_scale, y_scale)
        for values in (line.lows, line.highs)
    )
    if line.dots:
        return " ".join(f"M{x} {y}V{top}" for (x, y), (_, top) in zip(below, above, strict=True))
    return _path([*above, *reversed(below)]) + "z" if finite else ""


def _points(
    xs: Sequence[float], ys: Sequence[float], x_scale: Scale, y_scale: Scale
) -> list[tuple[int, int]]:
    """What is no number lies on the bottom; `_segments` leaves it out."""
    return [
        (
            round(SIZE * x_scale.place(x)),
            round(SIZE * (1 - y_scale.place(y))) if math.isfinite(y) else SIZE,
        )
        for x, y in zip(xs, ys, strict=True)
    ]


def _segments(
    points: Sequence[tuple[int, int]],
    xs: Sequence[float],
    ys: Sequence[float],
    breaks: Sequence[float],
) -> Iterable[list[tuple[int, int]]]:
    """Stretches without a gap or a break."""
    segment: list[tuple[int, int]] = []
    before = -math.inf
    for point, x, y in zip(points, xs, ys, strict=True):
        if segment and (not math.isfinite(y) or any(before < at <= x for at in breaks)):
            yield segment
            segment = []
        if math.isfinite(y):
            segment.append(point)
        before = x
    if segment:
        yield segment


def _path(points: Sequence[tuple[int, int]]) -> str:
    """With relative steps, which are shorter."""
    if not points:
        return ""
    x, y = points[0]
    steps = "".join(f"l{x2 - x1} {y2 - y1}" for (x1, y1), (x2, y2) in pairwise(points))
    return f"M{x} {y}{steps}"
