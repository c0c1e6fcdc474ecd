"""The bare loop that ours is timed against: it samples, scores and trains as ours does."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import bench_loop
import pytest
import torch
from bare import training
from bare.loop import BareLoop, Batch
from bare.sampling import denoise, transition
from bare.training import TRAININGS, Renoised
from torch import Tensor

from unirl.algorithms.advantage import AdvantageRule
from unirl.algorithms.diffusion_dpo import PairRows
from unirl.algorithms.making import make_algorithm
from unirl.config.schema import RunConfig, SamplingConfig
from unirl.core.types import Rewards, ScoredRollout, Trajectory
from unirl.data.stream import PromptStream
from unirl.distributed.ranks import OneRank
from unirl.models import lora
from unirl.reward.scorers.color import ColorScorer
from unirl.runtime.build import build_host, build_reward, build_stack, load_all_prompts
from unirl.runtime.training_model import build_training_model
from unirl.samplers.denoise import sample_trajectory
from unirl.samplers.kernels import make_kernel
from unirl.samplers.noise import seed_of
from unirl.samplers.solvers import make_solver
from unirl.trainer.requests import RequestFactory

RECIPES = (bench_loop.QUICKSTART, *bench_loop.RECIPES)
KINDS = (
    bench_loop.QUICKSTART,
    "tiny_flash_grpo",
    "tiny_tempflow_grpo",
    "tiny_mix_grpo_flash",
    "tiny_grpo_guard",
    "tiny_flow_dppo",
    "tiny_distillation",
    "tiny_diffusion_nft",
    "tiny_awm",
    "tiny_diffusion_dpo",
    "tiny_draft",
    "tiny_refl",
)
"""The other recipes differ from these in keys only."""
SMALL = ("batch_size=2", "sampling.samples_per_prompt=8")
SIGMAS = (1.0, 0.8, 0.5, 0.25, 0.0)
CPU = torch.device("cpu")


@pytest.mark.parametrize("recipe", RECIPES)
def test_both_sides_do_the_same_work(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scored: defaultdict[int, list[int]] = defaultdict(list)
    score = ColorScorer.score_differentiable

    def counted(self: ColorScorer, images: Tensor, records: list) -> Tensor:
        scored[id(self)].append(len(images))
        return score(self, images, records)

    monkeypatch.setattr(ColorScorer, "score_differentiable", counted)
    comparison = bench_loop.compare(recipe, 0, SMALL)
    assert comparison.work["denoiser_backwards"] > 0
    assert comparison.work["optimizer_steps"] > 0
    ours, bare = scored.values()
    assert ours == bare


def test_other_work_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"tiny_awm.*'denoiser_forwards': 8"):
        bench_loop.require_equal("tiny_awm", {"denoiser_forwards": 8}, {"denoiser_forwards": 9})


@pytest.mark.parametrize("kernel", ["flow", "dance", "cps", "flash", "ddim"])
def test_kernels_are_ours(kernel: str) -> None:
    sampling = SamplingConfig.model_validate({"kernel": kernel, "eta": 0.7})
    generator = torch.Generator().manual_seed(0)
    x, v = torch.randn(2, 3, 3, 4, 4, generator=generator)
    s, s_next = torch.tensor(SIGMAS[:3]), torch.tensor(SIGMAS[1:4])
    ours = make_kernel(kernel, 0.7, SIGMAS).transition(x, v, s, s_next)
    levels = (s.view(-1, 1, 1, 1), s_next.view(-1, 1, 1, 1))
    mean, std = transition(sampling, torch.tensor(SIGMAS), x, v, *levels)
    torch.testing.assert_close(mean, ours.mean)
    torch.testing.assert_close(std, ours.std)


@pytest.mark.parametrize("solver", ["euler", "dpmpp_2m"])
def test_steps_without_noise_are_ours(solver: str) -> None:
    sampling = SamplingConfig.model_validate({"solver": solver, "height": 4, "width": 4})
    weight = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))

    def velocity(x: Tensor, s: Tensor, ids: Tensor) -> Tensor:
        return torch.tanh(torch.einsum("bchw,cd->bdhw", x, weight)) * (1 + s.view(-1, 1, 1, 1))

    torch.manual_seed(0)
    none = torch.empty((2, 0), dtype=torch.int64)
    path, _, _ = denoise(sampling, velocity, torch.tensor(SIGMAS), torch.zeros(2, 1), none, 1)
    ours = sample_trajectory(
        lambda x, s, step: velocity(x, s, none),
        path[0],
        SIGMAS,
        make_kernel("flow", 0.7, SIGMAS),
        make_solver(solver, SIGMAS),
        [(), ()],
        lambda step: torch.zeros(()),
    )
    torch.testing.assert_close(path[-1], ours.final_latents)


@pytest.mark.parametrize("recipe", KINDS)
def test_losses_and_gradients_are_ours(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the same samples, noise and old weights, some way from where they were sampled."""
    monkeypatch.setattr(lora, "initial_value", _away_from_base)
    sides = Sides(bench_loop.settings(recipe, (*SMALL, "model.precision=fp32")))
    rows, every = sides.rows, torch.arange(len(sides.rows))
    monkeypatch.setattr(training, "Renoised", lambda *asked: _drawn_as(rows, *asked))
    with torch.no_grad():
        anchored, _ = sides.algorithm.anchor(sides.stack.policy(), rows, [every])
        bare = TRAININGS[sides.config.algorithm.path](sides.bare, sides.batch)
        fixed = bare.fixed(every)
    sides.move_both()
    our_loss = sides.algorithm.loss(sides.stack.policy(), anchored).loss
    bare_loss = bare.loss(every, fixed)
    assert bare.sample.tolist() == rows.sample_index.tolist()
    torch.testing.assert_close(bare_loss, our_loss, rtol=1e-3, atol=1e-4)
    our_loss.mean().backward()
    bare_loss.mean().backward()
    for name, ours in sides.stack.model.network.named_parameters():
        if ours.requires_grad:
            found = sides.bare.network.get_parameter(name).grad
            assert ours.grad is not None
            assert ours.grad.abs().max() > 0
            atol = 1e-3 * float(ours.grad.abs().max())
            torch.testing.assert_close(found, ours.grad, rtol=1e-2, atol=atol)


class Sides:
    """Both sides of a recipe at the same weights, with one batch that the bare loop sampled."""

    def __init__(self, config: RunConfig) -> None:
        torch.manual_seed(0)
        self.config = config
        host = build_host(config)
        reward = build_reward(config, host)
        model, backend = build_training_model(config, CPU, OneRank(), with_encoders=True)
        self.stack = build_stack(config, model, backend, reward, CPU, OneRank(), host)
        # Only the ratio between equal constants is the same; the bare loop leaves them out.
        replaying = config.algorithm.model_copy(update={"old_log_prob": "replay"})
        self.algorithm = make_algorithm(replaying, reward.differentiable)
        self.bare = BareLoop(config)
        self.batch = self.bare.sample(0)
        self.rows = self.algorithm.rows([self._scored()])

    def _scored(self) -> ScoredRollout:
        """The batch as ours has it, with our own advantages."""
        config, batch, model = self.config, self.batch, self.stack.model
        prompts = PromptStream(load_all_prompts(config).train, config.batch_size, config.seed)
        request = RequestFactory(config, model, self.algorithm).training(0, prompts.batch(0))
        assert torch.tensor(request.sigmas).tolist() == batch.sigmas.tolist()
        images = model.decode(batch.path[-1], request.sampling)
        names = config.reward.scorers if config.reward else {}
        components = {
            name: torch.as_tensor(scorer.score(images, batch.records))
            for name, (scorer, _) in zip(names, self.bare.scorers, strict=True)
        }
        rewards = Rewards(batch.reward, components, torch.ones(len(request), dtype=torch.bool))
        rule = AdvantageRule.of(config)
        advantages = rule.advantages(rewards)
        torch.testing.assert_close(batch.advantage, advantages, rtol=1e-4, atol=1e-5)
        return ScoredRollout(
            request,
            _trajectory(batch),
            model.encode(batch.records, request.sampling),
            None,
            torch.arange(len(request)),
            rewards,
            advantages,
            rule.trained(rewards),
        )

    @torch.no_grad()
    def move_both(self) -> None:
        """The same way, far enough for ratios to be clipped."""
        for name, ours in self.stack.model.network.named_parameters():
            if ours.requires_grad:
                ours.add_(0.01 * torch.randn(ours.shape))
                self.bare.network.get_parameter(name).copy_(ours)


def _away_from_base(name: str, shape: torch.Size, seed: int) -> Tensor:
    """An adapter weight."""
    return 0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(seed_of(name)))


def _trajectory(batch: Batch) -> Trajectory:
    """With log-probs that nobody reads."""
    steps, samples = batch.sde_steps, torch.arange(len(batch.ids))[:, None]
    kept = torch.tensor(batch.kept_steps, dtype=torch.int64)
    return Trajectory(
        latents=batch.path[steps, samples],
        next_latents=batch.path[steps + 1, samples],
        log_probs=torch.zeros(steps.shape),
        steps=steps,
        kept_latents=batch.path[kept].transpose(0, 1),
        final_latents=batch.path[-1],
    )


def _drawn_as(rows: Any, loop: BareLoop, batch: Batch, num_samples: int) -> Renoised:
    """Renoised samples with the noise and levels of our rows."""
    renoised = Renoised(loop, batch, num_samples)
    ours = rows.preferred if isinstance(rows, PairRows) else rows
    assert len(ours.time) == len(renoised.time)
    renoised.time, renoised.noise = ours.time, ours.noise
    return renoised
