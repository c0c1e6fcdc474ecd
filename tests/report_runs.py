"""Run directories as a run would leave them, written without running anything."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from unirl.config.schema import RunConfig
from unirl.tracking.evaluations import EvaluatedSample, write_evaluation
from unirl.tracking.sessions import SessionLog, State, sessions_file

PROMPTS = ("a red number", "a café in the rain", "eine Straße, 夜の街", "two cats")


def write_run(
    path: Path,
    num_rollouts: int = 12,
    eval_interval: int = 4,
    config: Mapping[str, Any] | None = None,
    prompts: Sequence[str] = PROMPTS,
    gain: float = 0.3,
    image_side: int = 16,
    seed: int = 0,
) -> Path:
    """A finished run; its held-out reward rises by `gain`."""
    path.mkdir(parents=True)
    write_config(
        path,
        run_name=path.name,
        num_rollouts=num_rollouts,
        eval_interval=eval_interval,
        seed=seed,
        **(config or {}),
    )
    noise = random.Random(seed)
    rows = []
    for rollout in range(num_rollouts + 1):
        if eval_interval and rollout % eval_interval == 0:
            rows.append(eval_row(rollout, 0.4 + gain * rollout / num_rollouts))
        if rollout < num_rollouts:
            rows.append(rollout_row(rollout, 0.4 + gain * rollout / num_rollouts, noise))
    write_rows(path, rows)
    if eval_interval:
        write_samples(path, 0, prompts, 0.4, image_side)
        write_samples(path, num_rollouts, prompts, 0.4 + gain, image_side)
    write_sessions(path, (0, num_rollouts, "finished", ""))
    write_log(path, [f"INFO {path.name}: training 0.2 of 2.1 M parameters of tiny, results in x"])
    return path


def write_config(path: Path, **values: Any) -> None:
    text = yaml.safe_dump(RunConfig.model_validate(values).model_dump(mode="json"))
    (path / "config.yaml").write_text(text)


def rollout_row(rollout: int, reward: float, noise: random.Random) -> dict[str, Any]:
    wobble = noise.gauss(0, 0.05)
    return {
        "kind": "rollout",
        "rollout": rollout,
        "optimizer_step": rollout + 1,
        "rollout/reward_mean": reward + wobble,
        "rollout/reward_std": 0.2 + wobble / 4,
        "rollout/advantage_mean": 0.0,
        "rollout/advantage_std": 0.9,
        "rollout/zero_std_group_ratio": max(0.0, wobble),
        "train/loss": wobble * 1e-4,
        "train/ratio_mean": 1 + wobble * 1e-4,
        "train/ratio_std": 2e-4,
        "train/clip_fraction": abs(wobble),
        "train/approx_kl": 1e-8 * (1 + abs(wobble)),
        "train/grad_norm": 0.01 + abs(wobble),
        "train/skipped_steps": 0.0,
        "train/lr": 1e-4,
        "perf/rollout_seconds": 3 + wobble,
        "perf/reward_seconds": 1.0,
        "perf/train_seconds": 4.0,
        "perf/total_seconds": 8.2 + wobble,
        **progress(rollout + 1),
    }


def eval_row(rollout: int, reward: float) -> dict[str, Any]:
    return {
        "kind": "eval",
        "rollout": rollout,
        "optimizer_step": rollout,
        "eval/reward_mean": reward,
        "eval/ocr_mean": reward + 0.1,
        "eval/judge_exact_read_mean": reward / 2,
        "eval/num_samples": 4.0,
        **progress(rollout),
    }


def progress(rollouts: int) -> dict[str, float]:
    return {
        "progress/wall_seconds": 8.5 * rollouts + 2,
        "progress/device_seconds": 17.0 * rollouts + 4,
        "progress/images": 128.0 * rollouts,
        "progress/denoiser_evaluations": 700.0 * rollouts,
    }


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """NaN as the string that a run writes."""
    lines = []
    for row in rows:
        plain = {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in row.items()
        }
        lines.append(json.dumps(plain) + "\n")
    (path / "metrics.jsonl").write_text("".join(lines))


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_samples(
    path: Path, step: int, prompts: Sequence[str], reward: float, image_side: int
) -> None:
    """Of each prompt one sample with an image; rewards rise along the prompts."""
    samples = [
        EvaluatedSample(
            place, text, 0, reward + 0.01 * place * (1 if step else -1), {"ocr": reward}, {}
        )
        for place, text in enumerate(prompts)
    ]
    shape = (len(prompts), image_side, image_side, 3)
    images = np.random.default_rng(step).integers(0, 255, shape, dtype=np.uint8)
    write_evaluation(path, "eval", step, samples, images)


def write_log(path: Path, lines: Sequence[str]) -> None:
    """`LEVEL message` each, a minute apart."""
    stamped = [f"2026-11-30 20:{place:02d}:10,000 {line}\n" for place, line in enumerate(lines)]
    (path / "run.log").write_text("".join(stamped))


def write_sessions(path: Path, *sessions: tuple[int, int | None, State | None, str]) -> None:
    """Each with the rollouts it began and ended with, its state (None: killed) and the reason."""
    sessions_file(path).unlink(missing_ok=True)
    for start, done, state, reason in sessions:
        log = SessionLog(path)
        log.begin(start)
        if state is not None:
            log.end(done, state, reason)


def write_moves(path: Path, num_windows: int) -> None:
    """Of a rollout engine that comes for each rollout and leaves after it, with its trace."""
    lines, events, now = [], [], 1e15
    for window in range(num_windows):
        start = now
        for move, track in (("onload", 2), ("offload", 3)):
            moved, dropped = (2**30, 0) if move == "onload" else (0, 2**30)
            held = 2 * 2**30 if move == "onload" else 2**30
            lines.append(
                {
                    "seq": len(lines) + 1, "transition": len(lines) + 1, "rollout": window,
                    "during": "window", "role": "rollout", "move": move, "cause": "enter rollout",
                    "rule": "release first", "component": "rollout.base", "from": "parked",
                    "to": "resident", "version": "0", "moved_bytes": moved,
                    "dropped_bytes": dropped, "seconds": 0.02, "device_bytes": held,
                    "host_bytes": 2**30,
                }
            )  # fmt: skip
            args = {"moved_bytes": moved, "dropped_bytes": dropped}
            name = "rollout.base parked to resident"
            events.append(_event("X", track, name, now, 2e4, args))
            now += 2e4
            events.append(_event("C", 0, "bytes", now, 0, {"device": held, "host": 2**30}))
            if move == "onload":
                events.append(_event("X", 1, "rollout", now, 1e6, {}))
                now += 1e6
        events.append(_event("X", 1, "train", now, 2e6, {}))
        now += 2e6
        events.append(_event("X", 1, "total", start, now - start, {}))
    (path / "transitions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "trace.json").write_text("[\n" + "".join(json.dumps(e) + ",\n" for e in events))


def _event(
    kind: str, track: int, name: str, at: float, length: float, args: Mapping[str, int]
) -> dict[str, Any]:
    return {
        "ph": kind, "pid": 0, "tid": track, "name": name, "ts": at, "dur": length, "args": args
    }  # fmt: skip
