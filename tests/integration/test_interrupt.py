"""Ctrl-C: the first ends a run with a checkpoint, the second at once."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from runs import assert_same_state, read_json_lines, start, train, wait_for_rows, wait_until

from unirl.report.numbers import plural
from unirl.report.outcome import outcome_of
from unirl.report.reading import read_run

ENDLESS = "num_rollouts=100000"
LONG_ROLLOUTS = ("batch_size=500", "sampling.samples_per_prompt=8", "rollout.forward_batch_size=16")


def test_ctrl_c_ends_with_a_checkpoint_that_resumes_exactly(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    process = start(directory, ENDLESS)
    metrics = wait_for_rows(directory, process)

    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in output + errors
    assert "stopping: finishing the phase in hand" in output
    found = re.search(rf"stopped after (\d+) rollouts; go on with load_dir={directory}\n", output)
    assert found, output
    done = int(found[1])
    assert len(read_json_lines(metrics)) == done
    outcome = outcome_of(read_run(directory))
    assert outcome.sentence == f"Interrupted after {plural(done, 'rollout')} by Ctrl-C."

    total = f"num_rollouts={done + 1}"
    resumed = train(directory, total, "save_interval=1000", f"load_dir={directory}")
    whole = train(tmp_path / "whole", total, "save_interval=1000")
    assert f"checkpoint-{done}" in resumed.checkpoints
    assert_same_state(whole, resumed, step=done + 1)
    assert whole.numbers() == resumed.numbers()


def test_a_second_ctrl_c_ends_at_once_without_a_checkpoint(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    process = start(directory, ENDLESS, *LONG_ROLLOUTS)
    wait_until(lambda: log_has(directory, "rollout onload"), process)
    process.send_signal(signal.SIGINT)
    wait_until(lambda: log_has(directory, "Press Ctrl-C again to stop at once"), process)
    assert outcome_of(read_run(directory)).state == "going on"
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert errors == "interrupted\n"
    assert "by a second signal" in outcome_of(read_run(directory)).sentence
    assert "rollout 1/" not in output
    assert not list(directory.glob("checkpoints/*"))


def test_a_run_has_its_directory_alone_and_a_stop_before_training_promises_nothing(
    tmp_path: Path,
) -> None:
    """Nothing was trained, so there is no checkpoint to go on with, and the name is free again."""
    directory = tmp_path / "run"
    long_evaluation = ("eval_interval=1", "eval_num_prompts=256", "eval_chunk_prompts=1")
    process = start(directory, ENDLESS, *long_evaluation, "eval_samples_per_prompt=100")
    wait_until(lambda: log_has(directory, "rollout onload"), process)

    second = train(directory)
    assert second.exit_code == 3
    assert f"another process is running in {directory}" in second.errors

    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    assert "stopped after 0 rollouts" in output
    assert "load_dir" not in output
    assert train(directory).exit_code == 0


def log_has(directory: Path, text: str) -> bool:
    log = directory / "run.log"
    return log.exists() and text in log.read_text()


def test_a_closed_terminal_ends_with_a_checkpoint_and_nohup_goes_on(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    process = start(directory, ENDLESS)
    wait_for_rows(directory, process)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGHUP)  # of the kernel and of the shell
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 129, errors
    assert "by SIGHUP" in outcome_of(read_run(directory)).sentence
    assert list(directory.glob("checkpoints/checkpoint-*"))

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = start(tmp_path / "nohup", ENDLESS)
    finally:
        signal.signal(signal.SIGHUP, before)
    metrics = wait_for_rows(tmp_path / "nohup", process)
    process.send_signal(signal.SIGHUP)
    size = metrics.stat().st_size
    wait_until(lambda: metrics.stat().st_size > size, process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
