"""What ranks tell each other, on three processes and on one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TypeVar

import pytest
import torch
from rank_pool import RankPool

from unirl.core.errors import ConfigError, ModelError, RankError
from unirl.distributed.agreement import require_same_settings
from unirl.distributed.group import (
    LAUNCH_VARIABLES,
    joined,
    launched_world_size,
    require_local_devices,
    take_device,
)
from unirl.distributed.ranks import OneRank, Ranks

T = TypeVar("T")


def ask(question: Callable[[Ranks], T], num_ranks: int) -> T:
    """One question, as a run asks it."""
    with joined() as ranks:
        return question(ranks)


def on_ranks(pool: RankPool, num_ranks: int, question: Callable[[Ranks], T]) -> list[T]:
    return pool.run(num_ranks, ask, question, num_ranks)


def raised(action: Callable[[], object]) -> tuple[type[Exception], str] | None:
    try:
        action()
    except Exception as error:
        return type(error), str(error)
    return None


def exchanges(ranks: Ranks) -> Mapping[str, object]:
    own = f"from {ranks.rank}"
    ranks.barrier()
    return {
        "rank": ranks.rank,
        "world_size": ranks.world_size,
        "is_main": ranks.is_main,
        "gather": ranks.gather(own),
        "broadcast": ranks.broadcast(own),
        "any": (ranks.any(ranks.rank == 2), ranks.any(False)),
        "together": ranks.together(lambda: own),
        "together, nothing": ranks.together(lambda: None),
        "on_main": ranks.on_main(lambda: own),
        "same": raised(lambda: require_same_settings({"the moon": 1}, ranks)),
    }


def test_values_are_exchanged_in_rank_order(pool: RankPool) -> None:
    for rank, answer in enumerate(on_ranks(pool, 3, exchanges)):
        assert answer == {
            "rank": rank,
            "world_size": 3,
            "is_main": rank == 0,
            "gather": ["from 0", "from 1", "from 2"],
            "broadcast": "from 0",
            "any": (True, False),
            "together": f"from {rank}",
            "together, nothing": None,
            "on_main": "from 0",
            "same": None,
        }


def test_one_rank_answers_for_itself() -> None:
    answer = exchanges(OneRank())
    assert answer == {
        "rank": 0,
        "world_size": 1,
        "is_main": True,
        "gather": ["from 0"],
        "broadcast": "from 0",
        "any": (False, False),
        "together": "from 0",
        "together, nothing": None,
        "on_main": "from 0",
        "same": None,
    }


def failures(ranks: Ranks) -> list[tuple[type[Exception], str] | None]:
    def fail_on(rank: int, error: Exception) -> Callable[[], None]:
        def action() -> None:
            if ranks.rank == rank:
                raise error

        return action

    return [
        raised(lambda: ranks.together(fail_on(1, ModelError("no file")))),
        raised(lambda: ranks.together(fail_on(2, ValueError("odd")))),
        raised(lambda: ranks.on_main(fail_on(0, ConfigError("no folder")))),
        raised(lambda: ranks.on_main(fail_on(1, ConfigError("never run")))),
        raised(lambda: require_same_settings({"the sum": ranks.rank // 2}, ranks)),
    ]


def test_a_failure_on_one_rank_is_everyones_and_names_it(pool: RankPool) -> None:
    every = on_ranks(pool, 3, failures)
    kind = [[failure and failure[0] for failure in of_rank] for of_rank in every]
    assert kind[0] == [ModelError, RankError, ConfigError, None, ConfigError]
    assert kind[1] == [ModelError, RankError, ConfigError, None, ConfigError]
    assert kind[2] == [ModelError, ValueError, ConfigError, None, ConfigError]
    text = [[failure and failure[1] for failure in of_rank] for of_rank in every]
    assert text[0][0] == "rank 1: no file"
    assert text[1][0] == "no file"
    assert text[0][1] == "rank 2: ValueError: odd"
    assert text[2][2] == "rank 0: no folder"
    differs = "the ranks were not started alike: the sum is 0 on rank 0 and 1 on rank 2. "
    assert [of_rank[4].startswith(differs) for of_rank in text] == [True] * 3


def refused(num_devices: int) -> tuple[type[Exception], str] | None:
    def join() -> None:
        with joined() as ranks:
            take_device(num_devices, "cpu", ranks)

    return raised(join)


def test_another_number_of_processes_than_devices_is_refused_on_all(pool: RankPool) -> None:
    for failure in pool.run(2, refused, 4):
        assert failure is not None
        assert failure[0] is ConfigError
        assert "num_devices is 4, but the launcher started 2 processes" in failure[1]
        assert "Set num_devices=2" in failure[1]


def group_exists(ranks: Ranks) -> bool:
    return torch.distributed.is_initialized()


def test_a_process_group_lives_as_long_as_the_run(pool: RankPool) -> None:
    assert on_ranks(pool, 2, group_exists) == [True, True]
    assert pool.run(2, torch.distributed.is_initialized) == [False, False]


def test_one_process_makes_no_group(pool: RankPool) -> None:
    assert on_ranks(pool, 1, group_exists) == [False]
    assert "RANK" not in os.environ
    assert ask(group_exists, 1) is False


def test_only_a_complete_pair_of_variables_means_a_launcher() -> None:
    assert launched_world_size({}) is None
    assert launched_world_size({"WORLD_SIZE": "8"}) is None
    assert launched_world_size({"RANK": "0", "WORLD_SIZE": "8"}) == 8


def test_missing_launch_variables_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCH_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    failure = refused(2)
    assert failure is not None
    assert failure[0] is ConfigError
    assert "LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not" in failure[1]


def test_more_gpus_than_this_machine_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    require_local_devices(3, "cuda")
    require_local_devices(64, "cpu")
    with pytest.raises(ConfigError, match=r"num_devices is 4, but this machine has 3 GPUs"):
        require_local_devices(4, "cuda")
