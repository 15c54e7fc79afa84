"""Rollouts: samples groups of completions, and rewards and counts them.

Ranks and workers sample with a policy: any object with `stream` (as sampler.stream_groups) and
`text`. `prompts` are Questions.
"""

import contextlib
import functools
import hashlib
import math
import random
from collections import deque

from grpo.rewards import begin_rewards, set_rewards
from grpo.sample import Group, Prompt


# --- Prompts ------------------------------------------------------------------------
class Order:
    """An endless sequence, order[n] for any n: each epoch has all prompts, shuffled anew."""

    def __init__(self, prompts, seed):
        self.prompts, self.seed, self.epoch, self.shuffled = prompts, seed, None, []

    def __getitem__(self, number):
        epoch, at = divmod(number, len(self.prompts))
        if epoch != self.epoch:
            self.epoch, self.shuffled = epoch, list(self.prompts)
            random.Random(f"{self.seed}/{epoch}").shuffle(self.shuffled)
        return self.shuffled[at]


# --- Sample and reward --------------------------------------------------------------
def sampled_and_rewarded(policy, recipe, prompts, *, seed, timed=contextlib.nullcontext):
    """Yields a Group for each of `prompts`, in the order in which the groups end. `prompts` is read
    when there is room for another group. Rewards are computed, or awaited, within `with timed()`;
    sampling continues if other processes compute them. Raises the errors of stream_groups,
    stream_turns and set_rewards.
    """
    stream, waiting = policy.stream, deque()  # waiting: (group, what begin_rewards has returned)
    if recipe.turns:
        stream = functools.partial(recipe.turns.stream_turns, policy, recipe)

    def finish(group, calls):
        with timed():
            set_rewards(recipe, group, calls)
        return group

    for question, samples in stream(
        (Prompt(question, question.ids) for question in prompts),
        group_size=recipe.c.GROUP_SIZE,
        max_sequences=recipe.c.SAMPLE_BATCH,
        max_new_tokens=recipe.c.MAX_COMPLETION_TOKENS,
        temperature=recipe.c.TEMPERATURE,
        seed=seed,
    ):
        for sample in samples:
            sample.text = sample.text or question.opening + policy.text(sample)
        group = Group(question.index, question.item, question.ids, samples)
        waiting.append((group, begin_rewards(recipe, group)))
        while waiting and all(future.done() for _, future in waiting[0][1] if future):
            yield finish(*waiting.popleft())
    while waiting:
        yield finish(*waiting.popleft())


def seed_of(*parts):
    """Returns a seed of 56 bits that depends on all `parts` (texts and numbers)."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:7], "big")


# --- Count --------------------------------------------------------------------------
def is_flat(group):
    """Returns whether a group's total rewards are equal, up to the rounding of sums."""
    totals = applying(sample.total for sample in group.samples)
    return not totals or max(totals) - min(totals) <= 1e-14 * max(map(abs, totals))


def skip_if_flat(c, group):
    """Marks a flat group, with SKIP_FLAT_GROUPS, as one that is only counted."""
    group.skipped = c.SKIP_FLAT_GROUPS and is_flat(group)
    for sample in group.samples if group.skipped else ():
        sample.logps = []  # of no use any more, and half of what ranks and workers send


def applying(values):
    """Returns the values without NaN, which means that the reward does not apply."""
    return [value for value in values if not math.isnan(value)]
