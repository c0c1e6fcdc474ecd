"""What a checkpoint says about the run can be read by later versions."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from unirl.checkpoint.shards import write_shards
from unirl.checkpoint.state import SHADOW_FILE, TrainerState, read_trainer_state, read_weights
from unirl.core.errors import CheckpointError


def test_a_checkpoint_from_before_costs_were_counted_is_read(tmp_path: Path) -> None:
    state = TrainerState(2, 2, None, {}, {"images": 8.0})
    fields = asdict(state)
    (tmp_path / "trainer_state.json").write_text(json.dumps(fields))
    assert read_trainer_state(tmp_path) == state
    del fields["progress"]
    (tmp_path / "trainer_state.json").write_text(json.dumps(fields))
    assert read_trainer_state(tmp_path) == TrainerState(2, 2, None, {})


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "shards"])
@pytest.mark.parametrize("kept", [(), ("base_ema", "old")], ids=["none", "two"])
def test_a_shadow_that_is_missing_is_answered_with_those_there(
    tmp_path: Path, sharded: bool, kept: tuple[str, ...]
) -> None:
    shadows = {f"{name}.layer.weight": torch.full((2,), 3.0) for name in kept}
    if sharded:
        named = {f"shadow.{name}": tensor for name, tensor in shadows.items()}
        write_shards(tmp_path, {"weights.layer.weight": torch.zeros(2)} | named, alone=True)
    elif shadows:
        save_file(shadows, tmp_path / SHADOW_FILE)
    has = "has only base_ema, old" if kept else "has none"
    with pytest.raises(CheckpointError, match=f"shadow weights 'older': it {has}.*--shadow none"):
        read_weights(tmp_path, "older")
    for name in kept:
        (only,) = read_weights(tmp_path, name).items()
        assert only[0] == "layer.weight"
        assert only[1].tolist() == [3.0, 3.0]
