"""The reward service: weights, failures, dropped groups, judges and parking."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import host_arena, offload, onload, rollout_request, sample, tiny_model
from torch import Tensor

from unirl.config.schema import RewardConfig
from unirl.core.components import FROZEN, Component, RebuiltComponent, TensorComponent
from unirl.core.errors import ConfigError, DataError, ResidencyError, RewardError
from unirl.core.types import PromptRecord, Rollout
from unirl.reward.scorer import DifferentiableScorer, Scorer
from unirl.reward.service import RewardService, WeightedScorer

NAN = float("nan")
Score = Callable[[Tensor, Sequence[PromptRecord]], Any]


class FunctionScorer(Scorer):
    """Scores with a function; counts its calls."""

    def __init__(self, function: Score, components: Sequence[Component] = ()) -> None:
        self._function = function
        self._components = components
        self.num_calls = 0

    def score(self, images: Tensor, records: Sequence[PromptRecord]) -> Any:
        self.num_calls += 1
        return self._function(images, records)

    def components(self) -> Sequence[Component]:
        return self._components


def brightness(images: Tensor, records: Sequence[PromptRecord]) -> Tensor:
    return images.float().mean(dim=(1, 2, 3)) / 255


def constant(value: float) -> Score:
    return lambda images, records: [value] * len(records)


def crash(images: Tensor, records: Sequence[PromptRecord]) -> Any:
    raise KeyError("no such model")


def fails_for(text: str, otherwise: Score, failure: float = NAN) -> Score:
    """`failure` for images of one prompt."""

    def score(images: Tensor, records: Sequence[PromptRecord]) -> list[float]:
        scores = torch.as_tensor(otherwise(images, records)).tolist()
        pairs = zip(records, scores, strict=True)
        return [failure if record.text == text else value for record, value in pairs]

    return score


@pytest.fixture(scope="module")
def rollout() -> Rollout:
    """3 prompts x 4 samples."""
    return sample(tiny_model(), rollout_request(num_prompts=3))


def service(
    scorers: dict[str, tuple[Score | Scorer, float]],
    judges: dict[str, Score | Scorer] | None = None,
    **config: Any,
) -> RewardService:
    def scorer(given: Score | Scorer) -> Scorer:
        return given if isinstance(given, Scorer) else FunctionScorer(given)

    return RewardService(
        {n: WeightedScorer(scorer(s), weight) for n, (s, weight) in scorers.items()},
        {n: scorer(s) for n, s in (judges or {}).items()},
        RewardConfig.model_validate(config),
        host_arena(),
    )


def texts(rollout: Rollout) -> list[str]:
    return rollout.request.prompts.texts


# --- scores ---------------------------------------------------------------------------------------


def test_the_total_is_the_weighted_sum_and_components_are_unweighted(rollout):
    rewards = service({"a": (brightness, 0.5), "b": (constant(2.0), -3.0)}).score(rollout)
    expected = brightness(rollout.images, ())
    torch.testing.assert_close(rewards.components["a"], expected)
    assert rewards.components["b"].tolist() == [2.0] * 12
    torch.testing.assert_close(rewards.total, 0.5 * expected - 6)
    assert rewards.valid.all()
    assert {rewards.total.dtype, rewards.components["a"].dtype} == {torch.float32}


def test_every_sample_is_scored_with_the_record_of_its_prompt(rollout):
    order = {text: float(i) for i, text in enumerate(texts(rollout))}
    rewards = service({"a": (lambda images, records: [order[r.text] for r in records], 1.0)})
    assert rewards.score(rollout).total.tolist() == [0.0] * 4 + [1.0] * 4 + [2.0] * 4


@pytest.mark.parametrize(
    "returned",
    [[1] * 12, [True] * 12, torch.ones(12, dtype=torch.float64), torch.ones(12).numpy()],
    ids=["ints", "bools", "float64", "numpy"],
)
def test_scores_may_be_any_kind_of_numbers(rollout, returned):
    rewards = service({"a": (lambda images, records: returned, 1.0)}).score(rollout)
    assert rewards.total.tolist() == [1.0] * 12


def test_a_scorer_that_keeps_a_graph_does_not_pass_it_on(rollout):
    weight = torch.ones(12, requires_grad=True)
    for score in (lambda images, records: brightness(images, ()) * weight, lambda *_: weight):
        assert not service({"a": (score, 1.0)}).score(rollout).total.requires_grad


def test_a_scorer_that_writes_into_the_images_is_an_error(rollout):
    def black_out(images: Tensor, records: Sequence[PromptRecord]) -> list[float]:
        images.zero_()
        return [0.0] * len(records)

    own = replace(rollout, images=rollout.images.clone())
    with pytest.raises(RewardError, match="scorer 'bad' wrote into the images"):
        service({"bad": (black_out, 1.0), "good": (brightness, 1.0)}).score(own)


# --- videos ---------------------------------------------------------------------------------------


class Motion(FunctionScorer, DifferentiableScorer):
    """How much the brightness of a video changes from its first frame to its last."""

    takes_videos = True

    def __init__(self) -> None:
        super().__init__(lambda videos, records: self.score_differentiable(videos / 255, records))

    def score_differentiable(self, images: Tensor, records: Sequence[PromptRecord]) -> Tensor:
        return (images[:, -1] - images[:, 0]).mean(dim=(1, 2, 3))


class SmoothBrightness(DifferentiableScorer):
    def score_differentiable(self, images: Tensor, records: Sequence[PromptRecord]) -> Tensor:
        assert len(images) == len(records)
        return images.mean(dim=(1, 2, 3))


@pytest.fixture(scope="module")
def videos(rollout: Rollout) -> Rollout:
    """Of 5 frames, each of another brightness."""
    generator = torch.Generator().manual_seed(0)
    frames = torch.randint(0, 256, (12, 5, 3, 8, 8), dtype=torch.uint8, generator=generator)
    return replace(rollout, images=frames)


def test_a_scorer_of_images_sees_each_frame_and_its_mean_counts(videos):
    order = {text: float(i) for i, text in enumerate(texts(videos))}

    def score(images: Tensor, records: Sequence[PromptRecord]) -> Tensor:
        assert images.shape == (60, 3, 8, 8)
        return brightness(images, ()) + torch.tensor([order[r.text] for r in records])

    expected = videos.images.float().mean(dim=(1, 2, 3, 4)) / 255
    expected += torch.arange(3.0).repeat_interleave(4)
    found = service({"a": (score, 1.0)}).score(videos).total
    torch.testing.assert_close(found, expected)


def test_a_scorer_of_videos_is_given_them_whole(videos, rollout):
    first, last = videos.images[:, 0].float(), videos.images[:, -1].float()
    expected = (last - first).mean(dim=(1, 2, 3)) / 255
    torch.testing.assert_close(service({"a": (Motion(), 1.0)}).score(videos).total, expected)
    # An image is a video of one frame.
    assert not service({"a": (Motion(), 1.0)}).score(rollout).total.any()


def test_videos_are_scored_with_a_gradient_to_every_frame(videos):
    pixels = (videos.images[:2].float() / 255).requires_grad_()
    scorers = {"bright": (SmoothBrightness(), 2.0), "motion": (Motion(), 1.0)}
    records = videos.request.sample_records[:2]
    total = service(scorers).differentiable(pixels, records)
    assert total.shape == (2,)
    total.sum().backward()
    assert pixels.grad is not None
    per_frame = pixels.grad.sum(dim=(2, 3, 4))
    torch.testing.assert_close(per_frame, torch.tensor([[-0.6, 0.4, 0.4, 0.4, 1.4]] * 2))


def test_one_bad_frame_drops_the_group_of_its_video(videos):
    def score(images: Tensor, records: Sequence[PromptRecord]) -> list[float]:
        is_bad = (images == videos.images[5, 3]).flatten(1).all(dim=1)
        return torch.where(is_bad, NAN, 1.0).tolist()

    rewards = service({"a": (score, 1.0)}, on_failure="drop_group").score(videos)
    assert rewards.valid.tolist() == [True] * 4 + [False] * 4 + [True] * 4


def test_a_wrong_number_of_scores_is_told_in_frames_or_videos(videos):
    with pytest.raises(RewardError, match=r"shape \(12,\) for 60 images"):
        service({"a": (lambda images, records: [1.0] * 12, 1.0)}).score(videos)


# --- failures -------------------------------------------------------------------------------------

FAILURES: dict[str, tuple[Score, str]] = {
    "nan": (constant(NAN), "returned nan for 12 of 12 images"),
    "infinity": (constant(float("inf")), "returned inf"),
    "too few": (lambda images, records: [1.0] * 11, r"shape \(11,\) for 12 images"),
    "a column": (lambda images, records: torch.ones(12, 1), r"shape \(12, 1\)"),
    "a number": (lambda images, records: 1.0, r"shape \(\)"),
    "nothing": (lambda images, records: None, "failed: "),
    "words": (lambda images, records: ["good"] * 12, "failed: "),
    "an exception": (crash, "failed: KeyError: 'no such model'"),
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("on_failure", ["raise", "retry"])
def test_a_failure_is_an_error_that_names_the_scorer(rollout, failure, on_failure):
    score, message = FAILURES[failure]
    broken = service({"fine": (brightness, 1.0), "broken": (score, 1.0)}, on_failure=on_failure)
    with pytest.raises(RewardError, match=f"scorer 'broken' .*{message}"):
        broken.score(rollout)


def test_a_single_nan_names_the_first_prompt_it_was_given_for(rollout):
    bad = texts(rollout)[1]
    broken = service({"a": (fails_for(bad, brightness), 1.0)})
    with pytest.raises(RewardError, match=f"4 of 12 images, first for prompt '{bad}'"):
        broken.score(rollout)


@pytest.mark.parametrize("num_failures", [0, 1, 2, 3])
def test_retry_asks_again_as_often_as_set_and_then_raises(rollout, num_failures):
    def flaky(images: Tensor, records: Sequence[PromptRecord]) -> Any:
        return (crash if scorer.num_calls <= num_failures else brightness)(images, records)

    scorer = FunctionScorer(flaky)
    rewards = service({"flaky": (scorer, 1.0)}, on_failure="retry", num_retries=2)
    if num_failures <= 2:
        torch.testing.assert_close(rewards.score(rollout).total, brightness(rollout.images, ()))
    else:
        with pytest.raises(RewardError, match="no such model"):
            rewards.score(rollout)
    assert scorer.num_calls == min(num_failures, 2) + 1


def crashes_for(text: str) -> Score:
    def score(images: Tensor, records: Sequence[PromptRecord]) -> Any:
        if any(record.text == text for record in records):
            raise OSError("timeout")
        return brightness(images, records)

    return score


@pytest.mark.parametrize("kind", ["nan", "crash"])
def test_drop_group_drops_only_the_failing_group_and_never_counts_it_as_zero(rollout, kind):
    bad = texts(rollout)[1]
    score = fails_for(bad, brightness) if kind == "nan" else crashes_for(bad)
    rewards = service({"a": (score, 1.0)}, on_failure="drop_group").score(rollout)
    assert rewards.valid.tolist() == [True] * 4 + [False] * 4 + [True] * 4
    assert rewards.total[4:8].isnan().all()
    expected = brightness(rollout.images, ())
    torch.testing.assert_close(rewards.total[rewards.valid], expected[rewards.valid])


def test_one_bad_sample_costs_its_whole_group(rollout):
    def score(images: Tensor, records: Sequence[PromptRecord]) -> Any:
        scores = brightness(images, records)
        if len(records) == 12 or records[0].text == texts(rollout)[2]:
            scores[-1] = NAN
        return scores

    rewards = service({"a": (score, 1.0)}, on_failure="drop_group").score(rollout)
    assert rewards.valid.tolist() == [True] * 8 + [False] * 4


def test_groups_dropped_by_different_scorers_add_up(rollout):
    first, second, _ = texts(rollout)
    rewards = service(
        {"a": (fails_for(first, brightness), 1.0), "b": (crashes_for(second), 0.0)},
        on_failure="drop_group",
    ).score(rollout)
    assert rewards.valid.tolist() == [False] * 8 + [True] * 4


def test_an_interrupt_is_not_taken_for_a_failing_scorer(rollout):
    def interrupted(images: Tensor, records: Sequence[PromptRecord]) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        service({"a": (interrupted, 1.0)}, on_failure="drop_group").score(rollout)


# --- judges ---------------------------------------------------------------------------------------


def test_judges_do_not_count_in_the_reward(rollout):
    judged = service({"a": (constant(1.0), 1.0)}, {"judge": brightness})
    assert judged.score(rollout).components.keys() == {"a"}
    torch.testing.assert_close(judged.judge(rollout)["judge"], brightness(rollout.images, ()))


def test_a_judge_that_fails_is_left_out_loudly_and_harms_nothing(rollout, caplog):
    judged = service({"a": (constant(1.0), 1.0)}, {"broken": crash, "fine": constant(2.0)})
    with caplog.at_level(logging.WARNING):
        scores = judged.judge(rollout)
    assert scores.keys() == {"fine"}
    assert "judge left out of this evaluation: scorer 'broken' failed: KeyError" in caplog.text


# --- suites ---------------------------------------------------------------------------------------


def test_a_suite_is_scored_by_its_own_scorers_and_one_that_fails_costs_its_total(rollout, caplog):
    suites = {
        "sound": {"a": brightness, "b": constant(2.0)},
        "broken": {"a": brightness, "b": crash},
    }
    scored = RewardService(
        {},
        {},
        RewardConfig(),
        host_arena(),
        {
            suite: {name: WeightedScorer(FunctionScorer(s), -3.0) for name, s in scorers.items()}
            for suite, scorers in suites.items()
        },
    )
    sound = scored.score_suite(rollout, "sound")
    expected = brightness(rollout.images, ())
    torch.testing.assert_close(sound.total, -3 * expected - 6)
    assert sound.valid.all()
    broken = scored.score_suite(rollout, "broken")
    assert not broken.valid.any()
    torch.testing.assert_close(broken.components["a"], expected)
    assert broken.components["b"].isnan().all()
    assert "left out of this evaluation of suite broken: scorer 'b' failed" in caplog.text


# --- records --------------------------------------------------------------------------------------


class NeedsText(FunctionScorer):
    def required_metadata(self) -> Sequence[str]:
        return ("text",)


@pytest.mark.parametrize("place", ["scorer", "judge"])
def test_missing_metadata_names_scorer_field_prompt_and_key(place):
    needs = NeedsText(constant(1.0))
    checked = (
        service({"reader": (needs, 1.0)})
        if place == "scorer"
        else service({"a": (constant(1.0), 1.0)}, {"reader": needs})
    )
    good = PromptRecord("0", "red cat", {"text": "RED"})
    checked.check_records([good], "data.train")
    with pytest.raises(DataError, match=r"'reader' .*metadata\.text.*'blue dog'.*data\.train"):
        checked.check_records([good, PromptRecord("1", "blue dog", {})], "data.train")


# --- parking --------------------------------------------------------------------------------------


def test_parking_moves_every_scorers_and_judges_components_and_refuses_to_score(rollout):
    weight, other = torch.ones(5), torch.ones(7)
    sessions: list[str] = []
    session = RebuiltComponent(
        "session",
        lambda: sessions.append("drop") or 11,
        lambda: sessions.append("build") or 11,
        lambda: 11,
    )
    parts = [TensorComponent("a.weight", lambda: [weight], lambda: FROZEN), session]
    judge_part = TensorComponent("judge.weight", lambda: [other], lambda: FROZEN)
    scored = service(
        {"a": (FunctionScorer(brightness, parts), 1.0)},
        {"judge": FunctionScorer(brightness, [judge_part])},
    )
    moved = offload(scored)
    assert (moved.num_bytes, moved.dropped_bytes) == (12 * 4, 11)
    for use in (scored.score, scored.judge):
        with pytest.raises(ResidencyError, match="while parked"):
            use(rollout)
    assert offload(scored).num_bytes == 0
    assert onload(scored).num_bytes == 12 * 4 + 11
    assert sessions == ["drop", "build"]
    assert scored.score(rollout).valid.all()
    assert weight.tolist() == [1.0] * 5


@pytest.mark.parametrize(
    ("declared", "told"),
    [
        (torch.nn.Linear(2, 2), "must return a list of TensorComponent and RebuiltComponent"),
        ([torch.nn.Linear(2, 2)], "must return a list of TensorComponent and RebuiltComponent"),
        ([TensorComponent("net", list, lambda: FROZEN)] * 2, "has one name twice"),
    ],
)
def test_components_that_are_none_are_refused_when_the_service_is_built(declared, told):
    with pytest.raises(ConfigError, match=rf"scorer 'a': FunctionScorer.components\(\).*{told}"):
        service({"a": (FunctionScorer(brightness, declared), 1.0)})


def test_two_scorers_of_one_class_have_components_of_their_own():
    def part() -> list[Component]:
        return [TensorComponent("net", lambda: [torch.ones(3)], lambda: FROZEN)]

    both = service(
        {n: (FunctionScorer(brightness, part()), 1.0) for n in ("left", "right")},
        {"judge": FunctionScorer(brightness, part())},
    )
    names = [part.name for part in both.parts]
    assert names == ["reward.left.net", "reward.right.net", "reward.judge.net"]
