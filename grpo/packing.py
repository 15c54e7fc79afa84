"""Which sequences run together: micro-batches of a bounded number of padded tokens.

    rounds = plan_micro_batches(sizes, world, budget)  # rounds[number][rank]: numbers of sequences

Every rank knows the whole step and computes the same plan: nothing is communicated. A sequence's
size is (number of its prompt, prompt tokens, completion tokens); sequences with the same number
share the prompt. The server packs what it scores by the same functions.
"""

import itertools
from collections import Counter
from dataclasses import replace

GROWTH = 1.02  # of the budget that is tried next


def number_prompts(prompts, share):
    """Returns the number of each sequence's prompt: equal neighbours have the same one, or with
    `share` False each its own.

    >>> [number_prompts([[1], [1], [2]], share) for share in (True, False)]
    [[0, 0, 1], [0, 1, 2]]
    """
    if not share:
        return list(range(len(prompts)))
    runs = itertools.groupby(prompts)
    return [number for number, (_, run) in enumerate(runs) for _ in run]


def in_order(sizes):
    """Returns sequence numbers: those of a prompt together, longest first; prompts by their longest
    completion. Neighbours are then of similar length, which wastes least on padding."""
    longest = Counter()
    for prompt, _, tokens in sizes:
        longest[prompt] = max(tokens, longest[prompt])
    keys = [(-longest[prompt], prompt, -tokens) for prompt, _, tokens in sizes]
    return sorted(range(len(sizes)), key=keys.__getitem__)


def pack_by_tokens(sizes, units, budget):
    """Returns `units` (lists of sequence numbers) packed into batches, in their order.

    A unit is never split. A batch has at most `budget` padded_tokens, unless it is a single unit.

    >>> pack_by_tokens([(0, 5, 3), (0, 5, 2), (1, 4, 1)], [[0], [1], [2]], budget=14)
    [[0, 1], [2]]
    """
    batches = []
    for unit in units:
        if not batches or padded_tokens(sizes, batches[-1] + unit) > budget:
            batches.append([])
        batches[-1] += unit
    return batches


def padded_tokens(sizes, batch):
    """Returns a batch's cost in tokens, a rule of ours: prompts, each as wide as the widest;
    completions, each as long as the longest; and 1/8 of each prompt token that a further sequence
    shares, for the memory of its keys and values."""
    prompts, widths, lengths = zip(*(sizes[number] for number in batch), strict=True)
    different, wide = len(set(prompts)), max(widths)
    return different * wide + len(batch) * max(lengths) + (len(batch) - different) * wide // 8


def whole_groups(sizes, budget):
    """Returns units for pack_by_tokens: all sequences of a prompt, or single ones where the batch
    would be too large."""
    units = []
    for _, run in itertools.groupby(in_order(sizes), key=lambda number: sizes[number][0]):
        numbers = list(run)
        fit = padded_tokens(sizes, numbers) <= budget
        units += [numbers] if fit else [[number] for number in numbers]
    return units


def plan_micro_batches(sizes, world, budget):
    """Returns rounds; a round has a micro-batch (a list of sequence numbers) for each of the ranks.

    ZeRO-2 communicates in every backward: all ranks need the same number of micro-batches, and in
    each round they wait for the largest. So there are as few rounds as the budget allows, of equal
    micro-batches rather than full ones and a rest. In the last round a rank may get an empty list.

    >>> plan_micro_batches([(0, 4, 1), (1, 4, 5), (2, 4, 3)], world=2, budget=9)
    [[[1], [2]], [[0], []]]
    """
    units = [[number] for number in in_order(sizes)]
    full = pack_by_tokens(sizes, units, budget)
    count = -(-len(full) // world) * world
    cost = sum(padded_tokens(sizes, batch) for batch in full)
    limit = min(budget, cost / max(count, 1))
    while len(batches := pack_by_tokens(sizes, units, limit)) > count:
        limit = min(budget, GROWTH * limit)
    batches += [[]] * (-len(batches) % world)
    return [batches[i : i + world] for i in range(0, len(batches), world)]


def plan_rounds(sequences, share_prompts, rank, world, budget):
    """Returns this rank's (sequences, is_filler) of each round in which the ranks train a step's
    sequences; see plan_micro_batches. A rank that has no micro-batch left gets a filler: all ranks
    take part in each round."""
    numbers = number_prompts([s.prompt for s in sequences], share_prompts)
    lengths = ((len(s.prompt), len(s.completion)) for s in sequences)
    sizes = [(n, *pair) for n, pair in zip(numbers, lengths, strict=True)]
    filler = replace(min(sequences, key=lambda s: len(s.completion)))  # its loss is multiplied by 0
    plan = plan_micro_batches(sizes, world, budget)
    mine = [[sequences[i] for i in batches[rank]] for batches in plan]
    return [(batch or [filler], not batch) for batch in mine]
