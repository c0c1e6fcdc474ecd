"""CPU tensors without memory: real operations, real autograd, no values.

A `Weightless` tensor looks like a CPU tensor to autograd, autocast and attention's choice of a
kernel, and hands every operation to a tensor on the meta device. That is what torch's fake tensors
do; these do only what counting bytes needs and are several times as fast, since blocks of one shape
are worked out once and Python is not asked for a tensor's device.

    with weightless():
        latents = torch.zeros(64, 16, 64, 64)  # costs nothing
        network(latents).sum().backward()  # after make_weightless(network)

Whole numbers and truths that were made of such alone (positions, lengths, masks) keep their values
while they are few. Of all others, a value that is asked for (`item`) is 0, and where a result's
shape depends on values, it is the largest it could be: all values are different for `unique`, none
is 0 for `nonzero`, and a mask that picks values picks all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

CPU = torch.device("cpu")
META = torch.device("meta")
FEW = 2**20
"""Larger tensors do not keep their values."""


@dataclass
class Memory:
    """Of values and of all their views."""

    is_known: bool = True
    """Until something unknown is written there."""


class Known(NamedTuple):
    values: Tensor
    memory: Memory


class Weightless(Tensor):
    """A CPU tensor by its looks; shape, strides and storage are those of `meta`."""

    meta: Tensor
    known: Known | None

    @staticmethod
    def __new__(cls, meta: Tensor) -> Weightless:
        tensor = Tensor._make_wrapper_subclass(
            cls,
            meta.size(),
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=CPU,
        )
        tensor.meta = meta
        tensor.known = None
        return tensor

    # Python functions of torch see an ordinary tensor; operations come to __torch_dispatch__.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.meta.untyped_storage()

    def tolist(self) -> Any:
        values = _values(self)
        # Inside the mode torch would make weightless tensors again on the way.
        with _disable_current_modes():
            return (torch.zeros_like(self.meta, device=CPU) if values is None else values).tolist()

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _on_meta(func, args, kwargs or {})


class WeightlessMode(TorchDispatchMode):
    """Inside, new tensors are weightless, and so is everything made of other tensors."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _on_meta(func, args, kwargs or {})


def make_weightless(module: nn.Module) -> None:
    """Replace every tensor the module holds; ties stay, and values are gone.

    Some networks keep tables as plain attributes, so these are replaced as well.
    """
    replaced: dict[int, Tensor] = {}

    def weightless(tensor: Tensor) -> Tensor:
        if id(tensor) not in replaced:
            new = Weightless(tensor.detach().to(META))
            is_parameter = isinstance(tensor, nn.Parameter)
            replaced[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if is_parameter else new
        return replaced[id(tensor)]

    for part in module.modules():
        for tensors in (part._parameters, part._buffers, part.__dict__):
            for name, value in tensors.items():
                if isinstance(value, Tensor):
                    tensors[name] = weightless(value)  # type: ignore[index]


def _on_meta(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    is_known = _is_known(func, args, kwargs)
    if func is torch.ops.aten._local_scalar_dense.default:
        values = _values(args[0]) if is_known else torch.zeros((), dtype=args[0].dtype, device=CPU)
        return func(values)
    if is_known and func in _SHAPED_BY_VALUES:
        values = _with_values(func, args, kwargs)
        return _remember(_wrap(_unwrap(values, {}), {}), values, args)
    result = _without_values(func, args, kwargs)
    if not is_known:
        _forget_what_is_written(func, args)
    elif all(map(_can_keep, _inside(result))):
        _remember(result, _with_values(func, args, kwargs), args)
    return result


def _without_values(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    if func is torch.ops.aten.index.Tensor:
        args = (args[0], _as_places(args[1]))
    if func in _LARGEST:
        return _wrap(_LARGEST[func](*(_unwrap(value, {}) for value in args)), {})
    if _takes_device(func):
        kwargs = {**kwargs, "device": META}
    if _makes_new_tensors(func):
        named = tuple((name, _layout(value)) for name, value in kwargs.items())
        return _wrap(_tensors(_result(func, _layout(args), named)), {})
    wrappers: dict[int, Weightless] = {}
    metas = [_unwrap(value, wrappers) for value in args]
    return _wrap(func(*metas, **{n: _unwrap(v, wrappers) for n, v in kwargs.items()}), wrappers)


def _all_different(values: Tensor, *options: bool) -> tuple[Tensor, Tensor, Tensor]:
    count = values.numel()
    inverse = torch.empty(values.shape, dtype=torch.int64, device=META)
    return values.new_empty(count, device=META), inverse, inverse.new_empty(count)


def _none_is_zero(values: Tensor) -> Tensor:
    return torch.empty((values.numel(), values.ndim), dtype=torch.int64, device=META)


def _picked(values: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    places: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype == torch.bool:
            places += _none_is_zero(index).unbind(1)
        else:
            places.append(index)
    return torch.ops.aten.index.Tensor(values, places)


_LARGEST: Mapping[Any, Callable[..., Any]] = {
    torch.ops.aten._unique2.default: _all_different,
    torch.ops.aten.nonzero.default: _none_is_zero,
    torch.ops.aten.index.Tensor: _picked,
}
"""In place of operations whose results' shape depends on values."""
_SHAPED_BY_VALUES = {*_LARGEST, torch.ops.aten.repeat_interleave.Tensor}
_WITHOUT_VALUES = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
}


# --- values of whole numbers and truths ---------------------------------------------------------


def _can_keep(tensor: Tensor) -> bool:
    is_exact = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
    return is_exact and tensor.numel() <= FEW


def _values(tensor: Tensor) -> Tensor | None:
    """A tensor's values where they are known."""
    if not _can_keep(tensor):
        return None
    if isinstance(tensor, Weightless):
        known = tensor.known
        return known.values if known is not None and known.memory.is_known else None
    return tensor if tensor.device == CPU else None


def _is_known(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation has the same result each time and known values go in."""
    if func in _WITHOUT_VALUES or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    return all(_values(tensor) is not None for tensor in _inside((args, tuple(kwargs.values()))))


def _with_values(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    if _takes_device(func):
        kwargs = {**kwargs, "device": CPU}
    return func(*_real(args), **{name: _real(value) for name, value in kwargs.items()})


def _remember(result: Any, values: Any, args: Any) -> Any:
    """`result`, which keeps its `values` from now on; they may be views of the arguments'."""
    known = [t.known for t in _inside(args) if isinstance(t, Weightless) and t.known is not None]
    memories = {one.values.untyped_storage()._cdata: one.memory for one in known}
    for tensor, real in zip(_inside(result), _inside(values), strict=True):
        if isinstance(tensor, Weightless) and _can_keep(tensor):
            memory = memories.setdefault(real.untyped_storage()._cdata, Memory())
            tensor.known = Known(real, memory)
    return result


def _forget_what_is_written(func: Any, args: Any) -> None:
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            for tensor in _inside(value):
                if isinstance(tensor, Weightless) and tensor.known is not None:
                    tensor.known.memory.is_known = False


def _as_places(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Known masks as the places they pick."""
    places: list[Tensor | None] = []
    for index in indices:
        values = None if index is None or index.dtype != torch.bool else _values(index)
        places += [index] if values is None else list(values.nonzero().unbind(1))
    return places


def _real(value: Any) -> Any:
    """Arguments with values in place of weightless tensors."""
    if isinstance(value, Tensor):
        return _values(value)
    if isinstance(value, list | tuple):
        return type(value)(map(_real, value))
    return value


def _inside(value: Any) -> Iterator[Tensor]:
    """The tensors in arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _inside(one)


# --- operations whose results are new tensors: worked out once for each layout of inputs ----------


class _Layout(NamedTuple):
    """All that an operation on the meta device asks of a tensor."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class _Several(NamedTuple):
    kind: type
    values: tuple[Any, ...]


class _Value(NamedTuple):
    kind: type
    """1, 1.0 and True are equal, but not to an operation."""
    value: Any


def _layout(value: Any) -> Any:
    """A hashable description of arguments or results."""
    if isinstance(value, Tensor):
        return _Layout(value.shape, value.stride(), value.dtype)
    if isinstance(value, list | tuple):
        return _Several(type(value), tuple(map(_layout, value)))
    return _Value(type(value), value)


def _tensors(layout: Any) -> Any:
    """Meta tensors, in what `_layout` described."""
    match layout:
        case _Layout(shape, stride, dtype):
            return torch.empty_strided(shape, stride, dtype=dtype, device=META)
        case _Several(kind, values):
            return kind(map(_tensors, values))
        case _Value(_, value):
            return value


@cache
def _result(func: Any, args: Any, kwargs: tuple[tuple[str, Any], ...]) -> Any:
    named = {name: _tensors(value) for name, value in kwargs}
    return _layout(func(*_tensors(args), **named))


@cache
def _makes_new_tensors(func: Any) -> bool:
    schema = func._schema
    shared = any(one.alias_info is not None for one in (*schema.arguments, *schema.returns))
    # The one view that its schema does not call a view.
    return not shared and func is not torch.ops.aten._unsafe_view.default


# --- views and operations in place --------------------------------------------------------------


@cache
def _takes_device(func: Any) -> bool:
    return any(argument.name == "device" for argument in func._schema.arguments)


def _unwrap(value: Any, wrappers: dict[int, Weightless]) -> Any:
    """The meta tensors behind a value; notes whose they are in `wrappers`."""
    if isinstance(value, Weightless):
        wrappers[id(value.meta)] = value
        return value.meta
    if isinstance(value, Tensor):
        return value.detach().to(META)
    if isinstance(value, list | tuple):
        return type(value)(_unwrap(one, wrappers) for one in value)
    return value


def _wrap(value: Any, wrappers: Mapping[int, Weightless]) -> Any:
    """Weightless tensors around meta ones; what an operation wrote in place is what was given."""
    if isinstance(value, Tensor):
        known = wrappers.get(id(value))
        return Weightless(value) if known is None else known
    if isinstance(value, list | tuple):
        return type(value)(_wrap(one, wrappers) for one in value)
    return value
