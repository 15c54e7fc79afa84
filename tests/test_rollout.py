"""A rank's rollout: zero-variance groups are counted, and what is sent is what was sampled."""

from types import SimpleNamespace

import pytest
import torch
from fakes import (
    MIXED,
    FakeEngine,
    a_group,
    a_recipe,
    prompts_of,
    sampled,
    tiny_policy,
)

from grpo.rollout import is_flat, skip_if_flat
from grpo.run import Clock


def test_sampling_is_bounded_and_as_the_recipe_says():
    engine, recipe = FakeEngine(), a_recipe(SAMPLE_BATCH=5, TEMPERATURE=0.7)
    assert len(sampled(engine, recipe, prompts_of([MIXED] * 5))) == sum(engine.asked) == 5
    assert max(engine.asked) == 2  # groups of 2, not 3
    assert engine.settings == {
        "max_sequences": 5,
        "max_new_tokens": 8,
        "temperature": 0.7,
        "seed": 0,
    }


@pytest.mark.parametrize("rewards, flat", [
    ([[1, -1], [1, 0.5], [1, 2]], False),  # all right, and only the format differs
    ([[-1, 1], [-1, 1], [-1, 1]], True),
    ([[1, 1], [-1, 1], [1, 1]], False),
    ([[1, -3], [0, -1], [-1, 1]], True),  # 2 x correctness + format is the same
    ([[0.1 + 0.2, 0], [0.3, 0], [0.3, 0]], True),  # the same to rounding
    ([[1, float("nan")], [1, 0], [1, float("nan")]], True),  # one that does not apply
])  # fmt: skip
def test_a_group_is_flat_if_its_total_reward_is_constant(rewards, flat):
    three = {"lengths": (1, 2, 1), "truncated": (False,) * 3}
    group = a_group(rewards, **three)
    for skip in (True, False):
        skip_if_flat(a_recipe(SKIP_FLAT_GROUPS=skip).c, group)
        assert (is_flat(group), group.skipped) == (flat, flat and skip)


def test_broken_weights_are_said_to_be_broken(tiny):
    policy = tiny_policy(tiny)
    with torch.no_grad():
        next(policy.model.parameters()).fill_(float("nan"))
    with pytest.raises(RuntimeError, match="logits are not finite"):
        sampled(policy, a_recipe(), [(0, {}, [5, 6])])


def test_a_policy_streams_text_and_ids(tiny):
    """The engine that trainer and worker share: the seed decides, rewards are of the ids' text."""
    policy = tiny_policy(tiny)
    texts = []
    task = SimpleNamespace(rewards=lambda item, text: texts.append(text) or {"a": 1.0})
    recipe = a_recipe(task=task, REWARD_WEIGHTS={"a": 1.0}, GROUP_SIZE=3)
    prompts, clock = [(9, {}, [5, 6, 7]), (4, {}, [8])], Clock()
    first = sampled(policy, recipe, prompts, timed=lambda: clock.part("reward"))
    assert sorted(group.index for group in first) == [4, 9]
    assert texts == [policy.text(s) for group in first for s in group.samples]
    assert clock.parts["reward"] > 0
    assert first == sampled(policy, recipe, prompts) != sampled(policy, recipe, prompts, seed=1)
