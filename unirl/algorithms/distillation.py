"""On-policy distillation (arXiv:2306.13649; DiffusionOPD): teachers correct a student's own steps.

    loss = KL(N(mean, std) || N(mean_teacher, std)) = (mean - mean_teacher)^2 / (2 std^2)

at the states of the student's rollout, or (mean - mean_teacher)^2 / 2. A teacher is another set of
the trained weights; each prompt names its own by metadata[teacher_key].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl.algorithms.anchored import Anchored
from unirl.algorithms.base import Algorithm, DifferentiableReward, Policy, RowLosses
from unirl.algorithms.reference import divergence
from unirl.algorithms.transitions import TransitionRows, transition_rows, velocity_of
from unirl.config.catalog import ALGORITHMS
from unirl.config.schema import AlgorithmConfig
from unirl.core.errors import DataError
from unirl.core.types import PromptRecord, ScoredRollout


@dataclass(frozen=True)
class StudentRows(Anchored):
    """Transitions of the student, and who teaches there."""

    transitions: TransitionRows
    teacher: Tensor
    """[R] int64: which of the teachers."""


@dataclass(frozen=True)
class TaughtRows(Anchored):
    """The same with what the teachers say."""

    student: StudentRows
    teacher_velocity: Tensor
    """[R, *latent] guided, float32."""


class Distillation(Algorithm[StudentRows, TaughtRows]):
    """Rows are transitions; the anchor asks every teacher about its own, once per window."""

    capabilities = ALGORITHMS["distillation"].capabilities

    def __init__(self, config: AlgorithmConfig, reward: DifferentiableReward) -> None:
        self._config = config
        self._domains = tuple(config.teachers)

    def teachers(self) -> Mapping[str, str]:
        return {weights_of(domain): file for domain, file in self._config.teachers.items()}

    def check_prompts(self, records: Sequence[PromptRecord], key: str) -> None:
        for record in records:
            teacher_of(record, self._config, key)

    def rows(self, scored: Sequence[ScoredRollout]) -> StudentRows:
        transitions = transition_rows(scored)
        records = [record for one in scored for record in one.request.sample_records]
        domains = [teacher_of(record, self._config, "data.train") for record in records]
        of_sample = torch.tensor([self._domains.index(domain) for domain in domains])
        samples = transitions.sample_index
        return StudentRows(transitions, of_sample.to(samples.device)[samples])

    def anchor(
        self, policy: Policy, rows: StudentRows, slices: Sequence[Tensor]
    ) -> tuple[TaughtRows, Mapping[str, float]]:
        velocity = torch.zeros_like(rows.transitions.latents)
        for number, domain in enumerate(self._domains):
            with policy.using(weights_of(domain)):
                for index in slices:
                    taught = rows.teacher[index].tolist()
                    own = index[[place for place, who in enumerate(taught) if who == number]]
                    # Forwards of sharded weights are collective, so every rank makes as many: a
                    # teacher without rows in a slice is asked about one of another's.
                    asked = own if len(own) else index[:1]
                    answer = velocity_of(policy.model, rows.transitions.select(asked))
                    velocity[own] = answer[: len(own)]
        return TaughtRows(rows, velocity), {}

    def loss(self, policy: Policy, rows: TaughtRows) -> RowLosses:
        transitions, taught = rows.student.transitions, rows.teacher_velocity
        velocity = velocity_of(policy.model, transitions)
        kl = divergence("nats", transitions, velocity, taught)
        if self._config.distill_form == "nats":
            loss = kl
        else:
            loss = divergence("mean_mse", transitions, velocity, taught) / 2
        details = {"loss": loss, "kl_teacher": kl, "teacher": rows.student.teacher.float()}
        return RowLosses(loss, {name: value.detach() for name, value in details.items()})

    def metrics(self, details: Mapping[str, Tensor]) -> Mapping[str, float]:
        metrics = {name: float(details[name].mean()) for name in ("loss", "kl_teacher")}
        if len(self._domains) > 1:
            for number, domain in enumerate(self._domains):
                own = details["kl_teacher"][details["teacher"] == number]
                if len(own):
                    metrics[f"kl_teacher_{domain}"] = float(own.mean())
        return metrics


def weights_of(domain: str) -> str:
    """The name under which `Policy.using` has the teacher of a domain."""
    return f"teacher-{domain}"


def teacher_of(record: PromptRecord, config: AlgorithmConfig, key: str) -> str:
    """The domain whose teacher a prompt has; DataError with the prompts' key where it has none."""
    domains = config.teachers
    if len(domains) == 1:
        return next(iter(domains))
    domain = record.metadata.get(config.teacher_key)
    if str(domain) not in domains:
        raise DataError(
            f"{key}: algorithm.teachers are {', '.join(domains)}, but metadata."
            f"{config.teacher_key} of prompt {record.text!r} is {domain!r}. Add a teacher, correct "
            "the record, or set algorithm.teacher_key."
        )
    return str(domain)
