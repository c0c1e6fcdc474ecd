"""The values that travel between roles, each made by one role and consumed by the next.

    PromptBatch -> RolloutRequest -> Rollout -> Rewards -> ScoredRollout -> rows -> UpdateStats

Dimensions: P prompts x G samples per prompt = B samples, T denoising steps, S recorded (SDE) steps.
Samples are ordered prompt-major: sample b belongs to prompt b // G.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PromptRecord:
    """One line of a prompt file."""

    prompt_id: str
    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """What scorers compare with, e.g. {"text": "374", "text_color": "red"}."""
    images: tuple[str, ...] = ()
    """Files of the images that the model is given beside the text: what is edited or continued."""


@dataclass(frozen=True)
class PromptBatch:
    """P prompts."""

    records: tuple[PromptRecord, ...]

    def __len__(self) -> int:
        return len(self.records)

    @property
    def texts(self) -> list[str]:
        return [record.text for record in self.records]


MAIN_SUITE = "eval"
"""The suite of data.eval, scored with the reward that is trained on and by the judges."""


@dataclass(frozen=True)
class PromptSuite:
    """Prompts that are evaluated together."""

    name: str
    records: tuple[PromptRecord, ...]
    samples_per_prompt: int

    def __len__(self) -> int:
        return len(self.records)


@dataclass(frozen=True)
class SamplingParams:
    """How images are sampled; the same for every sample of a request."""

    num_inference_steps: int
    guidance_scale: float
    height: int
    width: int
    eta: float
    """Noise level of the SDE steps; 0 makes every step an ODE step."""
    kernel: str
    """Name of the transition kernel, see `samplers.kernels`."""
    solver: str = "euler"
    """Name of the solver of the steps that are not stochastic, see `samplers.solvers`."""
    num_frames: int = 1
    """F, of a video."""
    low_noise_guidance_scale: float | None = None
    """Guidance below the level at which a model's second expert takes over; None: the same."""
    decoded_frames: str | int = "all"
    """Which frames of a video become pixels: `all`, `first`, or every n-th from the first on."""


@dataclass(frozen=True)
class RolloutRequest:
    """Everything an engine needs to sample B = P x G images, as plain values."""

    prompts: PromptBatch
    samples_per_prompt: int
    sampling: SamplingParams
    sigmas: tuple[float, ...]
    """T+1 noise levels from 1 to 0."""
    sde_steps: tuple[tuple[int, ...], ...]
    """For each of B samples its S steps that are sampled as an SDE and recorded, ascending; S is
    the same for all, and 0 for an ODE."""
    initial_noise_keys: tuple[str, ...]
    """B keys; equal keys give equal start noise."""
    step_noise_keys: tuple[str, ...]
    """B keys; the noise of step t is drawn from key and t."""
    weight_version: int | None
    """The version the engine must hold; None: the weights it was built with."""
    kept_steps: tuple[int, ...] = ()
    """Steps before which the latents are kept besides, ascending, for algorithms that go on from
    there."""

    def __len__(self) -> int:
        return len(self.prompts) * self.samples_per_prompt

    @property
    def num_sde_steps(self) -> int:
        """S."""
        return len(self.sde_steps[0]) if self.sde_steps else 0

    @property
    def start_names(self) -> list[tuple[int, str]]:
        """B names; samples of equal ones have the same prompt and start noise, and so are the same
        until their first stochastic step."""
        group_size = self.samples_per_prompt
        return [(b // group_size, key) for b, key in enumerate(self.initial_noise_keys)]

    @property
    def sample_records(self) -> tuple[PromptRecord, ...]:
        """B prompt records, one per sample."""
        return tuple(r for r in self.prompts.records for _ in range(self.samples_per_prompt))


class Conditioning:
    """What a model is told about B samples: a frozen dataclass of [B, ...] tensors per family.

    Tensors of different length in their second dimension are joined by filling up with zeros, so
    a family whose prompts differ in length keeps a mask beside its embeddings.
    """

    def _map(self, function: Callable[[Tensor], Tensor]) -> Self:
        changed = {f.name: function(getattr(self, f.name)) for f in fields(self)}  # type: ignore[arg-type]
        return replace(self, **changed)  # type: ignore[type-var]

    def select(self, index: Tensor) -> Self:
        """The rows `index`; rows may repeat."""
        return self._map(lambda tensor: tensor[index.to(tensor.device)])

    def to(self, device: Any) -> Self:
        return self._map(lambda tensor: tensor.to(device))

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """Concatenate along the batch."""
        import torch

        def joined(tensors: Sequence[Tensor]) -> Tensor:
            longest = max((tensor.shape[1] for tensor in tensors if tensor.ndim > 1), default=0)
            return torch.cat([_filled_up(tensor, longest) for tensor in tensors])

        names = [f.name for f in fields(cls)]  # type: ignore[arg-type]
        values = {name: joined([getattr(part, name) for part in parts]) for name in names}
        return replace(parts[0], **values)  # type: ignore[type-var]


def _filled_up(tensor: Tensor, length: int) -> Tensor:
    """[B, length, ...], zeros behind what was there; [B] stays as it is."""
    if tensor.ndim < 2 or tensor.shape[1] == length:
        return tensor
    filled = tensor.new_zeros((len(tensor), length, *tensor.shape[2:]))
    filled[:, : tensor.shape[1]] = tensor
    return filled


@dataclass(frozen=True)
class Trajectory:
    """The recorded part of B denoising paths."""

    latents: Tensor
    """[B, S, *latent] state before each recorded step, float32."""
    next_latents: Tensor
    """[B, S, *latent] state after it, exactly the numbers the log-prob was computed on."""
    log_probs: Tensor
    """[B, S] log-probability under the sampling policy, mean over latent elements, float32."""
    steps: Tensor
    """[B, S] int64: which step of the schedule each one is, as the engine made it."""
    kept_latents: Tensor
    """[B, K, *latent] state before each of the request's kept_steps, float32."""
    final_latents: Tensor
    """[B, *latent] the clean end of the path."""


@dataclass(frozen=True)
class Rollout:
    """What an engine returns for one request."""

    request: RolloutRequest
    trajectory: Trajectory
    conditioning: Conditioning
    negative_conditioning: Conditioning | None
    """What guidance leads away from; None where the model's guidance needs none."""
    images: Tensor
    """[B, 3, H, W] uint8, of videos [B, F, 3, H, W]."""
    sigmas: tuple[float, ...]
    """The noise levels the engine stepped through, to be held against those asked for."""


@dataclass(frozen=True)
class Rewards:
    """Scores of B samples."""

    total: Tensor
    """[B] weighted sum, float32."""
    components: Mapping[str, Tensor]
    """Each scorer's own score, [B] float32."""
    valid: Tensor
    """[B] bool; False where a scorer failed and its group is dropped."""


@dataclass(frozen=True)
class ScoredRollout:
    """What training needs of a rollout: media end at the reward service.

    On several ranks, `rewards` and `advantages` are those of all N samples of the rollout, the same
    on every rank; the rest is this rank's b samples of them.
    """

    request: RolloutRequest
    trajectory: Trajectory
    conditioning: Conditioning
    negative_conditioning: Conditioning | None
    places: Tensor
    """[b] int64: where this rank's samples are among the N."""
    rewards: Rewards
    """Of N samples."""
    advantages: Tensor
    """[N] float32, 0 where not trained."""
    trained: Tensor
    """[N] bool: valid samples that training takes; the others' rows are left out."""

    def __len__(self) -> int:
        """This rank's samples."""
        return len(self.request)

    @property
    def num_samples(self) -> int:
        """N."""
        return len(self.advantages)


@dataclass(frozen=True)
class UpdateStats:
    """What one optimizer step did."""

    metrics: Mapping[str, float]
    skipped: str | None = None
    """Why the step was not taken (with the parameter names), None when it was."""
