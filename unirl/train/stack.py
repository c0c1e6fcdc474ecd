"""The train role: the update loop over the trained weights, blind to the algorithm.

On several ranks each trains on its own samples; which samples form an optimizer step, and how its
loss is averaged, is decided for all samples of all ranks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from unirl.algorithms.base import BASE, Algorithm, Policy, RowLosses, Rows
from unirl.config.schema import StackConfig
from unirl.core.components import Movable
from unirl.core.errors import TrainingError
from unirl.core.types import SamplingParams, ScoredRollout, UpdateStats
from unirl.distributed.ranks import Ranks
from unirl.memory.hostmem import HostArena
from unirl.models.base import DiffusionModel
from unirl.models.lora import adapter_disabled
from unirl.tracking.pooling import pool_metrics
from unirl.train.backend import TrainBackend, clip_gradients
from unirl.train.optimizer import learning_rate_factor
from unirl.train.step_parts import StepPart, split_into_steps
from unirl.train.weights import TrainedWeights

logger = logging.getLogger("unirl.train")

MOST_LOST_WINDOWS = 3
"""In a row, with non-finite gradients in every step: the run will not recover by itself."""


class TrainStack:
    """Trains `weights` on windows of scored rollouts.

    The network stays in eval mode: sampling and training must be the same function, or the ratio
    would not start at 1.
    """

    def __init__(
        self,
        model: DiffusionModel,
        backend: TrainBackend,
        algorithm: Algorithm[Any, Any],
        config: StackConfig,
        total_steps: int,
        sampling: SamplingParams,
        seed: int,
        device: torch.device,
        ranks: Ranks,
        host: HostArena,
        *,
        teachers: Mapping[str, Mapping[str, Tensor]] | None = None,
        moments_on_demand: bool = False,
    ) -> None:
        """`model` is on `device` with its adapter attached or its network requiring grad, laid out
        over the ranks as `backend` has it.

        `host` is where parked weights go. `teachers`: weights by name and trained parameter, for
        the algorithm's `teachers`. `moments_on_demand`: Adam's moments are on the device only
        within the `around_step` of an update.
        """
        self.model = model
        self.weights = TrainedWeights(
            model,
            backend,
            algorithm,
            config.optimizer,
            sampling,
            device,
            host,
            teachers or {},
            moments_on_demand=moments_on_demand,
        )
        self._backend = backend
        self._ranks = ranks
        self._algorithm = algorithm
        self._config = config
        self._total_steps = total_steps
        self._seed = seed
        self._num_lost_windows = 0

    @property
    def weight_version(self) -> int:
        """Optimizer steps taken since the start of the run."""
        return self.weights.weight_version

    @property
    def num_trained(self) -> int:
        """Trained scalars."""
        return sum(parameter.numel() for parameter in self.weights.trained.values())

    @property
    def parts(self) -> Sequence[Movable]:
        """What the residency planner moves."""
        return self.weights.parts

    @contextmanager
    def sampling(self, *, unshard: bool) -> Iterator[None]:
        """Around each generation with the trained network itself: it has the weights that rollouts
        sample with, and with `unshard` they stay gathered meanwhile."""
        with (
            self.weights.sampling_weights(),
            self._backend.gathered() if unshard else nullcontext(),
        ):
            yield

    def update(
        self,
        scored: Sequence[ScoredRollout],
        around_step: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> list[UpdateStats]:
        """Train on one window of rollouts: num_updates_per_batch optimizer steps.

        `around_step` is entered around each of them: it has the optimizer's moments on the device.

        The samples are split into that many parts. The anchor of all parts is fixed before the
        first step, in the very slices the steps will use. Collective: all ranks get the same.
        """
        self.weights.require_on_device("update")
        rows = self._algorithm.rows(scored)
        # A function of seed and step, so that a resumed run draws the same parts.
        draw = f"{self._seed}/parts/{self.weight_version}"
        parts = split_into_steps(rows, scored, self._config, self._ranks, draw)
        if not parts:
            metrics = {"grad_norm": 0.0, "lr": self._apply_learning_rate()}
            return [UpdateStats(metrics, "no sample of the window gave anything to train on")]
        if any(part.num_fillers for part in parts):
            rows = rows.select(_with_filler(rows))
        with torch.no_grad():
            rows, anchor_metrics = self._algorithm.anchor(
                self.policy(), rows, [index for part in parts for index in part.slices]
            )
        version_before = self.weight_version
        stats = [self._step(rows, part, around_step) for part in parts]
        if self.weight_version > version_before:  # else a push of the same version would differ
            for name, rule in self._algorithm.shadows().items():
                self.weights.shadows[name].follow(rule.decay(self.weight_version))
        self._count_lost(stats)
        pooled = pool_metrics(self._ranks.gather(anchor_metrics))
        first = UpdateStats({**stats[0].metrics, **pooled}, stats[0].skipped)
        return [first, *stats[1:]]

    def _count_lost(self, stats: Sequence[UpdateStats]) -> None:
        """Raise TrainingError when nothing but non-finite gradients came for some windows."""
        lost = all(one.skipped and not math.isfinite(one.metrics["grad_norm"]) for one in stats)
        self._num_lost_windows = self._num_lost_windows + 1 if lost else 0
        if self._num_lost_windows == MOST_LOST_WINDOWS:
            raise TrainingError(
                f"no optimizer step was taken in {MOST_LOST_WINDOWS} windows in a row: "
                f"{stats[-1].skipped}. Lower stack.optimizer.learning_rate, set "
                "model.precision=fp32, or look at what the reward and the loss give."
            )

    def policy(self) -> Policy:
        """The model as the algorithm sees it at this point of the run."""
        network = self.model.network
        sets = {**self.weights.shadows, **self.weights.teachers}
        return Policy(
            self.model,
            {BASE: lambda: adapter_disabled(network)}
            | {name: weights.active for name, weights in sets.items()},
            progress=self.weight_version / self._total_steps,
        )

    def _step(
        self, rows: Rows, part: StepPart, around_step: Callable[[], AbstractContextManager[None]]
    ) -> UpdateStats:
        """One optimizer step on the mean loss over the rows of all slices of all ranks."""
        details = self._backward(rows, part)
        trained = list(self.weights.trained.values())
        self._backend.reduce_gradients(trained)
        norm = self._backend.gradient_norm(trained)
        grad_norm = float(norm)
        skipped = self._reason_to_skip(grad_norm)
        learning_rate = self._apply_learning_rate()
        if skipped is None:
            clip_gradients(self._backend, trained, norm, self._config.max_grad_norm)
            self.weights.step(around_step())
        elif self._ranks.is_main:
            logger.warning("optimizer step skipped: %s", skipped)
        # Gradients are dropped here, not before the next backward, so parking never carries them.
        self.weights.optimizer.zero_grad(set_to_none=True)
        metrics = {
            **self._algorithm.metrics(details),
            "grad_norm": grad_norm,
            "lr": learning_rate,
        }
        return UpdateStats(metrics, skipped)

    def _backward(self, rows: Rows, part: StepPart) -> dict[str, Tensor]:
        """Gradients of the step; returns the details of all its rows, of all ranks."""
        details: list[Mapping[str, Tensor]] = []
        num_own = len(part.slices) - part.num_fillers
        for number, index in enumerate(part.slices):
            losses = self._algorithm.loss(self.policy(), rows.select(index))
            _require_term_per_row(losses, len(index))
            scale = self._backend.loss_scale if number < num_own else 0.0
            self._backend.before_backward(is_last=number + 1 == len(part.slices))
            (losses.loss.sum() * (scale / part.num_rows)).backward()
            if number < num_own:
                details.append({name: value.cpu() for name, value in losses.details.items()})
        every = [one for of_rank in self._ranks.gather(details) for one in of_rank]
        return {name: torch.cat([one[name] for one in every]) for name in every[0]}

    def _reason_to_skip(self, grad_norm: float) -> str | None:
        """The same on every rank, since the norm is."""
        if not math.isfinite(grad_norm):
            bad = [
                name
                for name, parameter in self.weights.trained.items()
                if parameter.grad is not None
                and not bool(self._backend.local(parameter.grad).isfinite().all())
            ]
            names = sorted({name for names in self._ranks.gather(bad) for name in names})
            some = ", ".join([*names[:3], *(["..."] if len(names) > 3 else [])])
            where = f"{len(names)} of {len(self.weights.trained)} tensors: {some}"
            return f"non-finite gradient (norm {grad_norm}) in {where if names else 'the norm'}"
        if grad_norm == 0:  # the moments alone would still move the weights
            return "zero gradient: equal rewards in every group, or the aim is reached"
        return None

    def _apply_learning_rate(self) -> float:
        factor = learning_rate_factor(
            self._config.scheduler, self.weight_version, self._total_steps
        )
        learning_rate = self._config.optimizer.learning_rate * factor
        for group in self.weights.optimizer.param_groups:
            group["lr"] = learning_rate
        return learning_rate


def _with_filler(rows: Rows) -> Tensor:
    """Indices of all rows, and of one more that stands for the filler."""
    return torch.arange(len(rows) + 1, device=rows.sample_index.device) % len(rows)


def _require_term_per_row(losses: RowLosses, num_rows: int) -> None:
    """Raise TrainingError for an algorithm that averages by itself."""
    for name, terms in [("loss", losses.loss), *losses.details.items()]:
        if terms.shape != (num_rows,):
            raise TrainingError(
                f"the algorithm gave {name} of shape {tuple(terms.shape)} for {num_rows} rows; "
                "`loss` and each of its details must have one term per row, which the train stack "
                "averages over all micro-batches and ranks."
            )
