"""Rollout requests: what is sampled for a rollout id or an evaluation, down to the noise keys."""

from __future__ import annotations

from unirl.config.schema import RunConfig
from unirl.core.types import PromptBatch, RolloutRequest, SamplingParams
from unirl.models.base import DiffusionModel
from unirl.samplers.window import select_sde_steps


class RequestFactory:
    """Pure functions of (config, rollout id, prompts): a resumed run asks the same questions."""

    def __init__(self, config: RunConfig, model: DiffusionModel) -> None:
        self._config = config
        self._train = _training_params(config)
        self._eval = evaluation_params(config)
        self._train_sigmas = _sigmas(model, self._train)
        self._eval_sigmas = _sigmas(model, self._eval)

    def training(self, rollout_id: int, prompts: PromptBatch) -> RolloutRequest:
        """Noise is keyed by rollout, prompt position and sample."""
        config = self._config
        group_size = config.sampling.samples_per_prompt
        groups = [f"{config.seed}/rollout-{rollout_id}/prompt-{p}" for p in range(len(prompts))]
        samples = [f"{group}/sample-{g}" for group in groups for g in range(group_size)]
        same_start = [group for group in groups for _ in range(group_size)]
        return RolloutRequest(
            prompts=prompts,
            samples_per_prompt=group_size,
            sampling=self._train,
            sigmas=self._train_sigmas,
            sde_steps=self._sde_steps(rollout_id, self._train),
            initial_noise_keys=tuple(same_start if config.sampling.init_same_noise else samples),
            step_noise_keys=tuple(samples),
            weight_version=None,
        )

    def evaluation(self, prompts: PromptBatch) -> RolloutRequest:
        """Noise is keyed by the prompt's text, so every evaluation starts from the same noise."""
        num_samples = self._config.eval_samples_per_prompt
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
            sde_steps=self._sde_steps(0, self._eval),
            initial_noise_keys=keys,
            step_noise_keys=keys,
            weight_version=None,
        )

    def _sde_steps(self, rollout_id: int, params: SamplingParams) -> tuple[int, ...]:
        if params.eta == 0:
            return ()
        config = self._config
        return select_sde_steps(
            config.sampling.sde_steps, params.num_inference_steps, rollout_id, config.seed
        )


def _training_params(config: RunConfig) -> SamplingParams:
    sampling = config.sampling
    return SamplingParams(
        num_inference_steps=sampling.num_inference_steps,
        guidance_scale=sampling.guidance_scale,
        height=sampling.height,
        width=sampling.width,
        eta=sampling.eta,
        kernel=sampling.kernel,
    )


def evaluation_params(config: RunConfig) -> SamplingParams:
    """The training values with the eval_sampling overlay, at noise level eval_eta."""
    overlay = config.eval_sampling.model_dump(exclude_none=True)
    merged = config.sampling.model_copy(update={**overlay, "eta": config.eval_eta})
    return _training_params(config.model_copy(update={"sampling": merged}))


def _sigmas(model: DiffusionModel, params: SamplingParams) -> tuple[float, ...]:
    return model.sigmas(params.num_inference_steps, params.height, params.width)
