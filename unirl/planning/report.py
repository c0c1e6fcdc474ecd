"""A plan as text for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from unirl.config.components import engine_capabilities
from unirl.core.errors import ConfigError
from unirl.planning.plan import Plan, automatic, free_problem
from unirl.residency.auto import Assignment, assign_window, explain
from unirl.residency.directory import State
from unirl.residency.plan import (
    Line,
    Peak,
    Traffic,
    is_overlapped,
    traffic,
    transition_text,
    transitions,
)
from unirl.residency.problem import ResidencyProblem, size_text
from unirl.residency.timeline import plain_window

GIB = 2**30
MIB = 2**20


def text(plan: Plan, recipe: str) -> str:
    """The whole plan, a page or two."""
    blocks = [
        [f"{recipe}: sizes from {plan.source}, for {_target(plan)}"],
        _memory(plan),
        _moves(plan),
        _host(plan),
        _reasons(plan),
        [f"Not counted: {remark}" for remark in plan.remarks],
        verdict(plan),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _target(plan: Plan) -> str:
    target = plan.target
    if target.memory_bytes is None:
        return "a device of any size (--gpu or --budget-gib sets one)"
    if not target.reserve_bytes:
        return target.name
    sizes = f"{size_text(target.memory_bytes)}, {size_text(target.reserve_bytes)} of them kept free"
    return f"{target.name} ({sizes})"


# --- memory -------------------------------------------------------------------------------------


def _memory(plan: Plan) -> list[str]:
    """Components x phases: what is on the device at the fullest moment of each."""
    largest = max(peak.total_bytes for peak in plan.peaks)
    unit, word = (GIB, "GiB") if largest >= GIB else (MIB, "MiB")
    rows = [("", [peak.kind.value for peak in plan.peaks])]
    for label, names in _rows(plan, largest // 1000):
        rows.append((label, [_cell(peak, names, unit) for peak in plan.peaks]))
    rows.append(("workspace", [_number(peak.workspace_bytes, unit) for peak in plan.peaks]))
    rows.append(("in all", [_number(peak.total_bytes, unit) for peak in plan.peaks]))
    budget = plan.target.budget_bytes
    if budget is not None:
        rows.append(("of budget", [f"{peak.total_bytes / budget:.0%}" for peak in plan.peaks]))
    head = f"On the device, {word} (host: parked there; -: nowhere)"
    return [head, *_aligned(rows), *_workspace(plan)]


def _rows(plan: Plan, small: int) -> Iterator[tuple[str, list[str]]]:
    """Label and components of each line of the table; those of at most `small` bytes share one."""
    sizes = {name: part.num_bytes() for name, part in plan.notes.parts.items()}
    by_size = sorted(sizes, key=lambda name: (name.split(".")[0], -sizes[name], name))
    for name in by_size:
        if sizes[name] > small:
            yield name, [name]
    rest = [name for name in by_size if 0 < sizes[name] <= small]
    if rest:
        yield f"{len(rest)} smaller", rest


def _aligned(rows: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    first = max(len(label) for label, _ in rows)
    widths = [max(map(len, column)) for column in zip(*(cells for _, cells in rows), strict=True)]
    return [
        f"  {label:{first}}"
        + "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        for label, cells in rows
    ]


def _workspace(plan: Plan) -> list[str]:
    space, config = plan.workspace, plan.config
    other = "without" if config.backend.activation_checkpointing else "with"
    return [
        f"  workspace: {space.num_micro_rows} rows forward and backward "
        f"{size_text(space.train)} ({size_text(space.train_other_checkpointing)} {other} "
        f"activation checkpointing),",
        f"  gradients {size_text(space.grads)}, sampling {size_text(space.rollout)}, text encoders "
        f"{size_text(space.encode)}, decoder {size_text(space.decode)},",
        f"  kept of a rollout {size_text(space.rollout_kept)}, rows of a window "
        f"{size_text(space.rows)}, optimizer's temporaries {size_text(space.optimizer_step)}",
    ]


def _cell(peak: Peak, names: Sequence[str], unit: int) -> str:
    there = [name for name in names if name in peak.note.device_bytes]
    if there:
        return _number(sum(peak.note.device_bytes[name] for name in there), unit)
    parked = any(peak.note.states.get(name) is State.PARKED for name in names)
    return "host" if parked else "-"


def _number(num_bytes: int, unit: int) -> str:
    return f"{num_bytes / unit:.2f}"


# --- moves --------------------------------------------------------------------------------------


def _moves(plan: Plan) -> list[str]:
    """The rows of a window in the log's wording, and what they cost."""
    lines = [f"Moves of a window ({_window_text(plan)})"]
    for group in transitions(plan.window):
        one = traffic(group)
        if one.moved_bytes or one.dropped_bytes:
            rule = "; overlap" if is_overlapped(group) else ""
            lines.append(f"  {transition_text(group):16} {_traffic(one)}{rule}")
    if len(lines) == 1:
        lines.append("  none")
    total = plan.window_traffic
    rates = f"{plan.target.onload_rate / 1e9:g} GB/s"
    lines.append(
        f"  in all           {_traffic(total)}; about {plan.window_seconds:.2f} s at {rates}"
    )
    return [*lines, *_overlaps(plan)]


def _overlaps(plan: Plan) -> list[str]:
    """The fullest moment in which one side has not left yet and the other is there."""
    if not plan.config.overlap_moves:
        return []
    both = [line["device_bytes"] for line in plan.notes.lines if _is_leaving_late(line)]
    if not both:
        return ["  overlap          nowhere: both sides do not fit, or only one has to be copied"]
    budget = plan.target.budget_bytes
    share = "" if budget is None else f", {max(both) / budget:.0%} of budget"
    return [f"  overlap          at most {size_text(max(both))} while both sides are there{share}"]


def _is_leaving_late(line: Line) -> bool:
    return is_overlapped([line]) and line["move"] == "offload" and line["component"] is not None


def _window_text(plan: Plan) -> str:
    count = plan.config.accumulate_rollouts
    rollouts = "1 rollout" if count == 1 else f"{count} rollouts"
    return f"{rollouts}, {plan.config.num_devices} device{'s'[: plan.config.num_devices != 1]}"


def _traffic(one: Traffic) -> str:
    parts = {"in": one.onload_bytes, "out": one.offload_bytes, "freed": one.dropped_bytes}
    return ", ".join(f"{size_text(size)} {word}" for word, size in parts.items() if size) or "0"


def _host(plan: Plan) -> list[str]:
    held = {key: size for key, size in plan.notes.host_bytes.items() if size}
    if not held:
        return []
    rows = sorted(held.items(), key=lambda item: (-item[1], item[0]))
    width = max(len(key) for key in held)
    lines = ["On the host, for parked weights of one process"]
    lines += [f"  {key:{width}}  {size_text(size):>10}" for key, size in rows]
    limit = plan.target.host_bytes
    of = "" if limit is None else f" of {size_text(limit)}"
    return [*lines, f"  {'in all':{width}}  {size_text(plan.host_bytes):>10}{of}"]


# --- why ----------------------------------------------------------------------------------------


def _reasons(plan: Plan) -> list[str]:
    """Why idle components stay or leave, and what the search would do instead."""
    if plan.too_big is not None:
        return []
    lines = _explained(plan.problem, assign_window(plan.problem, plain_window(plan.config)))
    return ["Why", *lines, *_advice(plan)] if lines else []


def _explained(problem: ResidencyProblem, assignment: Assignment) -> list[str]:
    """The reason for each gap; components with one reason share a line."""
    names: dict[str, list[str]] = {}
    for part in sorted(problem.parts, key=lambda part: (-part.num_bytes, part.name)):
        if part.num_bytes:
            for reason in explain(problem, assignment, part.name):
                names.setdefault(reason.split("; costs")[0], []).append(part.name)
    return [f"  {', '.join(parts)}: {reason}" for reason, parts in names.items()]


def _advice(plan: Plan) -> list[str]:
    """What residency=auto would choose and save while it is off."""
    if plan.config.residency == "auto" or engine_capabilities(plan.config).shares_train_weights:
        return []
    try:
        best = automatic(plan)
    except ConfigError as error:
        return [f"  residency=auto: {error}"]
    now, moved = plan.window_traffic.moved_bytes, best.choice.moved_bytes
    where = "" if plan.target.budget_bytes is None else f" on {plan.target.name}"
    asked = "residency=auto, with the three keys null,"
    if moved >= now:
        return [f"  {asked} would move as much{where}: {size_text(now)} per window"]
    less = size_text(moved) if moved else "nothing"
    choice = _explained(free_problem(plan), best) if moved else ["  everything stays"]
    return [
        f"  {asked} would move {less} per window{where} instead of {size_text(now)}:",
        *(f"  {line}" for line in choice),
    ]


def difference(plan: Plan, other: Plan) -> list[str]:
    """What the other plan does differently."""
    totals = {peak.kind: peak.total_bytes for peak in other.peaks}
    lines = []
    for peak in plan.peaks:
        if peak.kind in totals and totals[peak.kind] != peak.total_bytes:
            change = f"{size_text(peak.total_bytes)} -> {size_text(totals[peak.kind])}"
            lines.append(f"  {peak.kind.value:20} {change}")
    now, then = plan.window_traffic, other.window_traffic
    if now != then:
        moved = f"{size_text(now.moved_bytes)} -> {size_text(then.moved_bytes)}"
        lines.append(f"  {'moved per window':20} {moved}")
    if plan.host_bytes != other.host_bytes:
        held = f"{size_text(plan.host_bytes)} -> {size_text(other.host_bytes)}"
        lines.append(f"  {'on the host':20} {held}")
    return [*(lines or ["  nothing changes"]), *(f"  {line}" for line in verdict(other))]


# --- verdict ------------------------------------------------------------------------------------


def verdict(plan: Plan) -> list[str]:
    """One line when it fits; what is too much, and the largest of it, when it does not."""
    lines = []
    if (peak := plan.too_big) is not None:
        held = ", ".join(f"{name} {size_text(size)}" for name, size in peak.largest(3))
        lines.append(
            f"Does not fit: {peak.kind.value} needs {size_text(peak.total_bytes)}, the budget is "
            f"{size_text(plan.target.budget_bytes or 0)}. The largest: {held}."
        )
    if plan.host_is_too_small:
        lines.append(
            f"Does not fit: parked weights need {size_text(plan.host_bytes)} of host memory, "
            f"there are {size_text(plan.target.host_bytes or 0)}."
        )
    if lines:
        return lines
    fullest = max(plan.peaks, key=lambda peak: peak.total_bytes)
    what = f"the fullest phase is {fullest.kind.value} with {size_text(fullest.total_bytes)}"
    known = plan.target.budget_bytes is not None
    return [f"Fits: {what}." if known else f"No budget given; {what}."]


def as_json(plan: Plan, recipe: str) -> dict[str, Any]:
    """The same for programs, in bytes and seconds."""
    target, total = plan.target, plan.window_traffic
    return {
        "recipe": recipe,
        "source": plan.source,
        "fits": plan.fits,
        "budget_bytes": target.budget_bytes,
        "host_budget_bytes": target.host_bytes,
        "num_rollouts": plan.config.num_rollouts,
        "phases": [_peak_json(peak) for peak in plan.peaks],
        "window": {
            "transitions": [transition_text(group) for group in transitions(plan.window)],
            "onload_bytes": total.onload_bytes,
            "offload_bytes": total.offload_bytes,
            "dropped_bytes": total.dropped_bytes,
            "seconds": plan.window_seconds,
        },
        "host_bytes": plan.notes.host_bytes,
        "moves": _without_seconds(plan),
        "remarks": list(plan.remarks),
    }


def _peak_json(peak: Peak) -> dict[str, Any]:
    return {
        "phase": peak.kind.value,
        "rollout": peak.note.rollout,
        "device_bytes": dict(peak.note.device_bytes),
        "workspace_bytes": peak.workspace_bytes,
        "total_bytes": peak.total_bytes,
    }


def _without_seconds(plan: Plan) -> Sequence[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k != "seconds"} for line in plan.notes.lines]
