"""Files of evaluations: found by suite and step, set aside when a run resumes before them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from unirl.tracking.evaluations import (
    EvaluatedSample,
    changes_file,
    comparable_since,
    evaluation_file,
    evaluation_steps,
    note_changes,
    read_evaluation,
    read_images,
    set_aside_evaluations,
    write_evaluation,
)

SAMPLES = [
    EvaluatedSample(0, "a cat", 0, 0.1, {"ocr": 0.1}, {"light": 1 / 3}),
    EvaluatedSample(0, "a cat", 1, None, {}, {}),
]


def write(run_dir: Path, suite: str, step: int) -> Path:
    images = np.full((1, 2, 3, 3), step % 256, dtype=np.uint8)
    return write_evaluation(run_dir, suite, step, SAMPLES, images)


def test_what_was_written_is_read_back(tmp_path):
    read = read_evaluation(write(tmp_path, "eval", 5))
    assert [s.image for s in read] == ["images/eval-000005/0000.png", None]
    assert [(s.reward, s.scores, s.judges) for s in read] == [
        (s.reward, s.scores, s.judges) for s in SAMPLES
    ]
    assert read_images(tmp_path, "eval", 5, count=4).tolist() == [[[[5] * 3] * 3] * 2]


def test_steps_are_those_of_the_suite_in_order(tmp_path):
    for suite, step in [("eval", 1234567), ("eval", 20), ("photos", 3)]:
        write(tmp_path, suite, step)
    assert evaluation_steps(tmp_path) == [20, 1234567]
    assert evaluation_steps(tmp_path, "photos") == [3]
    assert evaluation_steps(tmp_path / "nothing") == []


def test_a_resume_sets_aside_what_it_will_evaluate_again_and_loses_nothing(tmp_path):
    for step in (0, 2, 4):
        write(tmp_path, "eval", step)
    (tmp_path / "images" / "before_after.png").touch()
    later = evaluation_file(tmp_path, "eval", 4).read_bytes()
    set_aside_evaluations(tmp_path, 2, first=2)
    assert evaluation_steps(tmp_path) == [0]
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == [
        "before-resume-2",
        "before_after.png",
        "eval-000000",
    ]
    aside = tmp_path / "evaluations" / "before-resume-2"
    assert (aside / "eval-000004.jsonl").read_bytes() == later
    write(tmp_path, "eval", 4)
    set_aside_evaluations(tmp_path, 2, first=3)
    assert sorted(path.name for path in aside.iterdir()) == [
        "eval-000002.jsonl",
        "eval-000004.jsonl",
        "eval-000004.jsonl.2",
    ]


def test_evaluations_are_compared_from_the_last_change_on(tmp_path):
    assert comparable_since(tmp_path) == 0
    note_changes(tmp_path, 4, ["seed: 0 -> 1"])
    note_changes(tmp_path, 12, ["seed: 1 -> 0"])
    with changes_file(tmp_path).open("a") as file:
        file.write('{"rollout": 9')
    assert comparable_since(tmp_path) == 12
