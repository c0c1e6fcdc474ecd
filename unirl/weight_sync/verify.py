"""Proof after a push: what the engine holds and what it computes, not what it says."""

from __future__ import annotations

from unirl.core.errors import WeightSyncError
from unirl.weight_sync.base import WeightTarget
from unirl.weight_sync.payload import LoadReport, WeightPayload, checksum

PROBE_TOLERANCE = 0.02
"""Largest relative difference of probe outputs: bf16 arithmetic on differently aligned memory."""


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
    if payload.probe is None:
        return
    difference = target.check_probe(payload)
    if not difference <= PROBE_TOLERANCE:
        raise WeightSyncError(
            f"the engine's output on the probe differs from the trainer's by {difference:.3g} "
            f"(relative; at most {PROBE_TOLERANCE}): it does not sample from the pushed weights"
        )
