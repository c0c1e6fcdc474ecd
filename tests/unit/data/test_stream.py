"""Which prompts a rollout takes depends on the seed and the rollout's number alone."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unirl.core.errors import DataError
from unirl.core.types import PromptRecord
from unirl.data.stream import PromptStream


def records(count: int) -> list[PromptRecord]:
    return [PromptRecord(str(index), f"prompt {index}") for index in range(count)]


def ids(stream: PromptStream, rollout_id: int) -> list[str]:
    return [record.prompt_id for record in stream.batch(rollout_id).records]


sizes = st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))


@settings(derandomize=True)
@given(sizes, st.integers(-5, 2**40), st.integers(0, 20))
def test_an_epoch_repeats_no_prompt_and_leaves_out_fewer_than_a_batch(size, seed, epoch):
    num_prompts, batch_size = size
    stream = PromptStream(records(num_prompts), batch_size, seed)
    first = epoch * stream.batches_per_epoch
    batches = [ids(stream, first + offset) for offset in range(stream.batches_per_epoch)]
    assert all(len(batch) == batch_size for batch in batches)
    seen = [prompt_id for batch in batches for prompt_id in batch]
    assert len(set(seen)) == len(seen) > num_prompts - batch_size


@settings(derandomize=True)
@given(sizes, st.integers(0, 1000), st.lists(st.integers(0, 200), min_size=1, max_size=10))
def test_a_batch_is_the_same_in_any_order_and_after_any_restart(size, seed, rollout_ids):
    num_prompts, batch_size = size
    stream = PromptStream(records(num_prompts), batch_size, seed)
    drawn = {rollout_id: ids(stream, rollout_id) for rollout_id in rollout_ids}
    for rollout_id in reversed(rollout_ids):
        restarted = PromptStream(records(num_prompts), batch_size, seed)
        assert ids(restarted, rollout_id) == drawn[rollout_id]


def test_epochs_and_seeds_have_different_orders():
    def order(seed: int, epoch: int) -> tuple[str, ...]:
        return tuple(ids(PromptStream(records(100), 100, seed), epoch))

    orders = {order(seed, epoch) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    assert tuple(map(str, range(100))) not in orders


def test_over_many_epochs_every_prompt_is_used_about_equally():
    stream = PromptStream(records(10), 4, seed=0)
    uses = dict.fromkeys(map(str, range(10)), 0)
    for rollout_id in range(500):
        for prompt_id in ids(stream, rollout_id):
            uses[prompt_id] += 1
    # 250 epochs of 8 of 10 prompts: 200 uses each, standard deviation 6.3.
    assert all(170 < count < 230 for count in uses.values())


def test_the_order_is_pinned_so_that_old_runs_can_resume():
    assert ids(PromptStream(records(12), 4, seed=7), 4) == ["2", "10", "7", "6"]


def test_a_batch_larger_than_the_prompt_set_is_refused_with_the_numbers():
    with pytest.raises(DataError, match=r"batch_size=9 .*data\.train holds 8.*at most 8"):
        PromptStream(records(8), 9, seed=0)
