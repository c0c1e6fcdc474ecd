"""A reward that ruins what a judge looks at: the alarm, and runs that end on it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rank_pool import RankPool
from runs import Run, train
from torch import Tensor

from unirl.core.types import PromptRecord
from unirl.reward.scorer import Scorer
from unirl.runtime.interrupt import CONDITION_MET


class Dark(Scorer):
    """What brightness as a reward gives up."""

    def score(self, images: Tensor, records: Sequence[PromptRecord]) -> Tensor:
        return 1 - images.float().mean(dim=(1, 2, 3)) / 255


HACKED = (
    "~reward.scorers",
    "+reward.scorers.light.path=failing_scorers:Brightness",
    "+eval_rewards.dark.path=test_reward_hacking:Dark",
    "stack.optimizer.learning_rate=3e-2",
    "sampling.samples_per_prompt=4",
    "eval_interval=1",
    "num_rollouts=6",
)
STOPPED = (*HACKED, "stop_on=[hacking]")
SUITE = (
    "{data:'pkg:numbers/train.jsonl',num_prompts:4,"
    "scorers:{dark:{path:'test_reward_hacking:Dark'}}}"
)


def alarms(run: Run) -> list[float]:
    return [row["eval/hacking_alarm_dark"] for row in run.rows("eval")[1:]]


def test_the_alarm_goes_off_loudly_and_the_run_goes_on_unless_told(tmp_path: Path) -> None:
    run = train(tmp_path / "run", *HACKED)
    assert run.exit_code == 0, run.errors
    assert len(alarms(run)) == 6
    assert alarms(run)[-1] == 1
    assert "reward hacking: since the evaluation after" in run.output


def test_a_run_ends_on_it_with_a_checkpoint_and_stays_ended_until_told(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", *HACKED)
    first = 1 + alarms(whole).index(1)
    assert 1 <= first < 6
    run = train(tmp_path / "run", *STOPPED)
    assert run.exit_code == CONDITION_MET
    assert run.checkpoints[-1] == f"checkpoint-{first}"
    assert run.numbers() == whole.numbers()[: 2 * first + 1]
    assert "stop_on=[hacking] ended the run" in run.output

    load = f"load_dir={run.directory}"
    again = train(run.directory, *STOPPED, load)
    assert again.exit_code == CONDITION_MET
    assert again.numbers() == run.numbers()
    seldom = train(run.directory, *STOPPED, load, "eval_interval=100")
    assert seldom.exit_code == CONDITION_MET, "what the records say still holds"
    assert seldom.numbers() == run.numbers()
    on = train(run.directory, *HACKED, load)
    assert on.exit_code == 0, on.errors
    assert on.numbers() == whole.numbers()


def test_an_alarm_at_the_last_evaluation_is_in_the_exit_code_of_the_whole_run(
    tmp_path: Path,
) -> None:
    settings = (*STOPPED, "eval_interval=6", "save_interval=6")
    run = train(tmp_path / "run", *settings)
    assert run.exit_code == CONDITION_MET
    assert "stop_on=[hacking] was met by the last evaluation" in run.output
    again = train(run.directory, *settings, "load_dir=auto")
    assert again.exit_code == CONDITION_MET
    assert "is complete: 6 rollouts are done" in again.output
    assert again.numbers() == run.numbers()


def test_a_scorer_of_a_suite_ends_a_run_too(tmp_path: Path) -> None:
    run = train(tmp_path / "run", *STOPPED, "~eval_rewards", f"+eval_suites.own={SUITE}")
    assert run.exit_code == CONDITION_MET, run.errors
    assert "dark of suite own fell by" in run.output
    assert run.rows("eval")[-1]["eval/own/hacking_alarm_dark"] == 1


def test_all_ranks_end_together(pool: RankPool, tmp_path: Path) -> None:
    runs = pool.run(2, train, tmp_path / "run", "num_devices=2", *STOPPED)
    assert [run.exit_code for run in runs] == [CONDITION_MET] * 2
