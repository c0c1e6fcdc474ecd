"""Keys of guidance: scales that the model, as its files describe it, would not take."""

from __future__ import annotations

import json
from collections.abc import Iterator

from unirl.config import catalog
from unirl.config.families import Setting
from unirl.config.model_files import value_in_files
from unirl.config.problem import Problem
from unirl.config.schema import EvalSamplingConfig, ModelConfig, RunConfig, SamplingConfig


def sampling_blocks(config: RunConfig) -> Iterator[tuple[str, SamplingConfig | EvalSamplingConfig]]:
    yield "sampling", config.sampling
    yield "eval_sampling", config.eval_sampling


def guidance_taken(config: RunConfig) -> Iterator[Problem]:
    """Whether this model is one of its family's that make images without guidance."""
    entry = catalog.MODELS.get(config.model.family)
    if entry is None:
        return  # the user's own family: only it knows
    if not entry.takes_guidance:
        why = f"model.family={config.model.family}"
    elif entry.unguided is not None and _says(config.model, entry.unguided):
        setting = entry.unguided
        why = f"this model ({setting.key}={json.dumps(setting.value)} in its {setting.file})"
    else:
        return
    for block, sampling in sampling_blocks(config):
        scale = sampling.guidance_scale
        if scale is not None and scale > 1:
            yield Problem(
                f"{block}.guidance_scale",
                f"is {scale:g}, but {why} was trained to make its samples without guidance. Set "
                f"{block}.guidance_scale=1.",
            )


def _says(model: ModelConfig, setting: Setting) -> bool:
    return value_in_files(model, setting.file, setting.key) == setting.value


def guidance_of_experts(config: RunConfig) -> Iterator[Problem]:
    """low_noise_guidance_scale needs a second expert, and guidance to differ from."""
    entry = catalog.MODELS.get(config.model.family)
    for block, sampling in sampling_blocks(config):
        low, guidance = sampling.low_noise_guidance_scale, sampling.guidance_scale
        if low is None:
            continue
        if entry is not None and not entry.has_experts:
            yield Problem(
                f"{block}.low_noise_guidance_scale",
                f"is {low:g}, but model.family={config.model.family} has no network of its own "
                "for low noise. Set it to null.",
            )
        elif guidance is not None and guidance <= 1:
            yield Problem(
                f"{block}.low_noise_guidance_scale",
                f"is {low:g}, but there is no guidance at {block}.guidance_scale={guidance:g}. "
                f"Set it to null, or {block}.guidance_scale above 1.",
            )
