"""What a checkpoint says about the run can be read by later versions."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from unirl.checkpoint.state import TrainerState, read_trainer_state


def test_a_checkpoint_from_before_costs_were_counted_is_read(tmp_path: Path) -> None:
    state = TrainerState(2, 2, None, {}, {"images": 8.0})
    fields = asdict(state)
    (tmp_path / "trainer_state.json").write_text(json.dumps(fields))
    assert read_trainer_state(tmp_path) == state
    del fields["progress"]
    (tmp_path / "trainer_state.json").write_text(json.dumps(fields))
    assert read_trainer_state(tmp_path) == TrainerState(2, 2, None, {})
