"""Runs an ONNX graph with torch operators, so that gradients flow from its output to its input.

In goes the path of an ONNX file, out comes an `nn.Module` with frozen weights that computes what
onnxruntime computes. It knows the operators of small convolutional and transformer recognisers
(opset 11 or 12), one function each; any other graph is refused when it is loaded. The file is
parsed by the package `onnx`.

    network = OnnxNetwork("recogniser.onnx")
    network(images).sum().backward()
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch
import torch.nn.functional as F
from onnx import helper, numpy_helper
from torch import Tensor, nn

from unirl.core.errors import ModelError

OPSETS = (11, 12)
"""Later ones moved attributes to inputs, earlier ones inputs to attributes."""
INTEGERS: dict[int, torch.dtype] = {
    onnx.TensorProto.INT32: torch.int32,
    onnx.TensorProto.INT64: torch.int64,
}


@dataclass(frozen=True)
class Step:
    """One node of the graph: `output = OPERATORS[operator](*inputs, **attributes)`."""

    operator: str
    inputs: tuple[str, ...]
    output: str
    attributes: dict[str, Any]


class OnnxNetwork(nn.Module):
    """A graph of one input and one output with frozen float32 weights."""

    def __init__(self, path: str | Path) -> None:
        """Raises ModelError when the graph has an operator, attribute or opset unknown here."""
        super().__init__()
        model = onnx.load(str(path))
        _require_opset(model, path)
        self._steps = tuple(_step(n, path) for n in model.graph.node if n.op_type != "Constant")
        weights = _constants(model.graph)
        self._input = next(v.name for v in model.graph.input if v.name not in weights)
        self._output = model.graph.output[0].name
        self._names = [name for name, value in weights.items() if value.is_floating_point()]
        self._weights = nn.ParameterList(
            nn.Parameter(weights[name], requires_grad=False) for name in self._names
        )
        # Shapes and axes: Python needs their values, so they stay on the CPU.
        self._integers = {n: w for n, w in weights.items() if not w.is_floating_point()}
        self.metadata = {entry.key: entry.value for entry in model.metadata_props}

    def forward(self, x: Tensor) -> Tensor:
        """The graph's output for a float32 input on the device of the weights."""
        values = dict(zip(self._names, self._weights, strict=True)) | self._integers
        values[self._input] = x
        for step in self._steps:
            inputs = [values[name] for name in step.inputs]
            values[step.output] = OPERATORS[step.operator](*inputs, **step.attributes)
        return values[self._output]


def _require_opset(model: onnx.ModelProto, path: str | Path) -> None:
    found = {entry.domain: entry.version for entry in model.opset_import}
    if len(found) != 1 or found.get("") not in OPSETS:
        raise ModelError(f"{path} uses ONNX opset {found}; only {OPSETS} of the standard one run.")


def _step(node: onnx.NodeProto, path: str | Path) -> Step:
    """Raises ModelError for what OPERATORS cannot run."""
    if node.op_type not in OPERATORS:
        raise ModelError(
            f"{path}: ONNX operator {node.op_type} is unknown; known are {', '.join(OPERATORS)}. "
            "Add a function to OPERATORS in unirl/reward/onnx_in_torch.py."
        )
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    unknown = set(attributes) - set(inspect.signature(OPERATORS[node.op_type]).parameters)
    if unknown:
        raise ModelError(f"{path}: ONNX operator {node.op_type} has unknown {sorted(unknown)}.")
    if len(node.output) != 1 or "" in node.input:
        raise ModelError(f"{path}: {node.op_type} leaves inputs out or has several outputs.")
    return Step(node.op_type, tuple(node.input), node.output[0], attributes)


def _constants(graph: onnx.GraphProto) -> dict[str, Tensor]:
    """Weights by name, wherever the exporter put them: initializers or Constant nodes."""
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    tensors |= {n.output[0]: n.attribute[0].t for n in graph.node if n.op_type == "Constant"}
    return {name: torch.tensor(numpy_helper.to_array(t)) for name, t in tensors.items()}


# --- operators: positional arguments are the node's inputs, keywords its attributes ---------------


def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    kernel_shape: Sequence[int],
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
    group: int,
) -> Tensor:
    """2-d convolution; `pads` is (top, left, bottom, right)."""
    top, left, bottom, right = pads
    if (top, left) == (bottom, right):
        return F.conv2d(x, weight, bias, tuple(strides), (top, left), tuple(dilations), group)
    x = F.pad(x, (left, right, top, bottom))
    return F.conv2d(x, weight, bias, tuple(strides), 0, tuple(dilations), group)


def batch_normalization(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    variance: Tensor,
    *,
    epsilon: float,
    momentum: float,
) -> Tensor:
    """Inference form; momentum is for training."""
    return F.batch_norm(x, mean, variance, scale, bias, training=False, eps=epsilon)


def average_pool(
    x: Tensor,
    *,
    kernel_shape: Sequence[int],
    strides: Sequence[int],
    pads: Sequence[int],
    ceil_mode: int,
    count_include_pad: int,
) -> Tensor:
    """2-d average over windows without padding."""
    if any(pads):
        raise ModelError(f"AveragePool with pads {list(pads)} is not supported, only with zeros.")
    return F.avg_pool2d(x, tuple(kernel_shape), tuple(strides), ceil_mode=bool(ceil_mode))


def softmax(x: Tensor, *, axis: int) -> Tensor:
    """Over the last axis: before opset 13, Softmax runs over all axes from `axis` on."""
    if axis not in (-1, x.ndim - 1):
        raise ModelError(f"Softmax over axis {axis} of {x.ndim} is not supported, only the last.")
    return x.softmax(dim=-1)


def reshape(x: Tensor, shape: Tensor) -> Tensor:
    """0 keeps a dimension, -1 is what is left."""
    return x.reshape([x.shape[i] if n == 0 else n for i, n in enumerate(shape.tolist())])


def slice_axes(
    x: Tensor, starts: Tensor, ends: Tensor, axes: Tensor, steps: Tensor | None = None
) -> Tensor:
    """`x[start:end:step]` along each of the axes; indices may be negative or past the end."""
    index = [slice(None)] * x.ndim
    strides = [1] * len(axes) if steps is None else steps.tolist()
    for axis, *bounds in zip(axes.tolist(), starts.tolist(), ends.tolist(), strides, strict=True):
        index[axis] = slice(*bounds)
    return x[tuple(index)]


def cast(x: Tensor, *, to: int) -> Tensor:
    """To an integer type: only shapes are cast in the graphs run here."""
    if to not in INTEGERS:
        raise ModelError(f"Cast to ONNX type {to} is not supported, only to int32 and int64.")
    return x.to(INTEGERS[to])


def reduce_mean(x: Tensor, *, axes: Sequence[int], keepdims: int = 1) -> Tensor:
    return x.mean(dim=tuple(axes), keepdim=bool(keepdims))


def hard_sigmoid(x: Tensor, *, alpha: float, beta: float) -> Tensor:
    return (alpha * x + beta).clamp(0, 1)


def clip(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return torch.clamp(x, low, high)


def concat(*parts: Tensor, axis: int) -> Tensor:
    return torch.cat(parts, dim=axis)


def squeeze(x: Tensor, *, axes: Sequence[int]) -> Tensor:
    return x.squeeze(tuple(axes))


def transpose(x: Tensor, *, perm: Sequence[int]) -> Tensor:
    return x.permute(tuple(perm))


def global_average_pool(x: Tensor) -> Tensor:
    return x.mean(dim=tuple(range(2, x.ndim)), keepdim=True)


def shape_of(x: Tensor) -> Tensor:
    return torch.tensor(x.shape)


def add(a: Tensor, b: Tensor) -> Tensor:
    return a + b


def subtract(a: Tensor, b: Tensor) -> Tensor:
    return a - b


def multiply(a: Tensor, b: Tensor) -> Tensor:
    return a * b


def divide(a: Tensor, b: Tensor) -> Tensor:
    if not a.is_floating_point():
        raise ModelError("Div of integers is not supported.")
    return a / b


def power(a: Tensor, b: Tensor) -> Tensor:
    return a**b


def matmul(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def relu(x: Tensor) -> Tensor:
    return x.relu()


def sigmoid(x: Tensor) -> Tensor:
    return x.sigmoid()


def square_root(x: Tensor) -> Tensor:
    return x.sqrt()


OPERATORS: dict[str, Callable[..., Tensor]] = {
    "Add": add,
    "AveragePool": average_pool,
    "BatchNormalization": batch_normalization,
    "Cast": cast,
    "Clip": clip,
    "Concat": concat,
    "Conv": conv,
    "Div": divide,
    "GlobalAveragePool": global_average_pool,
    "HardSigmoid": hard_sigmoid,
    "MatMul": matmul,
    "Mul": multiply,
    "Pow": power,
    "ReduceMean": reduce_mean,
    "Relu": relu,
    "Reshape": reshape,
    "Shape": shape_of,
    "Sigmoid": sigmoid,
    "Slice": slice_axes,
    "Softmax": softmax,
    "Sqrt": square_root,
    "Squeeze": squeeze,
    "Sub": subtract,
    "Transpose": transpose,
}
