"""Requests are pure functions of configuration, rollout id and prompts."""

from __future__ import annotations

import pytest
from builders import SIZE, records, run_config, sampling_params, tiny_model

from unirl.algorithms.making import make_algorithm
from unirl.core.types import PromptBatch
from unirl.samplers.schedule import custom_sigmas
from unirl.trainer.requests import RequestFactory, evaluation_params

MODEL = tiny_model()
PROMPTS = PromptBatch(records(3))


def factory(**overrides: object) -> RequestFactory:
    config = run_config({k.replace("__", "."): v for k, v in overrides.items()})
    return RequestFactory(config, MODEL, make_algorithm(config.algorithm))


def test_a_training_request_is_the_same_whenever_it_is_asked_for():
    later = factory()
    for rollout_id in (9, 3, 5):
        later.training(rollout_id, PROMPTS)
    assert later.training(4, PROMPTS) == factory().training(4, PROMPTS)


def test_every_sample_of_every_rollout_has_noise_of_its_own():
    requests = [factory().training(rollout_id, PROMPTS) for rollout_id in range(3)]
    for kind in ("initial_noise_keys", "step_noise_keys"):
        keys = [key for request in requests for key in getattr(request, kind)]
        assert len(set(keys)) == len(keys) == 3 * 12
    other = factory(seed=1).training(0, PROMPTS)
    assert not set(other.initial_noise_keys) & set(requests[0].initial_noise_keys)


def test_the_same_prompt_twice_in_a_batch_gets_different_noise():
    twice = PromptBatch((records(1)[0], records(1)[0]))
    keys = factory().training(0, twice).initial_noise_keys
    assert len(set(keys)) == len(keys)


def test_init_same_noise_shares_the_start_within_a_group_only():
    request = factory(sampling__init_same_noise=True).training(0, PROMPTS)
    starts = request.initial_noise_keys
    assert [len(set(starts[i : i + 4])) for i in (0, 4, 8)] == [1, 1, 1]
    assert len(set(starts)) == 3
    assert len(set(request.step_noise_keys)) == 12


def test_training_asks_for_noise_and_evaluation_for_the_ode():
    training, evaluation = factory().training(0, PROMPTS), factory().evaluation(PROMPTS, 2)
    assert training.num_sde_steps == 2
    assert len(set(training.sde_steps)) == 1
    assert training.sampling.eta == 0.7
    assert evaluation.sde_steps == ((),) * 6
    assert evaluation.sampling.eta == 0
    assert len(evaluation) == 6
    assert not set(training.initial_noise_keys) & set(evaluation.initial_noise_keys)


def test_noisy_evaluation_takes_the_same_steps_every_time():
    asked = factory(eval_eta=0.3, sampling__sde_steps={"strategy": "all"}).evaluation(PROMPTS, 2)
    assert asked.sde_steps == ((0, 1, 2, 3),) * 6
    assert asked.sampling.eta == 0.3


def test_the_evaluation_overlay_changes_what_it_names_and_keeps_the_rest():
    overlay = {"num_inference_steps": 7, "guidance_scale": 3.0}
    made = factory(eval_sampling=overlay).evaluation(PROMPTS, 2)
    assert (made.sampling.num_inference_steps, made.sampling.guidance_scale) == (7, 3.0)
    assert (made.sampling.height, made.sampling.kernel) == (SIZE, "flow")
    assert len(made.sigmas) == 8
    params = evaluation_params(run_config({"eval_sampling": {"kernel": "cps"}}))
    assert (params.kernel, params.num_inference_steps) == ("cps", 5)


@pytest.mark.parametrize("guidance", [0.0, 0])
def test_an_overlay_of_zero_is_not_taken_for_unset(guidance):
    params = evaluation_params(
        run_config({"sampling.guidance_scale": 5.0, "eval_sampling": {"guidance_scale": guidance}})
    )
    assert params.guidance_scale == 0


def test_the_schedule_is_the_models():
    assert factory().training(0, PROMPTS).sigmas == MODEL.sigmas(sampling_params(num_steps=5))


def test_samples_of_one_start_share_its_noise_and_its_one_stochastic_step():
    sde = {"strategy": "stratified"}
    asked = factory(sampling__samples_per_start=2, sampling__sde_steps=sde).training(3, PROMPTS)
    keys, steps = asked.initial_noise_keys, asked.sde_steps
    assert [len(set(keys[at : at + 2])) for at in range(0, 12, 2)] == [1] * 6
    assert len(set(keys)) == 6
    assert len(set(asked.step_noise_keys)) == 12
    assert all(steps[at] == steps[at + 1] and len(steps[at]) == 1 for at in range(0, 12, 2))
    assert steps[:4] == steps[4:8] == steps[8:]
    assert steps[0] != steps[2]


def test_a_thinned_schedule_keeps_every_level_that_training_needs():
    keys = {"sampling__num_inference_steps": 10, "sampling__thin_after": 2}
    window = {"strategy": "list", "steps": [1, 2]}
    asked = factory(**keys, sampling__sde_steps=window).training(0, PROMPTS)
    assert asked.sigmas == pytest.approx((1.0, 0.9, 0.8, 0.7, 0.5, 0.3, 0.1, 0.0))
    assert len(factory(**keys).evaluation(PROMPTS, 2).sigmas) == 11


@pytest.mark.parametrize("kind", ["linear", "karras", "exponential"])
def test_another_schedule_than_the_models_can_be_asked_for(kind: str):
    asked = factory(sampling__sigma_schedule=kind, sampling__shift=3.0).training(0, PROMPTS)
    assert asked.sigmas == custom_sigmas(kind, 5, 3.0)
    assert asked.sigmas != factory().training(0, PROMPTS).sigmas
