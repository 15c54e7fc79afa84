"""Micro-batches: which rows run forward and backward together, and in which order.

    plans = plan_micro_batches(sizes, world, budget)        # for each rank, lists of row numbers
    for mine, last, score in micro_batches(rows, engine, exchange, ...): ...

What the reference server has scored first is trained while it scores on: a step waits for little
more than the first of its micro-batches.
"""

import itertools
from collections import Counter


# --- The plan -----------------------------------------------------------------------
def number_prompts(prompts, share):
    """-> for each row the number of its prompt: neighbours with equal prompts share one.

    With `share` False each row has its own. Example: [[1], [1], [2]], True -> [0, 0, 1]
    """
    if not share:
        return list(range(len(prompts)))
    runs = itertools.groupby(prompts)
    return [number for number, (_, run) in enumerate(runs) for _ in run]


def order_rows(sizes):
    """-> row numbers: a prompt's rows together, longest first; prompts by their longest row."""
    longest = Counter()
    for prompt, _, tokens in sizes:
        longest[prompt] = max(tokens, longest[prompt])

    def place(row):
        prompt, _, tokens = sizes[row]
        return -longest[prompt], prompt, -tokens

    return sorted(range(len(sizes)), key=place)


def pack_by_tokens(sizes, units, budget):
    """Packs `units`, lists of row numbers, into batches in their order; a unit never splits.

    `sizes` has (prompt number, prompt tokens, completion tokens) of every row; a prompt's rows are
    neighbours. A batch has at most `budget` padded_tokens, unless it is a single unit.
    Example: [(0, 5, 3), (0, 5, 2), (1, 4, 1)], [[0], [1], [2]], 14 -> [[0, 1], [2]]
    """
    batches, prompts, wide, long = [], 0, 0, 0
    for unit in units:
        own = shape(sizes, unit)
        shared = bool(batches) and sizes[batches[-1][-1]][0] == sizes[unit[0]][0]
        grown = prompts + own[0] - shared, max(wide, own[1]), max(long, own[2])
        if not batches or padded_tokens(len(batches[-1]) + len(unit), *grown) > budget:
            batches.append([])
            grown = own
        batches[-1] += unit
        prompts, wide, long = grown
    return batches


def shape(sizes, rows):
    """-> (prompts, tokens of the longest, tokens of the longest completion) of rows."""
    prompts, wide, long = zip(*(sizes[row] for row in rows), strict=True)
    return len(set(prompts)), max(wide), max(long)


def padded_tokens(rows, prompts, wide, long):
    """-> what a batch costs: its prompts at the width of the longest, its rows at the width of the
    longest completion, and an eighth of a token for each token of a shared prompt that a further
    row attends to: its keys and values are no work, but memory."""
    return prompts * wide + rows * long + (rows - prompts) * wide // 8


def whole_groups(sizes, budget):
    """-> units for pack_by_tokens: the rows of a prompt, or single ones where all do not fit."""
    units = []
    for _, run in itertools.groupby(order_rows(sizes), key=lambda row: sizes[row][0]):
        rows = list(run)
        fit = padded_tokens(len(rows), *shape(sizes, rows)) <= budget
        units += [rows] if fit else [[row] for row in rows]
    return units


def plan_micro_batches(sizes, world, budget):
    """-> for each rank a list of micro-batches (lists of row numbers), equally many for each rank.

    As few as there can be, and of one size rather than full ones and a rest: in each ZeRO-2
    communicates, so ranks wait there for the one with most. Where it takes no more of them, and no
    longer, groups stay whole: one that is cut waits for the scores of two. A rank without rows for
    its last micro-batch gets an empty one.
    Example: [(0, 4, 1), (1, 4, 5), (2, 4, 3)], 2 ranks, budget 9 -> [[[1], [0]], [[2], []]]
    """
    rows = [[row] for row in order_rows(sizes)]
    most = -(-len(pack_by_tokens(sizes, rows, budget)) // world) * world
    plans = []
    for units in (whole_groups(sizes, budget), rows):
        # The smallest budget that needs no more batches makes them equal: to a 64th
        low, high = 0 if most > 1 else budget, budget
        while high - low > 1 + high // 64:
            middle = (low + high) // 2
            enough = len(pack_by_tokens(sizes, units, middle)) <= most
            low, high = (low, middle) if enough else (middle, high)
        plans.append(pack_by_tokens(sizes, units, high))

    def seconds(batches):
        costs = [padded_tokens(len(batch), *shape(sizes, batch)) for batch in batches]
        turns = [max(costs[i : i + world]) for i in range(0, len(costs), world)]
        return len(batches) > most, sum(turns)

    batches = min(plans, key=seconds)
    batches += [[]] * (-len(batches) % world)
    return [batches[rank::world] for rank in range(world)]
