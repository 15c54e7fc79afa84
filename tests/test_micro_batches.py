"""How a step is cut into micro-batches, and in which order they are trained."""

import itertools
import math
import random
from types import SimpleNamespace

import pytest
import torch
from test_trainer import Ranks, a_group, exchanges

import grpo_ref_split as trainer
from grpo.packing import order_rows, pack_by_tokens, plan_micro_batches, whole_groups
from grpo.training.exchange import micro_batches
from grpo.training.metrics import Clock


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


def test_packing_a_random_sweep():
    for seed in range(500):
        sizes, budget = random_sizes(seed)
        order = order_rows(sizes)
        runs = [prompt for prompt, _ in itertools.groupby(sizes[row][0] for row in order)]
        assert len(runs) == len(set(runs)), seed  # a group stays together
        batches = pack_by_tokens(sizes, [[row] for row in order], budget)
        assert list(itertools.chain(*batches)) == order and all(batches), seed
        assert all(len(b) == 1 or padded_tokens(b, sizes) <= budget for b in batches), seed
        # The next row would not have fitted: nothing was cut that need not be.
        for one, two in itertools.pairwise(batches):
            assert padded_tokens([*one, two[0]], sizes) > budget, seed


def test_planning_a_random_sweep():
    """ZeRO-2 communicates in every backward: ranks with unequal counts of them hang."""
    for seed in range(500):
        sizes, budget = random_sizes(seed)
        world = random.Random(seed).choice([1, 2, 3, 8, 50])  # 50 ranks are often more than rows
        plans = plan_micro_batches(sizes, world, budget)
        assert len(plans) == world
        assert len({len(plan) for plan in plans}) == 1, seed
        rows = [row for plan in plans for batch in plan for row in batch]
        assert sorted(rows) == list(range(len(sizes)))  # every row once
        for plan in plans:
            filled = [bool(batch) for batch in plan]
            assert filled == sorted(filled, reverse=True)  # the empty ones on top
            fit = [len(b) == 1 or padded_tokens(b, sizes) <= budget for b in plan if b]
            assert all(fit), seed
        # No more of them than rows cut anywhere need, and the last to be trained are the longest
        batches = [batch for turn in zip(*plans, strict=True) for batch in turn if batch]
        order = order_rows(sizes)
        rows = [[row] for row in order]
        needed = len(pack_by_tokens(sizes, rows, budget))
        assert len(plans[0]) == -(-needed // world), seed
        assert list(itertools.chain(*batches)) == order
        # No slower than the best cut into so many of one size; ranks wait for the one with most
        cuts = [pack_by_tokens(sizes, rows, n) for n in range(0, budget + 1, max(1, budget // 50))]
        cuts = [cut for cut in cuts if len(cut) <= len(plans[0]) * world]
        best = min((seconds(cut, sizes, world) for cut in cuts), default=math.inf)
        assert seconds(batches, sizes, world) <= 1.05 * best + 2 * max(map(sum, sizes), default=0)


def seconds(batches, sizes, world):
    costs = [padded_tokens(batch, sizes) for batch in batches]
    return sum(max(costs[i : i + world]) for i in range(0, len(costs), world))


def test_micro_batches_are_of_one_size_and_groups_whole_where_that_is_no_slower():
    groups = [(g, 40, 10) for g in range(8) for _ in range(4)]  # 8 groups of 4 rows, 95 tokens each
    rows = [[row] for row in order_rows(groups)]
    assert [len(b) for b in pack_by_tokens(groups, rows, 250)] == [9, 9, 9, 5]  # rows cut anywhere
    assert [len(b) for b in plan_micro_batches(groups, 1, 250)[0]] == [8, 8, 8, 8]
    # Three groups fit: where they are cut, in equal thirds, one in three waits for two scorings
    three = plan_micro_batches([(g, 400, 64) for g in range(8) for _ in range(8)], 1, 4096)
    assert [len(b) for b in three[0]] == [24, 24, 16]
    two = plan_micro_batches(groups, 2, 400)
    assert [[len(b) for b in plan] for plan in two] == [[16], [16]]
    # Three groups on two ranks: whole ones would let a rank wait for half of its time
    uneven = plan_micro_batches(groups[:12], 2, 400)
    assert [[len(b) for b in plan] for plan in uneven] == [[6], [6]]


def test_what_the_server_scores_is_cut_between_groups_unless_one_is_too_large():
    small, large = [(0, 40, 10)] * 4, [(1, 40, 100)] * 4
    assert whole_groups(small + large, 200) == [[4], [5], [6], [7], [0, 1, 2, 3]]


@pytest.mark.parametrize("threads", [(2, 2), (2, 1), (1, 2)])
def test_ranks_with_unlike_numbers_of_cores_call_the_same(monkeypatch, threads):
    """A broadcast by one rank in the other's backward would hang both."""
    ranks, both = Ranks(monkeypatch), exchanges(["f", "e"], ["a", "d"], ["b", "c"])
    monkeypatch.setattr(trainer.dist, "get_world_size", lambda: 2)
    both[1].server = both[0].server
    module = SimpleNamespace(shares=True)
    engine = SimpleNamespace(module=module, device=torch.device("cpu"))

    def steps(rank):
        both[rank].begin("abcdef", step=0, oldest=0)
        rows, order = unscored_rows("abcdef"), []
        settings = {"budget": 8, "threads": threads[rank], "own_cores": False}
        for mine, _, score in micro_batches(rows, engine, both[rank], Clock(), **settings):
            score()
            ranks.meet("backward")
            order.append([row.group for row in mine])
            assert all(row.ref_logps is not None for row in mine)
        return order

    before = torch.get_num_threads()
    try:
        first, second = ranks.run(steps)
    finally:
        torch.set_num_threads(before)
    assert len(first) == len(second) == 3
    assert sorted(itertools.chain(*first, *second)) == sorted("aabbccddeeff")


def unscored_rows(ids):
    """-> the rows of groups of two, each with a prompt of its own."""
    groups = [a_group([[1.0, -1.0], [-1.0, -1.0]], id=id, ref_logps=None) for id in ids]
    rows = trainer.make_rows(groups, 0)
    for number, row in enumerate(rows):
        row.prompt = [number // 2]
    return rows


@pytest.mark.parametrize("own_cores", [False, True])
@pytest.mark.parametrize("url", ["http://127.0.0.1:59875", "http://far.away:59875"])
def test_a_server_beside_gets_a_core_for_as_long_as_it_scores(monkeypatch, own_cores, url):
    """Until all of the step is scored, not just what is trained first; and the row's scores."""
    alone, before = exchanges(["c"], ["a"], ["b"])[0], torch.get_num_threads()
    monkeypatch.setattr(trainer.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(trainer.dist, "get_world_size", lambda: 1)
    alone.server.url = url
    alone.begin("abc", step=0, oldest=0)
    module = SimpleNamespace(shares=True)
    engine = SimpleNamespace(module=module, device=torch.device("cpu"))
    seen = []
    settings = {"budget": 8, "threads": 2, "own_cores": own_cores}
    rows = unscored_rows("abc")
    try:
        for mine, last, score in micro_batches(rows, engine, alone, Clock(), **settings):
            threads = torch.get_num_threads()
            score()
            seen.append((mine[0].group, len(mine), last, threads, torch.get_num_threads()))
            assert [len(row.ref_logps) for row in mine] == [3, 1]
    finally:
        torch.set_num_threads(before)
    few = 2 if own_cores or "far" in url else 1
    assert seen[0] == ("c", 2, False, few, few)
    assert seen[1:] == [("a", 2, False, few, 2), ("b", 2, True, 2, 2)]
