"""Two networks for two ranges of noise, whole and in shards."""

from __future__ import annotations

import copy

import pytest
import torch
from builders import CPU
from families.wan import wan_transformer
from rank_pool import RankPool
from torch import Tensor

from unirl.config.schema import BackendConfig
from unirl.distributed.group import joined
from unirl.models.blocks import find_blocks
from unirl.models.experts import NoiseLevelExperts
from unirl.train.sharded import ShardedBackend, make_mesh

BOUNDARY = 875.0
TIMES = ([900.0, 999.0], [500.0, 100.0])
"""Of two ranks: all at high noise, all at low noise."""


def experts() -> NoiseLevelExperts:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return NoiseLevelExperts(wan_transformer(), wan_transformer(), BOUNDARY).eval()


def loss(network: NoiseLevelExperts, times: list[float]) -> Tensor:
    """Each row's latents and text depend on its time alone."""
    seeds = [torch.Generator().manual_seed(int(time)) for time in times]
    latents = torch.stack([torch.randn(16, 2, 4, 6, generator=seed) for seed in seeds])
    texts = torch.stack([torch.randn(5, 32, generator=seed) for seed in seeds])
    (answer,) = network(
        hidden_states=latents,
        timestep=torch.tensor(times),
        encoder_hidden_states=texts,
        return_dict=False,
    )
    return answer.square().sum()


def gradients_in_shards(times: tuple[list[float], ...]) -> dict[str, Tensor]:
    """Of this rank's rows and the other's, summed."""
    with joined() as ranks:
        network, settings = experts(), BackendConfig(prefetch=1)
        blocks = find_blocks(network, ["WanTransformerBlock"])
        mesh = make_mesh(settings, ranks.world_size, CPU)
        backend = ShardedBackend(network, blocks, mesh, settings)
        backend.before_backward(is_last=True)
        (backend.loss_scale * loss(network, times[ranks.rank])).backward()
        grads = {name: p.grad for name, p in network.named_parameters()}
        return {name: backend.whole(grad) for name, grad in grads.items() if grad is not None}


@pytest.mark.parametrize(
    "times",
    [TIMES, TIMES[::-1], ([900.0, 100.0], [500.0, 999.0])],
    ids=["apart", "swapped", "mixed"],
)
def test_ranks_of_different_phases_train_in_step(
    pool: RankPool, times: tuple[list[float], ...]
) -> None:
    whole = experts()
    loss(whole, [*times[0], *times[1]]).backward()
    expected = {name: p.grad for name, p in whole.named_parameters()}
    for grads in pool.run(2, gradients_in_shards, times):
        assert grads.keys() == expected.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-4)


def test_the_idle_network_changes_no_bit_of_the_answer() -> None:
    network = experts()
    alone = loss(network, TIMES[0])
    other = copy.deepcopy(network)
    for parameter in other.transformer_2.parameters():
        parameter.data *= 3
    assert torch.equal(loss(other, TIMES[0]), alone)
