"""`load_dir=auto`: the same command line starts a run and takes it up again, whatever ended it."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import Run, assert_same_state, contents, read_json_lines, start, train, wait_for_rows

from unirl.report.outcome import outcome_of
from unirl.report.reading import read_run
from unirl.tracking.evaluations import evaluation_file

AUTO = ("load_dir=auto", "save_interval=2", "num_rollouts=4", "doctor=false")


def outage(after: int) -> str:
    """Override: a reward that fails for good after so many calls."""
    own = f"own:{{path:'failing_scorers:FailsAfter',args:{{num_calls:{after}}}}}"
    return f"reward.scorers={{ocr:null,color:null,{own}}}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tmp_path_factory.mktemp("whole") / "run", *AUTO)


def test_auto_starts_a_run_and_leaves_a_complete_one_alone(whole: Run) -> None:
    assert whole.exit_code == 0, whole.errors
    assert whole.checkpoints == ["checkpoint-2", "checkpoint-4"]
    before = contents(whole.directory)
    again = train(whole.directory, *AUTO)
    assert again.exit_code == 0
    assert "is complete: 4 rollouts are done" in again.output
    assert contents(whole.directory) == before


def test_what_a_kill_at_the_very_end_left_out_is_written_by_the_next_start(tmp_path: Path) -> None:
    run = train(tmp_path / "run", *AUTO)
    sessions = run.directory / "sessions.jsonl"
    sessions.write_text(sessions.read_text().splitlines(keepends=True)[0])
    for name in ("report.html", "curves.png"):
        (run.directory / name).unlink()
    numbers = run.numbers()
    again = train(run.directory, *AUTO)
    assert again.exit_code == 0, again.errors
    assert (run.directory / "report.html").exists()
    assert (run.directory / "curves.png").exists()
    sentence = outcome_of(read_run(run.directory)).sentence
    assert sentence == "All 4 rollouts are done. Resumed 1 time, at rollout 4."
    assert again.numbers() == numbers


def test_a_complete_run_of_which_only_the_checkpoints_are_left_is_complete(tmp_path: Path) -> None:
    kept = f"save_dir={tmp_path / 'kept'}"
    run = train(tmp_path / "run", *AUTO, kept)
    shutil.rmtree(run.directory)
    again = train(run.directory, *AUTO, kept)
    assert again.exit_code == 0, again.errors
    assert "is complete: 4 rollouts are done" in again.output


def test_auto_passes_over_a_damaged_checkpoint_and_says_why(whole: Run, tmp_path: Path) -> None:
    run = train(tmp_path / "run", *AUTO)
    weights = run.checkpoint(4) / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    again = train(run.directory, *AUTO)
    assert again.exit_code == 0, again.errors
    assert "load_dir=auto passes over a checkpoint" in again.output
    assert f"{weights} is damaged: expected" in again.output
    assert_same_state(whole, again, step=4)
    assert again.numbers() == whole.numbers()
    assert "checkpoint-4.before-resume-2" in again.checkpoints, "not deleted"


def test_an_outage_of_the_reward_saves_what_is_trained(tmp_path: Path) -> None:
    settings = ("save_interval=100", "num_rollouts=4", "load_dir=auto", "doctor=false")
    whole = train(tmp_path / "whole", *settings, outage(100))
    failed = train(tmp_path / "run", *settings, outage(3))
    assert failed.exit_code == 1
    assert "TimeoutError: no answer" in failed.errors
    assert "the run failed; its first 3 rollouts are saved" in failed.output
    assert failed.checkpoints == ["checkpoint-3"]
    outcome = outcome_of(read_run(failed.directory))
    assert outcome.state == "failed"
    assert "TimeoutError: no answer" in outcome.sentence
    resumed = train(tmp_path / "run", *settings, outage(100))
    assert resumed.exit_code == 0, resumed.errors
    assert_same_state(whole, resumed, step=4)
    assert resumed.numbers() == whole.numbers()
    sentence = outcome_of(read_run(resumed.directory)).sentence
    assert sentence == "All 4 rollouts are done. Resumed 1 time, at rollout 3."


def test_a_killed_run_is_told_as_one(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    process = start(directory, "num_rollouts=3000", "doctor=false")
    wait_for_rows(directory, process)
    process.kill()
    process.communicate()
    assert outcome_of(read_run(directory)).state == "killed"


def test_sigterm_within_a_window_ends_after_the_phase_and_loses_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    settings = ("accumulate_rollouts=3", "load_dir=auto", "doctor=false")
    process = start(directory, *settings, "num_rollouts=3000")
    wait_for_rows(directory, process)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    assert f"go on with load_dir={directory}" in output
    (checkpoint,) = (directory / "checkpoints").glob("checkpoint-*")
    done = int(checkpoint.name.split("-")[1])
    assert done % 3 == 0
    total = (f"num_rollouts={done + 3}", "save_interval=999")
    resumed = train(directory, *settings, *total)
    whole = train(tmp_path / "whole", *settings, *total)
    assert_same_state(whole, resumed, step=done + 3)
    assert resumed.numbers() == whole.numbers()


def test_a_run_that_is_out_of_time_ends_with_its_own_exit_code(tmp_path: Path) -> None:
    run = train(tmp_path / "run", "max_hours=1e-9")
    assert run.exit_code == 124
    assert "stopped after 0 rollouts" in run.output


def test_files_that_changed_since_the_save_are_named(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    shipped = Path(__file__).parents[2] / "unirl/assets/numbers/train.jsonl"
    prompts.write_text(shipped.read_text())
    settings = ("save_interval=1", "num_rollouts=1", f"data.train={prompts}")
    run = train(tmp_path / "run", *settings)
    prompts.write_text("".join(shipped.read_text().splitlines(keepends=True)[:-1]))
    resumed = train(run.directory, *settings, "num_rollouts=2", "load_dir=auto", "num_threads=1")
    assert "something else than the run was saved with: content of data.train" in resumed.output
    assert "without making it another run: load_dir: None -> auto; num_rollouts: 1 -> 2" in (
        resumed.output
    )


def test_evaluations_that_were_made_otherwise_are_not_compared(tmp_path: Path) -> None:
    settings = ("eval_interval=2", "save_interval=2", "doctor=false", "load_dir=auto")
    first = train(tmp_path / "run", *settings, "num_rollouts=4")
    assert "before: after" not in first.output
    changed = train(first.directory, *settings, "num_rollouts=6", "seed=5")
    assert changed.exit_code == 0, changed.errors
    assert "evaluations from rollout 4 on are not compared with earlier ones: seed: 0 -> 5" in (
        changed.output
    )
    assert "before: after 4 rollouts; after: after 6 of 6" in changed.output
    (line,) = read_json_lines(changed.directory / "evaluation_changes.jsonl")
    assert line == {"rollout": 4, "changes": ["seed: 0 -> 5"]}
    rows = {row["rollout"]: row["eval/reward_mean"] for row in changed.rows("eval")}
    assert f"{rows[4]:7.4f}  -> {rows[6]:8.4f}" in changed.output
    best = (changed.directory / "checkpoints" / "best").resolve().name
    assert best != "checkpoint-2", "it was evaluated with other noise"


def test_an_evaluation_that_is_not_made_again_stands(tmp_path: Path) -> None:
    settings = ("save_interval=2", "doctor=false", "load_dir=auto")
    first = train(tmp_path / "run", *settings, "num_rollouts=2", "eval_interval=2")
    made = evaluation_file(first.directory, "eval", 2).read_bytes()
    rows = first.rows("eval")
    assert [row["rollout"] for row in rows] == [0, 2]
    seldom = train(first.directory, *settings, "num_rollouts=4", "eval_interval=4")
    assert seldom.exit_code == 0, seldom.errors
    assert evaluation_file(seldom.directory, "eval", 2).read_bytes() == made
    assert seldom.rows("eval")[:2] == rows
    assert [row["rollout"] for row in seldom.rows("eval")] == [0, 2, 4]
    otherwise = train(first.directory, *settings, "num_rollouts=5", "eval_interval=5", "seed=5")
    assert otherwise.exit_code == 0, otherwise.errors
    assert [row["rollout"] for row in otherwise.rows("eval")] == [0, 2, 5], "of other noise"


def test_what_is_missing_in_the_record_is_told(tmp_path: Path) -> None:
    settings = ("eval_interval=1", "save_interval=3", "doctor=false", "load_dir=auto")
    run = train(tmp_path / "run", *settings, "num_rollouts=3")
    (run.directory / "evaluations" / "eval-000001.jsonl").unlink()
    metrics = run.directory / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    broken = next(i for i, line in enumerate(lines) if '"eval", "rollout": 2' in line)
    lines[broken] = lines[broken][:40] + "\n"
    metrics.write_text("".join(lines))
    resumed = train(run.directory, *settings, "num_rollouts=4")
    assert resumed.exit_code == 0, resumed.errors
    assert f"line {broken + 1} cannot be read and is moved aside" in resumed.output
    assert "evaluations lacks the evaluations after 1 rollouts" in resumed.output
    assert "metrics.jsonl lacks the rows of the evaluations after 2 rollouts" in resumed.output


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: text[:-30], "is damaged: Unterminated string"),
        (lambda text: "[1]\n", "is damaged"),
        (lambda text: "", "is damaged: it lacks samples"),
        (lambda text: text[: text.rindex("\n", 0, -1) + 1], "is damaged: it lacks samples"),
    ],
)
def test_a_damaged_evaluation_is_moved_aside_and_told(
    tmp_path: Path, damage: Callable[[str], str], said: str
) -> None:
    settings = ("eval_interval=1", "save_interval=2", "doctor=false", "load_dir=auto")
    run = train(tmp_path / "run", *settings, "num_rollouts=2")
    file = evaluation_file(run.directory, "eval", 1)
    broken = damage(file.read_text())
    file.write_text(broken)
    resumed = train(run.directory, *settings, "num_rollouts=3")
    assert resumed.exit_code == 0, resumed.errors
    assert f"{file} {said}" in resumed.output
    assert "evaluations lacks the evaluations after 1 rollouts" in resumed.output
    assert (file.parent / "before-resume-2" / file.name).read_text() == broken


def test_what_made_evaluations_comparable_may_be_lost_but_not_silently(tmp_path: Path) -> None:
    settings = ("eval_interval=2", "save_interval=2", "doctor=false", "load_dir=auto")
    train(tmp_path / "run", *settings, "num_rollouts=2")
    run = train(tmp_path / "run", *settings, "num_rollouts=4", "seed=5")
    changes = run.directory / "evaluation_changes.jsonl"
    changes.write_text(changes.read_text()[:-5])
    resumed = train(run.directory, *settings, "num_rollouts=6", "seed=5")
    assert f"not compared with earlier ones: {changes} is damaged" in resumed.output
    assert "before: after 4 rollouts; after: after 6 of 6" in resumed.output
