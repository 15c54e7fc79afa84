"""A worker and rank 0's side of it: fetch, prove, sample, hand over. The trainer's side is in this
process, behind a real socket."""

import io
import itertools
import os
from collections import Counter

import pytest
import requests
import torch
from fakes import ALL_RIGHT, ALL_WRONG, MIXED
from trainer_side import Policy, change, end, publish, serving, weights

from grpo.client import Refused, TooLong
from grpo.options.workers import worker as worker_module
from grpo.options.workers.worker import TrainerClient, run_worker
from grpo.rollout import Order

OUTCOMES = [MIXED, ALL_WRONG, MIXED, ALL_RIGHT, MIXED, MIXED, MIXED]
USABLE = [outcome is MIXED for outcome in OUTCOMES]


class Ended(Exception):
    """Raised in the worker by a script, as nothing else ends it but a trainer that is gone."""


class Script:
    """Runs a function of `steps` before each question that a worker asks between two rounds, and
    ends it after the last."""

    def __init__(self, monkeypatch, *steps):
        script, self.steps, self.statuses = self, list(steps), Counter()

        class Scripted(TrainerClient):
            def policy(self, groups):
                if not script.steps:
                    raise Ended
                script.steps.pop(0)()
                return super().policy(groups)

            def call(self, method, path, **named):
                reply = super().call(method, path, **named)
                script.statuses[path.split("/")[1], reply.status_code] += 1
                return reply

        monkeypatch.setattr(worker_module, "TrainerClient", Scripted)


go_on = dict  # does nothing


@pytest.fixture
def side(tmp_path):
    """Room for 7 groups, of a policy that is published."""
    with serving(tmp_path, outcomes=OUTCOMES, PROMPTS_PER_STEP=7, SAMPLE_BATCH=4) as workers:
        publish(workers, 0)
        yield workers


def run(side, policy=None, name="me", expected=Ended):
    """Runs a worker until it ends with `expected`; -> its policy and the exception."""
    policy = policy or Policy(version=8)
    with pytest.raises(expected) as ended:
        run_worker(policy, side.recipe.others(), name)
    return policy, ended.value


def in_order(side, *positions, name="me"):
    """-> the items at these positions of the worker's order."""
    order = Order(side.recipe.prompts, f"{side.c.SEED}/{name}")
    return [order[position].index for position in positions]


# --- What it samples --------------------------------------------------------------------
def test_a_worker_samples_rounds_with_the_newest_policy(side, monkeypatch):
    change(side, SKIP_FLAT_GROUPS=False)
    publish(side, 0)
    script = Script(monkeypatch, go_on, go_on, lambda: publish(side, 3))
    policy, _ = run(side)
    assert policy.loads == [weights(0).tolist(), weights(3).tolist()]
    assert [group.version for group in side.groups] == [0] * 4 + [3] * 2
    assert Counter(g.index for g in side.groups) == Counter(in_order(side, *range(6)))
    facts = {(g.run, g.sampler, g.outcome) for g in side.groups}
    assert facts == {(side.run, "me", "correctness")}
    assert len({group.id for group in side.groups}) == 6
    assert script.statuses == {("policy", 200): 5, ("group", 200): 6}  # two are downloads
    assert max(policy.asked) <= 2  # groups of two in a SAMPLE_BATCH of 4


def test_no_two_rollouts_draw_alike(tmp_path, monkeypatch):
    """Nor two workers, nor the same positions under another policy, or in another run."""

    def seeds(name, run_name):
        with serving(tmp_path, run=run_name, PROMPTS_PER_STEP=2) as side:

            def step(version):
                side.groups.clear()
                publish(side, version)

            Script(monkeypatch, lambda: step(0), lambda: side.groups.clear(), lambda: step(1))
            return run(side, name=name)[0].seeds

    everyone = [*seeds("me", "run"), *seeds("you", "run"), *seeds("me", "other")]
    assert len(set(everyone)) == len(everyone) == 9
    torch.Generator().manual_seed(max(everyone))  # which takes 64 bits


def test_flat_groups_are_sent_to_be_counted_and_take_no_room(side, monkeypatch):
    """So the trainer's accuracy is of all that was sampled, and steps have as many groups."""
    Script(monkeypatch, *[go_on] * 4)
    run(side)
    items = [OUTCOMES[item] for item in in_order(side, *range(8))]
    assert [USABLE[group.index] for group in side.groups] == [True] * items.count(MIXED)
    taken = side.take(0)
    assert len(taken) == 8 and not side.skipped
    assert sum(group.skipped for group in taken) == 8 - items.count(MIXED) > 0
    assert all(any(s.logps for s in group.samples) != group.skipped for group in taken)
    right = [sample.rewards["correctness"] > 0 for group in taken for sample in group.samples]
    assert sum(right) == items.count(MIXED) + 2 * items.count(ALL_RIGHT)


# --- A newer policy, and room ---------------------------------------------------------
def test_a_policy_that_is_gone_before_it_was_fetched_is_asked_for_anew(side, monkeypatch):
    def fetch(self, record, path):
        if record["version"] == 0:
            publish(side, 4)
            publish(side, 1)
        return plain(self, record, path)

    plain = worker_module.TrainerClient.fetch
    monkeypatch.setattr(worker_module.TrainerClient, "fetch", fetch)
    Script(monkeypatch, go_on, go_on, go_on)
    policy, _ = run(side)
    assert policy.loads == [weights(1).tolist()]
    assert {group.version for group in side.groups} == {1}


def test_what_begins_with_the_same_weights_at_a_later_step_is_of_that_step(side, monkeypatch):
    """Or all that is sampled would grow too old, where steps in a row train nothing."""
    change(side, SKIP_FLAT_GROUPS=False)
    publish(side, 0)

    def train():
        side.publish(9)
        side.finish()

    Script(monkeypatch, go_on, train)
    policy, _ = run(side)
    assert policy.loads == [weights(0).tolist()] and len(side.groups) == 4
    assert {group.version for group in side.groups} == {0, 9}


def test_a_worker_waits_while_the_trainer_has_no_policy_or_enough_groups(tmp_path, monkeypatch):
    """Without a limit: there is an answer, and a step may take long."""
    with serving(tmp_path, PROMPTS_PER_STEP=1, WAIT_LIMIT_SECONDS=0) as side:
        steps = [lambda: publish(side, 0), lambda: side.take(0), lambda: side.take(0)]
        monkeypatch.setattr(worker_module.Wait, "sleep", lambda *_: steps.pop(0)())
        script = Script(monkeypatch, *[go_on] * 3)
        run(side)
        assert len(side.groups) == 1 and not steps
        assert script.statuses["policy", 503] == 3


# --- What it refuses ----------------------------------------------------------------------


def test_a_worker_that_can_not_prove_its_policy_samples_nothing(side, monkeypatch):
    Script(monkeypatch, *[go_on] * 3)
    policy = Policy(version=8)
    policy.load = lambda tensors: None
    run(side, policy, expected=RuntimeError)
    assert policy.seeds == [] and not side.groups


def test_a_worker_of_another_model_ends(side, monkeypatch):
    Script(monkeypatch, *[go_on] * 3)
    side.policy.model.w = torch.nn.Parameter(torch.zeros(4))
    side.publish(1)
    side.finish()
    run(side, expected=SystemExit)


@pytest.mark.parametrize("page", [b"<html>", b"[]", b"5", b'{"ok": true}', b"\xff"])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_worker_says_if_another_program_has_the_address(side, monkeypatch, page, after):
    """From the start, at the policy's file, or in the middle of a round."""
    answers, plain = itertools.count(), requests.Session.request

    def request(*args, **named):
        reply = plain(*args, **named)
        if next(answers) >= after:
            reply._content, reply.raw = page, io.BytesIO(page)
        return reply

    monkeypatch.setattr(requests.Session, "request", request)
    said = str(run(side, expected=(Refused, RuntimeError))[1])
    assert ("another program" if after != 1 else "damaged in transit") in said


def test_sequence_ratios_need_a_worker_without_rounding(tmp_path, monkeypatch):
    with serving(tmp_path, RATIO_LEVEL="sequence") as side:
        publish(side, 0)
        Script(monkeypatch, go_on)
        policy = Policy(version=8)
        policy.noise = 1e-2
        run(side, policy, expected=SystemExit)
        side.take(0)
        Script(monkeypatch, go_on)
        assert run(side) and len(side.groups) == 4


# --- The trainer ends and returns --------------------------------------------------------
def test_a_worker_ends_once_the_trainer_is_gone(tmp_path, monkeypatch, no_pause):
    with serving(tmp_path, WAIT_LIMIT_SECONDS=0.2) as side:
        publish(side, 0)
        Script(monkeypatch, go_on, lambda: end(side))
        run(side, expected=TooLong)
        assert len(side.groups) == 4  # all that it began


def test_a_worker_leaves_no_file(side, monkeypatch, tmp_path):
    """Not even one that is killed while it fetches a policy: its file has no name."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    found, plain = [], worker_module.safetensors.torch.load_file

    def load_file(path):
        found.append((os.path.getsize(path) > 0, os.listdir(folder)))
        return plain(path)

    monkeypatch.setattr(worker_module.safetensors.torch, "load_file", load_file)
    Script(monkeypatch, go_on, go_on)
    run(side)
    assert found == [(True, [])]
