"""What an evaluation leaves in the run directory: a line per sample, and images as they were made.

    evaluations/eval-000010.jsonl   {"prompt": 0, "text": "a cat", "sample": 0, "reward": 0.5, ...}
    images/eval-000010/0000.png     the first sample of prompt 0, lossless

The step counts the rollouts done before. The file of lines comes last, so where it is, its images
are. A run that was resumed with other prompts, noise or rewards at evaluation says so:

    evaluation_changes.jsonl        {"rollout": 12, "changes": ["seed: 0 -> 3"]}

From there on evaluations are compared with each other, not with earlier ones. Imports no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from unirl.core.errors import UnirlError
from unirl.core.types import MAIN_SUITE
from unirl.tracking.files import output_errors, replacing


@dataclass(frozen=True)
class EvaluatedSample:
    """One sample of an evaluation and what was said about it."""

    prompt: int
    """Place of its prompt in the suite, from 0."""
    text: str
    sample: int
    """Which of the prompt's samples, from 0."""
    reward: float | None
    """Weighted total; None where a scorer failed and the prompt was dropped."""
    scores: Mapping[str, float]
    """Each scorer's own score; one that failed is missing."""
    judges: Mapping[str, float]
    image: str | None = None
    """Its PNG from the run directory on; of a video first, middle and last frame side by side."""


def write_evaluation(
    run_dir: Path,
    suite: str,
    step: int,
    samples: Sequence[EvaluatedSample],
    images: NDArray[np.uint8],
) -> Path:
    """Write the images [P', H, W, 3] of the first P' prompts and then the lines; same input, same
    bytes.

    Raises:
        UnirlError: the disk refused.
    """
    for prompt, image in enumerate(images):
        with replacing(image_file(run_dir, suite, step, prompt)) as temporary:
            Image.fromarray(image).save(temporary)
    path = evaluation_file(run_dir, suite, step)
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for sample in samples:
            if sample.sample == 0 and sample.prompt < len(images):
                sample = replace(sample, image=_image_name(suite, step, sample.prompt))
            file.write(json.dumps(asdict(sample)) + "\n")
    return path


def evaluation_file(run_dir: Path, suite: str, step: int) -> Path:
    return run_dir / "evaluations" / f"{suite}-{step:06d}.jsonl"


def image_file(run_dir: Path, suite: str, step: int, prompt: int) -> Path:
    return run_dir / _image_name(suite, step, prompt)


def read_evaluation(path: Path) -> list[EvaluatedSample]:
    """The samples of one file, in its order: by prompt, then by sample.

    Raises UnirlError for a file that was cut, edited or emptied.
    """
    try:
        with path.open(encoding="utf-8") as file:
            samples = [EvaluatedSample(**json.loads(line)) for line in file]
    except (ValueError, TypeError) as error:
        raise UnirlError(f"{path} is damaged: {error}. Restore it, or move it away.") from error
    group = sum(sample.prompt == 0 for sample in samples)
    places = [(sample.prompt, sample.sample) for sample in samples]
    if group == 0 or places != [(place // group, place % group) for place in range(len(samples))]:
        raise UnirlError(f"{path} is damaged: it lacks samples. Restore it, or move it away.")
    return samples


def read_images(run_dir: Path, suite: str, step: int, count: int) -> NDArray[np.uint8]:
    """[P', H, W, 3] of the first prompts of an evaluation, at most `count`."""
    images = []
    for prompt in range(count):
        path = image_file(run_dir, suite, step, prompt)
        if not path.exists():
            break
        with Image.open(path) as image:
            images.append(np.asarray(image))
    return np.stack(images)


def evaluation_steps(run_dir: Path, suite: str = MAIN_SUITE) -> list[int]:
    """Steps at which a suite was evaluated, ascending; those that can be compared with the last."""
    folder, since = run_dir / "evaluations", comparable_since(run_dir)
    steps = (step for _, name, step in _evaluations(folder) if name == suite)
    return sorted(step for step in steps if step >= since)


def changes_file(run_dir: Path) -> Path:
    return run_dir / "evaluation_changes.jsonl"


def note_changes(run_dir: Path, rollout: int, changes: Sequence[str]) -> None:
    """From this rollout on evaluations are made otherwise: `key: old -> new` each."""
    path = changes_file(run_dir)
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    line = json.dumps({"rollout": rollout, "changes": list(changes)}) + "\n"
    with replacing(path) as temporary:
        temporary.write_text(before + line, encoding="utf-8")


def comparable_since(run_dir: Path) -> int:
    """Evaluations after at least so many rollouts differ by the weights alone."""
    path, since = changes_file(run_dir), 0
    lines = path.read_bytes().splitlines() if path.exists() else []
    for line in lines:
        with suppress(ValueError, KeyError, TypeError):  # told when the run is taken up again
            since = max(since, int(json.loads(line)["rollout"]))
    return since


def evaluated_suites(run_dir: Path, step: int) -> list[str]:
    """Suites that were evaluated at a step."""
    return [suite for _, suite, at in _evaluations(run_dir / "evaluations") if at == step]


def set_aside_damaged(run_dir: Path, rollout: int, num_rewarded: Mapping[int, float]) -> list[str]:
    """Move evaluations that cannot be read into `before-resume-<rollout>`; why, a sentence each.

    num_rewarded: by step, how many samples of the main suite had a reward, as far as it is known.
    """
    folder, reasons = run_dir / "evaluations", []
    for path, suite, step in list(_evaluations(folder)):
        try:
            samples = read_evaluation(path)
        except UnirlError as error:
            reasons.append(str(error))
        else:
            found = sum(sample.reward is not None for sample in samples)
            if suite != MAIN_SUITE or found == num_rewarded.get(step, found):
                continue
            reasons.append(f"{path} is damaged: it lacks samples.")
        _move_into(folder / f"before-resume-{rollout}", path)
    return reasons


def set_aside_evaluations(run_dir: Path, rollout: int, first: int) -> list[Path]:
    """Take back evaluations at or after the step `first`, before a run resumes at `rollout`.

    Lines and images go to a folder `before-resume-<rollout>` beside them. Returns the new names.
    """
    moved = []
    for folder in (run_dir / "evaluations", run_dir / "images"):
        for path, _, step in list(_evaluations(folder)):
            if step >= first:
                moved.append(_move_into(folder / f"before-resume-{rollout}", path))
    return moved


def _move_into(aside: Path, path: Path) -> Path:
    with output_errors(aside):
        aside.mkdir(exist_ok=True)
        target, number = aside / path.name, 2
        while target.exists():  # of an earlier resume at the same rollout
            target, number = aside / f"{path.name}.{number}", number + 1
        return path.rename(target)


def _image_name(suite: str, step: int, prompt: int) -> str:
    return f"images/{suite}-{step:06d}/{prompt:04d}.png"


def _evaluations(folder: Path) -> Iterator[tuple[Path, str, int]]:
    """Files and folders that belong to one evaluation, with its suite and step."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        match = re.fullmatch(r"(\w+)-(\d{6,})(\.\w+)?", path.name)
        if match:
            yield path, match[1], int(match[2])
