"""Reads the text in small images with the PP-OCRv4 recogniser, one ONNX file run on the CPU.

In go uint8 RGB images that show one line of text, out come strings. The network is the one inside
the PyPI package `rapidocr-onnxruntime` (Apache-2.0); only its file is used, because the package's
own pipeline pads every image to 320 pixels and its text detector fails on images this small.

    recognizer = OcrRecognizer(bundled_model_path(), num_threads=1)
    recognizer.read(images)  # ['374', '12']
"""

import importlib.util
import itertools
import unicodedata
from collections.abc import Sequence
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
        self._alphabet = read_alphabet(self._session)

    def read(self, images: np.ndarray) -> list[str]:
        """One string per image, NFKC and upper case. images: uint8 [B, 3, H, W], numpy or torch."""
        texts = [ctc_collapse(row, self._alphabet) for row in self._probs(images).argmax(axis=-1)]
        return [unicodedata.normalize("NFKC", text).upper() for text in texts]

    def confidence(self, images: np.ndarray, targets: Sequence[str]) -> list[float]:
        """Probability of each target text, as the geometric mean over its characters, in [0, 1].

        Raises ValueError for a character the network does not know.
        """
        classes = [[self._class_of(character) for character in target] for target in targets]
        log_probs = np.log(self._probs(images) + 1e-12)
        return [
            float(np.exp(ctc_log_likelihood(rows, wanted) / len(wanted)))
            for rows, wanted in zip(log_probs, classes, strict=True)
        ]

    def _probs(self, images: np.ndarray) -> np.ndarray:
        """[B, T, C] probability of each class at each of T positions along the line."""
        pixels = recognizer_input(np.asarray(images))
        batches = [pixels[i : i + BATCH_SIZE] for i in range(0, len(pixels), BATCH_SIZE)]
        outputs = [self._session.run(None, {self._input_name: batch})[0] for batch in batches]
        return np.concatenate([np.asarray(output) for output in outputs])

    def _class_of(self, character: str) -> int:
        if character not in self._alphabet:
            raise ValueError(f"the OCR network does not know the character {character!r}")
        return self._alphabet.index(character)


def read_alphabet(session: onnxruntime.InferenceSession) -> list[str]:
    """Characters by class index: the CTC blank, the list in the model's metadata, the space."""
    characters = session.get_modelmeta().custom_metadata_map["character"].splitlines()
    return ["", *characters, " "]


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


def ctc_log_likelihood(log_probs: np.ndarray, classes: Sequence[int]) -> float:
    """log p(text) summed over all CTC paths (Graves et al. 2006), for log_probs [T, C]."""
    states = [0]  # blanks around and between the characters
    for wanted in classes:
        states += [wanted, 0]
    emitted = log_probs[:, states]
    # A character may follow another directly unless they are the same.
    skips = np.full(len(states), -np.inf)
    skips[3::2] = [0.0 if a != b else -np.inf for a, b in itertools.pairwise(classes)]
    alpha = np.full(len(states), -np.inf)
    alpha[:2] = emitted[0, :2]
    for row in emitted[1:]:
        stay = alpha
        step = np.concatenate([[-np.inf], alpha[:-1]])
        skip = np.concatenate([[-np.inf, -np.inf], alpha[:-2]]) + skips
        alpha = np.logaddexp(np.logaddexp(stay, step), skip) + row
    return float(np.logaddexp(alpha[-1], alpha[-2]))


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
