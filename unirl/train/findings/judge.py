"""What the numbers of an examination mean: one plain sentence each, and the key to change.

Pure: in go the configuration, what the algorithm needs and `train.examination`'s numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from unirl.config.schema import RunConfig
from unirl.core.capabilities import AlgorithmCapabilities
from unirl.train.examination import Measured
from unirl.train.findings import agreement, learning, sampling
from unirl.train.findings.case import Case, Finding

Check = Callable[[Case], Iterator[Finding]]
"""Gives one finding, or none where there is nothing to look at."""

_CHECKS: tuple[Check, ...] = (
    agreement.layers,
    agreement.ratio,
    agreement.replay,
    agreement.batch_shape,
    sampling.schedule,
    sampling.window,
    sampling.equal_groups,
    learning.gradient_size,
    learning.silent_tensors,
    learning.gradient_by_step,
    learning.trust_region,
)


def findings(
    config: RunConfig, capabilities: AlgorithmCapabilities, measured: Measured
) -> tuple[Finding, ...]:
    """In the order in which one thing explains the next."""
    case = Case(config, capabilities, measured)
    return tuple(finding for check in _CHECKS for finding in check(case))
