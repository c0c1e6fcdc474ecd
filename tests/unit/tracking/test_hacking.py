"""The alarm: the held-out reward rose while what it does not see fell, both beyond doubt."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from unirl.tracking.evaluations import EvaluatedSample, write_evaluation
from unirl.tracking.hacking import Divergence, divergences

PROMPTS = 20
WATCHED = {"eval": ("dark",), "photos": ("ocr", "color")}


def evaluate(
    run_dir: Path,
    suite: str,
    step: int,
    reward: float,
    scores: Mapping[str, float] | None = None,
    judges: Mapping[str, float] | None = None,
    doubt: float = 0.01,
) -> None:
    """An evaluation with these means; `doubt` is how far single prompts are from them."""
    wobble = np.random.default_rng(step).uniform(-doubt, doubt, PROMPTS)
    wobble -= wobble.mean()
    samples = [
        EvaluatedSample(
            prompt,
            f"prompt {prompt}",
            0,
            reward + off,
            {name: score + off for name, score in (scores or {}).items()},
            {name: score + off for name, score in (judges or {}).items()},
        )
        for prompt, off in enumerate(wobble)
    ]
    write_evaluation(run_dir, suite, step, samples, np.zeros((0, 1, 1, 3), np.uint8))


def alarms(found: list[Divergence]) -> dict[str, bool]:
    return {divergence.metric: divergence.is_alarm for divergence in found}


def test_a_judge_is_compared_with_the_evaluation_at_which_it_was_highest(tmp_path: Path) -> None:
    for step, reward, dark in ((0, 0.4, 0.5), (5, 0.5, 0.6), (10, 0.7, 0.4)):
        evaluate(tmp_path, "eval", step, reward, judges={"dark": dark})
    assert divergences(tmp_path, 0, WATCHED) == []
    assert alarms(divergences(tmp_path, 5, WATCHED)) == {"eval/hacking_alarm_dark": False}
    (found,) = divergences(tmp_path, 10, WATCHED)
    assert (found.since, found.is_alarm) == (5, True)
    assert "judge dark fell by 0.2" in found.sentence


def test_a_suites_scorer_is_watched_against_the_held_out_reward(tmp_path: Path) -> None:
    for step, reward, ocr in ((0, 0.4, 0.9), (5, 0.7, 0.5)):
        evaluate(tmp_path, "eval", step, reward, scores={"ocr": reward})
        evaluate(tmp_path, "photos", step, 1 - reward, scores={"ocr": ocr, "color": 0.2})
    found = divergences(tmp_path, 5, WATCHED)
    assert alarms(found) == {
        "eval/photos/hacking_alarm_ocr": True,
        "eval/photos/hacking_alarm_color": False,
    }
    assert "held-out reward rose by 0.3" in found[0].sentence
    assert "ocr of suite photos fell by 0.4" in found[0].sentence
    assert divergences(tmp_path, 5, {"photos": ()}) == []


def test_what_may_be_chance_or_lowers_the_reward_too_is_no_alarm(tmp_path: Path) -> None:
    for step, reward, dark in ((0, 0.4, 0.5), (5, 0.41, 0.49)):
        evaluate(tmp_path, "eval", step, reward, judges={"dark": dark}, doubt=0.3)
    for step, reward in ((0, 0.7), (5, 0.4)):
        evaluate(tmp_path / "falls", "eval", step, reward, judges={"dark": reward})
    for run_dir in (tmp_path, tmp_path / "falls"):
        assert alarms(divergences(run_dir, 5, WATCHED)) == {"eval/hacking_alarm_dark": False}


def test_a_suite_that_is_new_since_a_resume_has_nothing_to_be_compared_with(
    tmp_path: Path,
) -> None:
    evaluate(tmp_path, "eval", 0, 0.4)
    evaluate(tmp_path, "eval", 5, 0.7)
    evaluate(tmp_path, "photos", 5, 0.1, scores={"ocr": 0.1})
    assert divergences(tmp_path, 5, WATCHED) == []
