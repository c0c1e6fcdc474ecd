"""Weights that are whole on a device: alone, or a copy on each of two ranks."""

from __future__ import annotations

import pytest
import torch
from rank_pool import RankPool
from torch import nn

import unirl.train.backend
from unirl.distributed.group import joined
from unirl.train.backend import CopiesBackend, WholeBackend, clip_gradients, write_share


def parameters_with_gradients(factor: float) -> list[nn.Parameter]:
    """Shapes of several sizes; the gradients are `factor` times 0, 1, 2, ..."""
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in [(3, 2), (5,), (1, 1, 4), (2,)]]
    for index, parameter in enumerate(parameters):
        values = torch.arange(parameter.numel(), dtype=torch.float32) + 10 * index
        parameter.grad = factor * values.view_as(parameter)
    return parameters


def gradients(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def reduce_copies(bucket_bytes: int) -> tuple[list[torch.Tensor], float, int]:
    """Gradients after the reduction, their norm, and how many all-reduces it took."""
    calls = 0
    all_reduce = torch.distributed.all_reduce

    def counted(tensor: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        all_reduce(tensor)

    with pytest.MonkeyPatch.context() as patch, joined() as ranks:
        patch.setattr(unirl.train.backend, "REDUCE_BUCKET_BYTES", bucket_bytes)
        patch.setattr(torch.distributed, "all_reduce", counted)
        backend = CopiesBackend()
        parameters = parameters_with_gradients(factor=1.0 + ranks.rank)
        without = nn.Parameter(torch.zeros(2))
        backend.reduce_gradients([*parameters, without])
        assert without.grad is None
        norm = backend.gradient_norm([*parameters, without])
        return gradients(parameters), float(norm), calls


# 6, 5, 4 and 2 numbers of 4 bytes.
@pytest.mark.parametrize(("bucket_bytes", "num_buckets"), [(1, 4), (24, 3), (44, 2), (2**20, 1)])
def test_gradients_of_copies_become_their_sum(
    pool: RankPool, bucket_bytes: int, num_buckets: int
) -> None:
    expected = gradients(parameters_with_gradients(factor=3.0))
    norm = float(torch.cat([one.flatten() for one in expected]).norm())
    for reduced, found_norm, calls in pool.run(2, reduce_copies, bucket_bytes):
        assert calls == num_buckets
        assert found_norm == pytest.approx(norm)
        for one, other in zip(reduced, expected, strict=True):
            assert torch.equal(one, other)


def test_large_gradients_are_scaled_to_the_largest_norm_and_small_ones_stay() -> None:
    backend = WholeBackend()
    parameters = [*parameters_with_gradients(1.0), nn.Parameter(torch.zeros(2))]
    norm = backend.gradient_norm(parameters)
    before = [one.clone() for one in gradients(parameters)]
    clip_gradients(backend, parameters, norm, max_norm=float(norm) * 2)
    assert all(torch.equal(a, b) for a, b in zip(before, gradients(parameters), strict=True))
    clip_gradients(backend, parameters, norm, max_norm=0.5)
    assert float(backend.gradient_norm(parameters)) == pytest.approx(0.5, rel=1e-4)


def test_a_whole_tensor_is_a_copy_on_the_cpu() -> None:
    parameter = nn.Parameter(torch.ones(3))
    whole = WholeBackend().whole(parameter)
    whole.zero_()
    assert torch.equal(parameter, torch.ones(3))
    assert not whole.requires_grad


def test_writing_a_share_keeps_the_parameter_and_its_dtype() -> None:
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    memory = parameter.data_ptr()
    write_share(WholeBackend(), parameter, torch.tensor([1.0, 2.0, 3.0]))
    assert parameter.tolist() == [1.0, 2.0, 3.0]
    assert parameter.dtype == torch.bfloat16
    assert parameter.data_ptr() == memory
