"""The train role: trained weights, optimizer and the update loop, blind to the algorithm.

On several ranks each trains on its own samples; which samples form an optimizer step, and how its
loss is averaged, is decided for all samples of all ranks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unirl.algorithms.base import BASE, Algorithm, Policy, RowLosses, Rows
from unirl.config.schema import StackConfig
from unirl.core.components import Movable
from unirl.core.errors import ModelError, TrainingError
from unirl.core.types import SamplingParams, ScoredRollout, UpdateStats
from unirl.distributed.ranks import Ranks
from unirl.memory.hostmem import HostArena
from unirl.memory.movers import RoleWeights
from unirl.models.base import DiffusionModel
from unirl.models.lora import adapter_disabled, adapter_parameters
from unirl.models.parameters import require_fit
from unirl.samplers.noise import seed_of
from unirl.tracking.pooling import pool_metrics
from unirl.train.backend import TrainBackend, clip_gradients, write_share
from unirl.train.components import train_components
from unirl.train.optimizer import (
    learning_rate_factor,
    make_optimizer,
    moment_tensors,
    moments_of,
    set_optimizer_step,
)
from unirl.train.shadows import WeightSet
from unirl.weight_sync.payload import Probe, WeightPayload

logger = logging.getLogger("unirl.train")

MOST_LOST_WINDOWS = 3
"""In a row, with non-finite gradients in every step: the run will not recover by itself."""


@dataclass(frozen=True)
class _Part:
    """This rank's rows of one optimizer step."""

    slices: Sequence[Tensor]
    """Row indices, at most micro_batch_size each; as many slices on every rank."""
    num_fillers: int
    """The last slices only keep the other ranks company: they do not count."""
    num_rows: int
    """Rows of the step on all ranks."""


class TrainStack:
    """Owns every weight that changes.

    The network stays in eval mode: sampling and training must be the same function, or the ratio
    would not start at 1. `weight_version` counts optimizer steps taken since the start of the run.
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
        self._backend = backend
        self._ranks = ranks
        self._algorithm = algorithm
        self._config = config
        self._total_steps = total_steps
        self._sampling = sampling
        self._seed = seed
        self._device = device
        # Kept: while a sharded network is gathered, it has other parameters under these names.
        self._parameters = dict(model.network.named_parameters())
        self._trained = {n: p for n, p in self._parameters.items() if p.requires_grad}
        if not self._trained:
            raise ModelError("stack: nothing to train, no parameter of the network requires grad")
        self._optimizer = make_optimizer(self._trained.values(), config.optimizer)
        self._num_steps = 0
        self._num_writes = 0
        self._num_lost_windows = 0
        self._shadows = {name: self._weight_set() for name in algorithm.shadows()}
        self._teachers = {n: self._read_teacher(n, w) for n, w in (teachers or {}).items()}
        components = train_components(
            model,
            backend,
            self._parameters,
            moments=lambda: moment_tensors(self._optimizer),
            num_writes=lambda: self._num_writes,
            shadows={name: weights.tensors for name, weights in self._shadows.items()},
            teachers={name: weights.tensors for name, weights in self._teachers.items()},
            moments_on_demand=moments_on_demand,
        )
        self._weights = RoleWeights(components, host, before_parking=backend.settle)

    @property
    def weight_version(self) -> int:
        return self._num_steps

    @property
    def num_trained(self) -> int:
        """Trained scalars."""
        return sum(parameter.numel() for parameter in self._trained.values())

    def gathered(self) -> AbstractContextManager[None]:
        """Keeps sharded weights gathered, for a generation with them."""
        return self._backend.gathered()

    def sampling_weights(self) -> AbstractContextManager[None]:
        """The network has the weights that rollouts sample with."""
        shadow = self._sampled_shadow()
        return nullcontext() if shadow is None else shadow.active()

    def _sampled_shadow(self) -> WeightSet | None:
        name = self._algorithm.sampling_weights()
        return None if name is None else self._shadows[name]

    def _weight_set(self) -> WeightSet:
        return WeightSet(self._trained, self._backend.local)

    def _read_teacher(self, name: str, tensors: Mapping[str, Tensor]) -> WeightSet:
        """Raises ModelError naming the teacher when its weights are not like the trained ones."""
        try:
            require_fit(self._trained, tensors)
        except ModelError as error:
            raise ModelError(f"algorithm.teachers: {name}: {error}") from error
        weights = self._weight_set()
        for parameter, held in weights.tensors.items():
            write_share(self._backend, held, tensors[parameter])
        return weights

    @property
    def parts(self) -> Sequence[Movable]:
        """What the residency planner moves."""
        return self._weights.parts

    @property
    def readable_while_parked(self) -> bool:
        """Whether weights can be read from their host copies; shards must be gathered on the
        device."""
        return self._backend.holds_whole

    # --- update ---------------------------------------------------------------------------------

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
        self._require_on_device("update")
        rows = self._algorithm.rows(scored)
        filler = torch.tensor([len(rows)], device=rows.sample_index.device)
        parts = self._split(rows, scored, filler)
        if not parts:
            metrics = {"grad_norm": 0.0, "lr": self._apply_learning_rate()}
            return [UpdateStats(metrics, "no sample of the window gave anything to train on")]
        if any(part.num_fillers for part in parts):
            rows = rows.select(torch.arange(len(rows) + 1, device=filler.device) % len(rows))
        with torch.no_grad():
            rows, anchor_metrics = self._algorithm.anchor(
                self.policy(), rows, [index for part in parts for index in part.slices]
            )
        steps_before = self._num_steps
        stats = [self._step(rows, part, around_step) for part in parts]
        if self._num_steps > steps_before:  # else a push of the same version would differ
            for name, rule in self._algorithm.shadows().items():
                self._shadows[name].follow(rule.decay(self._num_steps))
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
        sets = {**self._shadows, **self._teachers}
        return Policy(
            self.model,
            {BASE: lambda: adapter_disabled(network)}
            | {name: weights.active for name, weights in sets.items()},
            progress=self._num_steps / self._total_steps,
        )

    def _split(self, rows: Rows, scored: Sequence[ScoredRollout], filler: Tensor) -> list[_Part]:
        """This rank's rows of each optimizer step.

        A sample's place in the order that is cut into parts, and so its part, depends on the
        samples of all ranks. Rows of samples that are not trained are left out. `filler` is the
        index of a row for ranks that have less to do than another one.
        """
        num_parts, size = self._config.num_updates_per_batch, self._config.micro_batch_size
        starts = np.cumsum([0, *(one.num_samples for one in scored)]).tolist()
        samples = torch.cat([s + one.places for s, one in zip(starts, scored, strict=False)])
        trained = torch.cat([one.trained for one in scored])[samples]
        group_size = scored[0].request.samples_per_prompt
        places = self._places(starts[-1] // group_size, group_size)[samples]
        part_of_sample = torch.where(trained, places * num_parts // starts[-1], -1)
        part_of_row = part_of_sample.to(rows.sample_index.device)[rows.sample_index]
        part_of_row = part_of_row.where(rows.sample_index >= 0, -1)
        own = [torch.nonzero(part_of_row == part).flatten() for part in range(num_parts)]
        counts = self._ranks.gather([len(index) for index in own])
        parts = []
        for index, rank_counts in zip(own, zip(*counts, strict=True), strict=True):
            slices = list(index.split(size)) if len(index) else []
            num_fillers = max(-(-count // size) for count in rank_counts) - len(slices)
            if sum(rank_counts):
                parts.append(
                    _Part([*slices, *[filler] * num_fillers], num_fillers, sum(rank_counts))
                )
        return parts

    def _places(self, num_groups: int, group_size: int) -> Tensor:
        """[num_groups * group_size] each sample's place in the order that is cut into parts.

        Shuffled, each part takes equally many samples of every group, drawn at random.
        """
        if not self._config.shuffle_updates:
            return torch.arange(num_groups * group_size)
        # A function of seed and step, so that a resumed run draws the same parts.
        generator = torch.Generator().manual_seed(seed_of(f"{self._seed}/parts/{self._num_steps}"))
        turns = torch.rand(num_groups, group_size, generator=generator).argsort(dim=1)
        groups = torch.randperm(num_groups, generator=generator)
        return (turns * num_groups + groups[:, None]).flatten()

    def _step(
        self, rows: Rows, part: _Part, around_step: Callable[[], AbstractContextManager[None]]
    ) -> UpdateStats:
        """One optimizer step on the mean loss over the rows of all slices of all ranks."""
        details = self._backward(rows, part)
        trained = list(self._trained.values())
        self._backend.reduce_gradients(trained)
        norm = self._backend.gradient_norm(trained)
        grad_norm = float(norm)
        skipped = self._reason_to_skip(grad_norm)
        learning_rate = self._apply_learning_rate()
        if skipped is None:
            clip_gradients(self._backend, trained, norm, self._config.max_grad_norm)
            # Before the step: one that fails halfway has written already, and no copy of the
            # weights may pass for current then.
            self._num_steps += 1
            self._num_writes += 1
            with around_step():
                self._optimizer.step()
        elif self._ranks.is_main:
            logger.warning("optimizer step skipped: %s", skipped)
        # Gradients are dropped here, not before the next backward, so parking never carries them.
        self._optimizer.zero_grad(set_to_none=True)
        metrics = {
            **self._algorithm.metrics(details),
            "grad_norm": grad_norm,
            "lr": learning_rate,
        }
        return UpdateStats(metrics, skipped)

    def _backward(self, rows: Rows, part: _Part) -> dict[str, Tensor]:
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
                for name, parameter in self._trained.items()
                if parameter.grad is not None
                and not bool(self._backend.local(parameter.grad).isfinite().all())
            ]
            names = sorted({name for names in self._ranks.gather(bad) for name in names})
            some = ", ".join([*names[:3], *(["..."] if len(names) > 3 else [])])
            where = f"{len(names)} of {len(self._trained)} tensors: {some}"
            return f"non-finite gradient (norm {grad_norm}) in {where if names else 'the norm'}"
        if grad_norm == 0:  # the moments alone would still move the weights
            return "zero gradient: equal rewards in every group, or the aim is reached"
        return None

    def _apply_learning_rate(self) -> float:
        factor = learning_rate_factor(self._config.scheduler, self._num_steps, self._total_steps)
        learning_rate = self._config.optimizer.learning_rate * factor
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        return learning_rate

    # --- weights for the sync and for checkpoints ------------------------------------------------

    @torch.no_grad()
    def read_weights(self, *, adapter: bool, with_probe: bool) -> WeightPayload:
        """Host copies of the adapter or of all network weights that rollouts sample with, float32
        where trained.

        A parked stack is read from the host, where it moves nothing; it cannot answer a probe then,
        so the payload has none. Collective: every rank gets whole tensors.
        """
        source: Mapping[str, Tensor]
        source = adapter_parameters(self.model.network) if adapter else self._parameters
        shadow = self._sampled_shadow()
        if shadow is not None:
            source = {name: shadow.tensors.get(name, tensor) for name, tensor in source.items()}
        tensors = self._read(source, "read weights")
        probe = self._make_probe() if with_probe and self._weights.is_resident else None
        return WeightPayload(self.weight_version, tensors, is_adapter=adapter, probe=probe)

    def _read(self, source: Mapping[str, Tensor], action: str) -> dict[str, Tensor]:
        """Whole copies on the CPU, wherever the weights are. Collective."""
        if self.readable_while_parked:
            return {name: self._weights.on_host(tensor) for name, tensor in source.items()}
        self._require_on_device(action)
        self._backend.settle()
        return {name: self._backend.whole(tensor) for name, tensor in source.items()}

    def _make_probe(self) -> Probe:
        generator = torch.Generator().manual_seed(seed_of("weight-sync-probe"))
        shape = self.model.latent_shape(self._sampling)
        latents = torch.randn(1, *shape, generator=generator)
        sigma = torch.tensor([0.7])
        conditioning = self.model.example_conditioning(1, self._sampling, generator)
        inputs = (latents.to(self._device), sigma.to(self._device), conditioning)
        with self.sampling_weights():
            velocity = self.model.velocity(*inputs).cpu()
        with adapter_disabled(self.model.network):
            base_velocity = self.model.velocity(*inputs).cpu()
        return Probe(latents, sigma, conditioning.to("cpu"), velocity, base_velocity)

    def state_tensors(self, adapter_only: bool) -> dict[str, Tensor]:
        """The weights a checkpoint holds, whole: trained ones, or the whole network. Collective."""
        return self._read(self._trained if adapter_only else self._parameters, "save")

    def shadow_tensors(self) -> dict[str, Tensor]:
        """Whole shadow weights by `<shadow>.<parameter>`; none without shadows. Collective."""
        return self._read(self._named_shadows(), "save")

    def _named_shadows(self) -> dict[str, Tensor]:
        return {
            f"{shadow}.{name}": tensor
            for shadow, weights in self._shadows.items()
            for name, tensor in weights.tensors.items()
        }

    def optimizer_state(self) -> dict[str, Any]:
        """AdamW's state with whole tensors, and the steps taken. Collective."""
        state = self._optimizer.state_dict()
        whole = {
            index: {
                "step": moments["step"].clone(),
                **self._read({n: t for n, t in moments.items() if n != "step"}, "save"),
            }
            for index, moments in state["state"].items()
        }
        return {"optimizer": {**state, "state": whole}, "num_steps": self._num_steps}

    def load_state(
        self,
        tensors: Mapping[str, Tensor],
        shadows: Mapping[str, Tensor],
        optimizer_state: Mapping[str, Any],
    ) -> None:
        """Restore what `state_tensors`, `shadow_tensors` and `optimizer_state` gave, on any number
        of ranks.

        Raises ModelError, with nothing written, when they do not fit.
        """
        self._require_on_device("load")
        self._backend.settle()
        names = self._trained.keys() == tensors.keys()
        expected = self._trained if names else self._parameters
        require_fit(expected, tensors)
        held = self._named_shadows()
        _require_shadows(held, shadows)
        trained = list(self._trained.values())
        for index, state in optimizer_state["optimizer"]["state"].items():
            if index >= len(trained) or state["exp_avg"].shape != trained[index].shape:
                raise ModelError(f"the optimizer state does not fit at trained tensor {index}")
        for name, parameter in expected.items():
            write_share(self._backend, parameter, tensors[name])
        for name, shadow in held.items():
            write_share(self._backend, shadow, shadows[name])
        # The moments only: learning rate, betas and decay are this run's own settings.
        own_groups = self._optimizer.state_dict()["param_groups"]
        moments = {
            index: {
                name: value.clone()
                if name == "step"
                else self._backend.share_of(value, like=trained[index])
                for name, value in state.items()
            }
            for index, state in optimizer_state["optimizer"]["state"].items()
        }
        self._optimizer.load_state_dict({"state": moments, "param_groups": own_groups})
        self._num_steps = optimizer_state["num_steps"]
        self._num_writes += 1

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Begin with these trained weights: whole tensors, on every rank. Shadows begin there too.

        Raises ModelError, with nothing written, when they do not fit.
        """
        self._require_on_device("load")
        self._backend.settle()
        require_fit(self._trained, tensors)
        for name, parameter in self._trained.items():
            write_share(self._backend, parameter, tensors[name])
        for shadow in self._shadows.values():
            shadow.follow(0.0)
        self._num_writes += 1

    def sharded_state(self, adapter_only: bool) -> dict[str, Tensor]:
        """Weights, moments and shadows under `weights.<name>`, `exp_avg.<name>`,
        `shadow.<shadow>.<name>`, ..., as they lie here.

        A sharded save writes these tensors; a sharded load reads into them, which makes the
        moments if there were none.
        """
        self._require_on_device("save")
        self._backend.settle()
        source = self._trained if adapter_only else self._parameters
        state = {f"weights.{name}": parameter.detach() for name, parameter in source.items()}
        for name, parameter in self._trained.items():
            for moment, tensor in moments_of(self._optimizer, parameter).items():
                state[f"{moment}.{name}"] = tensor
        return state | {f"shadow.{name}": t for name, t in self._named_shadows().items()}

    def finish_sharded_load(self, num_steps: int) -> None:
        """After tensors of `sharded_state` were read from a checkpoint at this optimizer step."""
        set_optimizer_step(self._optimizer, num_steps)
        self._num_steps = num_steps
        self._num_writes += 1

    def _require_on_device(self, action: str) -> None:
        self._weights.require_resident("the train stack", action)


def _require_term_per_row(losses: RowLosses, num_rows: int) -> None:
    """Raise TrainingError for an algorithm that averages by itself."""
    for name, terms in [("loss", losses.loss), *losses.details.items()]:
        if terms.shape != (num_rows,):
            raise TrainingError(
                f"the algorithm gave {name} of shape {tuple(terms.shape)} for {num_rows} rows; "
                "`loss` and each of its details must have one term per row, which the train stack "
                "averages over all micro-batches and ranks."
            )


def _require_shadows(held: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Raise ModelError unless a checkpoint has exactly the shadow weights of this algorithm."""
    ours, theirs = ({name.partition(".")[0] for name in names} for names in (held, saved))
    if held.keys() != saved.keys():
        raise ModelError(
            f"it has the shadow weights {sorted(theirs) or 'none'}, but this algorithm keeps "
            f"{sorted(ours) or 'none'} beside the trained ones; resume with the algorithm that "
            "saved it, or start without load_dir."
        )
