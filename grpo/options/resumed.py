"""The next turn of a conversation goes on in its place in the batch, with its keys and values.

A prompt that begins with the ids of an ended sequence, which is still in the batch, is not run
again: the sequence takes what follows, the task's reply, one given token a step. A reply that is
longer than LONGEST of the prompt runs with it, as a new prompt does, all ids in one pass.
"""

LONGEST = 1 / 4  # each given token takes a step of the batch; the share is chosen, not measured


def resume(running, decoder, prompts):
    """Continues ended sequences with the prompts that begin with their ids; returns the others.
    `prompts` are (key, ids, number, limit), as stream_groups takes them, with a group_size of 1."""
    rows = (~running.active).nonzero().flatten().tolist()
    ends, kept, lengths, others = running.ends[rows].tolist(), {}, {}, []
    for row, end, ids in zip(rows, ends, running.ids[rows].tolist(), strict=True):
        *_, prompt, joined = running.owners[row]
        kept[row] = prompt + ids[joined:end], end
    for key, ids, *own in prompts:
        row = next((row for row, (old, _) in kept.items() if ids[: len(old)] == old), None)
        given = [] if row is None else ids[len(kept[row][0]) :]
        if row is None or own[0] > 1 or len(given) > LONGEST * len(ids):
            others.append((key, ids, *own))
            continue
        old, end = kept.pop(row)
        *_, prompt, joined = running.owners[row]
        running.owners[row] = (key, [None]), 0, end + len(given), prompt, joined
        running.active[row], running.tokens[row] = True, old[-1]
        running.unfinished += 1
        running.given |= {row: given} if given else {}
        lengths[row] = len(old) - 1 - len(prompt)  # the last id has not been run
    if lengths:
        decoder = getattr(decoder, "decoder", decoder)  # of one that is recorded
        decoder.lengths = [lengths.get(i, n) for i, n in enumerate(decoder.lengths)]
        decoder.arrange()
    return others
