"""Every metric that may be logged is explained."""

import re

import pytest

from unirl.tracking.metrics import METRICS, describe


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("rollout/reward_mean", "rollout/reward_mean"),
        ("rollout/reward_ocr_mean", "rollout/reward_<component>_mean"),
        ("rollout/reward_my_own_scorer_max", "rollout/reward_<component>_max"),
        ("perf/rollout_seconds", "perf/<phase>_seconds"),
        ("eval/ocr_mean", "eval/<component>_mean"),
        ("eval/judge_exact_read_mean", "eval/judge_<name>_mean"),
        ("eval/reward_mean", "eval/reward_mean"),
        ("residency/train_onloads", "residency/<role>_onloads"),
        ("train/rollout_replay_log_prob_diff_max", "train/rollout_replay_log_prob_diff_max"),
    ],
)
def test_a_name_is_found_under_its_most_specific_entry(name, entry):
    assert describe(name) is METRICS[entry]


@pytest.mark.parametrize(
    "name", ["train/los", "reward_mean", "train/loss/x", "eval/a/b/c_mean", ""]
)
def test_an_unknown_name_raises(name):
    with pytest.raises(LookupError, match=re.escape(f"'{name}'")):
        describe(name)


def test_every_entry_describes_itself_in_a_known_family():
    for name, metric in METRICS.items():
        assert describe(re.sub(r"<\w+>", "x", name)) is metric
        assert name.split("/")[0] in {
            "rollout",
            "train",
            "progress",
            "perf",
            "memory",
            "eval",
            "residency",
        }
        assert metric.meaning
