"""The train role: trained weights, optimizer and the update loop, blind to the algorithm."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unirl.algorithms.base import Algorithm, Rows
from unirl.config.schema import StackConfig
from unirl.core.components import FROZEN, Component, Moved, TensorComponent
from unirl.core.errors import ModelError, ResidencyError
from unirl.core.types import ScoredRollout, UpdateStats
from unirl.memory.movers import ComponentMover, module_components
from unirl.models.base import DiffusionModel
from unirl.models.lora import adapter_disabled, adapter_parameters
from unirl.models.parameters import copy_into, require_fit
from unirl.samplers.noise import seed_of
from unirl.train.optimizer import learning_rate_factor, make_optimizer, moment_tensors
from unirl.weight_sync.payload import Probe, WeightPayload

logger = logging.getLogger("unirl.train")


class TrainStack:
    """Owns every weight that changes.

    The network stays in eval mode: sampling and training must be the same function, or the ratio
    would not start at 1. `weight_version` counts optimizer steps taken since the start of the run.
    """

    def __init__(
        self,
        model: DiffusionModel,
        algorithm: Algorithm[Any],
        config: StackConfig,
        total_steps: int,
        latent_shape: tuple[int, ...],
        seed: int,
        device: torch.device,
    ) -> None:
        """`model` is on `device` with its adapter attached or its network requiring grad."""
        self.model = model
        self._algorithm = algorithm
        self._config = config
        self._total_steps = total_steps
        self._latent_shape = latent_shape
        self._seed = seed
        self._device = device
        self._trained = {n: p for n, p in model.network.named_parameters() if p.requires_grad}
        if not self._trained:
            raise ModelError("stack: nothing to train, no parameter of the network requires grad")
        self._optimizer = make_optimizer(self._trained.values(), config.optimizer)
        self._num_steps = 0
        self._num_writes = 0
        self._is_parked = False
        self._mover = ComponentMover(self._components())

    @property
    def weight_version(self) -> int:
        return self._num_steps

    @property
    def num_trained(self) -> int:
        """Trained scalars."""
        return sum(parameter.numel() for parameter in self._trained.values())

    def offload(self) -> Moved:
        moved = self._mover.offload()
        self._is_parked = True
        return moved

    def onload(self) -> Moved:
        moved = self._mover.onload()
        self._is_parked = False
        return moved

    def _components(self) -> list[Component]:
        network = self.model.network
        frozen = [p for name, p in network.named_parameters() if name not in self._trained]
        components: list[Component] = [
            TensorComponent("train.base", lambda: frozen, lambda: FROZEN),
            TensorComponent(
                "train.trained", lambda: list(self._trained.values()), lambda: self._num_writes
            ),
            TensorComponent(
                "train.optimizer", lambda: moment_tensors(self._optimizer), lambda: self._num_writes
            ),
            TensorComponent("train.buffers", lambda: list(network.buffers()), lambda: None),
        ]
        for name, module in self.model.frozen_modules.items():
            components += module_components(f"train.{name}", module)
        return components

    # --- update ---------------------------------------------------------------------------------

    def update(self, scored: Sequence[ScoredRollout]) -> list[UpdateStats]:
        """Train on one window of rollouts: num_updates_per_batch optimizer steps.

        The samples are split into that many consecutive parts. The anchor of all parts is fixed
        before the first step, in the very slices the steps will use.
        """
        self._require_on_device("update")
        rows = self._algorithm.rows(scored)
        parts = self._split(rows, num_samples=sum(len(one) for one in scored))
        rows, anchor_metrics = self._algorithm.anchor(
            self.model, rows, [index for part in parts for index in part]
        )
        stats = [self._step(rows, part) for part in parts]
        first = UpdateStats({**stats[0].metrics, **anchor_metrics}, stats[0].skipped)
        return [first, *stats[1:]]

    def _split(self, rows: Rows, num_samples: int) -> list[list[Tensor]]:
        """Row indices: one list per optimizer step, of slices of at most micro_batch_size rows."""
        num_parts = self._config.num_updates_per_batch
        part_of_row = self._places(num_samples)[rows.sample_index] * num_parts // num_samples
        parts = [torch.nonzero(part_of_row == part).flatten() for part in range(num_parts)]
        return [list(part.split(self._config.micro_batch_size)) for part in parts if len(part)]

    def _places(self, num_samples: int) -> Tensor:
        """[num_samples] each sample's place in the order that is cut into parts."""
        if not self._config.shuffle_updates:
            return torch.arange(num_samples, device=self._device)
        # A function of seed and step, so that a resumed run draws the same parts.
        generator = torch.Generator().manual_seed(seed_of(f"{self._seed}/parts/{self._num_steps}"))
        return torch.randperm(num_samples, generator=generator).to(self._device)

    def _step(self, rows: Rows, slices: Sequence[Tensor]) -> UpdateStats:
        """One optimizer step on the mean loss over the rows of all slices."""
        num_rows = sum(len(index) for index in slices)
        details: list[Mapping[str, Tensor]] = []
        for index in slices:
            losses = self._algorithm.loss(self.model, rows.select(index))
            (losses.loss.sum() / num_rows).backward()
            details.append(losses.details)
        joined = {name: torch.cat([d[name] for d in details]) for name in details[0]}
        grad_norm = self._clip_gradients()
        skipped = self._reason_to_skip(grad_norm)
        learning_rate = self._apply_learning_rate()
        if skipped is None:
            self._optimizer.step()
            self._num_steps += 1
            self._num_writes += 1
        else:
            logger.warning("optimizer step skipped: %s", skipped)
        # Gradients are dropped here, not before the next backward, so parking never carries them.
        self._optimizer.zero_grad(set_to_none=True)
        metrics = {
            **self._algorithm.metrics(joined),
            "grad_norm": grad_norm,
            "lr": learning_rate,
            "skipped_steps": float(skipped is not None),
        }
        return UpdateStats(metrics, skipped)

    def _clip_gradients(self) -> float:
        """Global norm before clipping."""
        norm = nn.utils.get_total_norm(
            [p.grad for p in self._trained.values() if p.grad is not None]
        )
        if norm.isfinite():  # scaling by a NaN would hide which gradients it came from
            nn.utils.clip_grads_with_norm_(self._trained.values(), self._config.max_grad_norm, norm)
        return float(norm)

    def _reason_to_skip(self, grad_norm: float) -> str | None:
        if not math.isfinite(grad_norm):
            names = [
                name
                for name, parameter in self._trained.items()
                if parameter.grad is not None and not bool(parameter.grad.isfinite().all())
            ]
            return f"non-finite gradient (norm {grad_norm}) in {', '.join(names) or 'the norm'}"
        if grad_norm == 0:  # the moments alone would still move the weights
            return "zero gradient: every group has equal rewards"
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
        """Host copies of the adapter or of all network weights, float32 where trained."""
        self._require_on_device("read weights")
        network = self.model.network
        source = adapter_parameters(network) if adapter else dict(network.named_parameters())
        tensors = {name: p.detach().to("cpu", copy=True) for name, p in source.items()}
        probe = self._make_probe() if with_probe else None
        return WeightPayload(self.weight_version, tensors, is_adapter=adapter, probe=probe)

    def _make_probe(self) -> Probe:
        generator = torch.Generator().manual_seed(seed_of("weight-sync-probe"))
        latents = torch.randn(1, *self._latent_shape, generator=generator)
        sigma = torch.tensor([0.7])
        conditioning = self.model.example_conditioning(1, generator)
        inputs = (latents.to(self._device), sigma.to(self._device), conditioning)
        velocity = self.model.velocity(*inputs).cpu()
        with adapter_disabled(self.model.network):
            base_velocity = self.model.velocity(*inputs).cpu()
        return Probe(latents, sigma, conditioning.to("cpu"), velocity, base_velocity)

    def state_tensors(self, adapter_only: bool) -> dict[str, Tensor]:
        """The weights a checkpoint holds: trained ones, or the whole network."""
        self._require_on_device("save")
        source = self._trained if adapter_only else dict(self.model.network.named_parameters())
        return {name: p.detach().to("cpu", copy=True) for name, p in source.items()}

    def optimizer_state(self) -> dict[str, Any]:
        self._require_on_device("save")
        return {"optimizer": self._optimizer.state_dict(), "num_steps": self._num_steps}

    def load_state(self, tensors: Mapping[str, Tensor], optimizer_state: Mapping[str, Any]) -> None:
        """Restore what `state_tensors` and `optimizer_state` gave.

        Raises ModelError, with nothing written, when they do not fit.
        """
        self._require_on_device("load")
        parameters = dict(self.model.network.named_parameters())
        expected = self._trained if tensors.keys() == self._trained.keys() else parameters
        require_fit(expected, tensors)
        trained = list(self._trained.values())
        for index, state in optimizer_state["optimizer"]["state"].items():
            if index >= len(trained) or state["exp_avg"].shape != trained[index].shape:
                raise ModelError(f"the optimizer state does not fit at trained tensor {index}")
        copy_into(expected, tensors)
        # The moments only: learning rate, betas and decay are this run's own settings.
        own_groups = self._optimizer.state_dict()["param_groups"]
        # Copies, because the memory of a tensor that torch.load made cannot be parked.
        moments = {
            index: {name: value.clone() for name, value in state.items()}
            for index, state in optimizer_state["optimizer"]["state"].items()
        }
        self._optimizer.load_state_dict({"state": moments, "param_groups": own_groups})
        self._num_steps = optimizer_state["num_steps"]
        self._num_writes += 1

    def _require_on_device(self, action: str) -> None:
        if self._is_parked:
            raise ResidencyError(f"the train stack was asked to {action} while parked")
