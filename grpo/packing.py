"""Plans which sequences run together, in micro-batches of a limited number of tokens.

    rounds = plan_micro_batches(sizes, world, budget)  # rounds[number][rank]: numbers of sequences

Every rank knows the whole step and computes the same plan without communication. The reference
server uses the same functions to pack what it scores.
"""

GROWTH = 1.02  # factor to the next budget tried; higher is faster to plan, less even


def sizes_of(prompts, completions, packs):
    """Returns the size of each sequence: (its tokens, the tokens that it adds to a batch that ends
    with the sequence before it). Sequences side by side run a shared prompt once. If the model does
    not pack, the second number is None, and a sequence is padded to the longest of its batch.

    >>> sizes_of([[1, 2], [1, 2], [3]], [[4], [5], [6]], packs=True)
    [(3, 3), (3, 1), (2, 2)]
    """
    sizes = []
    for last, prompt, completion in zip([None, *prompts], prompts, completions):
        alone = len(prompt) + len(completion)
        more = len(completion) if prompt == last else alone
        sizes.append((alone, more if packs else None))
    return sizes


def pack_by_tokens(sizes, budget):
    """Returns batches (lists of sequence numbers) of at most `budget` tokens; a longer sequence is
    alone. Packed sequences keep their order; others are sorted, the longest first.

    >>> pack_by_tokens([(8, 8), (7, 2), (5, 5)], budget=10)
    [[0, 1], [2]]
    >>> pack_by_tokens([(6, None), (7, None), (8, None)], budget=14)
    [[2], [1, 0]]
    """
    batches, tokens = [], 0
    for number in sorted(range(len(sizes)), key=lambda i: sizes[i][1] is None and -sizes[i][0]):
        alone, more = sizes[number]
        if more is None and batches:
            more = sizes[batches[-1][0]][0]  # as long as the batch's first
        if batches and tokens + more <= budget:
            batches[-1].append(number)
            tokens += more
        else:
            batches.append([number])
            tokens = alone
    return batches


def plan_micro_batches(sizes, world, budget):
    """Returns rounds; a round has one micro-batch (a list of sequence numbers) per rank.

    ZeRO-2 communicates in every backward, so all ranks need the same number of micro-batches, and
    in each round they wait for the largest. We therefore plan as few rounds as the budget allows,
    with micro-batches of equal size. In the last round a rank may get an empty list.

    >>> plan_micro_batches([(9, 9), (7, 7), (5, 5)], world=2, budget=9)
    [[[0], [1]], [[2], []]]
    """
    count = -(-len(pack_by_tokens(sizes, budget)) // world) * world
    least = sum(more or alone for alone, more in sizes)
    limit = min(budget, least / max(count, 1))
    while len(batches := pack_by_tokens(sizes, limit)) > count:
        limit = min(budget, GROWTH * limit)
    batches += [[]] * (-len(batches) % world)
    return [batches[i : i + world] for i in range(0, len(batches), world)]


def plan_rounds(samples, packs, rank, world, budget):
    """Returns this rank's (samples, is_filler) in each round of plan_micro_batches. All ranks join
    each round, so a rank without a micro-batch gets a filler."""
    sizes = sizes_of([s.prompt for s in samples], [s.ids for s in samples], packs)
    filler = min(samples, key=lambda s: len(s.ids))  # its loss is multiplied by 0
    plan = plan_micro_batches(sizes, world, budget)
    mine = [[samples[i] for i in batches[rank]] for batches in plan]
    return [(batch or [filler], not batch) for batch in mine]
