"""What a person reads: whole lines in a pipe, a bar on a terminal, and run.log in both cases."""

import io
import logging
import re

import pytest

from unirl.core.errors import UnirlError
from unirl.core.types import SamplingParams
from unirl.tracking.console import (
    ConsoleMode,
    ConsoleSink,
    RunConsole,
    eval_line,
    rollout_line,
    setup_logging,
    summary,
)
from unirl.tracking.intervals import Interval
from unirl.tracking.running import Running
from unirl.tracking.time_left import TimeLeft
from unirl.tracking.tracker import Row, Tracker

METRICS = {
    "rollout/reward_mean": 0.5123,
    "train/loss": 0.00312,
    "train/grad_norm": 0.8214,
    "train/lr": 3e-4,
    "train/ratio_mean": 1.0,
    "train/ratio_std": 3.1e-5,
    "train/clip_fraction": 0.12,
    "perf/rollout_seconds": 1.5,
    "perf/reward_seconds": 0.25,
    "perf/sync_seconds": 0.001,
    "perf/train_seconds": 12.3,
    "perf/total_seconds": 14.05,
    "perf/evaluate_seconds": 4.0,
    "progress/wall_seconds": 3600.0,
}
ROLLOUT = Row("rollout", 11, 12, METRICS)
EVAL = Row(
    "eval", 12, 12, {"eval/reward_mean": 0.53, "eval/ocr_mean": 1.0, "progress/images": 384.0}
)
EVAL_SAMPLING = SamplingParams(
    num_inference_steps=8, guidance_scale=1.0, height=16, width=32, eta=0.0, kernel="flow"
)


@pytest.fixture(autouse=True)
def unirl_logger_as_before():
    log = logging.getLogger("unirl")
    handlers, level = list(log.handlers), log.level
    yield
    for handler in set(log.handlers) - set(handlers):
        handler.close()
    log.handlers[:] = handlers
    log.setLevel(level)


def show(tmp_path, mode: ConsoleMode, rows=(ROLLOUT, EVAL), width=80, file=None) -> str:
    """What the console received."""
    output = io.StringIO() if file is None else file
    console = RunConsole(mode, output, width)
    setup_logging(tmp_path, console)
    left = TimeLeft(100, 11, lambda done: False, lambda done: False)
    sink = ConsoleSink(console, 100, 11, EVAL_SAMPLING, 4, left, Running())
    with Tracker([sink]) as tracker:
        for row in rows:
            tracker.log(row)
        logging.getLogger("unirl.residency").info("lifecycle residency: train offload")
        logging.getLogger("unirl.reward").warning("a scorer failed")
    summary([EVAL, EVAL], {}, tmp_path, EVAL.rollout)
    return output.getvalue()


def last_screen(text: str) -> list[str]:
    """The lines of the live display as they stay, without control codes."""
    after_the_last_erasure = text.rpartition("\x1b[2K")[2]
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", after_the_last_erasure).splitlines()[:3]


@pytest.mark.parametrize("mode", ["plain", "auto"])
def test_a_pipe_gets_one_unbroken_line_per_row(tmp_path, mode):
    assert show(tmp_path, mode).splitlines()[:4] == [
        "rollout 12/100  reward=0.512 loss=0.00312 gn=0.821 lr=3.0e-04 ratio=1±3.1e-05 clip=0.12",
        "EVAL step 12 (4 samples/prompt, 8 steps, 32x16, cfg=1 eta=0) reward_mean=0.53 ocr_mean=1",
        "lifecycle residency: train offload",
        "warning: a scorer failed",
    ]


def test_quiet_leaves_warnings_and_the_summary(tmp_path):
    warning, header, *_, place = show(tmp_path, "quiet").splitlines()
    assert warning == "warning: a scorer failed"
    assert header.split() == ["before", "->", "after", "change"]
    assert str(tmp_path) in place


def test_the_live_display_has_numbers_phases_and_times(tmp_path):
    text = show(tmp_path, "rich")
    how_far, numbers, phases = last_screen(text)
    assert len(how_far) == 80
    # 88 rollouts of 14.05 s; the evaluations to come are none.
    assert how_far.endswith("1:00:00 so far, 0:20:36 left")
    assert numbers == "reward=0.512 gn=0.821 ratio=1 clip=0.12"
    assert phases == "rollout=1.50s reward=0.25s train=12s evaluate=4.00s"
    assert "now between phases" in text
    assert "EVAL step 12" in text
    assert "lifecycle residency: train offload" in text
    assert "loss=" not in text, "the rollout's line would scroll the display away"


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120])
def test_the_live_display_fits_every_width_without_cutting_a_field(tmp_path, width):
    lines = last_screen(show(tmp_path, "rich", width=width))
    assert all(len(line) <= width for line in lines)
    whole = ["reward=0.512", "gn=0.821", "ratio=1", "clip=0.12"]
    assert lines[1].split() == whole[: len(lines[1].split())]
    if width >= 40:
        assert lines[1].split() == whole
        assert lines[0].endswith("0:20:36 left")
        assert "━" in lines[0]


class Gone(io.StringIO):
    """A reader that has left."""

    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


@pytest.mark.parametrize("mode", ["plain", "rich"])
@pytest.mark.parametrize("error", [BrokenPipeError(32, "gone"), OSError(28, "no space")])
def test_a_console_that_cannot_be_written_ends_no_run(tmp_path, mode, error):
    show(tmp_path, mode, file=Gone(error))
    assert "INFO rollout 12/100" in (tmp_path / "run.log").read_text()


def test_a_table_wider_than_the_terminal_has_names_above_numbers(tmp_path):
    output = io.StringIO()
    setup_logging(tmp_path, RunConsole("plain", output))
    before, after = {"eval/reward_mean": 0.25}, {"eval/reward_mean": 0.5}
    changes = {"eval/reward_mean": Interval(0.25, 0.01, 4)}
    rows = [Row("eval", step, step, metrics) for step, metrics in ((0, before), (4, after))]
    summary(rows, changes, tmp_path, 4, max_width=40)
    assert output.getvalue().splitlines()[:3] == [
        "before -> after change ± 95 % over prompts",
        "eval/reward_mean",
        "  0.2500 -> 0.5000 +0.2500 ± 0.0100",
    ]


@pytest.mark.parametrize("mode", ["rich", "plain", "quiet"])
def test_run_log_keeps_everything(tmp_path, mode):
    show(tmp_path, mode)
    text = (tmp_path / "run.log").read_text()
    for part in ("INFO rollout 12/100  reward=0.512", "INFO EVAL step 12", "lifecycle residency"):
        assert part in text


@pytest.mark.parametrize(
    ("mean", "shown"),
    [
        (1.0, "ratio=1±"),
        (1 + 1e-6, "ratio=1+1.0e-06±"),
        (1 + 2e-6, "ratio=1+2.0e-06±"),
        (1 - 3e-9, "ratio=1-3.0e-09±"),
        (1.2345, "ratio=1.2345±"),
        (float("nan"), "ratio=nan±"),
    ],
)
def test_ratios_near_one_show_their_deviation(mean, shown):
    row = Row("rollout", 0, 1, METRICS | {"train/ratio_mean": mean})
    assert shown in rollout_line(row, 10)


def test_a_line_shows_only_what_was_measured():
    row = Row("rollout", 0, 1, {"rollout/reward_mean": 0.5, "train/loss": 2.0})
    assert rollout_line(row, 10) == "rollout 1/10  reward=0.500 loss=2"
    assert eval_line(Row("eval", 0, 0, {}), "8 steps") == "EVAL step 0 (8 steps) "


def test_a_mean_stands_with_its_interval():
    metrics = {"eval/reward_mean": 0.5, "eval/reward_ci95": 0.0123, "eval/num_samples": 4.0}
    line = eval_line(Row("eval", 3, 3, metrics), "8 steps")
    assert line == "EVAL step 3 (8 steps) reward_mean=0.5±0.012 num_samples=4"


def test_the_summary_is_an_aligned_table_of_before_and_after(tmp_path):
    output = io.StringIO()
    setup_logging(tmp_path, RunConsole("plain", output))
    before = {"eval/ocr_mean": 0.45, "eval/judge_exact_read_mean": 0.2, "eval/num_samples": 64.0}
    after = before | {"eval/ocr_mean": 0.88, "eval/judge_exact_read_mean": 0.15}
    changes = {"eval/ocr_mean": Interval(0.43, 0.0211, 64)}
    rows = [
        Row("eval", step, step, metrics) for step, metrics in ((0, before), (2, {}), (4, after))
    ]
    summary(rows, changes, tmp_path, 4)
    *_, ocr, judge, place = output.getvalue().splitlines()
    assert ocr.split()[:-2] == ["eval/ocr_mean", "0.4500", "->", "0.8800", "+0.4300"]
    assert ocr.endswith(" ± 0.0211")
    assert judge.split()[-1] == "-0.0500"
    assert ocr.index("+0.43") == judge.index("-0.05")
    assert "num_samples" not in output.getvalue()
    assert str(tmp_path) in place


def test_markup_in_a_message_is_printed_as_it_is(tmp_path):
    output = io.StringIO()
    setup_logging(tmp_path, RunConsole("plain", output))
    logging.getLogger("unirl.data").warning("prompt [red]cat[/red] %s", "[/]")
    assert output.getvalue() == "warning: prompt [red]cat[/red] [/]\n"


def test_setting_up_twice_prints_once(tmp_path):
    outputs = [io.StringIO(), io.StringIO()]
    for number, output in enumerate(outputs):
        setup_logging(tmp_path / str(number), RunConsole("plain", output))
    logging.getLogger("unirl").info("hello")
    assert [output.getvalue() for output in outputs] == ["", "hello\n"]


def test_a_run_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UnirlError, match=r"file/run/run\.log cannot be written"):
        setup_logging(tmp_path / "file" / "run", RunConsole("plain", io.StringIO()))
