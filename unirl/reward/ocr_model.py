"""Reads the text in small images with the PP-OCRv4 recogniser, one ONNX file run on the CPU.

In go uint8 RGB images that show one line of text, out come strings. The network is the one inside
the PyPI package `rapidocr-onnxruntime` (Apache-2.0); only its file is used, because the package's
own pipeline pads every image to 320 pixels and its text detector fails on images this small.

    recognizer = OcrRecognizer(bundled_model_path(), num_threads=1)
    recognizer.read(images)  # ['374', '12']
"""

import importlib.util
import unicodedata
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image

PACKAGE, MODEL_FILE = "rapidocr_onnxruntime", "models/ch_PP-OCRv4_rec_infer.onnx"
INPUT_HEIGHT = 48
INPUT_WIDTH = 64
"""48 x 64 reads two or three characters as well as 48 x 96 (all of 256 clean renders) in half the
time."""
BATCH_SIZE = 16


def bundled_model_path() -> Path:
    """The recogniser inside the installed `rapidocr-onnxruntime`, which is not imported."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            "The OCR reward needs the recogniser of the package rapidocr-onnxruntime, "
            "which is not installed. "
            "Run: pip install --no-deps rapidocr-onnxruntime==1.4.4"
        )
    path = Path(spec.submodule_search_locations[0]) / MODEL_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing. Run: pip install --no-deps rapidocr-onnxruntime==1.4.4"
        )
    return path


class OcrRecognizer:
    """Images of one line of text in, strings out."""

    def __init__(self, model_path: str | Path, num_threads: int):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads
        options.inter_op_num_threads = 1
        # Spinning workers would burn the cores that the policy trains on between two calls.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(
            str(model_path), options, providers=["CPUExecutionProvider"]
        )
        self._input_name = self._session.get_inputs()[0].name
        metadata = self._session.get_modelmeta().custom_metadata_map
        self._alphabet = make_alphabet(metadata["character"])

    def read(self, images: np.ndarray) -> list[str]:
        """One string per image, NFKC and upper case. images: uint8 [B, 3, H, W], numpy or torch."""
        pixels = recognizer_input(np.asarray(images))
        texts: list[str] = []
        for start in range(0, len(pixels), BATCH_SIZE):
            feeds = {self._input_name: pixels[start : start + BATCH_SIZE]}
            classes = np.asarray(self._session.run(None, feeds)[0]).argmax(axis=-1)  # [B, T]
            texts += [ctc_collapse(row, self._alphabet) for row in classes]
        return [same_letter(text) for text in texts]


def make_alphabet(characters: str) -> list[str]:
    """Characters by class index: the CTC blank, the lines of the model's metadata, the space."""
    return ["", *characters.splitlines(), " "]


def same_letter(text: str) -> str:
    """One spelling for what the reward does not tell apart: case, full-width and other forms."""
    return unicodedata.normalize("NFKC", text).upper()


def recognizer_input(images: np.ndarray) -> np.ndarray:
    """float32 [B, 3, 48, 64] in [-1, 1], channels in BGR order, from uint8 [B, 3, H, W] RGB."""
    size = (INPUT_WIDTH, INPUT_HEIGHT)
    resized = [
        Image.fromarray(im.transpose(1, 2, 0)).resize(size, Image.Resampling.BILINEAR)
        for im in images
    ]
    if not resized:
        return np.zeros((0, 3, INPUT_HEIGHT, INPUT_WIDTH), np.float32)
    rgb = np.stack([np.asarray(im) for im in resized])
    return np.ascontiguousarray(rgb[..., ::-1].transpose(0, 3, 1, 2), np.float32) / 127.5 - 1.0


def ctc_collapse(classes: np.ndarray, alphabet: list[str]) -> str:
    """Best CTC path: merge repeated classes, then drop the blank (class 0). classes: [T]."""
    is_new = np.concatenate([[True], classes[1:] != classes[:-1]])
    return "".join(alphabet[i] for i in classes[is_new & (classes != 0)])


def edit_similarity(read: str, target: str) -> float:
    """1 for an exact reading, less by 1/len(target) for every edit (Levenshtein), never below 0."""
    if not target:
        raise ValueError("edit_similarity needs a non-empty target text.")
    return max(0.0, 1.0 - edit_distance(read, target) / len(target))


def edit_distance(a: str, b: str) -> int:
    """Levenshtein distance: insertions, deletions and replacements that turn a into b."""
    row = list(range(len(b) + 1))
    for i, from_a in enumerate(a, start=1):
        diagonal, row[0] = row[0], i
        for j, from_b in enumerate(b, start=1):
            replaced = diagonal + (from_a != from_b)
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, replaced)
    return row[-1]
