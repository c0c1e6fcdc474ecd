"""`unirl evaluate` and `unirl sample`: outside its run a checkpoint gives the run's own numbers."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from PIL import Image
from rank_pool import RankPool
from runs import REPLICA, Run, contents, read_json_lines, train, write_prompts

from unirl.cli.main import main
from unirl.tracking.evaluations import evaluation_file, read_evaluation

NFT = (
    *("sampling.eta=0", "algorithm=diffusion_nft", "algorithm.old_decay_rate=0.2"),
    "stack.optimizer.learning_rate=1e-2",
)
EVALUATED = ("eval_interval=2", "save_interval=2", "eval_chunk_prompts=3")
FEW = "{data:'pkg:numbers/heldout.jsonl',num_prompts:2,scorers:{c:{path:color}}}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    settings = (*EVALUATED, f"+eval_suites.few={FEW}", "logging.console=quiet")
    run = train(tmp_path_factory.mktemp("runs") / "run", *settings)
    assert run.exit_code == 0, run.errors
    return run


def unirl(*words: object) -> tuple[int, str, str]:
    """Exit code, output and errors."""
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = main([str(word) for word in words])
    return code, output.getvalue(), errors.getvalue()


def evaluations(folder: Path) -> dict[str, bytes]:
    return contents(folder / "evaluations") | contents(folder / "images")


def test_a_run_evaluated_again_gives_its_records_images_and_numbers(
    run: Run, tmp_path: Path
) -> None:
    code, output, errors = unirl("evaluate", run.directory, "--base", "--output", tmp_path / "out")
    assert code == 0, errors
    assert "checkpoint-2: 6 prompts" in errors, "quiet was the run, not this command"
    assert len(evaluations(run.directory)) == 2 * (2 + 4 + 2 + 1) + 1
    assert evaluations(tmp_path / "out") == evaluations(run.directory)
    for again, logged in zip(
        read_json_lines(tmp_path / "out" / "metrics.jsonl"), run.rows("eval"), strict=True
    ):
        names = {name for name in logged if name.startswith("eval/")}
        assert {name: again[name] for name in names} == {name: logged[name] for name in names}
    *_, last = run.rows("eval")
    lines = output.splitlines()
    assert lines[:3] == [
        f"{run.checkpoint(2)}, after 2 of 2 rollouts",
        "eval: 4 prompts x 1 sample of pkg:numbers/heldout.jsonl",
        "few: 2 prompts x 1 sample of pkg:numbers/heldout.jsonl",
    ]
    line = next(line for line in lines if line.startswith("eval/reward_mean"))
    assert f"{last['eval/reward_mean']:.4f} ± {last['eval/reward_ci95']:.4f}" in line


@pytest.mark.parametrize("recipe", [REPLICA, "quickstart"], ids=["replica", "trainside"])
def test_the_weights_that_rollouts_sample_with_are_those_evaluated(
    tmp_path: Path, recipe: str
) -> None:
    """DiffusionNFT's are a running average, `old`."""
    run = train(tmp_path / "run", *EVALUATED, *NFT, recipe=recipe)
    assert run.exit_code == 0, run.errors
    code, _, errors = unirl("evaluate", run.directory, "--output", tmp_path / "out")
    assert code == 0, errors
    again, logged = (
        evaluation_file(folder, "eval", 2) for folder in (tmp_path / "out", run.directory)
    )
    assert again.read_bytes() == logged.read_bytes()


def test_other_prompts_and_scorers_take_the_place_of_the_runs(run: Run, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "it's.jsonl", ["12", "345", "6"])
    words = (
        "--prompts",
        prompts,
        "--scorer",
        "jpeg_size",
        "--scorer",
        "failing_scorers:Brightness",
    )
    code, output, errors = unirl(
        "evaluate",
        run.checkpoint(2),
        *words,
        "eval_samples_per_prompt=2",
        "--output",
        tmp_path / "out",
    )
    assert code == 0, errors
    samples = read_evaluation(evaluation_file(tmp_path / "out", "eval", 2))
    assert [(s.prompt, s.sample) for s in samples] == [(p, g) for p in range(3) for g in range(2)]
    assert all(s.scores.keys() == {"jpeg_size", "Brightness"} for s in samples)
    assert all(s.judges == {} for s in samples)
    assert f"eval: 3 prompts x 2 samples of {prompts}\n" in output
    assert "eval/few/" not in output


def test_samples_that_were_not_scored_are_counted(run: Run, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", ["12", "111", "6"])
    words = ("--prompts", prompts, "--scorer", "failing_scorers:FailsOnOnePrompt")
    code, output, errors = unirl("evaluate", run.directory, *words, "reward.on_failure=drop_group")
    assert code == 0, errors
    assert f"eval: 3 prompts x 1 sample of {prompts}, 1 of them not scored\n" in output


def test_a_recipe_stands_for_the_model_it_begins_with(run: Run, tmp_path: Path) -> None:
    settings = run.directory / "config.yaml"
    code, output, errors = unirl("evaluate", settings, "--output", tmp_path / "out")
    assert code == 0, errors
    assert output.startswith(f"{settings}, before any training\n")
    first = {name: data for name, data in evaluations(run.directory).items() if "000000" in name}
    assert evaluations(tmp_path / "out") == first


def test_a_sample_is_the_image_that_the_run_evaluated(run: Run, tmp_path: Path) -> None:
    samples = read_evaluation(evaluation_file(run.directory, "eval", 2))
    text = samples[0].text
    words = ("--prompt", text, "--num", 2, "--base", "--output", tmp_path / "out")
    code, output, errors = unirl("sample", run.directory, *words)
    assert code == 0, errors
    for name, step in (("00-00.png", 2), ("base-00-00.png", 0)):
        image = run.directory / f"images/eval-{step:06d}/0000.png"
        assert (tmp_path / "out" / name).read_bytes() == image.read_bytes()
    listed = read_json_lines(tmp_path / "out" / "samples.jsonl")
    assert [(line["file"], line["sample"]) for line in listed] == [
        ("base-00-00.png", 0),
        ("base-00-01.png", 1),
        ("00-00.png", 0),
        ("00-01.png", 1),
    ]
    assert all(line["prompt"] == text for line in listed)
    assert (tmp_path / "out" / "before_after.png").exists()
    assert output.startswith(f"{run.checkpoint(2)}, after 2 of 2 rollouts\n")
    assert str(tmp_path / "out" / "00-01.png") in output


def test_seed_steps_and_guidance_are_what_was_asked(run: Run, tmp_path: Path) -> None:
    text = read_evaluation(evaluation_file(run.directory, "eval", 2))[0].text
    images = set()
    for number, words in enumerate([(), ("--seed", 5), ("--steps", 7), ("--guidance", 3)]):
        folder = tmp_path / str(number)
        code, _, errors = unirl(
            "sample", run.directory, "--prompt", text, *words, "--output", folder
        )
        assert code == 0, errors
        with Image.open(folder / "00-00.png") as image:
            images.add(image.tobytes())
    assert len(images) == 4


def test_ranks_share_the_prompts_and_give_the_records_of_one(run: Run, tmp_path: Path) -> None:
    """5 prompts in chunks of 3 and 2, in batches of the same size; the command starts the ranks."""
    changes = ("eval_num_prompts=5", "rollout.forward_batch_size=1")
    words = ("evaluate", run.directory, "--base", *changes, "--output")
    code, alone, errors = unirl(*words, tmp_path / "one")
    assert code == 0, errors
    together = subprocess.run(
        [sys.executable, "-m", "unirl", *map(str, words), tmp_path / "two", "num_devices=2"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert together.returncode == 0, together.stderr
    assert together.stdout == alone.replace("/one:", "/two:")
    one, two = (contents(tmp_path / name) for name in ("one", "two"))
    del one["config.yaml"], two["config.yaml"]
    assert len(one) > 10
    assert two == one
    assert "checkpoint-2: 7 of 7 prompts" in together.stderr


def test_a_run_on_ranks_evaluated_again_on_as_many_gives_its_records(
    pool: RankPool, tmp_path: Path
) -> None:
    on_two = ("num_devices=2", "num_rollouts=1", "eval_interval=1", "eval_num_prompts=5")
    logged, _ = pool.run(2, train, tmp_path / "run", *on_two, "save_interval=1", "doctor=false")
    words = ("evaluate", logged.directory, "--base", "num_devices=2", "--output", tmp_path / "out")
    ranks = pool.run(2, unirl, *words)
    assert [code for code, _, _ in ranks] == [0, 0], ranks[0][2]
    assert len(evaluations(logged.directory)) == 2 * (1 + 5 + 1) + 1
    assert evaluations(tmp_path / "out") == evaluations(logged.directory)


def test_ranks_fail_together_and_rank_0_says_why(pool: RankPool, run: Run, tmp_path: Path) -> None:
    two = ("evaluate", run.directory, "num_devices=2")
    for words, code, said in (
        ((*two, "--shadow", "old"), 1, "has none"),
        ((*two, "device=cuda:1"), 3, "one device for num_devices=2 ranks"),
        (("evaluate", run.directory), 3, "the launcher started 2 processes"),
    ):
        ranks = pool.run(2, unirl, *words)
        assert [found for found, _, _ in ranks] == [code] * 2
        assert said in ranks[0][2]
        assert ranks[1][1:] == ("", "")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("evaluate", "RUN", "--scorer", "nothing"), 3, "reward.scorers.nothing.path"),
        (("evaluate", "RUN", "--output", "RUN"), 1, "is not empty"),
        (("evaluate", "RUN", "--prompts", "/no/file.txt"), 3, "no such file"),
        (("evaluate", "RUN", "eval_num_prompts=1000"), 3, "has only 256 prompts"),
        (("evaluate", "RUN", "eval_suites.few.num_prompts=999"), 3, "has only 256 prompts"),
        (("evaluate", "quickstart", "eval_interval=0", "eval_num_prompts=999"), 3, "only 256"),
        (("evaluate", "RUN", "--scorer", "ocr", "--scorer", "ocr"), 3, "ocr is there more than"),
        (("evaluate", "quickstart", "--base"), 3, "Leave --base out"),
        (("sample", "quickstart", "--prompt", "red", "--output", "NEW", "--base"), 3, "--base"),
        (("sample", "RUN", "--prompt", " ", "--output", "NEW"), 3, "--prompt is blank"),
        (("sample", "RUN", "--prompt", "no/such.txt", "--output", "NEW"), 3, "name of a file"),
        (("evaluate", "RUN", "eval_num_prompt=3"), 3, "eval_num_prompts"),
        (("sample", "RUN", "--prompt", "red", "--output", "NEW", "num_devices=2"), 3, "one device"),
        (("sample", "RUN", "--prompt", "elephants", "--output", "NEW"), 1, "Unknown word"),
        (
            ("sample", "RUN", "--prompt", "red", "--output", "NEW", "--seed", "3", "seed=5"),
            3,
            "seed=5 says again",
        ),
        (("sample", "RUN", "--prompt", "red", "--output", "NEW", "--shadow", "old"), 1, "has none"),
        (("evaluate", "RUN/checkpoints/checkpoint-9"), 1, "checkpoints has checkpoint-2."),
        (("evaluate", "runs/none"), 1, "expected a checkpoint"),
        (("evaluate", "checkpoint-9"), 1, "expected a checkpoint"),
        (("evaluate", "diffusion/tiny/none"), 3, "no such recipe"),
        (("evaluate", "nothing"), 3, "no such recipe"),
    ],
)
def test_what_is_wrong_is_said(
    run: Run, tmp_path: Path, words: tuple[str, ...], code: int, said: str
) -> None:
    places = {"RUN": str(run.directory), "NEW": str(tmp_path / "new")}
    found, _, errors = unirl(*(_filled(word, places) for word in words))
    assert found == code, errors
    assert said in errors


def _filled(word: str, places: Mapping[str, str]) -> str:
    first, *others = word.split("/", 1)
    return "/".join([places.get(first, first), *others])
