"""The processes of one run, seen from one of them: who am I, and what do the others say.

Every rank runs the same text. Where a decision or a number must be the same on all of them, it goes
through `Ranks`; on one device `OneRank` answers for itself and no process group exists. All
methods are collectives: every rank calls them, in the same order. They exchange small Python
values on the CPU; tensors of weights and gradients are the train backend's business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from unirl.core.errors import RankError, UnirlError

T = TypeVar("T")


class Ranks(ABC):
    """This process among `world_size` equal ones."""

    rank: int
    world_size: int

    @property
    def is_main(self) -> bool:
        """Rank 0 alone owns console, files and trackers."""
        return self.rank == 0

    @abstractmethod
    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on every rank."""

    @abstractmethod
    def broadcast(self, value: T) -> T:
        """Rank 0's value; what the others pass is ignored."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until all ranks are here."""

    def any(self, flag: bool) -> bool:
        """Whether the flag is true on some rank."""
        return True in self.gather(flag)

    def together(self, action: Callable[[], T]) -> T:
        """Run `action` on every rank; where it fails on one, it fails on all.

        The action must not be a collective itself, or one that fails halfway would leave the
        others in it; an error of those ends the run through `distributed.watch`. The failing rank
        raises its own error. The others raise one of the same kind when it is a UnirlError (so a
        wrong configuration stays one), else RankError; the text names the rank.
        """
        outcome: _Outcome[T] = _attempt(action)
        failures = self.gather(outcome.failure)
        if outcome.error is not None:
            raise outcome.error
        for rank, failure in enumerate(failures):
            if failure is not None:
                kind, text = failure
                raise kind(f"rank {rank}: {text}")
        assert outcome.value is not None
        return outcome.value[0]

    def on_main(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 and give its result to all; its failure is everyone's."""

        def run() -> T | None:
            return action() if self.is_main else None

        return self.broadcast(self.together(run))  # type: ignore[return-value]


class _Outcome(Generic[T]):
    """How an action ended: its value in a tuple of one, or its error."""

    def __init__(self, value: tuple[T] | None, error: Exception | None) -> None:
        self.value = value
        self.error = error

    @property
    def failure(self) -> tuple[type[UnirlError], str] | None:
        """What the other ranks are told."""
        if self.error is None:
            return None
        if isinstance(self.error, UnirlError):
            return type(self.error), str(self.error)
        return RankError, f"{type(self.error).__name__}: {self.error}"


def _attempt(action: Callable[[], T]) -> _Outcome[T]:
    try:
        return _Outcome((action(),), None)
    except Exception as error:
        return _Outcome(None, error)


class OneRank(Ranks):
    """A run on one device: no process group, nothing to exchange."""

    rank = 0
    world_size = 1

    def gather(self, value: T) -> list[T]:
        return [value]

    def broadcast(self, value: T) -> T:
        return value

    def barrier(self) -> None:
        return

    def together(self, action: Callable[[], T]) -> T:
        return action()

    def on_main(self, action: Callable[[], T]) -> T:
        return action()
