"""Signs: what varies is drawn, steady zeros are a line, what has no meaning is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from report_runs import read_lines, write_rows, write_run

from unirl.report.health import Health, health
from unirl.report.reading import read_run
from unirl.report.shown import families


def health_of(path: Path, **metrics: float) -> Health:
    """Of a run whose rows have these values throughout."""
    rows = [
        {**row, **{name.replace("__", "/"): value for name, value in metrics.items()}}
        for row in read_lines(path / "metrics.jsonl")
    ]
    write_rows(path, rows)
    return health(families([read_run(path)])[0].runs)


def titles(found: Health) -> list[str]:
    return [sign.title for sign in found.drawn]


def test_what_varies_is_drawn_and_steady_zeros_are_a_line(tmp_path: Path) -> None:
    found = health_of(write_run(tmp_path / "run"))
    assert "Gradient norm" in titles(found)
    assert ("Skipped steps", "0 throughout") in found.quiet
    assert [sign.title for sign in found.others] == ["loss"]
    assert found.others[0].sentence == "Policy loss plus weighted penalties."


def test_trouble_that_never_changes_is_drawn(tmp_path: Path) -> None:
    found = health_of(write_run(tmp_path / "run"), rollout__zero_std_group_ratio=1.0)
    assert "Groups without a difference" in titles(found)


def test_groups_of_one_sample_have_no_advantages_to_look_at(tmp_path: Path) -> None:
    config: dict[str, Any] = {"sampling": {"samples_per_prompt": 1}}
    found = health_of(write_run(tmp_path / "run", config=config), rollout__zero_std_group_ratio=1.0)
    assert not {"Groups without a difference", "Advantages"} & set(titles(found))


def test_the_clip_range_is_drawn_where_it_is_near(tmp_path: Path) -> None:
    config = {"algorithm": {"clip_range": 2e-4}}
    found = health_of(write_run(tmp_path / "run", config=config))
    assert [level.label for level in found.drawn[0].drawing.levels] == ["clip range"] * 2


def test_spreads_become_lines_where_runs_are_compared(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / name)) for name in ("a", "b")]
    group = families(runs)[0]
    drawn = health(group.runs).drawn
    assert all(not line.band for sign in drawn for line in sign.drawing.lines)
    assert "Advantages: standard deviation" in [sign.title for sign in drawn]
