"""Scale on paper: bytes against what FSDP holds, traffic against the collectives it calls."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from scaling.costs import memory, volume
from scaling.networks import NETWORKS, build_network
from scaling.schedule import Schedule, schedule, transitions
from scaling_table import fit, main, on_mesh, row, size_text
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from unirl.cli.compose import compose
from unirl.config.catalog import MODELS
from unirl.config.geometry import device_geometry
from unirl.config.schema import BackendConfig, RunConfig
from unirl.core.errors import ConfigError
from unirl.distributed.ranks import OneRank
from unirl.distributed.sharding import own_prompts, sample_places
from unirl.models.blocks import find_blocks
from unirl.models.lora import attach_lora
from unirl.planning.layout import Layout, Unit, lay_out, pretended_group
from unirl.train.sharded import ShardedBackend, make_mesh

BLOCKS = MODELS["sd3"].block_classes
FULL = BackendConfig()
HYBRID = BackendConfig(mesh="hybrid", shard_size=2)


def tiny_sd3(base: torch.dtype = torch.float32) -> nn.Module:
    """Two blocks with a LoRA of rank 3, which no number of ranks above 1 divides."""
    network = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=8,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pooled_projection_dim=16,
        pos_embed_max_size=8,
    )
    if base == torch.bfloat16:
        network.bfloat16()
    attach_lora(network, 3, 6.0, MODELS["sd3"].lora_targets, seed=0)
    return network


def recipe(*overrides: str) -> RunConfig:
    plain = ["model.path=.", "stack.shuffle_updates=false"]
    return compose("diffusion/sd3/sd3_trainside", [*plain, *overrides])


# --- bytes on a rank ----------------------------------------------------------------------------


def shards_by_hand(rank: int, num_ranks: int) -> dict[str, tuple[Tensor, bool]]:
    """Local tensors of the tiny network on one rank, sharded by fully_shard alone."""
    with pretended_group(rank, num_ranks):
        network = tiny_sd3()
        mesh = init_device_mesh("cpu", (num_ranks,))
        for block in find_blocks(network, BLOCKS):
            fully_shard(block, mesh=mesh)
        fully_shard(network, mesh=mesh)
        return {
            name: (parameter.to_local(), parameter.requires_grad)
            for name, parameter in network.named_parameters()
            if isinstance(parameter, DTensor)
        }


@pytest.fixture(scope="module")
def layout_of_4() -> Layout:
    with pretended_group(0, 4):
        return lay_out(tiny_sd3(), BLOCKS, FULL, 4)


def test_bytes_of_a_rank_are_those_that_fully_shard_holds(layout_of_4: Layout) -> None:
    held = shards_by_hand(0, 4).values()
    assert layout_of_4.trained_bytes == sum(t.nbytes for t, is_trained in held if is_trained)
    assert layout_of_4.base_bytes == sum(t.nbytes for t, is_trained in held if not is_trained)
    assert layout_of_4.trained_bytes > 0


def test_ranks_together_hold_the_network_once_and_its_padding(layout_of_4: Layout) -> None:
    tensors = [t for rank in range(4) for t, _ in shards_by_hand(rank, 4).values()]
    assert sum(tensor.nbytes for tensor in tensors) == layout_of_4.network_bytes
    # A shard is a view of padded memory, as large on every rank.
    padded = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    assert padded == layout_of_4.gather_bytes
    assert padded == 4 * (layout_of_4.base_bytes + layout_of_4.trained_bytes)
    assert padded > layout_of_4.network_bytes


def test_copies_hold_everything_and_gather_nothing() -> None:
    with pretended_group(0, 4):
        layout = lay_out(tiny_sd3(), BLOCKS, BackendConfig(mesh="no_shard"), 4)
    assert layout.base_bytes + layout.trained_bytes == layout.network_bytes
    assert layout.trained_bytes == layout.whole_trained_bytes
    assert layout.largest_gathered_bytes(prefetch=1) == 0


def test_hybrid_holds_what_its_shard_group_would_alone() -> None:
    with pretended_group(0, 8):
        hybrid = lay_out(tiny_sd3(), BLOCKS, HYBRID, 8)
    with pretended_group(0, 2):
        alone = lay_out(tiny_sd3(), BLOCKS, FULL, 2)
    assert (hybrid.num_shards, hybrid.num_replicas) == (2, 4)
    assert hybrid.base_bytes == alone.base_bytes
    assert hybrid.units == alone.units


# --- traffic ------------------------------------------------------------------------------------


class RecordedTraffic(TorchDispatchMode):
    """Bytes this rank receives in the collectives that are called, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.received: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        match function.__name__.partition(".")[0]:
            case "_allgather_base_":
                whole, own = args[:2]
                self.received["all_gather"] += whole.nbytes - own.nbytes
            case "_reduce_scatter_base_":
                own, whole = args[:2]
                self.received["reduce_scatter"] += whole.nbytes - own.nbytes
            case "allreduce_":
                (tensor,) = args[0]  # between 2 replicas
                self.received["all_reduce"] += 2 * (tensor.nbytes // 2)
            case "all_gather_into_tensor":
                own, num_ranks = args[0], args[1]
                self.received["sync"] += own.nbytes * (num_ranks - 1)
        return function(*args, **(kwargs or {}))


def forward(network: nn.Module) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return network(
            hidden_states=torch.randn(1, 4, 8, 8),
            encoder_hidden_states=torch.randn(1, 3, 16),
            pooled_projections=torch.randn(1, 16),
            timestep=torch.ones(1),
            return_dict=False,
        )[0]


def run_window(
    network: nn.Module, backend: ShardedBackend, counts: Schedule, unshard: bool
) -> None:
    """The network calls of a window with one optimizer step, in the train stack's order."""
    with torch.no_grad():
        if unshard:
            with backend.gathered():
                for _ in range(counts.sampling_forwards):
                    forward(network)
        else:
            for _ in range(counts.sampling_forwards):
                forward(network)
        for _ in range(counts.forwards - counts.backwards):
            forward(network)
    for index in range(counts.backwards):
        backend.before_backward(is_last=index + 1 == counts.backwards)
        forward(network).sum().backward()
    for parameter in network.parameters():
        if parameter.requires_grad and counts.syncs:
            backend.whole(parameter)


@pytest.mark.parametrize(
    ("backend", "base", "unshard"),
    [
        (FULL, torch.float32, False),
        (FULL, torch.bfloat16, True),
        (HYBRID, torch.bfloat16, False),
        (BackendConfig(gather_dtype="bf16", defer_reduce=False), torch.float32, False),
    ],
    ids=["full", "unshard", "hybrid", "bf16-gathers-reduced-each-time"],
)
def test_volumes_are_those_of_the_collectives_that_fsdp_calls(
    backend: BackendConfig, base: torch.dtype, unshard: bool
) -> None:
    counts = Schedule(
        prompts=1,
        generations=1,
        sampling_forwards=3,
        forwards=4,
        backwards=2,
        optimizer_steps=1,
        sync_forwards=0,
        syncs=1,
        busy=1.0,
    )
    if backend.defer_reduce is None:
        backend = backend.model_copy(update={"defer_reduce": True})
    config = recipe(f"rollout.unshard={unshard}").model_copy(update={"backend": backend})
    with pretended_group(0, 4):
        layout = lay_out(tiny_sd3(base), BLOCKS, backend, 4)
        network = tiny_sd3(base)
        mesh = make_mesh(backend, 4, torch.device("cpu"))
        sharded = ShardedBackend(network, find_blocks(network, BLOCKS), mesh, backend)
        with RecordedTraffic() as recorded:
            run_window(network, sharded, counts, unshard)
    expected = volume(layout, counts, config)
    assert recorded.received == Counter(
        all_gather=expected.all_gather,
        reduce_scatter=expected.reduce_scatter,
        all_reduce=expected.all_reduce,
        sync=expected.sync,
    )


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.zeros(8, 10), requires_grad=False)  # 320 bytes
        self.trained = nn.Parameter(torch.zeros(3, 5))  # 60 bytes, 80 padded to 4 rows


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Parameter(torch.zeros(4, 1), requires_grad=False)  # 16 bytes


def test_two_blocks_counted_by_hand() -> None:
    config = recipe(
        "batch_size=4",
        "sampling.samples_per_prompt=2",
        "sampling.num_inference_steps=6",
        "sampling.sde_steps={strategy: all, range: [0.0, 0.5], num_steps: null}",  # 3 steps
        "stack.micro_batch_size=2",
        "stack.num_updates_per_batch=1",
    )
    with pretended_group(0, 4):
        layout = lay_out(Toy(), ["Block"], FULL, 4)
    assert layout == Layout(
        num_shards=4,
        num_replicas=1,
        base_bytes=80 + 80 + 4,
        trained_bytes=20 + 20,
        network_bytes=2 * (320 + 60) + 16,
        whole_trained_bytes=2 * 60,
        units=(Unit(400, 80), Unit(400, 80), Unit(16, 0)),
    )
    counts = schedule(config, 4)
    # A rank: 1 prompt x 2 samples, 6 forwards of both; 6 rows = 3 micro-batches, anchored first.
    assert (counts.sampling_forwards, counts.forwards, counts.backwards) == (6, 6, 3)
    received = volume(layout, counts, config)
    assert received.all_gather == (6 + 6 + 3) * 816 * 3 // 4
    assert received.reduce_scatter == 160 * 3 // 4
    assert (received.all_reduce, received.sync) == (0, 0)
    held = memory(layout, counts, config)
    assert (held.gradients, held.moments, held.gathered, held.engine) == (120, 80, 816, 0)


def test_copies_reduce_all_gradients_once_per_step() -> None:
    config = recipe("stack.num_updates_per_batch=2")
    layout = Layout(1, 4, 320, 60, 380, 60, (Unit(380, 60),))
    received = volume(layout, schedule(config, 4), config)
    assert received.all_reduce == 2 * 2 * 60 * 3 // 4
    assert (received.all_gather, received.reduce_scatter) == (0, 0)


# --- what a window asks -------------------------------------------------------------------------


class OneOfMany(OneRank):
    """Enough of a rank to ask which prompts are its own."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("keys", ["", "stack.micro_batch_size=5", "accumulate_rollouts=2"])
def test_micro_batches_are_those_of_the_samples_each_rank_has(num_ranks: int, keys: str) -> None:
    """Against the train stack's rule: a sample's place among all decides its part."""
    num_parts = 1 if "accumulate" in keys else 4
    config = recipe(f"stack.num_updates_per_batch={num_parts}", *keys.split())
    size, rollouts = config.stack.micro_batch_size, config.accumulate_rollouts
    total = 8 * 16 * rollouts
    turns = torch.zeros(num_parts, num_ranks)
    for rank in range(num_ranks):
        own = sample_places(own_prompts(8, OneOfMany(rank, num_ranks)), 16)
        places = torch.cat([own + 8 * 16 * rollout for rollout in range(rollouts)])
        rows = 3 * torch.bincount(places * num_parts // total, minlength=num_parts)
        turns[:, rank] = (rows / size).ceil()
    counts = schedule(config, num_ranks)
    assert counts.backwards == int(turns.amax(dim=1).sum())
    assert counts.busy == float(turns.sum()) / (counts.backwards * num_ranks)


def test_a_rank_without_prompts_in_an_optimizer_step_idles() -> None:
    assert schedule(recipe("stack.num_updates_per_batch=2"), 8).busy == 0.5
    assert schedule(recipe("stack.num_updates_per_batch=2"), 4).busy == 1.0
    shuffled = recipe("stack.num_updates_per_batch=2", "stack.shuffle_updates=true")
    assert schedule(shuffled, 8).busy == 1.0


def test_guidance_and_ranks_add_no_network_calls_but_more_steps_do() -> None:
    plain = schedule(recipe(), 8)
    assert plain.sampling_forwards == 10
    assert schedule(recipe("sampling.guidance_scale=4.5"), 8) == plain
    assert schedule(recipe("sampling.num_inference_steps=20"), 8).sampling_forwards == 20
    assert schedule(recipe("rollout.forward_batch_size=4"), 8).sampling_forwards == 40


def test_the_kl_reference_and_the_replay_cost_a_forward_each() -> None:
    replayed = schedule(recipe(), 8)
    assert replayed.forwards == 2 * replayed.backwards
    assert schedule(recipe("algorithm.old_log_prob=rollout"), 8).forwards == replayed.backwards
    assert schedule(recipe("algorithm.kl_coefficient=0.1"), 8).forwards == 3 * replayed.backwards


def test_moves_are_those_of_the_gate() -> None:
    config = compose("diffusion/tiny/tiny_residency_gate", [])
    parked = ["rollout onload", "rollout offload", "reward onload", "reward offload"]
    assert transitions(config) == ["train offload", *parked, "train onload"]
    resident = config.model_copy(update={"train_resident": True, "reward_resident": True})
    assert transitions(resident) == parked[:2]
    longer = config.model_copy(update={"accumulate_rollouts": 2})
    assert Counter(transitions(longer)) == Counter(
        ["train offload", *parked, *parked, "train onload"]
    )


# --- the table ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [4, 8, 12, 16])
def test_a_batch_is_impossible_exactly_where_a_run_is_refused(num_ranks: int) -> None:
    config = on_mesh(recipe(), num_ranks, "full", 8)
    fitted, note = fit(config)
    assert (note is None) == (list(device_geometry(config)) == [])
    assert list(device_geometry(fitted)) == []
    assert fitted.batch_size - config.batch_size < num_ranks


def test_the_note_has_the_equation_and_the_smallest_batch() -> None:
    _, note = fit(on_mesh(recipe(), 16, "full", 8))
    assert note is not None
    assert "batch_size 8 / 16 ranks = 0.5" in note
    assert note.endswith("batch_size=16")


def test_shard_groups_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"12 ranks / shard size 8 = 1\.50"):
        on_mesh(recipe(), 12, "hybrid", 8)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("sd3-medium", 2.03), ("sd3.5-medium", 2.24), ("sd3.5-large", 8.06), ("flux2-32b", 32.22)],
)
def test_networks_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    network = build_network(NETWORKS[name], recipe("stack.lora=null"))
    assert all(parameter.is_meta for parameter in network.parameters())
    total = sum(parameter.numel() for parameter in network.parameters())
    assert round(total / 1e9, 2) == billions


def test_32_billion_parameters_on_64_ranks_make_one_row() -> None:
    config, _ = fit(on_mesh(recipe(), 64, "full", 8))
    values = row("flux2-32b", config).split()
    assert values[:5] == ["flux2-32b", "64", "1", "16", "50%"]
    assert values[6:8] == ["960", "MiB"]  # 60.0 GiB in bf16 / 64


def test_the_command_prints_a_table_with_its_notes(capsys: pytest.CaptureFixture[str]) -> None:
    command = "--network sd3-medium --ranks 8 16 --mesh hybrid sync.verify=false"
    assert main(["diffusion/sd3/sd3_replica_lora", *command.split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith("train offload, rollout onload, rollout offload, train onload")
    assert [line.split()[1] for line in lines[3:5]] == ["8", "*16"]
    assert lines[5].startswith("* impossible: batch_size 8 / 16 ranks")


def test_the_page_shows_what_the_script_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """Checked on its tables of one network; the last column is a time."""
    page = (Path(__file__).resolve().parents[3] / "docs" / "scaling.md").read_text()
    pattern = r"```sh\npython scripts/scaling_table.py (.*)\n```\n\n```text\n((?:[^`].*\n)+)```"
    shown = [
        (command, table)
        for command, table in re.findall(pattern, page)
        if command.count("--network") == 1
    ]
    assert len(shown) == 2
    for command, table in shown:
        assert main(command.split()) == 0
        printed = capsys.readouterr().out
        assert _without_seconds(printed) == _without_seconds(table)


def _without_seconds(table: str) -> list[str]:
    return [line.rpartition("|")[0] or line for line in table.split("\n") if line]


def test_a_wrong_key_is_reported_like_anywhere_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diffusion/sd3/sd3_trainside", "stack.lora.rnk=3"]) == 3
    assert "stack.lora.rank" in capsys.readouterr().err


def test_sizes_are_written_with_three_digits() -> None:
    texts = [size_text(size) for size in (0, 1536, 999 * 2**20, 1000 * 2**20, 5 * 2**50)]
    assert texts == ["-", "1.5 KiB", "999 MiB", "0.977 GiB", "5.12e+03 TiB"]
