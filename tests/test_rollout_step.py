"""A step's groups, of all ranks and workers, with and without a server."""

import dataclasses
import json
import math
import threading
from collections import deque
from decimal import Decimal
from statistics import fmean, stdev
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fakes import (
    ALL_WRONG,
    MIXED,
    FakeEngine,
    a_group,
    a_recipe,
    a_run,
    prompts_of,
    totalled,
)
from rank_threads import Ranks

import grpo_ref_split as trainer
from grpo import metrics as metrics_module
from grpo import report
from grpo.options.workers.rank_0 import Workers
from grpo.ranks import RunFailed
from grpo.run import Progress
from grpo.sample import Group, Sample
from grpo.stop import stop


class Reference:
    """Answers with what `score` gives of a group."""

    part = "score"

    def __init__(self, score=lambda group: -torch.tensor(group.ids).float()):
        self.score, self.asked = score, []

    def ask(self, group):
        self.asked.append(group.index)

    def fill(self, groups, budget):
        assert [group.index for group in groups] == self.asked[-len(groups) :] or not groups
        for group in groups:
            group.take_ref_logps(self.score(group))


def take_step(outcomes, *, step=0, engine=None, workers=None, reference=None, **recipe):
    """-> sample_rollout's (groups, metrics, sampled) of groups with these rewards."""
    prompts, recipe = recipe.pop("prompts", ()), {"PROMPTS_PER_STEP": len(outcomes)} | recipe
    run = a_run(
        a_recipe(prompts, **recipe),
        order=prompts_of(outcomes),
        sampler=engine or FakeEngine(),
        progress=Progress("run", step),
        reference=reference or Reference(),
        workers=workers,
    )
    return trainer.sample_rollout(run)[:3]


def test_a_steps_groups_are_those_that_are_not_flat_and_its_metrics_are_of_all(alone):
    outcomes, prompts = [MIXED, ALL_WRONG, MIXED, MIXED, MIXED], [None] * 10
    groups, metrics, _ = take_step(outcomes, step=4, prompts=prompts)
    assert [g.index for g in groups] == [0, 2, 3, 4]
    assert {(g.version, g.sampler) for g in groups} == {(4, "trainer")}
    assert metrics["groups_sampled"] == 5 and metrics["frac_reward_zero_std"] == 1 / 5
    assert metrics["accuracy"] == 4 / 10 and metrics["completions/clipped_ratio"] == 1 / 2
    assert metrics["completions/mean_length"] == 1.5 and metrics["tokens_sampled"] == 15
    assert metrics["completions/mean_terminated_length"] == 2
    formats = (4 * -2 + 2.5) / 10
    assert metrics["rewards/format/mean"] == pytest.approx(formats)
    assert metrics["reward"] == pytest.approx(2 * (4 - 6) / 10 + formats)
    # With n - 1. That of the total is the mean over groups; TRL's, since 0.27, is over completions
    assert metrics["reward_std"] == pytest.approx(fmean([stdev([1, -3])] * 4 + [0]))
    assert metrics["rewards/format/std"] == pytest.approx(stdev([-1] * 8 + [1.25] * 2))
    assert "staleness" not in metrics and metrics["epoch"] == 5 / 10

    groups, metrics, _ = take_step(outcomes, SKIP_FLAT_GROUPS=False)
    assert [g.index for g in groups] == [0, 1, 2, 3, 4]
    assert metrics["frac_reward_zero_std"] == 1 / 5


def test_a_reward_that_does_not_apply_is_in_no_mean(alone):
    recipe, nan = a_recipe(), math.nan
    group = a_group([[1.0, nan], [-1.0, nan]])
    assert not any("format" in name for name in metrics_of(recipe, group))
    metrics = metrics_of(recipe, a_group([[1.0, nan], [-1.0, 0.5]]))
    assert (metrics["rewards/format/mean"], metrics["rewards/format/std"]) == (0.5, 0)
    assert metrics["accuracy"] == 1 / 2
    assert metrics_of(recipe, a_group([[1.0, 0], [nan, 0]]))["accuracy"] == 1
    assert "accuracy" not in metrics_of(recipe, a_group([[nan, 0.5], [nan, 1.0]]))
    assert metrics["reward"] == 0.5 / 2 and metrics["reward_std"] == pytest.approx(stdev([2, -1.5]))


def metrics_of(recipe, group):
    return metrics_module.rollout_metrics(a_run(recipe), [totalled(recipe, group)], 0)


def test_ranks_share_the_prompts_of_a_step(monkeypatch):
    """10 prompts on 4 ranks: 3, 3, 2 and 2; seeds differ."""
    counts, seeds, ids = [[0] * 4, [0] * 4], set(), set()

    def steps(rank):
        for step in (0, 1):
            engine = FakeEngine()
            groups, *_ = take_step([MIXED] * 10, step=step, engine=engine)
            counts[step][rank] = sum(engine.asked)
            seeds.add(engine.settings["seed"])
            ids.update(group.id for group in groups)

    Ranks(monkeypatch, 4).run(steps)
    assert counts == [[3, 3, 2, 2]] * 2 and len(seeds) == 8 and len(ids) == 20


def test_the_references_log_probs_come_with_the_groups_that_are_trained(alone, tmp_path):
    """Of a group when it is complete; flat ones cost the reference nothing, and are logged."""
    reference, outcomes = Reference(), [MIXED, ALL_WRONG, MIXED, MIXED]
    groups, _, sampled = take_step(outcomes, reference=reference)
    assert [g.index for g in groups] == reference.asked == [0, 2, 3]
    assert all([s.ref_logps for s in g.samples] == [[-7, -2], [-7]] for g in groups)
    unscored = [(g.index, g.samples[0].ref_logps is None) for g in sampled]
    assert unscored == list(enumerate([0, 1, 0, 0]))
    ids = [g.id for g in groups]
    assert ids == sorted(ids)  # the same order on every rank
    assert samples_of(tmp_path, sampled[1], a_recipe(prompts_of(outcomes)))[0]["flat"]  # 1 of 4


def test_a_reference_that_fails_ends_the_step_on_all_ranks(alone):
    def refuse(group):
        raise RuntimeError("another reference than at the start")

    with pytest.raises(RunFailed) as caught:
        take_step([MIXED] * 9, reference=Reference(refuse))
    assert isinstance(caught.value.__cause__, RuntimeError)


def samples_of(folder, group, recipe):
    """-> what a run logs of the group, as its first step's."""
    tokenizer = SimpleNamespace(decode=str)
    policy = SimpleNamespace(tokenizer=tokenizer)
    run = a_run(recipe, policy=policy)
    trainer.set_advantages(recipe.c, [group])
    report.RunFolder(folder).log_samples(run, [group])
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_samples_are_a_whole_group_with_all_that_is_known(alone, tmp_path):
    item = {"question": "Why?", "numbers": [1, 2], "tree": {1, 2}, "nan": math.nan}
    item |= {"answer": Decimal(42), "count": np.int64(42)}
    item |= {"program": "x" * 10**6, "values": list(range(10**5))}
    group = a_group(
        [[-1.0, 0.0], [-1.0, 1.25], [1.0, 1.25], [1.0, -1.0]], lengths=(1, 2, 1, 3),
        truncated=(False, False, True, False), version=3, item=item,
    )  # fmt: skip
    best, *_, worst = found = samples_of(tmp_path, group, a_recipe([(0, item, [5, 6])]))
    assert [sample["number"] for sample in found] == [2, 3, 1, 0]
    assert best.pop("time") and best.pop("advantage") > 0 > worst["advantage"]
    assert best == {
        "step": 1, "group": group.id, "number": 2, "prompt": "[5, 6]", "question": "Why?",
        "item": {"question": "Why?", "numbers": [1, 2], "tree": "{1, 2}", "nan": None,
                 "answer": "42", "count": "42", "program": "x" * 2000 + " ...",
                 "values": str([*range(9999)])[:2000] + " ..."},
        "answer": "42", "completion": "[13]",
        "rewards": {"correctness": 1.0, "format": 1.25}, "flat": False, "truncated": True,
        "sampler": "trainer", "policy_version": 3,
    }  # fmt: skip
    assert not any("item" in sample for sample in found[1:]) and worst["answer"] == "42"


LONG = Sample([7, 7, 7, 2], [-1.0] * 4, rewards={"correctness": 1, "format": 0.5}, total=2.5)
FLAT = Group(7, None, [5], [LONG])


def a_workers(number, *, version=0):
    """-> groups as a worker hands them over."""
    groups = []
    for i in range(number):
        ids = {"id": f"worker-{version}-{i}", "version": version, "sampler": "worker"}
        rewards = [[1.0, -1.0], [-1.0, -1.0]]
        groups.append(a_group(rewards, run="run", index=90 + i, **ids))
    return groups


class Arrived(Workers):
    """Rank 0's side of workers that have handed over these groups; it serves nothing."""

    def __init__(self, *groups, **constants):
        self.c, self.lock = a_recipe(**constants).c, threading.Lock()
        self.groups, self.dropped = list(groups), 0
        self.skipped = deque([dataclasses.replace(FLAT, skipped=True)])


def test_what_workers_sampled_comes_first_and_the_ranks_sample_the_rest(alone):
    engine, reference = FakeEngine(), Reference()
    workers = Arrived(*a_workers(2, version=1))
    theirs = {"workers": workers, "PUBLISH_STEPS": 1, "PROMPTS_PER_STEP": 3}
    groups, metrics, sampled = take_step(
        [MIXED] * 9, step=3, engine=engine, reference=reference, **theirs
    )
    assert sorted(g.index for g in groups) == [0, 90, 91] and engine.asked == [1]
    assert [g.index for g in sampled] == [7, 0, 90, 91]
    assert reference.asked == [90, 91, 0]  # workers' groups are scored while the rest is sampled
    # and the flat group that is not trained counts too
    assert metrics["groups_sampled"] == 4 and metrics["frac_reward_zero_std"] == 1 / 4
    assert metrics["completions/mean_length"] == (3 + 4 + 4 + 4) / 7
    assert (metrics["staleness"], metrics["staleness_max"]) == (4 / 3, 2)
    assert all(s.old_logps for s in trainer.samples_to_train(a_recipe().c, groups, 3))


def test_each_ranks_reference_scores_a_share_of_the_workers_groups(monkeypatch):
    """A worker sends to rank 0; a local reference there would score while the others wait."""
    constants = {"PUBLISH_STEPS": 1, "PROMPTS_PER_STEP": 4}
    workers = Arrived(*a_workers(4), **constants)
    workers.skipped.clear()

    def asked(rank):
        reference, own = Reference(), None if rank else workers
        take_step([], reference=reference, workers=own, **constants)
        return reference.asked

    assert Ranks(monkeypatch, 2).run(asked) == [[90, 92], [91, 93]]


def test_a_step_whose_groups_workers_have_all_sent_samples_none(alone):
    engine, constants = FakeEngine(), {"PUBLISH_STEPS": 1, "PROMPTS_PER_STEP": 3}
    workers = Arrived(*a_workers(3), *a_workers(2, version=1), **constants)
    theirs = {"workers": workers} | constants
    groups, metrics, _ = take_step([MIXED] * 9, step=1, engine=engine, **theirs)
    assert len(groups) == 3 and engine.asked == [] and metrics["groups_dropped"] == 0
    assert "tokens_per_second" not in metrics  # of the ranks
    assert len(workers.groups) == 2  # for the next step


def test_an_evaluation_leaves_out_what_never_applied_and_is_then_no_best(
    alone, tmp_path, monkeypatch
):
    task = SimpleNamespace(rewards=lambda item, text: {"correctness": None, "format": 1})
    recipe = a_recipe(task=task, GROUP_SIZE=1)
    result = metrics_module.evaluate(FakeEngine(), 0, recipe, prompts_of([MIXED]))
    assert result.keys() == {"eval_positive_format", "eval_truncated", "eval_completion_tokens"}
    progress = Progress("run", step=recipe.c.EVAL_STEPS)
    monkeypatch.setattr(trainer, "evaluate", lambda *_: result)
    folder = report.RunFolder(tmp_path)
    trainer.evaluate_if_due(a_run(recipe, progress=progress, folder=folder, questions=[]))
    assert (progress.evaluated, progress.best) == (progress.step, None)


def test_an_evaluation_begins_no_more_questions_once_the_run_is_to_stop(alone, monkeypatch):
    """Or deepspeed would kill the run before it has saved: 30 s after the signal."""
    engine, recipe = FakeEngine(), a_recipe(GROUP_SIZE=1)
    questions = prompts_of([MIXED] * 100)
    assert metrics_module.evaluate(engine, 0, recipe, questions)["eval_truncated"] == 0
    monkeypatch.setattr(stop, "asked", "SIGTERM")
    engine.settings = None
    assert metrics_module.evaluate(engine, 0, recipe, questions) == {} and engine.settings
