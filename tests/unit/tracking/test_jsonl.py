"""Metrics keep every digit, and a resume continues the file where it stands."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from unirl.core.errors import UnirlError
from unirl.tracking.jsonl import JsonlSink, read_rows, read_sound_rows, rewind
from unirl.tracking.tracker import Row


def write(path, rows):
    sink = JsonlSink(path)
    for row in rows:
        sink.log(row)
    sink.close()


def rollout_rows(start, end):
    return [Row("rollout", i, i + 1, {"rollout/reward_mean": i / 3}) for i in range(start, end)]


def test_rows_come_back_exactly(tmp_path):
    numbers = {
        "train/ratio_mean": 1 + 2**-52,
        "train/loss": 1e-300,
        "rollout/reward_mean": float(np.float32(0.1)),
    }
    row = Row("eval", 7, 8, numbers)
    write(tmp_path / "metrics.jsonl", [row])
    assert list(read_rows(tmp_path / "metrics.jsonl")) == [row]


def test_non_finite_numbers_are_valid_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [Row("rollout", 0, 1, {"a": math.nan, "b": math.inf, "c": -math.inf})])

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    fields = json.loads(path.read_text(), parse_constant=refuse)
    assert (fields["a"], fields["b"], fields["c"]) == ("nan", "inf", "-inf")
    (row,) = read_rows(path)
    assert math.isnan(row.metrics["a"])
    assert row.metrics["c"] == -math.inf


def test_each_row_is_readable_at_once(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for row in rollout_rows(0, 3):
        sink.log(row)
        assert list(read_rows(tmp_path / "metrics.jsonl"))[-1] == row
    sink.close()


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UnirlError, match=r"file/metrics\.jsonl cannot be written.*output_dir"):
        JsonlSink(tmp_path / "file" / "metrics.jsonl")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_is_an_error_that_names_the_file():
    sink = JsonlSink(Path("/dev/full"))
    with pytest.raises(UnirlError, match=r"/dev/full cannot be written: No space left"):
        sink.log(rollout_rows(0, 1)[0])
    with pytest.raises(UnirlError, match="No space left"):
        sink.close()


def test_rewind_moves_later_rows_aside_and_the_file_continues(tmp_path):
    path = tmp_path / "metrics.jsonl"
    baseline, at_resume = Row("eval", 0, 0, {}), Row("eval", 3, 3, {})
    write(path, [baseline, *rollout_rows(0, 3), at_resume, *rollout_rows(3, 5)])

    assert rewind(path, 3) == 3
    aside = tmp_path / "metrics.jsonl.before-resume-3"
    assert list(read_rows(path)) == [baseline, *rollout_rows(0, 3)]
    assert list(read_rows(aside)) == [at_resume, *rollout_rows(3, 5)]

    write(path, [at_resume, *rollout_rows(3, 6)])
    assert [row.rollout for row in read_rows(path)] == [0, 0, 1, 2, 3, 3, 4, 5]


def test_an_evaluation_that_stands_is_not_taken_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    stands, taken_back = Row("eval", 2, 2, {}), Row("eval", 3, 3, {})
    write(path, [*rollout_rows(0, 2), stands, *rollout_rows(2, 3), taken_back])
    assert rewind(path, 2, first_evaluation=3) == 2
    assert list(read_rows(path)) == [*rollout_rows(0, 2), stands]


def test_rewinding_twice_to_one_place_loses_nothing(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, rollout_rows(0, 4))
    rewind(path, 2)
    write(path, rollout_rows(2, 3))
    rewind(path, 2)
    aside = read_rows(tmp_path / "metrics.jsonl.before-resume-2")
    assert [row.rollout for row in aside] == [2, 3, 2]
    assert [row.rollout for row in read_rows(path)] == [0, 1]


@pytest.mark.parametrize("torn", [b'{"kind": "roll', b'{"rollout": 0}', b"\xff\x00"])
def test_a_line_cut_short_by_a_kill_is_moved_aside(tmp_path, torn):
    path = tmp_path / "transitions.jsonl"
    path.write_bytes(b'{"rollout": 0}\n' + torn)
    assert rewind(path, 5) == 1
    assert path.read_bytes() == b'{"rollout": 0}\n'
    assert (tmp_path / "transitions.jsonl.before-resume-5").read_bytes() == torn + b"\n"


def test_rewind_without_later_rows_changes_nothing(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert rewind(path, 0) == 0
    write(path, rollout_rows(0, 2))
    before = path.read_bytes()
    assert rewind(path, 2) == 0
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_broken_lines_are_left_out_of_the_sound_rows(tmp_path):
    path = tmp_path / "metrics.jsonl"
    row = '{"kind": "eval", "rollout": 2, "optimizer_step": 2, "eval/x": "nan"}\n'
    path.write_text(f'{row}[1]\n{{"kind": "eval"}}\ngarbage\n{row}{row[:20]}')
    assert [one.rollout for one in read_sound_rows(path)] == [2, 2]
