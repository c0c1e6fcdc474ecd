"""Modules of diffusers and transformers from their config.json alone, on the meta device.

In goes a component's folder, out comes the module as `from_pretrained` would store it, without
memory for its weights: a 32B transformer takes a tenth of a second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers.models.modeling_utils import ModelMixin
from torch import nn
from transformers import BatchEncoding


def module_on_meta(folder: Path, module_class: Any, dtype: torch.dtype) -> Any:
    """A frozen module in eval mode, parameters and buffers on meta in the dtypes of a real load.

    Raises FileNotFoundError without a config.json.
    """
    # Without the file transformers would quietly take its default architecture.
    if not (folder / "config.json").is_file():
        raise FileNotFoundError("no config.json.")
    build = _diffusers_module if issubclass(module_class, ModelMixin) else _transformers_module
    return build(folder, module_class, dtype).eval().requires_grad_(False)


def _diffusers_module(folder: Path, module_class: Any, dtype: torch.dtype) -> nn.Module:
    config = module_class.load_config(folder, local_files_only=True)
    with torch.device("meta"):
        module = module_class.from_config(config)
    return cast_as_loaded(module, dtype)


def cast_as_loaded(module: Any, dtype: torch.dtype) -> Any:
    """A diffusers module in the dtypes that `from_pretrained(dtype=...)` gives: what a checkpoint
    holds is cast but for the modules its class keeps in float32, what is computed stays."""
    kept = set(module._keep_in_fp32_modules or ())
    for name, tensor in module.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and kept.isdisjoint(name.split(".")):
            tensor.data = tensor.data.to(dtype)
    return module


def _transformers_module(folder: Path, module_class: Any, dtype: torch.dtype) -> nn.Module:
    config = module_class.config_class.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        return module_class._from_config(config, dtype=dtype)


class BlankTokenizer:
    """Stands in where there are no tokenizer files: every text is token 0, padded as asked."""

    def __init__(self, model_max_length: int = 77) -> None:
        self.model_max_length = model_max_length

    def tokenize(self, text: str) -> list[str]:
        """No words: pipelines look here for names of learned embeddings."""
        return []

    def encode(self, text: str) -> list[int]:
        """As many tokens as such a text about has: four letters each, as in English."""
        return [0] * (len(text) // 4)

    def apply_chat_template(
        self, chats: list[Any], *, tokenize: bool, max_length: int = 1, **_: Any
    ) -> Any:
        """The chats' tokens, padded to max_length; without tokenize the text of one, which is
        empty."""
        return self(chats, padding="max_length", max_length=max_length) if tokenize else ""

    def __call__(
        self, texts: str | list[Any], *, padding: str, max_length: int = 1, **_: Any
    ) -> BatchEncoding:
        """input_ids and attention_mask [len(texts), max_length]: the longest texts there may be."""
        count = 1 if isinstance(texts, str) else len(texts)
        ids = torch.zeros((count, max_length), dtype=torch.long)
        return BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
