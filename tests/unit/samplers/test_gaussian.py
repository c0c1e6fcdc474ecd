"""The Gaussian of a step against torch.distributions."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from unirl.samplers.gaussian import Gaussian


def random_gaussian(seed: int, shape: tuple[int, ...] = (3, 2, 4, 5)) -> Gaussian:
    generator = torch.Generator().manual_seed(seed)
    std = torch.rand(shape[0], generator=generator) + 0.1
    mean = torch.randn(shape, generator=generator)
    return Gaussian(mean, std.view(-1, *[1] * (len(shape) - 1)))


@pytest.mark.parametrize("shape", [(3, 40), (3, 8, 5), (3, 2, 4, 5), (3, 2, 2, 2, 5)])
def test_log_prob_is_the_mean_over_latent_elements_for_every_layout(shape):
    gaussian = random_gaussian(0, shape)
    value = torch.randn(shape, generator=torch.Generator().manual_seed(9))
    reference = Normal(gaussian.mean, gaussian.std.expand(shape)).log_prob(value)
    torch.testing.assert_close(gaussian.log_prob(value), reference.flatten(1).mean(dim=1))


def test_kl_is_the_exact_divergence_also_between_different_stds():
    left, right = random_gaussian(0), random_gaussian(1)
    reference = kl_divergence(
        Normal(left.mean, left.std.expand_as(left.mean)),
        Normal(right.mean, right.std.expand_as(right.mean)),
    )
    torch.testing.assert_close(left.kl(right), reference.flatten(1).mean(dim=1))
    assert not left.kl(left).abs().gt(1e-6).any()


def test_equal_content_has_equal_log_prob_and_kl_in_every_layout():
    layouts = [(3, 40), (3, 8, 5), (3, 2, 4, 5)]
    left, right = random_gaussian(0, (3, 40)), random_gaussian(1, (3, 40))
    results = []
    for shape in layouts:
        ones = (3, *[1] * (len(shape) - 1))
        a = Gaussian(left.mean.view(shape), left.std.view(ones))
        b = Gaussian(right.mean.view(shape), right.std.view(ones))
        results.append(torch.stack([a.log_prob(b.mean), a.kl(b)]))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


def test_sampling_is_mean_plus_std_times_the_noise_given():
    gaussian = random_gaussian(0)
    noise = torch.randn(gaussian.mean.shape, generator=torch.Generator().manual_seed(2))
    assert torch.equal(gaussian.sample(noise), gaussian.mean + gaussian.std * noise)


@pytest.mark.parametrize("std_shape", [(3,), (1, 1, 1, 1), (3, 2, 1, 1), (3, 1, 1)])
def test_a_std_that_would_broadcast_wrongly_is_refused(std_shape):
    with pytest.raises(ValueError, match="std has shape"):
        Gaussian(torch.zeros(3, 2, 4, 5), torch.ones(std_shape))


def test_a_value_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="against mean"):
        random_gaussian(0).log_prob(torch.zeros(1, 2, 4, 5))
