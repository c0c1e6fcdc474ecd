"""Prompts are read as the release's tokenizer.json says, and never by an empty vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from families.hunyuan_video import CASES as HUNYUAN_VIDEO
from families.wan import CASES as WAN
from families.wan_i2v import CASES as WAN_I2V
from tokenizers import Tokenizer
from transformers import GemmaTokenizer, Qwen2Tokenizer

from unirl.models.diffusers_folder import RulesInFile, read_tokenizer
from unirl.models.qwen_image21 import TextProcessor

TEXT = "Two lines,\n\nthree spaces:   and 猫"
PUBLISHED = {"hunyuan_video": "LlamaTokenizerFast", "wan": "T5TokenizerFast"}


@pytest.mark.parametrize("case", [HUNYUAN_VIDEO[0], WAN[0], WAN_I2V[0]], ids=lambda c: c.name)
def test_the_file_counts_and_not_the_class_that_the_folder_names(case, tmp_path: Path) -> None:
    folder = case.build(tmp_path / "model")
    config = folder / "tokenizer" / "tokenizer_config.json"
    named = PUBLISHED[case.family.removesuffix("_i2v")]
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tokenizer_class": named}))
    expected = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json")).encode(TEXT)
    tokenizer = case.load(folder).pipeline.tokenizer
    assert tokenizer(TEXT).input_ids == expected.ids
    assert tokenizer.unk_token_id not in expected.ids


@pytest.mark.parametrize("tokenizer", [RulesInFile, GemmaTokenizer, Qwen2Tokenizer])
def test_a_folder_without_a_vocabulary_is_refused(tokenizer: type, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"the folder has no tokenizer\.json"):
        read_tokenizer(tmp_path, tokenizer)


def test_a_processor_without_a_vocabulary_is_refused_too(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"nor vocab\.json and merges\.txt"):
        TextProcessor.from_pretrained(tmp_path)
