"""What each algorithm trains on and its loss, in the fewest lines.

A function per kind of training: loop and batch in, a `Training` out. Rows are numbers from 0 to
R - 1, in the order (step or noise level, sample), and what is known of them is indexed by these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from bare.sampling import log_prob, transition
from torch import Tensor, nn
from torch.nn.functional import softplus

if TYPE_CHECKING:
    from bare.loop import BareLoop, Batch


@dataclass(frozen=True)
class Training:
    """R rows."""

    sample: Tensor
    """[R] int64: the sample of each row."""
    fixed: Callable[[Tensor], Tensor]
    """Rows [r] -> what is kept of them from before the first step, without gradient."""
    loss: Callable[[Tensor, Tensor], Tensor]
    """(rows [r], what was kept of them) -> loss terms [r]."""


# --- the rollout's own stochastic steps ----------------------------------------------------------


class Transitions:
    """The stochastic steps of a batch; the network is asked once about each state."""

    def __init__(self, loop: BareLoop, batch: Batch) -> None:
        self.loop, self.batch = loop, batch
        self.step = batch.sde_steps.T.flatten()
        self.sample = torch.arange(len(batch.ids)).repeat(batch.sde_steps.shape[1])
        self.before = batch.path[self.step, self.sample]
        self.after = batch.path[self.step + 1, self.sample]
        self.state = self.step * len(batch.ids) + batch.state[self.step, self.sample]
        self.old_log_prob = batch.log_prob[self.step, self.sample]
        self.advantage = batch.advantage[self.sample]
        self.s = batch.sigmas[self.step].view(-1, 1, 1, 1)
        self.s_next = batch.sigmas[self.step + 1].view(-1, 1, 1, 1)

    def gaussian(self, network: nn.Module, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the next x."""
        batch = self.batch
        asked, kind = self.state[rows].unique(return_inverse=True)
        step, sample = asked // len(batch.ids), asked % len(batch.ids)
        x, s, ids = batch.path[step, sample], batch.sigmas[step], batch.ids[sample]
        v = self.loop.velocity(network, x, s, ids)[kind]
        levels = (self.s[rows], self.s_next[rows])
        sampling = self.loop.config.sampling
        return transition(sampling, batch.sigmas, self.before[rows], v, *levels)


def flow_grpo(
    loop: BareLoop, batch: Batch, weight: Callable[[Transitions], Tensor | int] = lambda t: 1
) -> Training:
    """The ratio to the rollout's log-probs, clipped; advantages are weighed."""
    t = Transitions(loop, batch)
    advantage = t.advantage * weight(t)

    def loss(rows: Tensor, old: Tensor) -> Tensor:
        new = log_prob(t.after[rows], *t.gaussian(loop.network, rows))
        return clipped(loop, advantage[rows], (new - old).exp())

    return Training(t.sample, lambda rows: t.old_log_prob[rows], loss)


def flash_weight(t: Transitions) -> Tensor:
    """std over |d mean / d v|, 1 on average over the steps."""
    steps, kind = t.step.unique(return_inverse=True)
    s, s_next = (t.batch.sigmas[steps + more].view(-1, 1, 1, 1) for more in (0, 1))
    sampling, nothing = t.loop.config.sampling, torch.zeros_like(s)
    mean, std = transition(sampling, t.batch.sigmas, nothing, nothing + 1, s, s_next)
    weight = (std / mean.abs()).flatten()
    return (weight / weight.mean())[kind]


def tempflow_weight(t: Transitions) -> Tensor:
    sampling, sigmas = t.loop.config.sampling, t.batch.sigmas
    _, std = transition(sampling, sigmas, t.before, t.before, t.s, t.s_next)
    return t.loop.config.algorithm.weight_scale * std.flatten()


def grpo_guard(loop: BareLoop, batch: Batch) -> Training:
    """A ratio in units of the noise, to the replayed means."""
    t = Transitions(loop, batch)

    def loss(rows: Tensor, old: Tensor) -> Tensor:
        mean, std = t.gaussian(loop.network, rows)
        ratio = ((mean - old) * (t.after[rows] - old) / std).mean((1, 2, 3)).exp()
        return clipped(loop, t.advantage[rows], ratio) / (t.s - t.s_next)[rows].flatten()

    return Training(t.sample, lambda rows: t.gaussian(loop.network, rows)[0], loss)


def flow_dppo(loop: BareLoop, batch: Batch) -> Training:
    """A ratio to the replayed means; 0 where they are far away and would go further."""
    t = Transitions(loop, batch)

    def loss(rows: Tensor, old: Tensor) -> Tensor:
        mean, std = t.gaussian(loop.network, rows)
        log_ratio = log_prob(t.after[rows], mean, std) - log_prob(t.after[rows], old, std)
        far = -log_prob(mean, old, std) >= loop.config.algorithm.kl_mask_threshold
        onwards = log_ratio * t.advantage[rows] > 0
        return -t.advantage[rows] * log_ratio.exp() * ~(far & onwards)

    return Training(t.sample, lambda rows: t.gaussian(loop.network, rows)[0], loss)


def distillation(loop: BareLoop, batch: Batch) -> Training:
    """KL to the teacher's step."""
    t = Transitions(loop, batch)

    def loss(rows: Tensor, taught: Tensor) -> Tensor:
        return -log_prob(taught, *t.gaussian(loop.network, rows))

    return Training(t.sample, lambda rows: t.gaussian(loop.teacher, rows)[0], loss)


# --- clean samples, noised again -----------------------------------------------------------------


class Renoised:
    """Clean samples at `timesteps_per_sample` levels each."""

    def __init__(self, loop: BareLoop, batch: Batch, num_samples: int) -> None:
        """Noise and levels for n samples, as K n rows."""
        self.loop, self.batch = loop, batch
        count, num_levels = loop.config.algorithm.timesteps_per_sample, len(batch.sigmas) - 1
        rounds = [torch.rand(num_samples, num_levels).argsort(1) for _ in range(count)]
        self.time = batch.sigmas[torch.cat(rounds, 1)[:, :count].T.flatten()]
        self.noise = torch.randn(len(self.time), *batch.path.shape[2:])

    def gap(self, network: nn.Module, rows: Tensor, sample: Tensor) -> Tensor:
        """noise - x0 - v: what the velocity is off by, for the samples [r] of these rows."""
        x0, t = self.batch.path[-1, sample], self.time[rows].view(-1, 1, 1, 1)
        noisy = (1 - t) * x0 + t * self.noise[rows]
        v = self.loop.velocity(network, noisy, self.time[rows], self.batch.ids[sample])
        return self.noise[rows] - x0 - v


def diffusion_nft(loop: BareLoop, batch: Batch) -> Training:
    """Towards good samples and away from bad ones, about the old policy."""
    settings, renoised = loop.config.algorithm, Renoised(loop, batch, len(batch.ids))
    sample = torch.arange(len(batch.ids)).repeat(settings.timesteps_per_sample)
    good = ((batch.advantage / settings.adv_clip_max).clamp(-1, 1) + 1) / 2

    def error(rows: Tensor, gap: Tensor) -> Tensor:
        """Of the clean image that v predicts: x_t - t v - x0 = t (noise - x0 - v)."""
        off = renoised.time[rows].view(-1, 1, 1, 1) * gap
        return (off**2).mean((1, 2, 3)) / off.detach().abs().mean((1, 2, 3)).clamp_min(1e-5)

    def loss(rows: Tensor, old: Tensor) -> Tensor:
        towards = settings.mix_beta * (renoised.gap(loop.network, rows, sample[rows]) - old)
        r = good[sample[rows]]
        mixed = r * error(rows, old + towards) + (1 - r) * error(rows, old - towards)
        return settings.adv_clip_max * mixed / settings.mix_beta

    return Training(sample, lambda rows: renoised.gap(loop.old, rows, sample[rows]), loss)


def awm(loop: BareLoop, batch: Batch) -> Training:
    """The ratio of evidence lower bounds, clipped."""
    settings, renoised = loop.config.algorithm, Renoised(loop, batch, len(batch.ids))
    sample = torch.arange(len(batch.ids)).repeat(settings.timesteps_per_sample)

    def bound(rows: Tensor) -> Tensor:
        error = mean_square(renoised.gap(loop.network, rows, sample[rows]))
        return -(error**settings.error_power)

    def loss(rows: Tensor, old: Tensor) -> Tensor:
        return clipped(loop, batch.advantage[sample[rows]], (bound(rows) - old).exp())

    return Training(sample, bound, loss)


def diffusion_dpo(loop: BareLoop, batch: Batch) -> Training:
    """The best sample of each prompt against the worst, both against the base model."""
    settings, groups = loop.config.algorithm, batch.reward.view(loop.config.batch_size, -1)
    first = torch.arange(len(groups)) * groups.shape[1]
    renoised = Renoised(loop, batch, len(groups))
    best = (first + groups.argmax(1)).repeat(settings.timesteps_per_sample)
    worst = (first + groups.argmin(1)).repeat(settings.timesteps_per_sample)

    def gap(network: nn.Module, rows: Tensor) -> Tensor:
        off_worst = renoised.gap(network, rows, worst[rows])
        return mean_square(off_worst) - mean_square(renoised.gap(network, rows, best[rows]))

    def loss(rows: Tensor, reference: Tensor) -> Tensor:
        return softplus(-settings.preference_beta / 2 * (gap(loop.network, rows) - reference))

    return Training(best, lambda rows: gap(loop.base, rows), loss)


# --- the gradient of the reward ------------------------------------------------------------------


def draft(loop: BareLoop, batch: Batch) -> Training:
    """From the first kept step through all kept ones to the clean image, and minus its reward."""
    kept = list(batch.kept_steps)
    before, levels = batch.path[kept[0]], [*batch.sigmas[kept], torch.zeros(())]

    def loss(rows: Tensor, x: Tensor) -> Tensor:
        for s, s_next in pairwise(levels):
            x = x + (s_next - s) * loop.velocity(loop.network, x, s.expand(len(x)), batch.ids[rows])
        return -loop.differentiable_reward(x, [batch.records[row] for row in rows.tolist()])

    return Training(torch.arange(len(batch.ids)), lambda rows: before[rows], loss)


TRAININGS: dict[str, Callable[[BareLoop, Batch], Training]] = {
    "flow_grpo": flow_grpo,
    "flash_grpo": partial(flow_grpo, weight=flash_weight),
    "tempflow_grpo": partial(flow_grpo, weight=tempflow_weight),
    "grpo_guard": grpo_guard,
    "flow_dppo": flow_dppo,
    "distillation": distillation,
    "diffusion_nft": diffusion_nft,
    "awm": awm,
    "diffusion_dpo": diffusion_dpo,
    "draft": draft,
    "refl": draft,
}
"""By algorithm.path; Dance-, Mix-GRPO, DDPO and AlignProp are others with other keys."""


def clipped(loop: BareLoop, advantage: Tensor, ratio: Tensor) -> Tensor:
    clip = loop.config.algorithm.clip_range
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip, 1 + clip))


def mean_square(off: Tensor) -> Tensor:
    return (off**2).mean((1, 2, 3))
