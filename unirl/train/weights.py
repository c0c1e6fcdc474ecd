"""All weights that change: trained parameters, their moments and shadows; read, saved, restored.

The train stack's update loop writes them; weight syncs and checkpoints read them, from the device
or, while they are parked, from the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from unirl.algorithms.base import Algorithm
from unirl.config.schema import OptimizerConfig
from unirl.core.components import Movable
from unirl.core.errors import ModelError
from unirl.core.types import SamplingParams
from unirl.memory.hostmem import HostArena
from unirl.memory.movers import RoleWeights
from unirl.models.base import DiffusionModel
from unirl.models.lora import adapter_disabled, adapter_parameters
from unirl.models.parameters import require_fit
from unirl.samplers.noise import seed_of
from unirl.train.backend import TrainBackend, write_share
from unirl.train.components import train_components
from unirl.train.optimizer import make_optimizer, moment_tensors, moments_of, set_optimizer_step
from unirl.train.shadows import WeightSet
from unirl.weight_sync.payload import Probe, WeightPayload


class TrainedWeights:
    """What an optimizer step writes, and what lies beside it on the device.

    `weight_version` counts optimizer steps taken since the start of the run.
    """

    def __init__(
        self,
        model: DiffusionModel,
        backend: TrainBackend,
        algorithm: Algorithm[Any, Any],
        optimizer: OptimizerConfig,
        sampling: SamplingParams,
        device: torch.device,
        host: HostArena,
        teachers: Mapping[str, Mapping[str, Tensor]],
        *,
        moments_on_demand: bool,
    ) -> None:
        """As of `TrainStack`."""
        self._model = model
        self._backend = backend
        self._sampling = sampling
        self._device = device
        # Kept: while a sharded network is gathered, it has other parameters under these names.
        self._parameters = dict(model.network.named_parameters())
        self.trained = {n: p for n, p in self._parameters.items() if p.requires_grad}
        """Parameters by name."""
        if not self.trained:
            raise ModelError("stack: nothing to train, no parameter of the network requires grad")
        self.optimizer = make_optimizer(self.trained.values(), optimizer)
        self._num_steps = 0
        self._num_writes = 0
        self.shadows = {name: self._weight_set() for name in algorithm.shadows()}
        self.teachers = {n: self._read_teacher(n, w) for n, w in teachers.items()}
        self._sampled = algorithm.sampling_weights()
        components = train_components(
            model,
            backend,
            self._parameters,
            moments=lambda: moment_tensors(self.optimizer),
            num_writes=lambda: self._num_writes,
            shadows={name: weights.tensors for name, weights in self.shadows.items()},
            teachers={name: weights.tensors for name, weights in self.teachers.items()},
            moments_on_demand=moments_on_demand,
        )
        self._weights = RoleWeights(components, host, before_parking=backend.settle)

    @property
    def weight_version(self) -> int:
        return self._num_steps

    @property
    def parts(self) -> Sequence[Movable]:
        """What the residency planner moves."""
        return self._weights.parts

    @property
    def readable_while_parked(self) -> bool:
        """Whether weights can be read from their host copies; shards must be gathered on the
        device."""
        return self._backend.holds_whole

    def require_on_device(self, action: str) -> None:
        self._weights.require_resident("the train stack", action)

    def sampling_weights(self) -> AbstractContextManager[None]:
        """The network has the weights that rollouts sample with."""
        shadow = self._sampled_shadow()
        return nullcontext() if shadow is None else shadow.active()

    def step(self, around: AbstractContextManager[None]) -> None:
        """An optimizer step, within `around`."""
        # Counted before it: one that fails halfway has written already, and no copy of the weights
        # may pass for current then.
        self._num_steps += 1
        self._num_writes += 1
        with around:
            self.optimizer.step()

    def _sampled_shadow(self) -> WeightSet | None:
        return None if self._sampled is None else self.shadows[self._sampled]

    def _weight_set(self) -> WeightSet:
        return WeightSet(self.trained, self._backend.local)

    def _read_teacher(self, name: str, tensors: Mapping[str, Tensor]) -> WeightSet:
        """Raises ModelError naming the teacher when its weights are not like the trained ones."""
        try:
            require_fit(self.trained, tensors)
        except ModelError as error:
            raise ModelError(f"algorithm.teachers: {name}: {error}") from error
        weights = self._weight_set()
        for parameter, held in weights.tensors.items():
            write_share(self._backend, held, tensors[parameter])
        return weights

    # --- weight sync ----------------------------------------------------------------------------

    @torch.no_grad()
    def read_weights(self, *, adapter: bool, with_probe: bool) -> WeightPayload:
        """Host copies of the adapter or of all network weights that rollouts sample with, float32
        where trained.

        A parked stack is read from the host, where it moves nothing; it cannot answer a probe then,
        so the payload has none. Collective: every rank gets whole tensors.
        """
        source: Mapping[str, Tensor]
        source = adapter_parameters(self._model.network) if adapter else self._parameters
        shadow = self._sampled_shadow()
        if shadow is not None:
            source = {name: shadow.tensors.get(name, tensor) for name, tensor in source.items()}
        tensors = self._read(source, "read weights")
        probe = self._make_probe() if with_probe and self._weights.is_resident else None
        return WeightPayload(self.weight_version, tensors, is_adapter=adapter, probe=probe)

    def _make_probe(self) -> Probe:
        generator = torch.Generator().manual_seed(seed_of("weight-sync-probe"))
        shape = self._model.latent_shape(self._sampling)
        latents = torch.randn(1, *shape, generator=generator)
        sigma = torch.tensor([0.7])
        conditioning = self._model.example_conditioning(1, self._sampling, generator)
        inputs = (latents.to(self._device), sigma.to(self._device), conditioning)
        with self.sampling_weights():
            velocity = self._model.velocity(*inputs).cpu()
        with adapter_disabled(self._model.network):
            base_velocity = self._model.velocity(*inputs).cpu()
        return Probe(latents, sigma, conditioning.to("cpu"), velocity, base_velocity)

    # --- checkpoints ----------------------------------------------------------------------------

    def state_tensors(self, adapter_only: bool) -> dict[str, Tensor]:
        """The weights a checkpoint holds, whole: trained ones, or the whole network. Collective."""
        return self._read(self.trained if adapter_only else self._parameters, "save")

    def shadow_tensors(self) -> dict[str, Tensor]:
        """Whole shadow weights by `<shadow>.<parameter>`; none without shadows. Collective."""
        return self._read(self._named_shadows(), "save")

    def optimizer_state(self) -> dict[str, Any]:
        """AdamW's state with whole tensors, and the steps taken. Collective."""
        state = self.optimizer.state_dict()
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
        self.require_on_device("load")
        self._backend.settle()
        names = self.trained.keys() == tensors.keys()
        expected = self.trained if names else self._parameters
        require_fit(expected, tensors)
        held = self._named_shadows()
        _require_shadows(held, shadows)
        trained = list(self.trained.values())
        for index, state in optimizer_state["optimizer"]["state"].items():
            if index >= len(trained) or state["exp_avg"].shape != trained[index].shape:
                raise ModelError(f"the optimizer state does not fit at trained tensor {index}")
        for name, parameter in expected.items():
            write_share(self._backend, parameter, tensors[name])
        for name, shadow in held.items():
            write_share(self._backend, shadow, shadows[name])
        # The moments only: learning rate, betas and decay are this run's own settings.
        own_groups = self.optimizer.state_dict()["param_groups"]
        moments = {
            index: {
                name: value.clone()
                if name == "step"
                else self._backend.share_of(value, like=trained[index])
                for name, value in state.items()
            }
            for index, state in optimizer_state["optimizer"]["state"].items()
        }
        self.optimizer.load_state_dict({"state": moments, "param_groups": own_groups})
        self._num_steps = optimizer_state["num_steps"]
        self._num_writes += 1

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Begin with these trained weights: whole tensors, on every rank. Shadows begin there too.

        Raises ModelError, with nothing written, when they do not fit.
        """
        self.require_on_device("load")
        self._backend.settle()
        require_fit(self.trained, tensors)
        for name, parameter in self.trained.items():
            write_share(self._backend, parameter, tensors[name])
        for shadow in self.shadows.values():
            shadow.follow(0.0)
        self._num_writes += 1

    def sharded_state(self, adapter_only: bool) -> dict[str, Tensor]:
        """Weights, moments and shadows under `weights.<name>`, `exp_avg.<name>`,
        `shadow.<shadow>.<name>`, ..., as they lie here.

        A sharded save writes these tensors; a sharded load reads into them, which makes the
        moments if there were none.
        """
        self.require_on_device("save")
        self._backend.settle()
        source = self.trained if adapter_only else self._parameters
        state = {f"weights.{name}": parameter.detach() for name, parameter in source.items()}
        for name, parameter in self.trained.items():
            for moment, tensor in moments_of(self.optimizer, parameter).items():
                state[f"{moment}.{name}"] = tensor
        return state | {f"shadow.{name}": t for name, t in self._named_shadows().items()}

    def finish_sharded_load(self, num_steps: int) -> None:
        """After tensors of `sharded_state` were read from a checkpoint at this optimizer step."""
        set_optimizer_step(self.optimizer, num_steps)
        self._num_steps = num_steps
        self._num_writes += 1

    # --- reading --------------------------------------------------------------------------------

    def _read(self, source: Mapping[str, Tensor], action: str) -> dict[str, Tensor]:
        """Whole copies on the CPU, wherever the weights are. Collective."""
        if self.readable_while_parked:
            return {name: self._weights.on_host(tensor) for name, tensor in source.items()}
        self.require_on_device(action)
        self._backend.settle()
        return {name: self._backend.whole(tensor) for name, tensor in source.items()}

    def _named_shadows(self) -> dict[str, Tensor]:
        return {
            f"{shadow}.{name}": tensor
            for shadow, weights in self.shadows.items()
            for name, tensor in weights.tensors.items()
        }


def _require_shadows(held: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Raise ModelError unless a checkpoint has exactly the shadow weights of this algorithm."""
    ours, theirs = ({name.partition(".")[0] for name in names} for names in (held, saved))
    if held.keys() != saved.keys():
        raise ModelError(
            f"it has the shadow weights {sorted(theirs) or 'none'}, but this algorithm keeps "
            f"{sorted(ours) or 'none'} beside the trained ones; resume with the algorithm that "
            "saved it, or start without load_dir."
        )
