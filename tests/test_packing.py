"""Packing: how a step is cut into micro-batches."""

import itertools
import math
import random

import pytest

from grpo.packing import pack_by_tokens, plan_micro_batches, sizes_of


def random_sizes(seed, packs):
    """-> (prompts and completions by length, sizes, budget): up to 10 groups of 1 to 8 rows."""
    rng = random.Random(seed)
    high = rng.choice([1, 5, 100, 1000])
    rows = []
    for prompt in range(rng.randint(0, 10)):
        prompt = [prompt] * rng.randint(1, high)
        rows += [(prompt, [0] * rng.randint(1, high)) for _ in range(rng.randint(1, 8))]
    prompts, completions = zip(*rows, strict=True) if rows else ([], [])
    return rows, sizes_of(prompts, completions, packs), rng.choice([1, 7, 100, 2000])


def tokens_of(batch, rows, packs):
    """-> each prompt once and what follows it; or all as long as the longest."""
    if not packs:
        return len(batch) * max(len(p) + len(c) for p, c in (rows[i] for i in batch))
    prompts = {rows[i][0][0]: len(rows[i][0]) for i in batch}
    return sum(prompts.values()) + sum(len(rows[i][1]) for i in batch)


@pytest.mark.parametrize("packs", [True, False])
def test_a_random_sweep(packs):
    """ZeRO-2 communicates in every backward: ranks with unequal counts of them hang."""
    for seed in range(80):
        rows, sizes, budget = random_sizes(seed, packs)
        world = random.Random(seed).choice([1, 2, 3, 8, 50])  # 50 ranks are often more than rows
        order = list(range(len(rows)))
        if not packs:
            order.sort(key=lambda i: -len(rows[i][0]) - len(rows[i][1]))
        packed = pack_by_tokens(sizes, budget)
        # The next row would not have fitted: nothing was cut that need not be
        for one, two in itertools.pairwise(packed):
            assert tokens_of([*one, two[0]], rows, packs) > budget, seed

        turns = plan_micro_batches(sizes, world, budget)
        assert all(len(turn) == world for turn in turns), seed
        for plan in zip(*turns, strict=True):  # of each rank, the empty ones on top
            assert sorted(plan, key=bool, reverse=True) == list(plan), seed
        planned = [batch for turn in turns for batch in turn if batch]
        for batches in (packed, planned):  # every row once, in order, and no batch too full
            assert list(itertools.chain(*batches)) == order and all(batches), seed
            fits = [len(b) == 1 or tokens_of(b, rows, packs) <= budget for b in batches]
            assert all(fits), seed
        assert len(turns) == -(-len(packed) // world), seed  # no more than are needed
        # No slower than the best cut into so many of one size; ranks wait for the one with most
        cuts = [pack_by_tokens(sizes, n) for n in range(0, budget + 1, max(1, budget // 50))]
        cuts = [cut for cut in cuts if len(cut) <= len(turns) * world]
        best = min((seconds(cut, rows, world, packs) for cut in cuts), default=math.inf)
        most = max((alone for alone, _ in sizes), default=0)
        assert seconds(planned, rows, world, packs) <= 1.05 * best + 2 * most, seed


def seconds(batches, rows, world, packs):
    costs = [tokens_of(batch, rows, packs) for batch in batches]
    return sum(max(costs[i : i + world]) for i in range(0, len(costs), world))
