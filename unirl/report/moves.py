"""What lay on the device when: components as lanes, bytes over time, and what moves cost."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from unirl.report.charts import Axis, Drawing, Line, draw
from unirl.report.numbers import duration, plural
from unirl.report.reading import Json, RunFiles
from unirl.report.scales import Scale, Tick
from unirl.residency.problem import size_text

PHASE_COLOURS = {"rollout": 0, "reward": 1, "train": 2, "save": 3, "sync": 4, "evaluate": 5}
_OUTER = ("total", "evaluate")
"""Phases that hold others; they are drawn as no lane of their own."""
_NOT_DRAWN = (*_OUTER, "sync")
_MOST_LANES = 14
_MOST_SPANS = 120
_MOST_STEPS = 240
"""Of bytes over time; beyond them only extremes are drawn."""
_NUM_BINS = 200


@dataclass(frozen=True)
class Span:
    """A bar of a lane, in per cent of its width."""

    start: float
    width: float
    colour: int
    label: str
    is_move: bool = False


@dataclass(frozen=True)
class Lane:
    label: str
    detail: str
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Timeline:
    """One window in detail."""

    sentence: str
    lanes: tuple[Lane, ...]
    """The phases, then every component that moves."""
    ticks: tuple[Tick, ...]
    phases: tuple[tuple[str, int], ...]
    """Names and colours."""


@dataclass(frozen=True)
class Traffic:
    """A row of the table of moves."""

    role: str
    component: str
    onloads: int
    offloads: int
    to_device: str
    to_host: str
    dropped: str
    seconds: str


@dataclass(frozen=True)
class Peak:
    phase: str
    text: str
    fraction: float


@dataclass(frozen=True)
class Held:
    """Bytes over time."""

    sentence: str
    drawing: Drawing


@dataclass(frozen=True)
class Moves:
    summary: str
    held: Held | None
    timeline: Timeline | None
    traffic: tuple[Traffic, ...]
    peaks: tuple[Peak, ...]


def moves(run: RunFiles) -> Moves:
    real = [line for line in run.moves if line.get("component") is not None]
    return Moves(
        summary=_summary(run, real),
        held=_held(run.events),
        timeline=_timeline(run.events, real),
        traffic=tuple(_traffic(real)),
        peaks=tuple(_peaks(run)),
    )


def _summary(run: RunFiles, real: Sequence[Json]) -> str:
    if not run.moves:
        return "No moves were written down (transitions.jsonl is missing or empty)."
    if not real and not run.of_kind("rollout"):
        return "Nothing was moved, and no window was trained on."
    if not real:
        return (
            "Nothing had to move: every weight stayed where it was, through "
            f"{plural(len(run.moves), 'change')} of role."
        )
    moved = sum(line["moved_bytes"] for line in real)
    dropped = sum(line["dropped_bytes"] for line in real)
    seconds = sum(line["seconds"] for line in real)
    most = max(line["device_bytes"] for line in real)
    return (
        f"{len(real):,} moves of components copied {size_text(moved)} in {duration(seconds)}; "
        f"{size_text(dropped)} were freed without a copy, because the host had them. Components "
        f"held at most {size_text(most)} on the device."
    )


def _traffic(real: Sequence[Json]) -> Iterator[Traffic]:
    """By component, those that moved most first."""
    groups: dict[tuple[str, str], list[Json]] = {}
    for line in real:
        groups.setdefault((line["role"], line["component"]), []).append(line)

    def total(lines: Sequence[Json]) -> int:
        return sum(line["moved_bytes"] for line in lines)

    for (role, component), lines in sorted(groups.items(), key=lambda item: -total(item[1])):
        onloads = [line for line in lines if line["move"] == "onload"]
        offloads = [line for line in lines if line["move"] == "offload"]
        yield Traffic(
            role,
            component,
            len(onloads),
            len(offloads),
            size_text(total(onloads)),
            size_text(total(offloads)),
            size_text(sum(line["dropped_bytes"] for line in lines)),
            duration(sum(line["seconds"] for line in lines)),
        )


def _peaks(run: RunFiles) -> Iterator[Peak]:
    """The most each phase took, as the device counted; nothing on a CPU."""
    peaks: dict[str, float] = {}
    for row in run.rows:
        for name, value in row.metrics.items():
            if name.startswith("memory/") and name.endswith("_peak_bytes"):
                phase = name.removeprefix("memory/").removesuffix("_peak_bytes")
                peaks[phase] = max(peaks.get(phase, 0.0), value)
    most = max(peaks.values(), default=0.0)
    for phase, peak in sorted(peaks.items(), key=lambda item: -item[1]):
        if phase not in _OUTER:
            yield Peak(phase.replace("_", " "), size_text(int(peak)), peak / most)


def _held(events: Sequence[Json]) -> Held | None:
    """Bytes of components on the device and on the host over the run."""
    counters = [event for event in events if event["ph"] == "C" and "device" in event["args"]]
    if len(counters) < 2:
        return None
    start = counters[0]["ts"]
    times = [event["ts"] - start for event in counters]
    unit, divisor = _unit(times[-1])
    few = len(counters) <= _MOST_STEPS
    lines = []
    for colour, (place, label) in ((0, ("device", "on the device")), (4, ("host", "on the host"))):
        mib = [event["args"][place] / 2**20 for event in counters]
        drawn = Line(label, *_steps(times, mib), colour) if few else _extremes(times, mib, label)
        lines.append(replace(drawn, colour=colour))
    drawing = draw(
        lines,
        Axis(f"time, {unit}", divisor, text=lambda value: duration(value / 1e6)),
        floor=0.0,
        from_zero=True,
        most_points=3 * _MOST_STEPS,
        num_y_ticks=4,
        value_text=lambda value: size_text(int(value * 2**20)),
    )
    if few:
        return Held("In MiB, over the wall clock.", drawing)
    return Held(
        "In MiB, over the wall clock. The line is the most of each stretch of time, the band "
        "reaches down to the least.",
        drawing,
    )


def _extremes(times: Sequence[float], values: Sequence[float], label: str) -> Line:
    """Of equally long times the most, with a band down to the least."""
    bins: list[list[float]] = [[] for _ in range(_NUM_BINS)]
    now = values[0]
    length = times[-1] / _NUM_BINS
    for time, value in zip(times, values, strict=True):
        place = min(int(time / length), _NUM_BINS - 1)
        bins[place] += [value] if bins[place] else [now, value]
        now = value
    xs, lows, highs = [], [], []
    now = values[0]
    for place, own in enumerate(bins):
        xs.append((place + 0.5) * length)
        lows.append(min(own, default=now))
        highs.append(max(own, default=now))
        now = own[-1] if own else now
    return Line(label, xs, highs, lows=lows, highs=highs)


def _steps(xs: Sequence[float], ys: Sequence[float]) -> tuple[list[float], list[float]]:
    """A value holds until the next one."""
    corner_xs, corner_ys = [xs[0]], [ys[0]]
    for x, y in zip(xs[1:], ys[1:], strict=True):
        corner_xs += [x, x]
        corner_ys += [corner_ys[-1], y]
    return corner_xs, corner_ys


def _unit(microseconds: float) -> tuple[str, float]:
    units = (("h", 3.6e9), ("min", 6e7), ("s", 1e6))
    return next((unit for unit in units if microseconds >= 2 * unit[1]), ("ms", 1e3))


def _timeline(events: Sequence[Json], real: Sequence[Json]) -> Timeline | None:
    """The last window that is there as a whole: its phases, and which components lay on the
    device."""
    slices = [event for event in events if event["ph"] == "X"]
    windows = [event for event in slices if event["name"] == "total"]
    copies = [event for event in slices if event.get("tid") in (2, 3)]
    if not windows or not real or not copies:
        return None
    window = windows[-1]
    start, length = window["ts"], window["dur"]
    if not length:
        return None
    scale = Scale(start, start + length)
    inside = [s for s in slices if s["ts"] >= start - 1 and s["ts"] + s["dur"] <= scale.high + 1]
    role_of = {line["component"]: line["role"] for line in real}
    phases = {
        event["name"]: PHASE_COLOURS.get(event["name"], 6)
        for event in inside
        if event.get("tid") == 1 and event["name"] not in _NOT_DRAWN
    }
    lanes = [Lane("phases", "", tuple(_phase_spans(inside, scale)))]
    lanes += _component_lanes(copies, role_of, scale, {line["component"]: line for line in real})
    unit, divisor = _unit(length)
    ticks = Scale(0, length / divisor).ticks(6)
    return Timeline(
        f"The last whole window, {duration(length / 1e6)} long. A bar: the component is on the "
        "device; dark: it is being copied or freed. Components that never move are not drawn.",
        tuple(lanes),
        tuple(Tick(tick.place, f"{tick.label} {unit}") for tick in ticks),
        tuple(phases.items()),
    )


def _phase_spans(inside: Sequence[Json], scale: Scale) -> Iterator[Span]:
    for event in inside:
        if event.get("tid") == 1 and event["name"] not in _NOT_DRAWN:
            name = event["name"]
            yield _span(
                event["ts"],
                event["ts"] + event["dur"],
                scale,
                PHASE_COLOURS.get(name, 6),
                f"{name}, {duration(event['dur'] / 1e6)}",
            )


def _component_lanes(
    copies: Sequence[Json],
    role_of: Mapping[str, str],
    scale: Scale,
    lines: Mapping[str, Json],
) -> list[Lane]:
    """A lane of each component that moves, with what it did before the window in mind."""
    by_component: dict[str, list[Json]] = {}
    for copy in sorted(copies, key=lambda event: event["ts"]):
        component = copy["name"].split(" ")[0]
        if component in role_of:
            by_component.setdefault(component, []).append(copy)
    lanes = []
    for component, own in by_component.items():
        role = role_of[component]
        colour = PHASE_COLOURS.get(role, 6)
        size = max(copy["args"]["moved_bytes"] + copy["args"]["dropped_bytes"] for copy in own)
        spans = tuple(_presence(own, scale, colour, component))
        if spans:
            lanes.append(Lane(component, size_text(size), spans[:_MOST_SPANS]))
    order = list(PHASE_COLOURS)
    lanes.sort(
        key=lambda lane: order.index(role_of[lane.label]) if role_of[lane.label] in order else 9
    )
    return lanes[:_MOST_LANES]


def _presence(copies: Sequence[Json], scale: Scale, colour: int, component: str) -> Iterator[Span]:
    """Stretches within the scale in which a component is on the device, and its copies."""
    starts = [copy["ts"] for copy in copies]
    first = max(0, bisect_left(starts, scale.low) - 1)
    here = copies[first] if copies else None
    # Before its first known move it was where that move took it from.
    since = scale.low if here is not None and _leaves(here) else None
    for copy in copies[first:]:
        if copy["ts"] > scale.high:
            break
        end = copy["ts"] + copy["dur"]
        if _leaves(copy):
            if since is not None:
                yield from _clipped(since, end, scale, colour, component)
            since = None
        elif since is None:
            since = copy["ts"]
        if copy["ts"] >= scale.low:
            moved = copy["args"]["moved_bytes"]
            what = f"{size_text(moved)} copied" if moved else "freed without a copy"
            way = "to the host" if _leaves(copy) else "to the device"
            yield _span(
                copy["ts"],
                end,
                scale,
                colour,
                f"{component} {way}: {what}, {duration(copy['dur'] / 1e6)}",
                is_move=True,
            )
    if since is not None:
        yield from _clipped(since, scale.high, scale, colour, component)


def _leaves(copy: Json) -> bool:
    return copy["tid"] == 3


def _clipped(start: float, end: float, scale: Scale, colour: int, label: str) -> Iterator[Span]:
    start, end = max(start, scale.low), min(end, scale.high)
    if end > start:
        yield _span(
            start, end, scale, colour, f"{label} on the device, {duration((end - start) / 1e6)}"
        )


def _span(
    start: float, end: float, scale: Scale, colour: int, label: str, is_move: bool = False
) -> Span:
    place = 100 * scale.place(start)
    return Span(round(place, 2), round(100 * scale.place(end) - place, 2), colour, label, is_move)
