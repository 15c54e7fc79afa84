"""Packing: how a step is cut into micro-batches."""

import itertools
import math
import random

import pytest
from fakes import NAMES, a_group

import grpo_ref_split as trainer
from grpo.packing import (
    in_order,
    pack_by_tokens,
    plan_micro_batches,
    plan_rounds,
    whole_groups,
)


def random_sizes(seed):
    """-> (sizes, budget): up to 10 groups of 1 to 8 rows, each row in its group's prompt."""
    rng = random.Random(seed)
    high = rng.choice([1, 5, 100, 1000])
    sizes = []
    for prompt in range(rng.randint(0, 10)):
        width = rng.randint(1, high)
        sizes += [(prompt, width, rng.randint(1, high)) for _ in range(rng.randint(1, 8))]
    return sizes, rng.choice([1, 7, 100, 2000])


def padded_tokens(batch, sizes):
    prompts = {sizes[row][0] for row in batch}
    wide = max(sizes[row][1] for row in batch)
    shared = (len(batch) - len(prompts)) * wide // 8  # keys and values of a prompt seen once more
    return len(prompts) * wide + len(batch) * max(sizes[row][2] for row in batch) + shared


def test_a_random_sweep():
    """ZeRO-2 communicates in every backward: ranks with unequal counts of them hang."""
    for seed in range(500):
        sizes, budget = random_sizes(seed)
        world = random.Random(seed).choice([1, 2, 3, 8, 50])  # 50 ranks are often more than rows
        order = in_order(sizes)
        assert sorted(order) == list(range(len(sizes))), seed
        runs = [prompt for prompt, _ in itertools.groupby(sizes[row][0] for row in order)]
        assert len(runs) == len(set(runs)), seed  # a group stays together
        rows = [[row] for row in order]
        packed = pack_by_tokens(sizes, rows, budget)
        # The next row would not have fitted: nothing was cut that need not be
        for one, two in itertools.pairwise(packed):
            assert padded_tokens([*one, two[0]], sizes) > budget, seed

        turns = plan_micro_batches(sizes, world, budget)
        assert all(len(turn) == world for turn in turns), seed
        for plan in zip(*turns, strict=True):  # of each rank, the empty ones on top
            assert sorted(plan, key=bool, reverse=True) == list(plan), seed
        planned = [batch for turn in turns for batch in turn if batch]
        for batches in (packed, planned):  # every row once, the longest last, and no batch too full
            assert list(itertools.chain(*batches)) == order and all(batches), seed
            assert all(len(b) == 1 or padded_tokens(b, sizes) <= budget for b in batches), seed
        assert len(turns) == -(-len(packed) // world), seed  # no more than are needed
        # No slower than the best cut into so many of one size; ranks wait for the one with most
        cuts = [pack_by_tokens(sizes, rows, n) for n in range(0, budget + 1, max(1, budget // 50))]
        cuts = [cut for cut in cuts if len(cut) <= len(turns) * world]
        best = min((seconds(cut, sizes, world) for cut in cuts), default=math.inf)
        assert seconds(planned, sizes, world) <= 1.05 * best + 2 * max(map(sum, sizes), default=0)


def seconds(batches, sizes, world):
    costs = [padded_tokens(batch, sizes) for batch in batches]
    return sum(max(costs[i : i + world]) for i in range(0, len(costs), world))


def test_what_the_server_scores_is_cut_between_groups_unless_one_is_too_large():
    small, large = [(0, 40, 10)] * 4, [(1, 40, 100)] * 4
    assert whole_groups(small + large, 200) == [[4], [5], [6], [7], [0, 1, 2, 3]]


def rows_of(ids):
    """-> the rows of groups of two, each with a prompt of its own."""
    groups = [a_group([[1.0, -1.0], [-1.0, -1.0]], id=id) for id in ids]
    rows = trainer.make_sequences(groups, NAMES, 0)
    for number, row in enumerate(rows):
        row.prompt = [number // 2]
    return rows


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_train_all_of_a_step_in_as_many_turns(world):
    """Each plans by itself; a rank with a backward more than another would wait for ever."""
    rows = rows_of("abcdef")
    plans = [plan_rounds(rows, True, rank, world, 8) for rank in range(world)]
    assert len({len(plan) for plan in plans}) == 1
    trained = [id(row) for plan in plans for batch, filler in plan for row in batch if not filler]
    assert sorted(trained) == sorted(map(id, rows))


def test_a_rank_without_sequences_takes_part_with_one_that_does_not_count():
    rows = rows_of("ab")[:3]
    for rank, counts in enumerate([True, True, True, False]):
        ((batch, is_filler),) = plan_rounds(rows, True, rank, 4, 8)
        assert is_filler != counts and len(batch) == 1
    assert len(batch[0].completion) == 1  # the shortest, and a copy: its old log-probs are its own
    assert all(batch[0] is not row for row in rows)
