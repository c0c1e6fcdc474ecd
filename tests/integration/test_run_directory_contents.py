"""What a run leaves behind, and what its last lines say."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml
from PIL import Image
from runs import REPLICA, Run, command, read_json_lines, train

from unirl.checkpoint.manifest import verify
from unirl.config.schema import RunConfig
from unirl.tracking.intervals import changes_between
from unirl.tracking.metrics import describe


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two rollouts with everything on."""
    directory = tmp_path_factory.mktemp("runs") / "run"
    return train(
        directory,
        "train_resident=false",
        "reward_resident=false",
        "eval_interval=1",
        "eval_rewards={exact_read:{path:exact_read}}",
        "algorithm.kl_coefficient=0.01",
        "save_interval=1",
        recipe=REPLICA,
    )


def test_the_run_succeeds_and_leaves_every_file(run: Run) -> None:
    assert run.exit_code == 0, run.errors
    names = {path.name for path in run.directory.iterdir() if not path.name.startswith(".")}
    files = {
        "config.yaml",
        "metrics.jsonl",
        "transitions.jsonl",
        "trace.json",
        "curves.png",
        "costs.png",
        "report.html",
        "doctor.json",
        "run.log",
        "sessions.jsonl",
    }
    assert names == files | {"images", "evaluations", "checkpoints"}


def test_config_yaml_is_the_whole_configuration_and_a_recipe(run: Run, tmp_path: Path) -> None:
    config = run.directory / "config.yaml"
    values = yaml.safe_load(config.read_text())
    assert RunConfig.model_validate(values).model_dump(mode="json") == values
    assert values["algorithm"]["kl_coefficient"] == 0.01
    again = command("train", tmp_path / "again", str(config))
    assert again.exit_code == 0, again.errors
    assert again.numbers() == run.numbers()


def test_every_logged_metric_is_in_the_catalogue_and_finite(run: Run) -> None:
    for row in run.rows():
        for name, value in row.items():
            if name not in ("kind", "rollout", "optimizer_step"):
                assert describe(name)
                assert math.isfinite(float(value)), name
    assert [(row["kind"], row["rollout"]) for row in run.rows()] == [
        ("eval", 0),
        ("rollout", 0),
        ("eval", 1),
        ("rollout", 1),
        ("eval", 2),
    ]
    assert [row["optimizer_step"] for row in run.rows("rollout")] == [1, 2]


def test_the_first_ratio_of_a_run_is_exactly_one(run: Run) -> None:
    first = run.rows("rollout")[0]
    assert first["train/ratio_min"] == first["train/ratio_max"] == 1
    assert first["train/kl_reference"] == 0
    assert run.rows("rollout")[1]["train/kl_reference"] > 0


def test_transitions_are_numbered_and_have_their_costs(run: Run) -> None:
    rows = read_json_lines(run.directory / "transitions.jsonl")
    assert [row["seq"] for row in rows] == list(range(1, len(rows) + 1))
    assert {row["cause"] for row in rows} <= {
        f"{request} {role}"
        for request in ("enter", "set")
        for role in ("train", "rollout", "reward")
    }
    onloads = [row for row in rows if row["move"] == "onload"]
    large = {row["component"] for row in onloads if row["moved_bytes"] > 1_000_000}
    assert large >= {"train.base", "train.moments", "rollout.base", "reward.ocr.network"}
    assert all(row["seconds"] > 0 for row in rows)


def test_frozen_weights_never_go_back_to_the_host(run: Run) -> None:
    """The engine wrote the one host copy before the run began; both roles park into it."""
    rows = read_json_lines(run.directory / "transitions.jsonl")
    parked = [row for row in rows if row["component"] in ("train.base", "rollout.base")]
    parked = [row for row in parked if row["move"] == "offload"]
    assert {row["component"] for row in parked} == {"train.base", "rollout.base"}
    assert all(row["moved_bytes"] == 0 and row["dropped_bytes"] > 1_000_000 for row in parked)


def test_moves_in_metrics_add_up_to_the_transitions(run: Run) -> None:
    """Moves of the last evaluation and save have no later row to be counted in."""
    last = max(i for i, move in enumerate(run.moves()) if move == "train onload")
    counted = sum(row.get("residency/train_onloads", 0) for row in run.rows("rollout"))
    assert counted == run.moves()[:last].count("train onload")


def test_pictures_open_and_have_the_size_of_the_grid(run: Run) -> None:
    pictures = sorted((run.directory / "images").glob("*.png"))
    assert len(pictures) == 4  # three evaluations and before/after
    for path in [*pictures, run.directory / "curves.png"]:
        with Image.open(path) as picture:
            picture.load()
            assert picture.width > 2 * 32 * 6  # two columns of enlarged images
            assert picture.height > 2 * 16 * 6


def test_the_checkpoint_is_sound(run: Run) -> None:
    assert run.checkpoints == ["checkpoint-1", "checkpoint-2"]
    assert (run.directory / "checkpoints" / "best").resolve().name in run.checkpoints
    manifest = verify(run.checkpoint(2))
    assert set(manifest.files) == {"weights.safetensors", "optimizer.pt", "trainer_state.json"}


def test_the_last_lines_compare_before_and_after(run: Run) -> None:
    *_, header, reward, _ocr, _color, _judge, where = run.output.splitlines()
    assert header.split()[:4] == ["before", "->", "after", "change"]
    first, *_, last = run.rows("eval")
    before, after = (f"{row['eval/reward_mean']:.4f}" for row in (first, last))
    assert reward.split()[:4] == ["eval/reward_mean", before, "->", after]
    change = changes_between(run.directory, 0, 2)["eval/reward_mean"]
    assert change.mean == pytest.approx(last["eval/reward_mean"] - first["eval/reward_mean"])
    assert reward.endswith(f"{change.mean:+.4f} ± {change.half_width:.4f}")
    assert str(run.directory) in where
    assert run.log.rstrip().endswith(where)


def test_a_single_evaluation_is_not_shown_as_before_and_after(tmp_path: Path) -> None:
    run = train(tmp_path / "run", "num_rollouts=1", "eval_interval=10")
    assert "->" not in run.output
    assert "eval_interval" in run.output
    assert str(run.directory) in run.output.splitlines()[-1]


def test_equal_seeds_give_equal_runs_and_others_do_not(tmp_path: Path) -> None:
    one, same, other = (
        train(tmp_path / name, "num_rollouts=1", f"seed={seed}").numbers()
        for name, seed in [("one", 1), ("same", 1), ("other", 2)]
    )
    assert one == same
    assert one != other
