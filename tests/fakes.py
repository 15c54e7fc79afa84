"""What tests of sampling and training share: a group, a recipe, a fake policy."""

import contextlib
import itertools
from dataclasses import replace
from types import SimpleNamespace

import torch
from transformers import AutoTokenizer

import grpo_ref_split as trainer
from grpo.constants import Constants
from grpo.forward import CompletionModel
from grpo.metrics import TokenStats
from grpo.options.workers.policy_proof import SharedPolicy
from grpo.prepare import load_policy, recipe_of
from grpo.rewards import total_of
from grpo.rollout import sampled_and_rewarded
from grpo.run import Clock, Progress
from grpo.sample import Group, Question, Sample


def a_group(rewards, *, lengths=(3, 1), truncated=(False, False), **changes):
    """-> a Group whose samples have these rewards: (correctness, format) for each."""
    first, samples = 0, []
    for pair, size, cut in zip(rewards, lengths, truncated):
        numbers = range(first, first := first + size)
        ids, logps = [10 + n for n in numbers], [-1.0 - n for n in numbers]
        named = dict(zip(NAMES, pair, strict=True))
        samples.append(Sample(ids, logps, cut, rewards=named, ref_logps=[-1.0] * size))
    fields = {"index": 0, "item": {"question": "?"}, "prompt": [5, 6], "id": "000000-0000-0000"}
    return totalled(a_recipe(), Group(samples=samples, **fields | changes))


def totalled(recipe, group):
    """-> the group, whose samples have the totals that rewarded() gives them."""
    for sample in group.samples:
        sample.total = total_of(recipe, sample)
    return group


NAMES = {"correctness": 2.0, "format": 1.0}
MIXED = [(1.0, -1.0), (-1.0, -1.0)]
ALL_WRONG = [(-1.0, 1.25), (-1.0, 1.25)]
ALL_RIGHT = [(1.0, 1.25), (1.0, 1.25)]


CONSTANTS = {  # of a small run
    "MODEL": "tiny",
    "TASK": "fake",
    "PROMPTS_PER_STEP": 3,
    "GROUP_SIZE": 2,  # as FakeEngine samples
    "SAMPLE_BATCH": 64,
    "MICRO_BATCH_TOKENS": 24,
    "MAX_PROMPT_TOKENS": 20,
    "MAX_COMPLETION_TOKENS": 8,
    "REWARD_WEIGHTS": NAMES,
    "OUTCOME": "correctness",
    "STOP_TOKENS": [],
    "WAIT_LIMIT_SECONDS": 1,
}


def a_recipe(prompts=(), *, task=None, **constants):
    """-> a Recipe whose task rewards a FakeEngine's completions as the prompt's item has it."""
    assert all(map(str.isupper, constants)), constants
    task = task or SimpleNamespace(
        rewards=lambda item, text: dict(zip(NAMES, item[text], strict=True))
    )
    c = Constants(trainer.DEFAULTS | CONSTANTS | constants)
    questions = [prompt and Question(*prompt) for prompt in prompts]
    found = {"weights": c.REWARD_WEIGHTS, "outcome": c.OUTCOME}
    return replace(recipe_of(c, task), prompts=questions, **found)


def one_reward(task, **constants):
    """-> a Recipe of a user's task with one reward and long completions."""
    own = {"REWARD_WEIGHTS": {"reward": 1.0}, "OUTCOME": "reward", "MAX_COMPLETION_TOKENS": 200}
    return a_recipe(task=task, **own | {"TASK": "mine"} | constants)


def prompts_of(outcomes):
    """-> prompts whose groups have these rewards: (correctness, format) for each completion."""
    items = [{"first": one, "second": two, "question": "?"} for one, two in outcomes]
    return [Question(i, item, [5, 6]) for i, item in enumerate(items)]


class FakeEngine:
    """In place of sampling: two completions for each prompt, one of which is cut."""

    def __init__(self):
        self.asked, self.settings = [], None

    def stream(self, prompts, *, group_size, max_sequences, **settings):
        self.settings = settings | {"max_sequences": max_sequences}
        while new := list(itertools.islice(prompts, max_sequences // group_size)):
            self.asked.append(len(new))
            for key, *_ in new:
                whole, cut = Sample([7, 2], [-1.0, -2.0], False), Sample([7], [-1.0], True)
                yield key, [whole, cut][:group_size]

    def follow(self, step):
        return contextlib.nullcontext()

    def text(self, completion):
        return "second" if completion.truncated else "first"


PROMPT = Question(0, {"question": "Why?"}, [5, 6])


def a_run(recipe, **parts):
    """-> the parts of a run that a step of sampling needs."""
    own = {
        "sampler": FakeEngine(),
        "clock": Clock(),
        "progress": Progress("run"),
        "workers": None,
    }
    return SimpleNamespace(recipe=recipe, greedy=recipe, c=recipe.c, **own | parts)


def sampled(engine, recipe, prompts, **changes):
    questions = (prompt and Question(*prompt) for prompt in prompts)
    return list(sampled_and_rewarded(engine, recipe, questions, **{"seed": 0} | changes))


def loss_of(policy, samples, **constants):
    """-> batch_loss's (loss, stats) of a micro-batch."""
    model, c = CompletionModel(policy.model), a_recipe(**constants).c
    hidden, ids = model([s.group.prompt for s in samples], [s.ids for s in samples])
    return trainer.batch_loss(c, hidden, model.head, ids, samples, policy.vocab_size)


def means_of(loss, stats):
    """-> the metrics of one rank's only micro-batch."""
    totals = TokenStats("cpu")
    totals.add(loss, stats)
    return totals.over_ranks()


PROMPTS = [Question(0, {}, [5, 6, 7, 8]), Question(1, {}, [40, 41, 42, 43, 44, 45])]


def tiny_policy(tiny, dtype="float32", drift=0.0, **changes):
    """-> the tiny Policy, its weights moved by `drift`."""
    policy = load_policy(str(tiny), AutoTokenizer.from_pretrained(tiny), dtype, **changes)
    policy = SharedPolicy(**vars(policy))
    move(policy.model, drift)
    return policy


def own_logps(policy, group):
    """-> the policy's log-probs of a group, sequence by sequence."""
    return torch.tensor([p for s in group.samples for p in policy.logps(s.group.prompt, s.ids)])


@torch.no_grad()
def move(model, drift):
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(drift * torch.randn_like(parameter))
