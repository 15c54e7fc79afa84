"""Which sequences run together: micro-batches of a bounded number of padded tokens.

    turns = plan_micro_batches(sizes, world, budget)    # turns[turn][rank]: numbers of sequences

Pure planning: every rank knows the whole step, computes the same plan, and nothing is communicated.
A sequence is known by its Size alone. The server packs what it scores by the same functions.
"""

import itertools
from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

GROWTH = 1.02  # of the size of micro-batches that is tried next


class Size(NamedTuple):
    """A sequence's number of its prompt (sequences with the same one share it), and its lengths."""

    prompt: int
    prompt_tokens: int
    completion_tokens: int


def number_prompts(prompts, share):
    """Returns each sequence's number of its prompt: equal neighbours have the same one.

    With `share` False each sequence has its own. Example: [[1], [1], [2]], True -> [0, 0, 1]
    """
    if not share:
        return list(range(len(prompts)))
    runs = itertools.groupby(prompts)
    return [number for number, (_, run) in enumerate(runs) for _ in run]


def in_order(sizes):
    """Returns sequence numbers: those of a prompt together, longest first; prompts by their longest
    completion. Neighbours are then of like length, which wastes least on padding."""
    longest = Counter()
    for prompt, _, tokens in sizes:
        longest[prompt] = max(tokens, longest[prompt])

    def key(number):
        prompt, _, tokens = sizes[number]
        return -longest[prompt], prompt, -tokens

    return sorted(range(len(sizes)), key=key)


def pack_by_tokens(sizes, units, budget):
    """Returns `units` (lists of sequence numbers) packed into batches, in their order.

    A unit is never split. A batch has at most `budget` padded_tokens, unless it is a single unit.
    Sequences of a prompt must be neighbours.
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


def shape(sizes, numbers):
    """Returns (prompts, tokens of the longest prompt, tokens of the longest completion)."""
    prompts, wide, long = zip(*(sizes[number] for number in numbers), strict=True)
    return len(set(prompts)), max(wide), max(long)


def padded_tokens(sequences, prompts, wide, long):
    """Returns what a batch costs, in tokens: its prompts, each as wide as the widest; its
    completions, each as long as the longest; and an eighth of a token for each token of a shared
    prompt that a further sequence attends to: its keys and values are no work, but memory."""
    return prompts * wide + sequences * long + (sequences - prompts) * wide // 8


def whole_groups(sizes, budget):
    """Returns units for pack_by_tokens: a prompt's sequences, or single ones where the batch would
    be too large."""
    units = []
    for _, run in itertools.groupby(in_order(sizes), key=lambda number: sizes[number][0]):
        numbers = list(run)
        fit = padded_tokens(len(numbers), *shape(sizes, numbers)) <= budget
        units += [numbers] if fit else [[number] for number in numbers]
    return units


def plan_micro_batches(sizes, world, budget):
    """Returns turns; a turn has a micro-batch (a list of sequence numbers) for each of the ranks.

    ZeRO-2 communicates in every backward: each rank needs equally many micro-batches, and in each
    turn the ranks wait for the one with most. So there are as few turns as the budget allows, and
    micro-batches of about one size rather than full ones and a rest. A rank without sequences for
    the last turn gets an empty list.
    Example: [(0, 4, 1), (1, 4, 5), (2, 4, 3)], 2 ranks, budget 9 -> [[[1], [2]], [[0], []]]
    """
    units = [[number] for number in in_order(sizes)]
    full = pack_by_tokens(sizes, units, budget)
    count = -(-len(full) // world) * world
    cost = sum(padded_tokens(len(batch), *shape(sizes, batch)) for batch in full)
    limit = min(budget, cost / max(count, 1))
    while len(batches := pack_by_tokens(sizes, units, limit)) > count:
        limit = min(budget, GROWTH * limit)
    batches += [[]] * (-len(batches) % world)
    return [batches[i : i + world] for i in range(0, len(batches), world)]


@dataclass
class Turn:
    """A forward and backward of all ranks, each on a micro-batch of its own."""

    batch: list  # this rank's sequences
    counts: bool  # False: nothing was left for this rank, which takes part all the same
    groups: set[str]  # ids of the groups of all ranks' sequences


def plan_turns(sequences, share_prompts, rank, world, budget):
    """Returns the turns in which the ranks train a step's sequences; see plan_micro_batches."""
    numbers = number_prompts([s.prompt for s in sequences], share_prompts)
    sizes = [
        Size(number, len(s.prompt), len(s.completion))
        for number, s in zip(numbers, sequences, strict=True)
    ]
    shortest = min(sequences, key=lambda s: len(s.completion))
    filler = replace(shortest, ref_logps=shortest.sampler_logps)
    turns = []
    for batches in plan_micro_batches(sizes, world, budget):
        mine = [sequences[i] for i in batches[rank]]
        groups = {sequences[i].group for batch in batches for i in batch}
        turns.append(Turn(mine or [filler], bool(mine), groups))
    return turns
