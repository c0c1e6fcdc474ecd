"""Does the image say what the prompt asks for? Read by a real OCR network (ONNX, on the CPU)."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from torch import Tensor

from unirl.core.components import Component, RebuiltComponent
from unirl.core.errors import ConfigError, ResidencyError
from unirl.core.types import PromptRecord
from unirl.reward.ocr_model import OcrRecognizer, bundled_model_path, edit_similarity
from unirl.reward.scorer import Scorer

SECOND_MODEL_FILE = "models/PP-OCRv6_rec_small.onnx"


class ParkableRecognizer:
    """An OCR session that is closed when parked and opened again from its file."""

    def __init__(self, path: Path, num_threads: int) -> None:
        self._path = path
        self._num_threads = num_threads
        self._recognizer: OcrRecognizer | None = None
        self._rebuild()

    def read_targets(
        self, images: Tensor, records: Sequence[PromptRecord]
    ) -> list[tuple[str, str]]:
        """(text read, text wanted) per image, both upper case."""
        if self._recognizer is None:
            raise ResidencyError("the OCR network was asked to read while parked")
        wanted = [str(record.metadata["text"]).upper() for record in records]
        return list(zip(self._recognizer.read(images.numpy()), wanted, strict=True))

    def component(self) -> Component:
        return RebuiltComponent("network", self._drop, self._rebuild, self._num_bytes)

    def _drop(self) -> int:
        self._recognizer = None
        return self._num_bytes()

    def _rebuild(self) -> int:
        self._recognizer = OcrRecognizer(self._path, self._num_threads)
        return self._num_bytes()

    def _num_bytes(self) -> int:
        return self._path.stat().st_size


class OcrScorer(Scorer):
    """1 - edit distance / length between the text read and metadata.text, at least 0."""

    def __init__(self, num_threads: int = 1) -> None:
        self._network = ParkableRecognizer(bundled_model_path(), num_threads)

    def components(self) -> Sequence[Component]:
        return (self._network.component(),)

    def required_metadata(self) -> Sequence[str]:
        return ("text",)

    def score(self, images: Tensor, records: Sequence[PromptRecord]) -> list[float]:
        pairs = self._network.read_targets(images, records)
        return [edit_similarity(read, wanted) for read, wanted in pairs]


class ExactReadScorer(Scorer):
    """1 where the text read is exactly metadata.text, else 0."""

    def __init__(self, num_threads: int = 1) -> None:
        self._network = ParkableRecognizer(bundled_model_path(), num_threads)

    def components(self) -> Sequence[Component]:
        return (self._network.component(),)

    def required_metadata(self) -> Sequence[str]:
        return ("text",)

    def score(self, images: Tensor, records: Sequence[PromptRecord]) -> list[float]:
        pairs = self._network.read_targets(images, records)
        return [float(read == wanted) for read, wanted in pairs]


class SecondOcrScorer(Scorer):
    """OcrScorer with another network (PP-OCRv6), as a judge that training never sees."""

    def __init__(self, num_threads: int = 1) -> None:
        self._network = ParkableRecognizer(_second_model_path(), num_threads)

    def components(self) -> Sequence[Component]:
        return (self._network.component(),)

    def required_metadata(self) -> Sequence[str]:
        return ("text",)

    def score(self, images: Tensor, records: Sequence[PromptRecord]) -> list[float]:
        pairs = self._network.read_targets(images, records)
        return [edit_similarity(read, wanted) for read, wanted in pairs]


def _second_model_path() -> Path:
    spec = find_spec("rapidocr")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("scorer second_ocr needs the package rapidocr: pip install rapidocr")
    return Path(spec.submodule_search_locations[0]) / SECOND_MODEL_FILE
