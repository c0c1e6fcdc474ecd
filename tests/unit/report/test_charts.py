"""Drawings: gaps, spreads, levels and what is said under the pointer."""

from __future__ import annotations

import math

from unirl.report.charts import Area, Axis, Level, Line, draw, draw_areas

AXIS = Axis("rollouts")


def test_values_that_are_no_numbers_leave_a_gap_and_are_counted() -> None:
    drawing = draw([Line("a", [0, 1, 2, 3, 4], [1.0, 2.0, math.nan, 2.0, 1.0])], AXIS)
    assert drawing.lines[0].path.count("M") == 2
    assert drawing.num_left_out == 1
    assert len(drawing.lines[0].points) == 4


def test_a_line_is_interrupted_by_a_rule_where_it_measures_something_else() -> None:
    drawing = draw([Line("a", [0, 2, 4, 6], [1.0, 2.0, 2.0, 1.0], breaks=[4])], AXIS)
    first, second = drawing.lines[0].path.split(" M")
    assert (first.count("l"), second.count("l")) == (1, 1)
    assert len(drawing.rules) == 1
    assert drawing.lines[0].points[1].place < drawing.rules[0] < drawing.lines[0].points[2].place
    assert len(drawing.lines[0].points) == 4
    assert drawing.num_left_out == 0


def test_a_lone_value_between_gaps_is_a_dot() -> None:
    drawing = draw([Line("a", [0, 1, 2], [math.nan, 2.0, math.nan])], AXIS)
    assert drawing.lines[0].dots.count("M") == 1


def test_a_spread_is_a_band_around_a_line_and_whiskers_at_dots() -> None:
    line = Line("a", [0, 1], [1.0, 2.0], lows=[0.5, 1.5], highs=[1.5, 2.5])
    dots = Line("a", [0, 1], [1.0, 2.0], lows=[0.5, math.nan], highs=[1.5, math.nan], dots=True)
    band, whiskers = draw([line, dots], AXIS).lines
    assert band.band.endswith("z")
    assert not band.whiskers
    assert whiskers.whiskers.count("V") == 1
    assert [point.value for point in whiskers.points] == ["1 ± 0.5000", "2"]


def test_a_level_near_the_values_is_drawn_and_a_far_one_is_not() -> None:
    line = Line("a", [0, 1], [1.0, 2.0])
    drawing = draw([line], AXIS, levels=[Level("near", 2.5), Level("far", 900.0)])
    assert [level.label for level in drawing.levels] == ["near"]
    assert 0 <= drawing.levels[0].place <= 1


def test_a_long_line_is_thinned() -> None:
    ys = [float(place % 7) for place in range(20_000)]
    drawing = draw([Line("a", list(range(20_000)), ys)], AXIS)
    assert len(drawing.lines[0].points) <= 500


def test_areas_tell_their_own_height() -> None:
    lower = Area("rollout", [0.0, 1.0], [0.0, 0.0], [2.0, 3.0], 0)
    upper = Area("train", [0.0, 1.0], [2.0, 3.0], [6.0, 8.0], 1)
    drawing = draw_areas([lower, upper], AXIS)
    assert [point.value for point in drawing.areas[1].points] == ["4", "5"]
