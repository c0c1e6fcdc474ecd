"""Residency without one of its rules: what the tests of this folder must tell from the real one.

Each class makes one mistake that public frameworks have made or that a change could bring back.
Planners first, then what they stand on (transaction, directory, ledger), then phases, loop and
movers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from builders import train_stack
from fake_device import FakeDevice
from torch import Tensor, nn

from unirl.config.schema import RunConfig
from unirl.core.components import Movable, Moved, Parking, TensorComponent
from unirl.core.types import PromptBatch, PromptSuite, Rollout, RolloutRequest
from unirl.memory.copies import Device
from unirl.memory.hostmem import HostArena
from unirl.memory.parts import TensorPart, nothing
from unirl.models.tiny import TinyModel
from unirl.residency.accounted import AccountedMove
from unirl.residency.directory import Directory
from unirl.residency.handoff import OverlappedHandoff
from unirl.residency.ledger import Ledger
from unirl.residency.planner import ResidencyPlanner, _Move
from unirl.residency.policy import KeepRule, ResidencyPolicy, Role
from unirl.residency.transaction import Transaction
from unirl.residency.transition import Transition
from unirl.train.optimizer import moments_of
from unirl.train.stack import TrainStack
from unirl.trainer.diffusion import DiffusionTrainer
from unirl.trainer.evaluation import Evaluator, _Chunk, evaluated_samples
from unirl.trainer.phases import Phases

# --- planners -------------------------------------------------------------------------------------


class MovesAlways(ResidencyPlanner):
    """Reports a move without looking whether anything changes."""

    def _changes_something(self, move: _Move, active: Role | None) -> bool:
        pinned = self._rule.is_pinned(move.role)
        return move.role in self._components and (move.to_device or not pinned)


class LeavesOneBehind(ResidencyPlanner):
    """Restores fewer components than it parked."""

    def _to_bring(self, role: Role) -> list[Movable]:
        return super()._to_bring(role)[:-1]


class TrainsBesideTheReward(ResidencyPlanner):
    def _idle(self, active: Role, preserve: Collection[Role]) -> list[_Move]:
        kept = {*preserve, Role.REWARD} if active is Role.TRAIN else preserve
        return super()._idle(active, kept)


class BringsTheTrainerBack(ResidencyPlanner):
    """After each rollout, instead of before the step."""

    def set(self, role: Role, on_device: bool) -> None:
        super().set(role, on_device)
        there_is_room = Role.REWARD in self._components and not self._on_device[Role.REWARD]
        if role is Role.ROLLOUT and not on_device and there_is_room:
            super().set(Role.TRAIN, on_device=True)


class OrderOfTheDay(ResidencyPlanner):
    """Parks in an order that differs from process to process."""

    _days = itertools.count()

    def __init__(
        self,
        rule: KeepRule,
        components: Mapping[Role, Sequence[Movable]],
        record: Callable[[Transition], None],
        wait_for_ranks: Callable[[], None],
        **options: object,
    ) -> None:
        super().__init__(rule, components, record, wait_for_ranks, **options)  # type: ignore[arg-type]
        self._is_odd = next(self._days) % 2 == 1

    def _idle(self, active: Role, preserve: Collection[Role]) -> list[_Move]:
        moves = super()._idle(active, preserve)
        return moves[::-1] if self._is_odd else moves


class ParksBystanders(ResidencyPlanner):
    """Sweeps the device before each phase, components of other slabs too."""

    def enter(self, active: Role, preserve: Collection[Role] = ()) -> None:
        for part in self._accounted:
            if part.name not in self._parts and part.parking is Parking.COPY:
                part.park(copy=True)
                part.unpark()
        super().enter(active, preserve)


class ForgetsUntrackedActive(ResidencyPlanner):
    """Skips the whole request when the active role does not share the slab."""

    def enter(self, active: Role, preserve: Collection[Role] = ()) -> None:
        if active in self._components:
            super().enter(active, preserve)


class BelievesTheRole(ResidencyPlanner):
    """Takes a role that was brought in for one that has everything."""

    def require_live(self, role: Role, besides: str = "") -> None:
        return


class WakesAllAgain(ResidencyPlanner):
    """Does not look which components are there."""

    def _to_bring(self, role: Role) -> list[Movable]:
        return list(self._components[role])


class PullsInWhatItParks(ResidencyPlanner):
    """Restores each role before it parks it, for a defined state."""

    def make_room(self, active: Role, preserve: Collection[Role] = ()) -> None:
        for move in self._idle(active, preserve):
            self.set(move.role, on_device=True)
        super().make_room(active, preserve)


class ForgetsWhatWasLeft(ResidencyPlanner):
    """Takes a role that is away for one that left nothing behind."""

    def _changes_something(self, move: _Move, active: Role | None) -> bool:
        is_there = self.is_on_device(move.role)
        return (move.to_device or is_there) and super()._changes_something(move, active)


class IgnoresPins(ResidencyPlanner):
    def _changes_something(self, move: _Move, active: Role | None) -> bool:
        return move.role in self._components and self._on_device[move.role] != move.to_device

    def _to_park(self, role: Role, active: Role | None) -> list[Movable]:
        parts = self._components[role]
        return [p for p in parts if p.is_resident and p.parking is not Parking.KEEP]


def parks_where_nothing_is_said(config: RunConfig) -> ResidencyPolicy:
    """Takes null for false."""
    keys = (config.train_resident, config.rollout_resident, config.reward_resident)
    return ResidencyPolicy(*map(bool, keys))


# --- planners on something broken -----------------------------------------------------------------


class _OnOtherGround(ResidencyPlanner):
    """A planner whose directory, ledger or transaction is a naive one."""

    directory_class: type[Directory] = Directory
    ledger_class: type[Ledger] = Ledger
    transaction_class: type[Transaction] = Transaction
    handoff_class: type[OverlappedHandoff] = OverlappedHandoff

    def __init__(
        self,
        rule: KeepRule,
        components: Mapping[Role, Sequence[Movable]],
        record: Callable[[Transition], None],
        wait_for_ranks: Callable[[], None],
        **options: object,
    ) -> None:
        super().__init__(rule, components, record, wait_for_ranks, **options)  # type: ignore[arg-type]
        self._directory = self.directory_class(self._parts.values())
        self.ledger = self.ledger_class(self.ledger._budget_bytes)
        self.ledger.read(self._accounted)
        self._transaction = self.transaction_class(self._directory, self.ledger)
        self._handoff = self.handoff_class(
            self._directory, self.ledger, self._transaction, self._handoff._budget_bytes
        )


class SkipsTheBudget(_OnOtherGround):
    class ledger_class(Ledger):  # noqa: N801
        def require_room(self, part: Movable) -> None:
            return


class LedgerThatNeverFrees(_OnOtherGround):
    class ledger_class(Ledger):  # noqa: N801
        def update(self, part: Movable) -> None:
            before = self._device.get(part.name, 0)
            super().update(part)
            self._device[part.name] = max(before, self._device[part.name])


class CopiesAlways(_OnOtherGround):
    """Every park copies device to host, frozen weights too."""

    class directory_class(Directory):  # noqa: N801
        def needs_copy(self, part: Movable) -> bool:
            return part.parking is Parking.COPY


class NeverCopiesAgain(_OnOtherGround):
    """One host copy is thought to be good for ever."""

    class directory_class(Directory):  # noqa: N801
        def needs_copy(self, part: Movable) -> bool:
            return part.parking is Parking.COPY and part.host_bytes() == 0


class ForgetsToUndo(_OnOtherGround):
    class transaction_class(Transaction):  # noqa: N801
        def undo(self, parts: Sequence[Movable], to_device: bool, error: BaseException) -> None:
            return


class GoesOnWhenUndoingFails(_OnOtherGround):
    class transaction_class(Transaction):  # noqa: N801
        def undo(self, parts: Sequence[Movable], to_device: bool, error: BaseException) -> None:
            for part in reversed(parts):
                try:
                    self._move(part, not to_device)
                except BaseException as second:
                    error.add_note(str(second))


class OverlapsWithoutRoom(_OnOtherGround):
    class handoff_class(OverlappedHandoff):  # noqa: N801
        def pays(self, leaving: Sequence[Movable], coming: Sequence[Movable]) -> bool:
            return self._budget_bytes is not None and bool(leaving) and bool(coming)


class FreesBeforeAllIsThere(_OnOtherGround):
    """Waits for the copies out, and not for those in."""

    class handoff_class(OverlappedHandoff):  # noqa: N801
        def _start(
            self, part: Movable, moves: list[AccountedMove], *, to_device: bool
        ) -> AccountedMove:
            if to_device:
                for move in moves:
                    if not move.to_device and move.is_open:
                        move.finish()
            return super()._start(part, moves, to_device=to_device)


class ForgetsToGiveBack(_OnOtherGround):
    class handoff_class(OverlappedHandoff):  # noqa: N801
        def _take_back(self, move: AccountedMove, error: BaseException) -> None:
            return


# --- phases and the loop --------------------------------------------------------------------------


class PushesBlindly(Phases):
    """Does not ask whether there is a base under the adapter."""

    def _load_weights(self) -> None:
        self.sync.sync()


class PushesBeforeWaking(Phases):
    def generate(
        self, request: RolloutRequest, *, sync_weights: bool, keep_awake: bool = False
    ) -> Rollout:
        if sync_weights:
            self._stage_adapter()
            self.sync.sync()
        return super().generate(request, sync_weights=False, keep_awake=keep_awake)


class LeavesTheEngineAwake(Phases):
    def sleep_after_failure(self, error: BaseException) -> None:
        return


class HidesTheFirstFailure(Phases):
    def sleep_after_failure(self, error: BaseException) -> None:
        self.residency.set(Role.ROLLOUT, on_device=False)


class SavesWhereverTheTrainerIs(DiffusionTrainer):
    def _save(self, rollouts_done: int) -> None:
        self._checkpoints.save(rollouts_done)


class BringsTheTrainerBackFirst(DiffusionTrainer):
    """Before it asks whether a save is due."""

    def _evaluate(self, rollouts_done: int) -> None:
        super()._evaluate(rollouts_done)
        self._phases.residency.enter(Role.TRAIN)


class SleepsBetweenChunks(Evaluator):
    def _run_chunk(
        self, suite: PromptSuite, start: int, sync_weights: bool, keep_awake: bool
    ) -> _Chunk:
        return super()._run_chunk(suite, start, sync_weights, keep_awake=False)


class EvaluatesBesideTheTrainer(Evaluator):
    """Brings in what it needs, and parks nobody for it."""

    def _run_chunk(
        self, suite: PromptSuite, start: int, sync_weights: bool, keep_awake: bool
    ) -> _Chunk:
        prompts = suite.records[start : start + self._config.eval_chunk_prompts]
        request = self._requests.evaluation(PromptBatch(prompts), suite.samples_per_prompt)
        phases = self._phases
        for role in (Role.ROLLOUT, Role.REWARD):
            phases.residency.set(role, on_device=True)
        rollout = phases.engine.generate(request)
        rewards = phases.reward.score(rollout)
        return _Chunk(suite.name, evaluated_samples(prompts, start, rewards, {}), rollout.images)


# --- movers ---------------------------------------------------------------------------------------

Movers = Callable[[Sequence[TensorComponent], HostArena, Device], Sequence[Movable]]


def movers_of(part_class: type[TensorPart]) -> Movers:
    """Parts of this class, which know nothing of each other."""

    def make(
        components: Sequence[TensorComponent], host: HostArena, device: Device
    ) -> Sequence[Movable]:
        return [
            part_class(c.name, c, host.copy_of(c.name), nothing, lambda _: device, nothing)
            for c in components
        ]

    return make


class RestoresParametersOnly(TensorPart):
    """Parks buffers too, and forgets them."""

    def unpark(self) -> Moved:
        moved = super().unpark()
        for tensor in self._component.tensors():
            if not isinstance(tensor, nn.Parameter):
                tensor.zero_()
        return moved


class MovesTensorByTensor(TensorPart):
    """Replaces each tensor's memory by a copy, as `module.to()` does."""

    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._component.tensors())

    def park(self, *, copy: bool) -> Moved:
        self._copies = [tensor.detach().clone() for tensor in self._component.tensors()]
        for tensor in self._component.tensors():
            tensor.data = tensor.new_empty(0)
        return Moved(self.num_bytes())

    def unpark(self) -> Moved:
        for tensor, copy in zip(self._component.tensors(), self._copies, strict=True):
            tensor.data = copy
        return Moved(self.num_bytes())


class HastyDevice(FakeDevice):
    """Nobody waits for its copies."""

    def wait(self) -> None:
        return


def moments_made_by_looking(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Creates the state that it reads."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [moment for p in parameters for moment in moments_of(optimizer, p).values()]


def moments_and_counters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Moves the scalar `step` to the device too."""
    return [value for state in optimizer.state.values() for value in state.values()]


def stack_that_keeps_gradients(model: TinyModel) -> TrainStack:
    stack = train_stack(model)
    stack.weights.optimizer.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]
    return stack
