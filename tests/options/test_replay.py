"""REPLAY: flat groups that take a completion of the other outcome from an earlier rollout."""

import pytest
from fakes import ALL_RIGHT, ALL_WRONG, MIXED, FakeEngine, a_group, a_recipe, a_run, prompts_of

import grpo_ref_split as trainer
from grpo.options.replay import Replay
from grpo.reference import NoReference
from grpo.resume import Progress


def rolled(replay, outcomes, *, step):
    """-> sample_step's (groups, metrics) of prompts whose groups come out as told."""
    settings = {"REPLAY": 2, "PROMPTS_PER_STEP": len(outcomes), "MAX_REFILLS": 0, "KL_BETA": 0.0}
    parts = {"stream": iter(prompts_of(outcomes)), "sampler": FakeEngine(), "replay": replay}
    parts |= {"progress": Progress("run", step), "reference": NoReference()}
    return trainer.sample_step(a_run(a_recipe(**settings), **parts))[:2]


def test_a_flat_group_is_trained_with_an_older_completion_of_the_other_outcome(alone):
    replay = Replay(2, "correctness")
    (first, *_), metrics = rolled(replay, [MIXED, ALL_RIGHT, ALL_WRONG], step=0)
    assert metrics["groups_replayed"] == 0
    groups, metrics = rolled(replay, [ALL_WRONG, ALL_WRONG, ALL_WRONG], step=1)
    assert metrics["groups_replayed"] == 2 and [g.index for g in groups] == [0, 1]
    assert metrics["accuracy"] == 0  # of what was sampled
    fresh, old = groups[0].samples
    assert old.ids == first.samples[0].ids and old.logps == first.samples[0].logps
    assert old.rewards["correctness"] == 1 and old.advantage > 0 > fresh.advantage
    samples = trainer.samples_to_train(a_recipe(MASK_TRUNCATED=False), groups, step=1)
    assert [(s.version, s.fresh) for s in samples] == [(None, True), (0, False)] * 2
    assert all(s.old_logps == s.logps and not s.on_policy for s in samples)


@pytest.mark.parametrize("step, taken", [(2, True), (3, False)])
def test_a_completion_is_kept_for_n_rollouts(step, taken):
    replay = Replay(2, "correctness")
    replay(a_group(MIXED))
    for version in range(1, step):
        replay(a_group(MIXED, index=1, version=version))
    group = a_group(ALL_WRONG, version=step, flat=True)
    assert replay(group) == taken and group.flat != taken
    assert not replay(a_group(ALL_WRONG, index=9, version=step, flat=True))  # another question


def test_training_does_not_change_what_is_kept():
    replay, group = Replay(1, "correctness"), a_group(MIXED)
    replay(group)
    group.samples[0].advantage = 7.0
    for version in (1, 1):
        flat = a_group(ALL_WRONG, version=version, flat=True)
        assert replay(flat) and flat.samples[-1].advantage == 0
        flat.samples[-1].advantage = 5.0
