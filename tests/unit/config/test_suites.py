"""What the alarm watches on which suite."""

from __future__ import annotations

from typing import Any

from builders import run_config

from unirl.config.suites import watched_scores


def watched(scorers: dict[str, Any], **judges: Any) -> dict[str, tuple[str, ...]]:
    reward = {"ocr": {"path": "ocr"}, "off": {"path": "color", "weight": 0.0}}
    suite = {"data": "photos.txt", "scorers": scorers}
    settings = {"reward.scorers": reward, "eval_rewards": judges, "eval_suites": {"photos": suite}}
    return watched_scores(run_config(settings))


def test_judges_and_scorers_that_the_reward_has_not_are_watched():
    found = watched({"size": {"path": "jpeg_size"}}, exact={"path": "exact_read"})
    assert found == {"eval": ("exact",), "photos": ("size",)}


def test_a_scorer_of_the_reward_is_not_watched_under_any_name_or_weight():
    assert watched({"text": {"path": "ocr", "weight": 3.0}})["photos"] == ()


def test_one_with_other_arguments_or_of_weight_0_there_is_watched():
    scorers = {"ocr": {"path": "ocr", "args": {"x": 1}}, "color": {"path": "color"}}
    assert watched(scorers)["photos"] == ("ocr", "color")
