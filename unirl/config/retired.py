"""Keys of earlier systems that are refused for any value, with the way to write them now.

A retired key that merely disappeared would be an unknown key with a poor suggestion; some of them
also invert their sense, which a rename would hide.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from unirl.config.problem import Problem

_INVERTED = (
    "is retired, whatever its value. Its successor {successor} has the opposite sense: "
    "{key}={on} is now {successor}={off}, and {key}={off} is now {successor}={on}."
)

_PLAIN = "is retired. Write {successor} instead."

_RETIRED: dict[str, tuple[str, str]] = {
    "enable_fsdp_offload": ("train_resident", _INVERTED),
    "offload_train_during_reward": ("train_resident", _INVERTED),
    "rollout_sleep_after_generate": ("rollout_resident", _INVERTED),
    "eval_cfg_text_scale": ("eval_sampling.guidance_scale", _PLAIN),
    "eval_num_inference_steps": ("eval_sampling.num_inference_steps", _PLAIN),
    "eval_height": ("eval_sampling.height", _PLAIN),
    "eval_width": ("eval_sampling.width", _PLAIN),
    "eval_media_max_items": ("logging.media_max_items", _PLAIN),
    "num_samples_per_prompt": ("sampling.samples_per_prompt", _PLAIN),
    "cfg_text_scale": ("sampling.guidance_scale", _PLAIN),
}

_REMOVED: dict[str, str] = {
    "eval_shift": "is retired: training and evaluation use the noise schedule of the model folder. "
    "Remove it.",
    "eval_mu": "is retired: the schedule's mu follows from eval_sampling.height and "
    "eval_sampling.width. Remove it.",
    "stage_config": "is retired: what it held is now in the blocks model and sampling. Remove it.",
}


def retired_keys(values: Mapping[str, Any], prefix: str = "") -> Iterator[Problem]:
    """A problem for each retired key, in whichever block it stands."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if name in _RETIRED:
            successor, text = _RETIRED[name]
            words = {"key": name, "successor": successor, "on": "true", "off": "false"}
            yield Problem(key, text.format(**words))
        elif name in _REMOVED:
            yield Problem(key, _REMOVED[name])
        elif (
            isinstance(value, Mapping) and name != "args"
        ):  # the user's own scorer has its own keys
            yield from retired_keys(value, f"{key}.")
