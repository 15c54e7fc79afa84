"""A step's rounds: full batches though many groups are flat, and no bias to short completions.

The sampler's own rules run here, of all ranks, with a decoder that only counts its columns: on a
GPU a decoded column costs the same for 8 sequences as for 64.
"""

import contextlib
import random
import statistics
from types import SimpleNamespace

import pytest
import torch
from fakes import a_recipe
from rank_threads import Ranks

import grpo_ref_split as trainer
from grpo import sampler
from grpo.metrics import Clock
from grpo.reference import NoReference
from grpo.resume import Progress
from grpo.rollout import Stream, groups_to_begin
from grpo.sampler import stream_groups
from grpo.start import NoWorkers

G, PROMPTS, RANKS, ROWS = 8, 28, 7, 64
LONGEST = 64  # tokens


class CountingDecoder:
    """A sequence's tokens are 0, 0, ... and 1, which is EOS; a prompt lists its group's lengths."""

    joins, compaction = True, 2  # as GraphedDecoder

    def __init__(self, columns):
        self.columns, self.left = columns, torch.zeros(0, dtype=torch.long)

    def admit(self, prompts, group_size):
        new = torch.tensor(prompts).flatten()
        self.left = torch.cat([self.left, new])
        return self.logits(new)

    def next_logits(self, tokens):
        self.columns[-1] += 1
        self.left -= 1
        return self.logits(self.left)

    def keep(self, indices):
        self.left = self.left[indices]

    def logits(self, left):
        return torch.stack([left.ne(1), left.eq(1)], 1) * 99.0


class CountingPolicy:
    """One rank's; `columns` has a number for each round."""

    def __init__(self):
        self.columns = []

    def stream(self, prompts, *, seed, **settings):
        self.columns.append(0)
        model = SimpleNamespace(device=torch.device("cpu"), columns=self.columns)
        settings |= {"temperature": 0, "eos_ids": {1}, "vocab_size": 2, "generator": None}
        return stream_groups(model, prompts, **settings)

    def follow(self, step):
        return contextlib.nullcontext()

    def text(self, completion):
        return str(len(completion.ids))


def prompts_of(flat_share, number=4000):
    """-> prompts of groups with lengths like those of GSM8K, an eighth as long; of the share
    `flat_share` all completions will be right."""
    draw = random.Random(0)
    prompts = []
    for i in range(number):
        lengths = [max(3, int(draw.lognormvariate(5.25, 0.45) / 8)) for _ in range(G)]
        item = {"flat": draw.random() < flat_share, "lengths": lengths}
        prompts.append((i, item, [min(LONGEST, n) for n in lengths]))
    return prompts


def rewards(item, text):
    """Right or wrong by turns, whatever the length, unless the group is flat."""
    rewards.calls += 1
    return {"a": 1.0 if item["flat"] else rewards.calls % 2}


rewards.calls = 0


def steps_of(patch, flat_share, number):
    """-> what the ranks did in each of so many steps: (columns of the slowest rank, the groups that
    are trained, how many usable ones were sampled, the share of flat groups expected next)."""
    patch.setattr(sampler, "make_decoder", lambda model, *_: CountingDecoder(model.columns))
    recipe = a_recipe(
        prompts_of(flat_share),
        task=SimpleNamespace(rewards=rewards),
        PROMPTS_PER_STEP=PROMPTS,
        GROUP_SIZE=G,
        SAMPLE_BATCH=ROWS,
        MAX_PROMPT_TOKENS=G,
        MAX_COMPLETION_TOKENS=LONGEST,
        REWARD_WEIGHTS={"a": 1.0},
        OUTCOME="a",
    )

    def of_rank(rank):
        run = SimpleNamespace(recipe=recipe, c=recipe.c, clock=Clock(), workers=NoWorkers())
        run.progress = Progress("run")
        run.stream, steps = Stream(recipe.prompts, 0, rank, RANKS), []
        run.reference = NoReference()
        for run.progress.step in range(number):
            run.sampler = CountingPolicy()
            groups, metrics, _ = trainer.sample_step(run)
            usable = metrics["groups_sampled"] * (1 - metrics["frac_outcome_zero_std"])
            steps.append((run.sampler.columns, groups, usable, run.progress.flat_share))
        return steps

    steps = []
    for of_ranks in zip(*Ranks(patch, RANKS).run(of_rank), strict=True):
        columns, groups, usable, shares = zip(*of_ranks, strict=True)
        slowest = sum(max(of_round) for of_round in zip(*columns, strict=True))
        assert len({tuple(g.id for g in seen) for seen in groups}) == len(set(shares)) == 1
        steps.append((slowest, groups[0], round(usable[0]), shares[0]))
    return steps


@pytest.fixture(scope="module")
def steps():
    """-> {share of flat groups: steps_of it}"""
    with pytest.MonkeyPatch.context() as patch:
        return {share: steps_of(patch, share, n) for share, n in {0.0: 6, 0.5: 10, 0.7: 6}.items()}


def test_flat_groups_cost_no_more_columns_than_they_must(steps):
    """Where a flat group was replaced when it was found, and a rank refilled by itself, the columns
    of the slowest of 7 ranks were 4.7 and 7.0 times as many at 50 and 70 % flat as at 0 %."""
    columns = {share: statistics.mean(s[0] for s in of[2:]) for share, of in steps.items()}
    assert columns[0.0] <= LONGEST
    assert columns[0.5] <= 2.3 * columns[0.0] and columns[0.7] <= 2.6 * columns[0.0]
    trained = {share: statistics.mean(len(s[1]) for s in of[2:]) for share, of in steps.items()}
    assert trained[0.0] == PROMPTS
    assert PROMPTS <= trained[0.5] < 1.25 * PROMPTS and PROMPTS <= trained[0.7] < 1.25 * PROMPTS


def test_all_that_is_usable_is_trained_so_short_completions_are_not_preferred(steps):
    items = {i: (item["flat"], sorted(ids)) for i, item, ids in prompts_of(0.5)}
    lengths = []
    for _, groups, usable, _ in steps[0.5]:
        assert len(groups) == usable >= PROMPTS
        for group in groups:
            sizes = [len(sample.ids) for sample in group.samples]
            assert items[group.index] == (False, sorted(sizes))
            lengths += sizes
    expected = [n for flat, ids in items.values() if not flat for n in ids]
    error = statistics.pstdev(expected) / len(lengths) ** 0.5
    assert len(lengths) > 2000 and error < 0.02 * statistics.mean(expected)
    assert abs(statistics.mean(lengths) - statistics.mean(expected)) < 4 * error


def test_the_share_that_was_flat_is_remembered_and_a_run_repeats_itself(steps, monkeypatch):
    assert steps[0.0][-1][3] == 0 and 0.4 < steps[0.5][-1][3] < 0.6
    again = steps_of(monkeypatch, 0.5, 2)
    ids = [[[g.id for g in groups] for _, groups, *_ in some] for some in (steps[0.5][:2], again)]
    assert ids[0] == ids[1]


@pytest.mark.parametrize(
    ("missing", "share", "most", "begun"),
    [
        (28, 0.0, 140, 28),
        (28, 0.5, 140, 64),  # 56 on average, and a standard deviation
        (28, 0.7, 140, 109),
        (28, 0.9, 140, 140),
        (28, 1.0, 140, 140),
        (1, 0.5, 140, 4),
        (1, 0.5, 2, 2),
        (3, 0.5, 0, 0),
        (0, 0.5, 9, 0),
        (-2, 1.0, 9, 0),
    ],
)
def test_how_many_groups_a_round_begins(missing, share, most, begun):
    assert groups_to_begin(missing, share, most) == begun


def test_so_many_are_enough_five_times_in_six():
    draw = random.Random(1)
    for share in (0.3, 0.5, 0.7):
        number = groups_to_begin(28, share, 10**6)
        usable = [sum(draw.random() >= share for _ in range(number)) for _ in range(2000)]
        assert 0.8 < statistics.mean(n >= 28 for n in usable) < 0.95
