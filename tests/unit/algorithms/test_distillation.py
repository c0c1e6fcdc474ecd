"""Distillation: the loss against torch.distributions, who teaches whom, and where it leads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from builders import (
    CPU,
    host_arena,
    randomize_adapter,
    records,
    rollout_request,
    run_config,
    sample,
    sampling_params,
    scored,
    tiny_model,
)
from safetensors.torch import save_file
from smooth_model import SmoothModel, assert_gradient_is_the_slope, latents, vectors
from torch import Tensor

from unirl.algorithms.base import Policy
from unirl.algorithms.distillation import Distillation, StudentRows, TaughtRows, weights_of
from unirl.algorithms.making import make_algorithm
from unirl.algorithms.transitions import TransitionRows, transition_of, velocity_of
from unirl.core.errors import DataError, ModelError
from unirl.core.types import PromptBatch, RolloutRequest
from unirl.distributed.ranks import OneRank
from unirl.models.base import DiffusionModel
from unirl.models.lora import adapter_parameters
from unirl.models.parameters import copy_into
from unirl.models.tiny import TinyModel
from unirl.samplers.kernels import make_kernel
from unirl.train.backend import WholeBackend
from unirl.train.shadows import WeightSet
from unirl.train.stack import TrainStack
from unirl.train.teachers import read_teacher

TWO = {"letters": "letters.safetensors", "digits": "digits.safetensors"}


def distillation(teachers: Mapping[str, str] | None = None, **keys: Any) -> Distillation:
    options = {f"algorithm.{key}": value for key, value in keys.items()}
    config = run_config({"algorithm.teachers": dict(teachers or {"default": "x"}), **options})
    return Distillation(config.algorithm, lambda images, records: images)


def trained_copy(model: TinyModel, seed: int) -> dict[str, Tensor]:
    """An adapter unlike the model's own, by parameter."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(parameter.shape, generator=generator) * 0.3
        for name, parameter in adapter_parameters(model.network).items()
    }


def taught_policy(model: TinyModel, teachers: Mapping[str, Mapping[str, Tensor]]) -> Policy:
    """A policy whose teachers are weight sets, as the train stack has them."""
    weights = {}
    for domain, tensors in teachers.items():
        held = WeightSet(adapter_parameters(model.network), lambda tensor: tensor)
        held.tensors = dict(tensors)
        weights[weights_of(domain)] = held.active
    return Policy(model, weights, progress=0.0)


def with_domains(request: RolloutRequest, *domains: str) -> RolloutRequest:
    """Each prompt with a domain of its own."""
    prompts = [
        replace(record, metadata={"domain": domain})
        for record, domain in zip(request.prompts.records, domains, strict=True)
    ]
    return replace(request, prompts=PromptBatch(tuple(prompts)))


def student_model() -> TinyModel:
    model = tiny_model()
    randomize_adapter(model)
    return model


def velocity_with(model: TinyModel, tensors: Mapping[str, Tensor], rows: TransitionRows) -> Tensor:
    """What the model says with these weights written into it."""
    parameters = adapter_parameters(model.network)
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    copy_into(parameters, tensors)
    with torch.no_grad():
        found = velocity_of(model, rows)
    copy_into(parameters, before)
    return found


# --- the loss -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["flow", "dance", "flash", "cps", "ddim"])
def test_the_loss_is_the_kl_of_the_students_step_to_the_teachers(kernel: str) -> None:
    model, algorithm = student_model(), distillation()
    teacher = trained_copy(model, seed=5)
    request = rollout_request(kernel=kernel, sde_steps=(1, 2), guidance_scale=2.0)
    rows = algorithm.rows([scored(sample(model, request))])
    policy = taught_policy(model, {"default": teacher})
    with torch.no_grad():
        taught, _ = algorithm.anchor(policy, rows, torch.arange(16).split(5))
    losses = algorithm.loss(policy, taught)
    student = transition_of(rows.transitions, velocity_of(model, rows.transitions))
    theirs = transition_of(rows.transitions, velocity_with(model, teacher, rows.transitions))
    expected = torch.distributions.kl_divergence(
        torch.distributions.Normal(student.mean, student.std.expand_as(student.mean)),
        torch.distributions.Normal(theirs.mean, theirs.std.expand_as(theirs.mean)),
    ).mean(dim=(1, 2, 3))
    assert expected.min() > 1e-4
    torch.testing.assert_close(losses.loss, expected, rtol=1e-4, atol=1e-6)
    half_mse = ((student.mean - theirs.mean) ** 2).mean(dim=(1, 2, 3)) / 2
    other = distillation(distill_form="mean_mse").loss(policy, taught)
    torch.testing.assert_close(other.loss, half_mse)
    torch.testing.assert_close(other.details["kl_teacher"], losses.loss.detach())


@pytest.mark.parametrize("distill_form", ["nats", "mean_mse"])
@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
def test_the_gradient_is_the_slope_through_both_guidance_branches(
    distill_form: str, guidance_scale: float
) -> None:
    model, algorithm = SmoothModel(), distillation(distill_form=distill_form)
    sigmas = (1.0, 0.75, 0.5, 0.25, 0.0)
    transitions = TransitionRows(
        latents=latents(4),
        next_latents=latents(4, seed=5),
        sigma=torch.tensor([0.75, 0.5, 0.75, 0.5], dtype=torch.float64),
        sigma_next=torch.tensor([0.5, 0.25, 0.5, 0.25], dtype=torch.float64),
        step=torch.tensor([1, 2, 1, 2]),
        rollout_log_prob=torch.zeros(4),
        advantages=torch.zeros(4),
        sample_index=torch.tensor([0, 0, 1, 1]),
        state=torch.arange(4),
        conditioning=vectors(2),
        negative_conditioning=vectors(2, seed=8) if guidance_scale > 1 else None,
        sampling=sampling_params(guidance_scale=guidance_scale),
        kernel=make_kernel("flow", 0.7, sigmas),
    )
    policy = Policy(cast(DiffusionModel, model), {}, progress=0.0)
    student = StudentRows(transitions, torch.zeros(4, dtype=torch.int64))
    taught = TaughtRows(student, latents(4, seed=6))
    assert_gradient_is_the_slope(lambda: algorithm.loss(policy, taught).loss.sum(), model.adapter)


def test_a_student_equal_to_its_teacher_has_nothing_to_learn() -> None:
    model, algorithm = student_model(), distillation()
    own = {name: p.detach().clone() for name, p in adapter_parameters(model.network).items()}
    policy = taught_policy(model, {"default": own})
    rows = algorithm.rows([scored(sample(model, rollout_request(guidance_scale=2.0)))])
    with torch.no_grad():
        taught, _ = algorithm.anchor(policy, rows, [torch.arange(16)])
    losses = algorithm.loss(policy, taught)
    assert not losses.loss.any()
    parameters = list(adapter_parameters(model.network).values())
    assert not any(g.any() for g in torch.autograd.grad(losses.loss.sum(), parameters))


# --- who teaches whom -----------------------------------------------------------------------------


def test_each_prompt_is_taught_by_the_teacher_of_its_domain() -> None:
    model, algorithm = student_model(), distillation(TWO)
    teachers = {"letters": trained_copy(model, 5), "digits": trained_copy(model, 6)}
    request = with_domains(rollout_request(num_prompts=3), "digits", "letters", "digits")
    rows = algorithm.rows([scored(sample(model, request))])
    policy = taught_policy(model, teachers)
    slices = torch.arange(len(rows)).split(4)  # one domain each, the last ones too
    with torch.no_grad():
        taught, _ = algorithm.anchor(policy, rows, slices)
    expected = {d: velocity_with(model, teachers[d], rows.transitions) for d in teachers}
    is_letters = (rows.sample_index // 4) == 1
    velocity = taught.teacher_velocity
    torch.testing.assert_close(velocity[is_letters], expected["letters"][is_letters])
    torch.testing.assert_close(velocity[~is_letters], expected["digits"][~is_letters])
    assert (expected["letters"] - expected["digits"]).abs().max() > 0.01
    metrics = algorithm.metrics(algorithm.loss(policy, taught).details)
    both = 2 * metrics["kl_teacher_digits"] + metrics["kl_teacher_letters"]
    assert metrics["kl_teacher"] == pytest.approx(both / 3, rel=1e-4)
    assert metrics["kl_teacher_digits"] != pytest.approx(metrics["kl_teacher_letters"])


def test_domains_are_asked_in_slices_that_mix_them_too() -> None:
    model, algorithm = student_model(), distillation(TWO)
    teachers = {"letters": trained_copy(model, 5), "digits": trained_copy(model, 6)}
    request = with_domains(rollout_request(), "digits", "letters")
    rows = algorithm.rows([scored(sample(model, request))])
    policy = taught_policy(model, teachers)
    found = []
    for size in (3, 16):
        with torch.no_grad():
            taught, _ = algorithm.anchor(policy, rows, torch.arange(16).split(size))
        found.append(taught.teacher_velocity)
    torch.testing.assert_close(found[0], found[1])


def test_all_ranks_make_equally_many_forwards_whatever_domains_they_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, algorithm = student_model(), distillation(TWO)
    policy = taught_policy(model, dict.fromkeys(TWO, trained_copy(model, 5)))
    calls: list[int] = []
    velocity = TinyModel.velocity

    def counting(self: TinyModel, latents: Tensor, *inputs: Any) -> Tensor:
        calls.append(len(latents))
        return velocity(self, latents, *inputs)

    counts = []
    for domains in (("digits", "digits"), ("digits", "letters")):
        rows = algorithm.rows([scored(sample(model, with_domains(rollout_request(), *domains)))])
        calls.clear()
        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(TinyModel, "velocity", counting)
            algorithm.anchor(policy, rows, torch.arange(16).split(4))
        counts.append(len(calls))
        if domains == ("digits", "digits"):
            assert sum(calls) == 16 + 4, "one row of each slice for the teacher without any"
    assert counts == [2 * 4, 2 * 4]


def test_each_teacher_is_put_in_place_once_per_window() -> None:
    model, algorithm = student_model(), distillation(TWO)
    entered = []

    @contextmanager
    def teacher(name: str) -> Iterator[None]:
        entered.append(name)
        yield

    weights = {weights_of(domain): lambda domain=domain: teacher(domain) for domain in TWO}
    rows = algorithm.rows([scored(sample(model, with_domains(rollout_request(), *TWO)))])
    with torch.no_grad():
        algorithm.anchor(Policy(model, weights, 0.0), rows, torch.arange(16).split(2))
    assert entered == list(TWO)


def test_the_student_is_back_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    model, algorithm = student_model(), distillation()
    policy = taught_policy(model, {"default": trained_copy(model, 5)})
    rows = algorithm.rows([scored(sample(model, rollout_request()))])
    before = {n: p.detach().clone() for n, p in adapter_parameters(model.network).items()}

    def failing(*inputs: Any) -> Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(TinyModel, "velocity", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        algorithm.anchor(policy, rows, [torch.arange(16)])
    after = adapter_parameters(model.network)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_single_teacher_needs_no_domain() -> None:
    distillation().check_prompts(records(3), "data.train")


def test_a_prompt_without_a_teacher_is_named_before_the_run() -> None:
    known, unknown, bare = records(3)
    known = replace(known, metadata={"kind": "digits"})
    algorithm = distillation(TWO, teacher_key="kind")
    algorithm.check_prompts([known], "data.train")
    for record in (replace(unknown, metadata={"kind": ["x"]}), replace(bare, metadata={})):
        with pytest.raises(DataError) as caught:
            algorithm.check_prompts([known, record], "data.train")
        for part in ("data.train", "letters, digits", "metadata.kind", record.text, "teacher_key"):
            assert part in str(caught.value)


def test_a_domain_that_is_a_number_in_the_prompt_file_is_found() -> None:
    algorithm = distillation({"1": "a", "2": "b"})
    algorithm.check_prompts([replace(records(1)[0], metadata={"domain": 2})], "data.train")


# --- training -------------------------------------------------------------------------------------


def student_stack(model: TinyModel, files: Mapping[str, Path], **keys: Any) -> TrainStack:
    """As the composition root builds it."""
    config = run_config(
        {
            "algorithm.path": "distillation",
            "algorithm.teachers": {domain: str(file) for domain, file in files.items()},
            "stack.optimizer.learning_rate": 0.02,
            **keys,
        }
    )
    algorithm = make_algorithm(config.algorithm)
    return TrainStack(
        model,
        WholeBackend(),
        algorithm,
        config.stack,
        20,
        sampling_params(),
        config.seed,
        CPU,
        OneRank(),
        host_arena(),
        teachers={name: read_teacher(file) for name, file in algorithm.teachers().items()},
    )


def test_the_student_comes_nearer_to_its_teacher(tmp_path: Path) -> None:
    model = student_model()
    save_file(trained_copy(model, 5), tmp_path / "weights.safetensors")
    stack = student_stack(model, {"default": tmp_path}, **{"stack.num_updates_per_batch": 2})
    divergences = []
    for _ in range(10):
        updates = stack.update([scored(sample(model, rollout_request()))])
        divergences.append(updates[0].metrics["kl_teacher"])
    assert divergences[-1] < 0.5 * divergences[0]


def test_two_teachers_are_followed_at_once(tmp_path: Path) -> None:
    model = student_model()
    files = {domain: tmp_path / file for domain, file in TWO.items()}
    for seed, file in enumerate(files.values()):
        save_file(trained_copy(model, 5 + seed), file)
    stack = student_stack(model, files)
    request = with_domains(rollout_request(), *TWO)
    metrics = [stack.update([scored(sample(model, request))])[0].metrics for _ in range(10)]
    for domain in TWO:
        assert metrics[-1][f"kl_teacher_{domain}"] < metrics[0][f"kl_teacher_{domain}"]


def test_a_teacher_of_another_shape_is_named(tmp_path: Path) -> None:
    model = student_model()
    save_file(trained_copy(tiny_model(lora_rank=3), 5), tmp_path / "other.safetensors")
    with pytest.raises(ModelError, match=r"teacher-default.*wrong shape"):
        student_stack(model, {"default": tmp_path / "other.safetensors"})


def test_a_file_that_is_no_teacher_is_named(tmp_path: Path) -> None:
    (tmp_path / "weights.safetensors").write_text("nothing")
    with pytest.raises(ModelError, match=r"algorithm\.teachers.*cannot be read"):
        student_stack(student_model(), {"default": tmp_path})
