"""Autocast on the CPU with the rules of a GPU, for counting what a GPU run would hold.

Both run matrix products in the low precision, but only a GPU's autocast computes norms, softmax,
powers and sums in float32, and so keeps float32 copies for the backward. The operations are those
of torch's two lists (aten/src/ATen/autocast_mode.h) that diffusion networks use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.library import _scoped_library

aten = torch.ops.aten
FLOAT32_INPUTS = (  # AT_FORALL_FP32
    *(aten.layer_norm.default, aten.rms_norm.default, aten.group_norm.default),
    *(aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.pow.Scalar),
    *(aten.rsqrt.default, aten.reciprocal.default, aten.exp.default, aten.log.default),
)
FLOAT32_RESULTS = (  # AT_FORALL_FP32_SET_OPT_DTYPE
    *(aten.softmax.int, aten.log_softmax.int, aten.cumsum.default),
    *(aten.sum.default, aten.sum.dim_IntList),
)
LOW_PRECISION = (torch.bfloat16, torch.float16)


@contextmanager
def gpu_autocast() -> Iterator[None]:
    """Inside, an enabled `torch.autocast("cpu")` also runs these operations in float32."""
    with _scoped_library("aten", "IMPL") as library:
        for operation in FLOAT32_INPUTS:
            library.impl(operation, _with_float32_inputs(operation), "AutocastCPU")
        for operation in FLOAT32_RESULTS:
            library.impl(operation, _with_float32_result(operation), "AutocastCPU")
        yield


def _with_float32_inputs(operation: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            return operation(*map(_widen, args), **kwargs)

    return kernel


def _with_float32_result(operation: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(value: Tensor, *args: Any, **kwargs: Any) -> Any:
        asks_dtype = "dtype" in kwargs or any(isinstance(arg, torch.dtype) for arg in args)
        if value.dtype in LOW_PRECISION and not asks_dtype:
            kwargs["dtype"] = torch.float32
        with _without_autocast():
            return operation(value, *args, **kwargs)

    return kernel


def _widen(value: Any) -> Any:
    is_low = isinstance(value, Tensor) and value.dtype in LOW_PRECISION
    return value.float() if is_low else value


def _without_autocast() -> Any:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    return torch._C._ExcludeDispatchKeyGuard(keys)
