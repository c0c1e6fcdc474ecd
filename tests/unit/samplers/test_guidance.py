"""Classifier-free guidance."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unirl.core.types import Conditioning
from unirl.samplers.guidance import classifier_free


@dataclass(frozen=True)
class Value(Conditioning):
    value: Tensor
    """[B, 1]"""


class Recorder:
    """velocity = conditioning x latents; keeps what it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        assert isinstance(conditioning, Value)
        self.calls.append((latents, sigma, conditioning.value))
        return latents * conditioning.value


LATENTS = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
SIGMA = torch.tensor([0.9, 0.5])
POSITIVE, NEGATIVE = Value(torch.tensor([[2.0], [3.0]])), Value(torch.tensor([[5.0], [7.0]]))


def test_both_halves_run_in_one_batch_with_the_unconditional_first():
    model = Recorder()
    classifier_free(model.velocity, LATENTS, SIGMA, POSITIVE, NEGATIVE, 4.0)
    ((latents, sigma, value),) = model.calls
    assert value.flatten().tolist() == [5, 7, 2, 3]
    assert torch.equal(latents, LATENTS.repeat(2, 1))
    assert torch.equal(sigma, SIGMA.repeat(2))


def test_guidance_extrapolates_from_the_unconditional_velocity():
    guided = classifier_free(Recorder().velocity, LATENTS, SIGMA, POSITIVE, NEGATIVE, 4.0)
    unconditional, conditional = LATENTS * NEGATIVE.value, LATENTS * POSITIVE.value
    assert torch.equal(guided, unconditional + 4.0 * (conditional - unconditional))


def test_scale_one_is_the_conditional_velocity_and_scale_zero_the_unconditional():
    one = classifier_free(Recorder().velocity, LATENTS, SIGMA, POSITIVE, NEGATIVE, 1.0)
    zero = classifier_free(Recorder().velocity, LATENTS, SIGMA, POSITIVE, NEGATIVE, 0.0)
    torch.testing.assert_close(one, LATENTS * POSITIVE.value)
    torch.testing.assert_close(zero, LATENTS * NEGATIVE.value)


def test_without_a_negative_the_model_runs_once_at_the_given_size():
    model = Recorder()
    velocity = classifier_free(model.velocity, LATENTS, SIGMA, POSITIVE, None, 4.0)
    assert torch.equal(velocity, LATENTS * POSITIVE.value)
    assert [len(call[0]) for call in model.calls] == [2]
