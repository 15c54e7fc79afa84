"""The next turn of a conversation continues in its place in the batch, with its KV cache.

If a prompt is a sequence that has ended but is still in the batch, with a short reply after it, it
is not run again: the sequence takes the reply, one forced token a step. A longer reply runs with
its whole conversation, as a new prompt does, in one pass.
"""

from dataclasses import replace

# A longer reply is run as a new prompt: tokens, share of the conversation (chosen, not measured)
LONGEST, SHARE = 64, 1 / 4


def continue_rows(running, decoder, prompts):
    """Continues ended sequences with the prompts that begin with their ids; returns the others.
    `prompts` are stream_groups' Prompts, with limits and a group_size of 1."""
    rows = (~running.active).nonzero().flatten().tolist()
    ends, kept, lengths, others = running.ends[rows].tolist(), {}, {}, []
    for row, end, ids in zip(rows, ends, running.ids[rows].tolist(), strict=True):
        was = running.rows[row]
        kept[row] = was.prompt + ids[was.joined : end], end

    def goes_on(old, end):  # if not even the limit fits, it is another conversation
        return ids[: len(old)] == old and running.limit - limit == end + len(ids) - len(old)

    for prompt in prompts:
        key, ids, number, limit = prompt
        row = next((row for row, has in kept.items() if number == 1 and goes_on(*has)), None)
        reply = [] if row is None else ids[len(kept[row][0]) :]
        if row is None or len(reply) > min(LONGEST, SHARE * len(ids)):
            others.append(prompt)
            continue
        old, end = kept.pop(row)
        was = running.rows[row]
        running.rows[row] = replace(was, group=(key, [None]), number=0, first=end + len(reply))
        running.active[row], running.tokens[row] = True, old[-1]
        running.unfinished += 1
        running.forced |= {row: reply} if reply else {}
        lengths[row] = len(old) - 1 - len(was.prompt)  # the last id has not been run
    if lengths:
        decoder.rewind(lengths)
    return others
