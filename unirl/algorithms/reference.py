"""Distance from a reference policy, and where the reference's weights come from."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from unirl.algorithms.base import BASE, Policy, RowLosses, ShadowRule
from unirl.algorithms.transitions import TransitionRows, transition_of, velocity_of
from unirl.config.schema import AlgorithmConfig

EMA = "ema"
"""A running average of the trained weights."""


class ReferencePenalty:
    """kl_coefficient times the divergence from the reference; costs no forward at 0."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self._coefficient = config.kl_coefficient
        self._form = config.kl_form
        self._weights = BASE if config.reference == "base" else EMA
        self._decay = config.ema_decay

    def shadows(self) -> Mapping[str, ShadowRule]:
        """What reference=ema needs; nothing where the reference is the base or unused."""
        if self._weights == BASE or self._coefficient == 0:
            return {}
        return {EMA: ShadowRule(lambda num_steps: self._decay)}

    def reference(self, policy: Policy, rows: TransitionRows) -> Tensor | None:
        """[r, *latent] the reference's velocity, to be asked for before gradients begin; None at
        coefficient 0."""
        if self._coefficient == 0:
            return None
        with torch.no_grad(), policy.using(self._weights):
            return velocity_of(policy.model, rows)

    def added_to(
        self,
        policy_loss: Tensor,
        details: Mapping[str, Tensor],
        rows: TransitionRows,
        velocity: Tensor,
        reference: Tensor | None,
    ) -> RowLosses:
        """policy_loss [r] plus the weighted divergence of velocity [r, *latent] from the reference,
        with both among the details."""
        loss, parts = policy_loss, {**details, "policy_loss": policy_loss}
        if reference is not None:
            parts["kl_reference"] = divergence(self._form, rows, velocity, reference)
            loss = loss + self._coefficient * parts["kl_reference"]
        parts["loss"] = loss
        return RowLosses(loss, {name: value.detach() for name, value in parts.items()})


def loss_metrics(details: Mapping[str, Tensor]) -> dict[str, float]:
    """Means of what `ReferencePenalty.added_to` put among the details."""
    names = ("loss", "policy_loss", "kl_reference")
    return {name: float(details[name].mean()) for name in names if name in details}


def divergence(form: str, rows: TransitionRows, velocity: Tensor, reference: Tensor) -> Tensor:
    """[r] of velocities [r, *latent]; a mean over latent elements, float32.

    nats          KL of the two Gaussians, (mean - mean_ref)^2 / (2 std^2)
    step_scaled   nats times -dt: what flow_grpo and verl-omni call KL
    mean_mse      (mean - mean_ref)^2, Flow-Factory's x-based
    velocity_mse  (v - v_ref)^2, Flow-Factory's v-based and DiffusionNFT's
    """
    if form == "velocity_mse":
        return ((velocity - reference) ** 2).flatten(1).mean(dim=1)
    ours, theirs = transition_of(rows, velocity), transition_of(rows, reference)
    match form:
        case "nats":
            return ours.kl(theirs)
        case "step_scaled":
            return ours.kl(theirs) * rows.time_step
        case "mean_mse":
            return ((ours.mean - theirs.mean) ** 2).flatten(1).mean(dim=1)
    raise ValueError(f"unknown form {form!r}")
