"""The sampler's scheduling without a model: how many columns a step decodes.

A column is one more token of every sequence of a rank's batch. On a GPU it takes about the same
time for 8 sequences as for 64, so that columns, not tokens, are what sampling costs. The rules are
those of sampler.stream_groups with the graphed decoder, and of a step's rounds. `c` has the options
of simulate.py as attributes; time is counted in columns.
"""

from dataclasses import dataclass, field
from pathlib import Path

from grpo.sampling.decoders.cuda_graph import GraphedDecoder
from grpo.sampling.decoders.shared_prompt import ROOM
from grpo.sampling.rollout import groups_to_begin

MEAN_LOG, DEVIATION_LOG, SHORTEST = 5.25, 0.45, 20  # assumed lengths: 211 tokens on average


@dataclass
class Batch:
    """What a rank does in a round. Sums over columns: of rows, and of rows times their room."""

    columns: int = 0
    rows: int = 0
    keys: int = 0
    recordings: int = 0
    admitted: list = field(default_factory=list)  # prompts of each prefill
    ended: list = field(default_factory=list)  # (column, lengths, whether it is flat) of a group


def run_batch(groups, c, draw, numbers):
    """Returns the Batch of a rank that samples so many groups, by stream_groups' rules."""
    batch, rows, room = Batch(), [], ROOM  # a row: (column in which it ends, in which it began)
    while True:
        running = [row for row in rows if row[0] > batch.columns]
        if not running:
            rows, room = [], ROOM
        free = (c.batch - len(running)) // c.group
        pays = free * c.group >= c.batch // GraphedDecoder.compaction
        new = min(free, groups) if pays or not running else 0
        changed = new > 0
        if len(rows) - len(running) > (0 if new else len(rows) // GraphedDecoder.compaction):
            rows, changed = running, True
        if new:
            batch.admitted.append(new)
            groups -= new
        for _ in range(new):
            lengths = [draw(numbers) for _ in range(c.group)]
            flat = numbers.random() < c.flat
            batch.ended.append((batch.columns + max(lengths), lengths, flat))
            rows = rows + [(batch.columns + length, batch.columns) for length in lengths]
        if not rows:
            return batch
        if batch.columns - min(begun for _, begun in rows) == room < c.longest:
            room, changed = min(c.longest, 2 * room), True
        batch.columns += 1
        batch.rows += len(rows)
        batch.keys += len(rows) * (room + c.prompt // c.group)  # a prompt's keys once for its group
        batch.recordings += changed


def run_rounds(c, draw, numbers):
    """Returns the rounds of a step, each a list of the ranks' Batches.

    All that a round begins is finished. Another follows if too few groups were of use.
    """
    usable, begun, rounds, most = 0, 0, [], c.prompts * (1 + c.refills)
    while usable < c.prompts and begun < most:
        wanted = groups_to_begin(c.prompts - usable, c.flat, most - begun)
        shares = [wanted // c.ranks + (rank < wanted % c.ranks) for rank in range(c.ranks)]
        rounds.append([run_batch(share, c, draw, numbers) for share in shares])
        begun += wanted
        usable += sum(not flat for b in rounds[-1] for *_, flat in b.ended)
    return rounds


def columns_of(rounds):
    """Returns the columns of a step: in each round the slowest rank decides."""
    return sum(max(batch.columns for batch in ranks) for ranks in rounds)


def lengths(c):
    """Returns a function of random.Random that draws a completion's length."""
    if c.lengths:
        real = [min(int(word), c.longest) for word in Path(c.lengths).read_text().split()]
        return lambda numbers: numbers.choice(real)

    def draw(numbers):
        return min(c.longest, max(SHORTEST, int(numbers.lognormvariate(MEAN_LOG, DEVIATION_LOG))))

    return draw
