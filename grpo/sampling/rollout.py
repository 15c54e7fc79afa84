"""Rollouts: samples groups of completions, rewards and counts them, and packs them as wire.Groups.

Ranks and workers sample with a policy: any object with `stream` (as sampler.stream_groups) and
`text`. A prompt is (index, item, prompt ids), as in Recipe.prompts. A sampled group is (prompt,
completions, rewards): G sampler.Completions, and for each a dict of floats by reward name.
"""

import contextlib
import functools
import hashlib
import math
import random
from collections import deque

import torch

from grpo.sampling.task import begin_rewards, reward_group, total
from grpo.wire import Group


# --- Prompts ------------------------------------------------------------------------
class Stream:
    """An endless sequence of prompts, fixed by a seed: each epoch has all prompts in a new order.
    Iterating yields a rank's share, every `world`-th prompt, from any `position` that is set."""

    def __init__(self, prompts, seed, rank=0, world=1):
        self.prompts, self.seed, self.position, self.world = prompts, seed, rank, world
        self.epoch, self.shuffled = None, []

    def __iter__(self):
        return self

    def __next__(self):
        epoch, at = divmod(self.position, len(self.prompts))
        if epoch != self.epoch:
            self.epoch, self.shuffled = epoch, list(self.prompts)
            random.Random(f"{self.seed}/{epoch}").shuffle(self.shuffled)
        self.position += self.world
        return self.shuffled[at]


# --- Sample and reward --------------------------------------------------------------
def sampled(policy, recipe, prompts, *, seed):
    """Yields (prompt, completions, texts) for each of `prompts`, in the order in which the groups
    end. This iterator is read when there is room for another group; a None means that it has no
    prompt yet.

    The task gets these texts, each a text or the texts of several turns; the trainer trains on the
    sampled ids, as re-tokenised text may differ. Raises the errors of stream_turns.
    """
    stream = policy.stream
    if recipe.has_turns:
        from grpo.sampling.turns import stream_turns

        stream = functools.partial(stream_turns, policy, recipe)
    groups = stream(
        (prompt and (prompt, prompt[2]) for prompt in prompts),
        group_size=recipe.c.GROUP_SIZE,
        max_sequences=recipe.batch,
        longest_prompt=recipe.c.MAX_PROMPT_TOKENS,
        max_new_tokens=recipe.c.MAX_COMPLETION_TOKENS,
        temperature=recipe.c.TEMPERATURE,
        seed=seed,
    )
    for prompt, completions in groups:
        opening = recipe.opening(prompt[2])
        yield prompt, completions, [c.turns or opening + policy.text(c) for c in completions]


def sampled_and_rewarded(policy, recipe, prompts, *, seed, timed=contextlib.nullcontext):
    """Yields a sampled group for each of `prompts`, as `sampled` does. Rewards are computed, or
    awaited, within `with timed()`; sampling continues if other processes compute them. Raises the
    errors of reward_group, too."""
    waiting = deque()  # groups, and the Futures of their rewards

    def finish(prompt, completions, texts, futures):
        with timed():
            return prompt, completions, reward_group(recipe, prompt[1], texts, futures)

    for prompt, completions, texts in sampled(policy, recipe, prompts, seed=seed):
        waiting.append((prompt, completions, texts, begin_rewards(recipe, prompt[1], texts)))
        while waiting and all(future.done() for future in waiting[0][-1]):
            yield finish(*waiting.popleft())
    while waiting:
        yield finish(*waiting.popleft())


def groups_to_begin(missing, flat_share, most):
    """Returns how many groups to start, at most `most`, to get m = `missing` usable ones if a share
    f = `flat_share` of groups has zero variance: (m + sqrt(m f)) / (1 - f).

    The formula is ours: n groups have n (1 - f) usable ones on average, with a standard deviation
    of sqrt(n f (1 - f)), and n (1 - f) is about m. We add one deviation, so that five times in six
    there are enough.
    """
    if missing <= 0:
        return 0
    if flat_share >= 1:
        return most
    wanted = (missing + math.sqrt(missing * flat_share)) / (1 - flat_share)
    return min(math.ceil(wanted), most)


def seed_of(*parts):
    """Returns a seed of 56 bits that depends on all `parts` (texts and numbers)."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:7], "big")


# --- Count --------------------------------------------------------------------------
def is_flat(values):
    """Returns whether a group has zero variance in its `values`. If these are outcomes, only the
    format would be compared, at full size; if they are total rewards, nothing can be compared.

    >>> is_flat([1, 1, 1]), is_flat([1, -1, 1])
    (True, False)
    """
    return max(values, default=0) - min(values, default=0) < 1e-6


def totals_of(rewards, lengths, weights, *, limit, overlong):
    """Returns the total rewards (floats) of completions with these lengths: task.total minus a
    penalty that grows over the last `overlong` tokens from 0 to 1 at the limit (DAPO 2503.14476,
    eq. 13; TRL's get_soft_overlong_punishment). `overlong` = 0 means no penalty.

    >>> totals_of([{"right": 1.0}] * 3, [8, 10, 12], {"right": 2.0}, limit=12, overlong=4)
    [2.0, 1.5, 1.0]
    """
    beyond = [max(0, n - limit + overlong) / max(1, overlong) for n in lengths]
    return [total(r, weights) - cost for r, cost in zip(rewards, beyond, strict=True)]


def tally(recipe, sampled):
    """Returns {name: number} of one sampled group, as counts_of; they are added up over groups."""
    _, completions, rewards = sampled
    lengths, cut = [c.length for c in completions], [c.truncated for c in completions]
    return counts_of(recipe, lengths, cut, rewards)


def tally_of(recipe, group):
    """Returns the tally of a worker's wire.Group and of zero-variance groups skipped before it."""
    counts = tally_of_one(recipe, group)
    return {name: value + group.skipped.get(name, 0) for name, value in counts.items()}


def tally_of_one(recipe, group):
    """Returns the tally of a wire.Group."""
    lengths, cut = [int(own.sum()) for own in group.owns()], group.truncated.tolist()
    return counts_of(recipe, lengths, cut, rewards_of(group))


def rewards_of(group):
    """Returns the rewards of a wire.Group's completions, dicts by name."""
    return [dict(zip(group.reward_names, row, strict=True)) for row in group.rewards.tolist()]


def counts_of(recipe, lengths, truncated, rewards):
    """Returns {name: number}. Each reward adds "reward_NAME" (the sum of the reward), "square_NAME"
    (the sum of its squares) and "applicable_NAME" (the number of completions)."""
    c = recipe.c
    applicable = {name: applying(r[name] for r in rewards) for name in recipe.weights}
    outcomes = applicable[recipe.outcome]
    sizes = {"limit": c.MAX_COMPLETION_TOKENS, "overlong": c.OVERLONG_TOKENS}
    totals = applying(totals_of(rewards, lengths, recipe.weights, **sizes))
    # If the outcome applies to fewer than two completions, we compare the total rewards
    by_reward = int(is_flat(totals))
    by_outcome = int(is_flat(outcomes)) if outcomes[1:] else by_reward
    sums = {f"reward_{name}": sum(values) for name, values in applicable.items()}
    sums |= {f"square_{name}": sum(v * v for v in values) for name, values in applicable.items()}
    sums |= {f"applicable_{name}": len(values) for name, values in applicable.items()}
    return sums | {
        "groups": 1,
        "flat": by_reward if c.SKIP_FLAT_GROUPS == "reward" else by_outcome,
        "flat_outcome": by_outcome,
        "flat_reward": by_reward,
        "completions": len(rewards),
        "tokens": sum(lengths),
        "truncated": sum(truncated),
        "right": sum(value > 0 for value in outcomes),
        "ended_tokens": sum(n for n, cut in zip(lengths, truncated, strict=True) if not cut),
        "total": sum(totals),
        "group_std": torch.tensor(totals, dtype=torch.float64).std().item() if totals[1:] else 0.0,
    }


def applying(values):
    """Returns the values without NaN, which means that the reward does not apply."""
    return [value for value in values if not math.isnan(value)]


# --- Pack ---------------------------------------------------------------------------
def make_group(sampled, *, id, run, version, sampler, outcome, skipped=None):
    """Returns the wire.Group of a sampled group."""
    (index, _, prompt_ids), completions, rewards = sampled
    names = list(rewards[0])
    own = torch.tensor([drawn for c in completions for drawn in c.own or [True] * len(c.ids)])
    return Group(
        id=id,
        run=run,
        policy_version=version,
        item=index,
        sampler=sampler,
        outcome=outcome,
        skipped=skipped or {},
        reward_names=names,
        prompt_ids=torch.tensor(prompt_ids, dtype=torch.int32),
        completion_ids=torch.tensor([i for c in completions for i in c.ids], dtype=torch.int32),
        completion_lengths=torch.tensor([len(c.ids) for c in completions], dtype=torch.int32),
        sampler_logps=torch.tensor([p for c in completions for p in c.logps]),
        truncated=torch.tensor([c.truncated for c in completions]),
        rewards=torch.tensor([[float(r[name]) for name in names] for r in rewards]),
        own=None if own.all() else own,
    )
