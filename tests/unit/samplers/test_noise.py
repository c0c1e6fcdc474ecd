"""Noise is a function of its key."""

from __future__ import annotations

import torch

from unirl.samplers.noise import keyed_noise, seed_of


def test_equal_keys_give_equal_rows_and_different_keys_different_ones():
    rows = keyed_noise(["a", "b", "a"], (3, 4))
    assert torch.equal(rows[0], rows[2])
    assert not torch.equal(rows[0], rows[1])
    assert rows.dtype == torch.float32


def test_a_row_does_not_depend_on_its_neighbours_order_or_the_global_seed():
    keys = [f"0/rollout-0/prompt-0/sample-{i}" for i in range(5)]
    together = keyed_noise(keys, (2, 8, 8))
    torch.manual_seed(123)
    for row, key in enumerate(keys):
        assert torch.equal(keyed_noise([key], (2, 8, 8))[0], together[row])
    assert torch.equal(keyed_noise(keys[::-1], (2, 8, 8)), together.flip(0))


def test_drawing_noise_leaves_the_global_generator_alone():
    torch.manual_seed(7)
    expected = torch.randn(3)
    torch.manual_seed(7)
    keyed_noise(["a"], (4,))
    assert torch.equal(torch.randn(3), expected)


def test_first_values_are_pinned():
    key = "0/rollout-0/prompt-0/sample-0"
    assert seed_of(key) == 7398123925357589152
    expected = torch.tensor([1.0825316905975342, 0.6228543519, 0.5440936684, 1.3846950531])
    torch.testing.assert_close(keyed_noise([key], (4,))[0], expected, rtol=0, atol=1e-6)
    expected = torch.tensor([-0.1728022694, -1.1992218494, -0.3802069127, 0.2313981801])
    large = keyed_noise(["a"], (3, 16, 32))[0, 0, 0, :4]
    torch.testing.assert_close(large, expected, rtol=0, atol=1e-6)


def test_seeds_fit_a_generator():
    assert all(0 <= seed_of(str(i)) < 2**63 for i in range(1000))


def test_noise_is_standard_normal():
    values = keyed_noise([str(i) for i in range(200)], (100,))
    assert abs(float(values.mean())) < 0.03
    assert abs(float(values.std()) - 1) < 0.03
    correlations = torch.corrcoef(values)[~torch.eye(200, dtype=torch.bool)]
    assert abs(float(correlations.mean())) < 0.01
