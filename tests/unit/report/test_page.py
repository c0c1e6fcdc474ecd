"""The page: complete in itself, safe to open, bounded in size, and whole for any state of a run."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_runs import PROMPTS, read_lines, write_config, write_moves, write_rows, write_run

from unirl.core.errors import UnirlError
from unirl.report.page import write_report


class Tags(HTMLParser):
    """Which elements there are, and what they refer to."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.references: list[str] = []
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def page(*runs: Path, output: Path | None = None) -> str:
    return write_report(runs, output).read_text(encoding="utf-8")


def test_it_refers_to_nothing_outside_itself(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    write_moves(path, 3)
    html = page(path)
    references = Tags(html).references
    assert len([one for one in references if one.startswith("data:image/png")]) == 2 * len(PROMPTS)
    assert all(one.startswith(("data:", "#")) for one in references)
    assert not re.search(r"url\(|@import|https?://", html)


def test_what_comes_from_a_run_is_escaped(tmp_path: Path) -> None:
    evil = '<script>alert(1)</script> & "quotes" \'</figure>'
    path = write_run(tmp_path / "run", prompts=[evil], config={"description": evil})
    with (path / "run.log").open("a") as log:
        log.write(f"2026-11-30 20:00:00,000 WARNING {evil}\n")
    plain, html = page(write_run(tmp_path / "plain")), page(path)
    assert Tags(html).names.count("script") <= Tags(plain).names.count("script")
    assert "<script>alert" not in html
    assert Tags(html).text.count("alert(1)") >= 3


def test_a_name_with_markup_cannot_leave_the_data_of_a_chart(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", config=None)
    config = (path / "config.yaml").read_text()
    (path / "config.yaml").write_text(
        config.replace("run_name: run", "run_name: '</script><img src=x>'")
    )
    assert "x" not in Tags(page(path)).references


def test_unicode_prompts_are_kept(tmp_path: Path) -> None:
    assert "eine Straße, 夜の街" in page(write_run(tmp_path / "run"))


def test_20_000_rollouts_make_a_page_of_bounded_size(tmp_path: Path) -> None:
    path = write_run(tmp_path / "long", num_rollouts=20_000, eval_interval=500)
    write_moves(path, 2_000)
    assert len(page(path)) < 1_500_000


def test_numbers_that_are_none_are_said_to_be_left_out(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    rows = read_lines(path / "metrics.jsonl")
    rows[3]["train/grad_norm"] = math.nan
    rows[-1]["eval/reward_mean"] = math.nan
    write_rows(path, rows)
    html = page(path)
    assert "1 value is not a number and left out" in html


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_run_that_has_hardly_begun_has_a_page(tmp_path: Path, kept: int) -> None:
    path = write_run(tmp_path / "run", eval_interval=0)
    write_rows(path, read_lines(path / "metrics.jsonl")[:kept])
    text = Tags(page(path)).text
    assert "never evaluated (eval_interval=0)" in text
    assert ("Nothing was measured yet" in text) == (kept == 0)


def test_a_run_without_anything_but_its_config_has_a_page(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    write_config(path, run_name="run", eval_interval=5)
    text = Tags(page(path)).text
    assert "metrics.jsonl is missing" in text
    assert "There is no evaluation yet" in text
    assert "eval_interval=0" not in text


def test_images_that_are_missing_or_broken_are_counted(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    folder = path / "images" / "eval-000012"
    (folder / "0000.png").unlink()
    (folder / "0001.png").write_bytes(b"\x89PNG\r\n")
    html = page(path)
    assert "2 images cannot be read" in html
    assert html.count("no image") == 2


def test_runs_without_progress_are_drawn_over_rollouts_alone(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    assert "Denoiser evaluations</label>" in page(path)
    rows = read_lines(path / "metrics.jsonl")
    plain = [{k: v for k, v in row.items() if "progress/" not in k} for row in rows]
    write_rows(path, plain)
    html = page(path)
    assert "</label>" not in html
    assert "Held-out" not in html  # the builder's runs have no data.eval


def test_what_the_doctor_found_is_told_in_its_words(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    wrong = {
        "name": "ratio", "value": "0.9", "is_fine": False,
        "sentence": "It must be 1.", "key": "algorithm.old_log_prob=replay",
    }  # fmt: skip
    (path / "doctor.json").write_text(json.dumps({"findings": [wrong]}))
    text = Tags(page(path)).text
    assert "It must be 1. Set algorithm.old_log_prob=replay ." in text


def test_several_runs_need_a_place_to_go(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name) for name in ("a", "b")]
    with pytest.raises(UnirlError, match="--output"):
        write_report(runs)


def test_a_run_that_was_repeated_is_not_another_seed(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name) for name in ("grpo-a", "grpo-b")]
    text = Tags(page(*runs, output=tmp_path / "all.html")).text
    assert "grpo, 2 runs" in text
    assert "standard deviation over runs, some of one seed" in text
    assert "mean over runs" in text
    assert "2 seeds" not in text


def test_runs_are_compared_by_what_differs(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "grpo-0"),
        write_run(tmp_path / "grpo-1", seed=1),
        write_run(tmp_path / "nft", config={"algorithm": {"path": "diffusion_nft"}}, gain=-0.2),
    ]
    text = Tags(page(*runs, output=tmp_path / "all.html")).text
    assert "grpo, 2 seeds" in text
    assert "algorithm.path flow_grpo flow_grpo diffusion_nft" in text
    assert "mean over seeds" in text
    assert "grpo, 2 seeds 0.700 ± 0.000 +0.300 ± 0.000 mean and standard deviation" in text
    assert "standard deviation over seeds" in text
    for name in ("grpo-0", "grpo-1", "nft"):
        assert f"{name} before: at the start; after: 12 rollouts" in text
