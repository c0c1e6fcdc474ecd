"""ONNX graphs run in torch: the same numbers as onnxruntime, and a clear no to what is unknown."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

pytest.importorskip("onnx")

import onnx
from onnx import TensorProto, helper, numpy_helper

from unirl.core.errors import ModelError
from unirl.reward.ocr_model import bundled_model_path
from unirl.reward.onnx_in_torch import OPERATORS, OnnxNetwork


def write_graph(
    folder: Path, nodes: list, weights: dict[str, np.ndarray] | None = None, opset: int = 12
) -> Path:
    """A model x -> y of those nodes."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xy")
    stored = [numpy_helper.from_array(value, name) for name, value in (weights or {}).items()]
    graph = helper.make_graph(nodes, "test", [x], [y], stored)
    opsets = [helper.make_opsetid("", opset)]
    path = folder / "graph.onnx"
    path.write_bytes(
        helper.make_model(graph, opset_imports=opsets, ir_version=7).SerializeToString()
    )
    return path


def in_onnxruntime(path: Path, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {session.get_inputs()[0].name: x})[0])


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def node(operator: str, *inputs: str, **attributes: object):
    return helper.make_node(operator, ["x", *inputs], ["y"], **attributes)


POOL = {"kernel_shape": [3, 2], "strides": [2, 1], "count_include_pad": 0}
CONV = {"kernel_shape": [3, 3], "dilations": [1, 1]}
NORM = dict(zip("sbmv", (noise(4), noise(4), noise(4), noise(4) + 2), strict=True))

CASES = {
    "convolution in groups": (
        node("Conv", "w", "b", **CONV, pads=[1, 1, 1, 1], strides=[2, 1], group=2),
        {"w": noise(6, 2, 3, 3), "b": noise(6)},
    ),
    "convolution padded on two sides only": (
        node("Conv", "w", **CONV, pads=[2, 0, 0, 1], strides=[1, 1], group=1),
        {"w": noise(5, 4, 3, 3)},
    ),
    "batch normalisation": (
        node("BatchNormalization", *"sbmv", epsilon=0.1, momentum=0.9),
        NORM,
    ),
    "average pool": (node("AveragePool", **POOL, pads=[0] * 4, ceil_mode=0), {}),
    "average pool that counts the rest": (
        node("AveragePool", **POOL, pads=[0] * 4, ceil_mode=1),
        {},
    ),
    "global average pool": (node("GlobalAveragePool"), {}),
    "mean that drops an axis": (node("ReduceMean", axes=[1], keepdims=0), {}),
    "mean that keeps an axis": (node("ReduceMean", axes=[-1]), {}),
    "hard sigmoid": (node("HardSigmoid", alpha=0.9, beta=0.4), {}),
    "clip": (node("Clip", "a", "b"), {"a": np.float32(-0.2), "b": np.float32(0.4)}),
    "softmax": (node("Softmax", axis=3), {}),
    "reshape with kept and inferred sizes": (node("Reshape", "s"), {"s": ints(0, -1, 5)}),
    "transpose": (node("Transpose", perm=[2, 0, 3, 1]), {}),
    "slice": (
        node("Slice", "a", "b", "d", "s"),
        {"a": ints(1, -4), "b": ints(9**9, -1), "d": ints(2, 3), "s": ints(2, 1)},
    ),
    "slice without steps": (node("Slice", "a", "b", "d"), dict.fromkeys("abd", ints(1))),
    "power": (node("Pow", "p"), {"p": np.float32(2)}),
}


@pytest.mark.parametrize("case", CASES)
def test_an_operator_computes_what_onnxruntime_computes(case: str, tmp_path: Path):
    operator, weights = CASES[case]
    path = write_graph(tmp_path, [operator], weights)
    x = noise(2, 4, 6, 5)
    expected = in_onnxruntime(path, x)
    got = OnnxNetwork(path)(torch.from_numpy(x)).numpy()
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("batch", "width"), [(1, 64), (3, 64), (2, 160)])
def test_the_recogniser_computes_what_onnxruntime_computes(batch: int, width: int):
    x = noise(batch, 3, 48, width)
    expected = in_onnxruntime(bundled_model_path(), x)
    got = OnnxNetwork(bundled_model_path())(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_every_operator_is_run_by_the_recogniser():
    graph = onnx.load(str(bundled_model_path())).graph
    assert {n.op_type for n in graph.node} - {"Constant"} == set(OPERATORS)


def test_weights_are_frozen_floats_and_shapes_stay_on_the_cpu():
    network = OnnxNetwork(bundled_model_path()).to("meta")
    parameters = list(network.parameters())
    assert sum(p.numel() for p in parameters) == 2_690_352
    assert not any(p.requires_grad for p in parameters)
    assert {p.dtype for p in parameters} == {torch.float32}
    assert network(torch.zeros(2, 3, 48, 64, device="meta")).shape == (2, 8, 6625)


@pytest.mark.parametrize(
    ("operator", "message"),
    [
        (node("Erf"), "operator Erf is unknown; known are Add.*Add a function to OPERATORS"),
        (node("HardSigmoid", alpha=1.0, beta=0.0, gamma=2.0), r"HardSigmoid has unknown \['gamma'"),
        (node("Clip", "", "b"), "Clip leaves inputs out"),
    ],
)
def test_a_graph_that_cannot_run_is_refused_when_it_is_loaded(operator, message, tmp_path: Path):
    path = write_graph(tmp_path, [operator], {"b": np.float32(1)})
    with pytest.raises(ModelError, match=message):
        OnnxNetwork(path)


def test_a_newer_opset_is_refused(tmp_path: Path):
    path = write_graph(tmp_path, [node("Relu")], opset=13)
    with pytest.raises(ModelError, match=r"opset.*13"):
        OnnxNetwork(path)


@pytest.mark.parametrize(
    ("operator", "message"),
    [
        (node("Softmax", axis=1), "axis 1 of 4"),
        (node("AveragePool", **POOL, pads=[0, 1, 0, 1], ceil_mode=0), "pads"),
        (node("Cast", to=TensorProto.FLOAT16), "Cast to ONNX type 10"),
    ],
)
def test_a_form_of_an_operator_that_would_compute_something_else_is_refused(
    operator, message, tmp_path: Path
):
    with pytest.raises(ModelError, match=message):
        OnnxNetwork(write_graph(tmp_path, [operator]))(torch.zeros(2, 4, 6, 5))
