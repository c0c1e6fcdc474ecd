"""What a role declares about itself, so that nothing is probed by name. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineCapabilities:
    """What a rollout engine can do."""

    shares_train_weights: bool
    """Samples with the train stack's own parameters: no sync, nothing to park."""
    emits_log_probs: bool
    """Returns log-probs of the recorded steps, so `old_log_prob: rollout` is possible."""
    keeps_adapter_on_sleep: bool
    """A pushed adapter survives sleep and wake; otherwise it must be pushed after each wake."""
    shares_base: bool = False
    """Can sample with the train stack's frozen weights in place: rollout.share_base."""
    returns_recorded: bool = False
    """Returns the images that a prompt names instead of sampling, without denoising steps."""


@dataclass(frozen=True)
class SyncCapabilities:
    """What a weight sync moves, and whether reading and loading can be split."""

    staged: bool
    """Has `extract` (reads the trainer) and `push` (loads the engine) as two steps."""
    adapters_only: bool
    """Moves the LoRA adapter only; the engine keeps its own base weights."""


@dataclass(frozen=True)
class AlgorithmCapabilities:
    """What an algorithm needs from the loop."""

    needs_advantages: bool
    """Trains on advantages, so that their keys count."""
    needs_ema_rollout: bool
    """Samples with an EMA shadow of the trained weights."""
    supports_multi_update: bool
    """Several optimizer steps per rollout batch are sound (the ratio corrects for them)."""
    needs_stochastic_steps: bool
    """Trains on recorded SDE steps, so sampling.eta must be above 0."""
    differentiates_reward: bool = False
    """Sends gradients through scorers and decoder: both are needed while training."""
    needs_groups: bool = False
    """Compares the samples of a prompt by their rewards, without advantages."""
    needs_reference: bool = False
    """Always compares with a reference policy, not only with kl_coefficient above 0."""
    options: tuple[str, ...] = ()
    """Keys of the algorithm block that it reads, besides path, args and adv_clip_max."""
