"""Rows together with what is fixed for each of them before the first update."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Self

from torch import Tensor


class Anchored:
    """Base of frozen dataclasses whose first field is rows, and whose others are tensors [R, ...]
    beside them, or None."""

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def sample_index(self) -> Tensor:
        """[R] int64."""
        return self._rows.sample_index

    def select(self, index: Tensor) -> Self:
        """The rows `index`, and what belongs to them."""
        first, *others = (field.name for field in fields(self))  # type: ignore[arg-type]
        beside = {name: getattr(self, name) for name in others}
        chosen = {name: None if t is None else t[index] for name, t in beside.items()}
        return replace(self, **{first: self._rows.select(index)}, **chosen)  # type: ignore[type-var]

    @property
    def _rows(self) -> Any:
        return getattr(self, fields(self)[0].name)  # type: ignore[arg-type]
