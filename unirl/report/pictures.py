"""The same prompts from the same noise before and after training, as images within the page."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from unirl.report.learning import REWARD
from unirl.report.numbers import change, plural, reward
from unirl.report.reading import RunFiles
from unirl.report.settings import evaluated_differently
from unirl.report.shown import ShownRun
from unirl.tracking.evaluations import EvaluatedSample

BOUND_BYTES = 6_000_000
"""All images of a page together, before they are written as text, which is a third longer."""
_SIDES = (512, 384, 288, 208, 144, 96)
"""Longest sides that are tried, until all images are within the bound."""
_SMALL = 128
"""Images up to this side are kept as they are, and enlarged by the browser pixel by pixel."""


@dataclass(frozen=True)
class Picture:
    uri: str
    width: int
    height: int
    """As embedded."""

    @property
    def is_small(self) -> bool:
        return max(self.width, self.height) <= _SMALL


@dataclass(frozen=True)
class Side:
    """Before or after."""

    picture: Picture | None
    reward: str


@dataclass(frozen=True)
class Pair:
    before: Side
    after: Side
    change: str
    direction: str
    """better, worse or same."""
    mark: str
    """What the pair is an extreme of; empty for most."""


@dataclass(frozen=True)
class PromptPairs:
    """One prompt, with a pair of each run."""

    text: str
    pairs: tuple[Pair | None, ...]


@dataclass(frozen=True)
class Pictures:
    labels: tuple[str, ...]
    steps: tuple[str, ...]
    """Of each run: which two evaluations are compared."""
    prompts: tuple[PromptPairs, ...]
    sentence: str


def pictures(runs: Sequence[ShownRun], bound: int = BOUND_BYTES) -> Pictures | str:
    """Every prompt that has an image of both evaluations, in the order of the prompt file; or why
    there are none."""
    paired = [run for run in runs if len(run.files.evaluations) == 2]
    if not paired:
        return _why_none(runs)
    samples = [_shown_samples(run.files) for run in paired]
    texts: dict[str, None] = {}
    for own in samples:
        texts |= dict.fromkeys(own)
    if not texts:
        return "The evaluations were written down without images."
    paths = [side.image for own in samples for two in own.values() for side in two]
    embedded, side = embed(paths, bound)
    columns = [_pairs(own, embedded) for own in samples]
    prompts = tuple(
        PromptPairs(text, tuple(column.get(text) for column in columns)) for text in texts
    )
    return Pictures(
        tuple(run.label for run in paired),
        tuple(_steps(run) for run in paired),
        prompts,
        _sentence(prompts, len(paths) - len(embedded), side, bound) + _alike(paired),
    )


def _why_none(runs: Sequence[ShownRun]) -> str:
    if any(run.files.evaluations for run in runs):
        alike = " of its kind" if any(run.files.evaluation_changes for run in runs) else ""
        return f"There is one evaluation{alike} so far; before and after need two."
    if any(run.files.comparable_evaluations(REWARD) for run in runs):
        return "Samples of the evaluations were not written down, so there are no images to show."
    reasons = dict.fromkeys(run.files.why_no_evaluation for run in runs)
    return f"{' '.join(reasons)} Before and after need two."


def _steps(run: ShownRun) -> str:
    before, after = run.files.evaluations
    start = "at the start" if before.step == 0 else plural(before.step, "rollout")
    done = run.outcome.done
    of_all = f"{after.step:,} of " if after.step != done else ""
    return f"before: {start}; after: {of_all}{plural(done, 'rollout')}"


def _sentence(prompts: Sequence[PromptPairs], num_missing: int, side: int, bound: int) -> str:
    shrunk = (
        f" Images are scaled down to {side} pixels, so that all of them stay within "
        f"{bound / 1e6:.0f} MB."
        if side < _SIDES[0]
        else ""
    )
    missing = (
        f" {plural(num_missing, 'image')} cannot be read or did not fit." if num_missing else ""
    )
    return (
        f"The first {plural(len(prompts), 'prompt')} of the evaluation, in the file's order and "
        f"not chosen by reward; the noise of a pair is the same.{shrunk}{missing}"
    )


def _alike(runs: Sequence[ShownRun]) -> str:
    if not evaluated_differently([run.files for run in runs]):
        return ""
    return " The runs were not evaluated in the same way, so compare within a run only."


@dataclass(frozen=True)
class _Shown:
    """A sample that has an image."""

    reward: float | None
    image: Path


def _shown_samples(run: RunFiles) -> dict[str, tuple[_Shown, _Shown]]:
    """By prompt: a sample with an image, and the same sample later. The text alone names a prompt
    that runs share; a text that comes twice is told apart by its place."""
    first, last = run.evaluations
    later = {(sample.prompt, sample.sample): sample for sample in last.samples}
    found: dict[str, tuple[_Shown, _Shown]] = {}
    for sample in first.samples:
        before = _shown(run, sample)
        after = _shown(run, later.get((sample.prompt, sample.sample)))
        if before is not None and after is not None:
            text = sample.text if sample.text not in found else f"{sample.text} (#{sample.prompt})"
            found[text] = (before, after)
    return found


def _shown(run: RunFiles, sample: EvaluatedSample | None) -> _Shown | None:
    if sample is None or sample.image is None:
        return None
    return _Shown(sample.reward, run.path / sample.image)


def _pairs(
    shown: Mapping[str, tuple[_Shown, _Shown]], embedded: Mapping[Path, Picture]
) -> dict[str, Pair]:
    changes = {
        text: after.reward - before.reward
        for text, (before, after) in shown.items()
        if before.reward is not None and after.reward is not None
    }
    marks = _marks(changes)
    return {
        text: Pair(
            _side(before, embedded),
            _side(after, embedded),
            change(changes[text]) if text in changes else "",
            _direction(changes.get(text)),
            marks.get(text, ""),
        )
        for text, (before, after) in shown.items()
    }


def _marks(changes: Mapping[str, float]) -> dict[str, str]:
    """The prompts that gained and lost most, if any did."""
    marks = {}
    best = max(changes, key=changes.__getitem__, default=None)
    worst = min(changes, key=changes.__getitem__, default=None)
    if best is not None and changes[best] > 0:
        marks[best] = "largest gain"
    if worst is not None and changes[worst] < 0:
        marks[worst] = "largest loss"
    return marks


def _side(shown: _Shown, embedded: Mapping[Path, Picture]) -> Side:
    text = "no reward" if shown.reward is None else reward(shown.reward)
    return Side(embedded.get(shown.image), text)


def _direction(gain: float | None) -> str:
    if gain is None or not math.isfinite(gain) or abs(gain) < 5e-4:
        return "same"
    return "better" if gain > 0 else "worse"


def embed(paths: Iterable[Path], bound: int) -> tuple[dict[Path, Picture], int]:
    """Images as data URIs of at most `bound` bytes together, and the longest side they may have.

    Files that are no images are left out, and the last ones where even small ones are too many.
    """
    images = {path: image for path in paths if (image := _open(path)) is not None}
    side = _SIDES[-1]
    encoded: dict[Path, tuple[Image.Image, bytes, str]] = {}
    for side in _SIDES:
        encoded = {path: _encoded(image, side) for path, image in images.items()}
        if sum(len(data) for _, data, _ in encoded.values()) <= bound:
            break
    embedded, room = {}, bound
    for path, (image, data, kind) in encoded.items():
        room -= len(data)
        if room < 0:
            break
        text = base64.b64encode(data).decode("ascii")
        embedded[path] = Picture(f"data:image/{kind};base64,{text}", *image.size)
    return embedded, side


def _open(path: Path) -> Image.Image | None:
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError):
        return None


def _encoded(image: Image.Image, side: int) -> tuple[Image.Image, bytes, str]:
    data = io.BytesIO()
    if max(image.size) <= min(_SMALL, side):
        image.save(data, "PNG", optimize=True)
        return image, data.getvalue(), "png"
    smaller = image.copy()
    smaller.thumbnail((side, side), Image.Resampling.LANCZOS)
    smaller.save(data, "WEBP", quality=85)
    return smaller, data.getvalue(), "webp"
