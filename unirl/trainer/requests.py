"""Rollout requests: what is sampled for a rollout id or an evaluation, down to the noise keys."""

from __future__ import annotations

from typing import Any

from unirl.algorithms.base import Algorithm
from unirl.config.schema import RunConfig, SamplingConfig
from unirl.core.types import PromptBatch, RolloutRequest, SamplingParams
from unirl.models.base import DiffusionModel
from unirl.samplers.schedule import custom_sigmas, thinned
from unirl.samplers.window import select_sde_steps


class RequestFactory:
    """Pure functions of (config, rollout id, prompts): a resumed run asks the same questions."""

    def __init__(
        self, config: RunConfig, model: DiffusionModel, algorithm: Algorithm[Any, Any]
    ) -> None:
        self._config = config
        self._algorithm = algorithm
        self._train = training_params(config)
        self._eval = evaluation_params(config)
        self._train_sigmas = _sigmas(model, config.sampling, self._train)
        self._eval_sigmas = _sigmas(model, evaluation_sampling(config), self._eval)

    def training(self, rollout_id: int, prompts: PromptBatch) -> RolloutRequest:
        """Noise is keyed by rollout, prompt position and sample."""
        config = self._config
        group_size = config.sampling.samples_per_prompt
        groups = [f"{config.seed}/rollout-{rollout_id}/prompt-{p}" for p in range(len(prompts))]
        samples = [f"{group}/sample-{g}" for group in groups for g in range(group_size)]
        starts = [key for group in groups for key in self._start_keys(group)]
        sde_steps = self._sde_steps(
            rollout_id, self._train, group_size, config.sampling.num_samples_per_start
        )
        kept_steps = self._algorithm.kept_steps(
            self._train.num_inference_steps, rollout_id, config.seed
        )
        return RolloutRequest(
            prompts=prompts,
            samples_per_prompt=group_size,
            sampling=self._train,
            sigmas=self._thinned(sde_steps, kept_steps),
            sde_steps=sde_steps * len(prompts),
            initial_noise_keys=tuple(starts),
            step_noise_keys=tuple(samples),
            weight_version=None,
            kept_steps=kept_steps,
        )

    def _start_keys(self, group: str) -> list[str]:
        """Of the samples of a group; those of equal keys start from the same noise."""
        group_size = self._config.sampling.samples_per_prompt
        per_start = self._config.sampling.num_samples_per_start
        if per_start == group_size:
            return [group] * group_size
        if per_start == 1:
            return [f"{group}/sample-{g}" for g in range(group_size)]
        return [f"{group}/start-{g // per_start}" for g in range(group_size)]

    def _thinned(
        self, sde_steps: tuple[tuple[int, ...], ...], kept_steps: tuple[int, ...]
    ) -> tuple[float, ...]:
        """The schedule without what thin_after leaves out behind the last step that training
        needs."""
        every = self._config.sampling.thin_after
        last = max((step for steps in (*sde_steps, kept_steps) for step in steps), default=-1)
        return self._train_sigmas if every == 1 else thinned(self._train_sigmas, last, every)

    def evaluation(self, prompts: PromptBatch, num_samples: int) -> RolloutRequest:
        """Noise is keyed by the prompt's text, so every evaluation starts from the same noise."""
        keys = tuple(
            f"{self._config.seed}/evaluation/{text}/sample-{g}"
            for text in prompts.texts
            for g in range(num_samples)
        )
        return RolloutRequest(
            prompts=prompts,
            samples_per_prompt=num_samples,
            sampling=self._eval,
            sigmas=self._eval_sigmas,
            sde_steps=self._sde_steps(0, self._eval, num_samples, 1) * len(prompts),
            initial_noise_keys=keys,
            step_noise_keys=keys,
            weight_version=None,
        )

    def _sde_steps(
        self, rollout_id: int, params: SamplingParams, group_size: int, samples_per_start: int
    ) -> tuple[tuple[int, ...], ...]:
        """Of the samples of one group; the same for all groups."""
        if params.eta == 0:
            return ((),) * group_size
        return select_sde_steps(
            self._config.sampling.sde_steps,
            params.num_inference_steps,
            rollout_id,
            self._config.seed,
            group_size,
            samples_per_start,
        )


def training_params(config: RunConfig) -> SamplingParams:
    """How samples are drawn in a rollout."""
    sampling = config.sampling
    return SamplingParams(
        num_inference_steps=sampling.num_inference_steps,
        guidance_scale=sampling.guidance_scale,
        height=sampling.height,
        width=sampling.width,
        eta=sampling.eta,
        kernel=sampling.kernel,
        solver=sampling.solver,
        num_frames=sampling.num_frames,
        low_noise_guidance_scale=sampling.low_noise_guidance_scale,
        decoded_frames=sampling.decoded_frames,
    )


def evaluation_sampling(config: RunConfig) -> SamplingConfig:
    """The training values with the eval_sampling overlay, at noise level eval_eta."""
    overlay = config.eval_sampling.model_dump(exclude_none=True)
    return config.sampling.model_copy(update={**overlay, "eta": config.eval_eta})


def evaluation_params(config: RunConfig) -> SamplingParams:
    """How images are sampled at evaluation."""
    return training_params(config.model_copy(update={"sampling": evaluation_sampling(config)}))


def _sigmas(
    model: DiffusionModel, sampling: SamplingConfig, params: SamplingParams
) -> tuple[float, ...]:
    if sampling.sigma_schedule == "model":
        return model.sigmas(params)
    return custom_sigmas(sampling.sigma_schedule, params.num_inference_steps, sampling.shift)
