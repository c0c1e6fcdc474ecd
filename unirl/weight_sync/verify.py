"""Proof after a push: what the engine holds and what it computes, not what it says."""

from __future__ import annotations

from torch import Tensor

from unirl.core.errors import WeightSyncError
from unirl.weight_sync.base import WeightTarget
from unirl.weight_sync.payload import LoadReport, Probe, WeightPayload, checksum

PROBE_TOLERANCE = 0.02
"""Largest relative difference of probe outputs: bf16 arithmetic on differently aligned memory."""
BASE_LIKENESS = 10
"""An engine this many times nearer to the base's output than to the trainer's ignores the adapter.

Early adapters change the output by less than PROBE_TOLERANCE, so nearness has to be compared."""


def verify_load(payload: WeightPayload, report: LoadReport, target: WeightTarget) -> None:
    """Raise WeightSyncError unless every tensor is bound, equal, and used by the engine."""
    if report.num_bound != len(payload.tensors):
        raise WeightSyncError(
            f"the engine bound {report.num_bound} of {len(payload.tensors)} pushed tensors"
        )
    expected = checksum(payload.tensors)
    if report.checksum != expected:
        raise WeightSyncError(
            f"the engine's weights differ from the pushed ones (sha256 {report.checksum[:12]} "
            f"instead of {expected[:12]})"
        )
    if payload.probe is not None:
        _verify_output(payload.probe, target.answer(payload.probe))


def _verify_output(probe: Probe, answer: Tensor) -> None:
    to_trainer = float((answer - probe.velocity).norm())
    to_base = float((answer - probe.base_velocity).norm())
    difference = to_trainer / max(float(probe.velocity.norm()), 1e-12)
    if not difference <= PROBE_TOLERANCE:
        raise WeightSyncError(
            f"the engine's output on the probe differs from the trainer's by {difference:.3g} "
            f"(relative; at most {PROBE_TOLERANCE}): it does not sample from the pushed weights"
        )
    if BASE_LIKENESS * to_base < to_trainer:
        raise WeightSyncError(
            "the engine's output on the probe is that of the model without the adapter "
            f"(distance {to_base:.3g}, to the trainer's {to_trainer:.3g}): the adapter is loaded "
            "but not used"
        )
