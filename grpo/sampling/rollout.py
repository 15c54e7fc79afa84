"""Rollouts: prompts are sampled in groups, rewarded, and made into what travels (wire.py).

The ranks of grpo_ref_split.py do this, and so do workers (worker.py, vllm_worker.py): all sample
with an engine, which has `stream` (as sampler.stream_groups) and `text`. What they must agree on is
a Recipe, made of the trainer's constants.
"""

import itertools
import math
import numbers
import random
import time
from difflib import get_close_matches

import torch

from grpo.sampling.reward_timeout import TooSlow, timely
from grpo.wire import Group, is_flat


# --- Prompts ------------------------------------------------------------------------
class Order:
    """The endless order of prompts that the seed gives: every epoch a new one, each prompt once."""

    def __init__(self, prompts, seed):
        self.prompts, self.seed, self.epoch = prompts, seed, None

    def __getitem__(self, position):
        epoch, at = divmod(position, len(self.prompts))
        if epoch != self.epoch:
            self.epoch, self.order = epoch, list(self.prompts)
            random.Random(f"{self.seed}/{epoch}").shuffle(self.order)
        return self.order[at]


class Stream:
    """A rank's prompts, without end: every world-th of the Order, from `position` on."""

    def __init__(self, prompts, seed, rank, world):
        self.order, self.position, self.world = Order(prompts, seed), rank, world

    def __iter__(self):
        return self

    def __next__(self):
        prompt = self.order[self.position]
        self.position += self.world
        return prompt


# --- Sample and reward --------------------------------------------------------------
def sampled_and_rewarded(engine, recipe, take, *, group_size, temperature, seed, count):
    """Yields (prompt, completions, rewards) as soon as each group is sampled.

    `take(n)` gives up to n prompts, as in Recipe.prompts. `rewards` holds, for each completion, the
    task's dict of named rewards. The task sees text; the trainer goes on with the sampled ids, as
    text tokenised again may give other ids. The time that rewards take goes to
    count["seconds_reward"]. Raises SystemExit if rewards don't fit REWARD_WEIGHTS.
    """
    numbers, started = itertools.count(), {}

    def take_ids(count):
        new = {next(numbers): prompt for prompt in take(count)}
        started.update(new)
        return [(key, prompt[2]) for key, prompt in new.items()]

    for key, completions in engine.stream(
        take_ids,
        group_size=group_size,
        max_rows=recipe.sample_batch,
        longest_prompt=recipe.max_prompt_tokens,
        max_new_tokens=recipe.max_completion_tokens,
        temperature=temperature,
        seed=seed,
    ):
        prompt, began = started.pop(key), time.perf_counter()
        rewards = rewarded(recipe, prompt[1], [engine.text(c) for c in completions])
        count["seconds_reward"] += time.perf_counter() - began
        yield prompt, completions, rewards


def rewarded(recipe, item, texts):
    """-> the named_floats of a group's completions. What the task raises is a bug, and no reward:
    it stops the run and says for what; so do rewards that take too long."""
    rewards, question = [], item.get("question")
    what = f"the rewards of question {question!r:.80}, tasks/{recipe.task_name}.py,"
    try:
        with timely(recipe.reward_timeout_seconds, what):
            for text in texts:
                rewards.append(named_floats(recipe, recipe.task.rewards(item, text), item, text))
    except (Exception, TooSlow) as error:
        remedy = " (REWARD_TIMEOUT_SECONDS)" if isinstance(error, TooSlow) else ""
        raise RuntimeError(
            f"tasks/{recipe.task_name}.py: rewards() failed with {error!r}{remedy} for the question"
            f" {item!r} and the completion {texts[min(len(rewards), len(texts) - 1)]!r}"
        ) from error
    return rewards


def named_floats(recipe, rewards, item, text):
    """-> what the task's rewards() returned for a completion `text`, as floats in the order of
    REWARD_WEIGHTS. Raises SystemExit where it is no dict of these names, or not of numbers."""
    names = list(recipe.reward_weights)
    if not isinstance(rewards, dict):
        wrong = f"it must be a dict of numbers by name, for {names}"
    elif rewards.keys() != recipe.reward_weights.keys():
        wrong = f"its names are {list(rewards)}, those in REWARD_WEIGHTS are {names}, and must be"
        wrong += f" the same{nearest(rewards, names)}"
    else:
        floats = {name: as_float(rewards[name]) for name in names}
        if all(map(math.isfinite, floats.values())):
            return floats
        wrong = "each must be a finite number, or True or False"
    raise SystemExit(
        f"tasks/{recipe.task_name}.py: rewards() returned {rewards!r:.500} for the question"
        f" {item!r} and the completion {text!r}: {wrong}"
    )


def nearest(theirs, names):
    """Example: nearest(["correct"], ["correctness"]) -> "; is 'correct' to be 'correctness'?" """
    absent, strange = [n for n in names if n not in theirs], [n for n in theirs if n not in names]
    near = [(n, m) for n in strange for m in get_close_matches(str(n), absent, 1)]
    return "".join(f"; is {n!r} to be {m!r}?" for n, m in near)


def as_float(value):
    """-> a number as a float, also NumPy's or torch's; True as 1, False as 0; all else as NaN."""
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    return float(value) if isinstance(value, numbers.Real) else math.nan


def rollout(engine, recipe, stream, count, *, share, seed):
    """Yields (sampled, flat) until `share` groups are worth training; counts all in `count`.

    Flat groups (all right, or all wrong) have nothing to compare: judged on OUTCOME, since a group
    that is all wrong would otherwise train its format alone, at full size. When there is room for
    it another prompt takes its place, up to MAX_REFILLS times `share` of them in all; after that
    there may be fewer than `share`.
    """
    kept, begun, ended = 0, 0, 0

    def take(room):
        nonlocal begun
        wanted = share - kept - (begun - ended)
        left = share * (1 + recipe.max_refills) - begun
        new = list(itertools.islice(stream, max(0, min(room, wanted, left))))
        begun += len(new)
        return new

    for sampled in sampled_and_rewarded(
        engine,
        recipe,
        take,
        group_size=recipe.group_size,
        temperature=recipe.temperature,
        seed=seed,
        count=count,
    ):
        flat = is_flat([r[recipe.outcome] for r in sampled[2]])
        count.update(tally(recipe, sampled, flat))
        ended += 1
        kept += not (flat and recipe.skip_flat_groups)
        yield sampled, flat


TALLY = ("groups", "flat", "completions", "tokens", "truncated", "right")


def tally(recipe, sampled, flat):
    """-> sums over the completions of one sampled group, by name."""
    _, completions, rewards = sampled
    return {
        "groups": 1,
        "flat": int(flat),
        "completions": len(completions),
        "tokens": sum(len(c.ids) for c in completions),
        "truncated": sum(c.truncated for c in completions),
        "right": sum(r[recipe.outcome] > 0 for r in rewards),
    } | {f"reward_{name}": sum(r[name] for r in rewards) for name in recipe.reward_weights}


def tally_of(recipe, group):
    """-> the same for a group that a worker sampled, with the flat ones it left out before it."""
    if group.sampler == "regrouped":  # counted when they were sampled
        return {}
    rewards = {n: group.rewards[:, i] for i, n in enumerate(group.reward_names)}
    own = {
        "groups": 1,
        "flat": int(group.flat),
        "completions": len(group.completion_lengths),
        "tokens": int(group.completion_lengths.sum()),
        "truncated": int(group.truncated.sum()),
        "right": int((rewards[recipe.outcome] > 0).sum()),
    } | {f"reward_{name}": float(rewards[name].sum()) for name in recipe.reward_weights}
    return {name: value + group.skipped.get(name, 0) for name, value in own.items()}


def make_group(sampled, *, id, run, version, sampler, outcome, skipped):
    """-> the wire's Group of a sampled one."""
    (index, _, ids), completions, rewards = sampled
    names = list(rewards[0])
    return Group(
        id=id,
        run=run,
        policy_version=version,
        item=index,
        sampler=sampler,
        outcome=outcome,
        skipped=skipped,
        reward_names=names,
        prompt_ids=torch.tensor(ids, dtype=torch.int32),
        completion_ids=torch.tensor([i for c in completions for i in c.ids], dtype=torch.int32),
        completion_lengths=torch.tensor([len(c.ids) for c in completions], dtype=torch.int32),
        sampler_logps=torch.tensor([p for c in completions for p in c.logps]),
        truncated=torch.tensor([c.truncated for c in completions]),
        rewards=torch.tensor([[float(r[name]) for name in names] for r in rewards]),
    )
