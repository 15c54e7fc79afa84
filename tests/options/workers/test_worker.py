"""A worker and rank 0's side of it: fetch, prove, sample, hand over. The trainer's side is in this
process, behind a real socket."""

import os
from collections import Counter

import pytest
import torch
from fakes import ALL_RIGHT, ALL_WRONG, MIXED
from trainer_side import Policy, change, end, publish, serving, weights

from grpo.options.workers import worker as worker_module
from grpo.options.workers.worker import TrainerClient, Worker, run_worker
from grpo.rollout import Stream
from grpo.waits import TooLong

OUTCOMES = [MIXED, ALL_WRONG, MIXED, ALL_RIGHT, MIXED, MIXED, MIXED]
USABLE = [outcome is MIXED for outcome in OUTCOMES]


class Ended(Exception):
    """Raised in the worker by a script, as nothing else ends it but a trainer that is gone."""


class Script:
    """Runs a function of `steps` before each question that a worker asks between two rollouts, and
    ends it after the last; one of `during` before each that it asks in a rollout."""

    def __init__(self, monkeypatch, *steps, during=()):
        script, self.steps, self.during = self, list(steps), list(during)
        self.statuses, self.sampling = Counter(), False

        class Scripted(TrainerClient):
            def policy(self, name):
                steps = script.during if script.sampling else script.steps
                if steps:
                    steps.pop(0)()
                elif steps is script.steps:
                    raise Ended
                return super().policy(name)

            def call(self, method, path, **named):
                reply = super().call(method, path, **named)
                script.statuses[path.split("/")[1], reply.status_code] += 1
                return reply

        class Noted(Worker):
            def sample(self, room):
                script.sampling = True
                super().sample(room)
                script.sampling = False

        monkeypatch.setattr(worker_module, "TrainerClient", Scripted)
        monkeypatch.setattr(worker_module, "Worker", Noted)


def go_on():
    pass


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
    order = Stream(side.recipe.prompts, f"{side.c.SEED}/{name}")
    return [order[position].index for position in positions]


# --- What it samples --------------------------------------------------------------------
def test_a_worker_samples_with_the_newest_policy_while_there_is_room(side, monkeypatch, no_pause):
    trained = []

    def train():
        trained.extend(side.groups)
        side.groups.clear()
        publish(side, 3)

    change(side, SKIP_FLAT_GROUPS=False)
    publish(side, 0)
    script = Script(monkeypatch, go_on, go_on, go_on, train, go_on, go_on)
    policy, _ = run(side)
    assert policy.loads == [weights(0).tolist(), weights(3).tolist()]
    groups = [*trained, *side.groups]
    assert [group.version for group in groups] == [0] * 7 + [3] * 7
    first, second = in_order(side, *range(7)), in_order(side, *range(7, 14))
    assert Counter(g.index for g in trained) == Counter(first)
    assert Counter(g.index for g in side.groups) == Counter(second)
    assert {(g.run, g.sampler, g.outcome) for g in groups} == {(side.run, "me", "correctness")}
    assert len({group.id for group in groups}) == 14
    assert script.statuses["group", 200] == 14 and script.statuses["group", 503] == 0
    assert policy.most <= 2  # groups of two in a SAMPLE_BATCH of 4


def test_a_worker_does_not_ask_after_each_group(side, monkeypatch):
    monkeypatch.setattr(worker_module, "ASK_SECONDS", 60)  # a group takes 0.5 s on a busy machine
    script = Script(monkeypatch, go_on, go_on)
    run(side)
    assert script.statuses["policy", 200] <= 4 and len(side.groups) == sum(USABLE)


def test_no_two_rollouts_draw_alike(tmp_path, monkeypatch):
    """Nor two workers, nor the same positions under another policy, or in another run."""

    def seeds(name, run_name):
        with serving(tmp_path, run=run_name, PROMPTS_PER_STEP=2) as side:

            def step(version):
                side.groups.clear()
                publish(side, version)

            Script(monkeypatch, lambda: step(0), go_on, lambda: step(1), go_on)
            return run(side, name=name)[0].seeds

    everyone = [*seeds("me", "run"), *seeds("you", "run"), *seeds("me", "other")]
    assert len(set(everyone)) == len(everyone) == 6
    torch.Generator().manual_seed(max(everyone))  # which takes 64 bits


def test_flat_groups_are_sent_to_be_counted_and_take_no_room(side, monkeypatch):
    """So the trainer's accuracy is of all that was sampled, and steps have as many groups."""
    Script(monkeypatch, *[go_on] * 6)  # more rollouts, for the room that flat groups leave
    run(side)
    assert len(side.groups) == 7 and all(USABLE[group.index] for group in side.groups)
    assert len(side.skipped) > 0 and not any(USABLE[group.index] for group in side.skipped)
    taken = side.take(0)
    assert [group.skipped for group in taken] == [False] * 7 + [True] * (len(taken) - 7)
    items = [OUTCOMES[item] for item in in_order(side, *range(len(taken)))]
    right = [sample.rewards["correctness"] > 0 for group in taken for sample in group.samples]
    assert items.count(ALL_WRONG) + items.count(ALL_RIGHT) == len(taken) - 7
    assert sum(right) == 7 + 2 * items.count(ALL_RIGHT)
    assert not side.skipped


# --- A newer policy, and room ---------------------------------------------------------
def test_what_has_begun_is_finished_and_nothing_begins_after_a_newer_policy(side, monkeypatch):
    monkeypatch.setattr(worker_module, "ASK_SECONDS", -1)
    change(side, SKIP_FLAT_GROUPS=False, PROMPTS_PER_STEP=3)
    publish(side, 0)
    begun = []

    def train():  # while two groups are in hand
        change(side, PROMPTS_PER_STEP=99)
        begun.append(len(policy.asked) and sum(policy.asked))
        publish(side, 1)

    policy = Policy(version=8)
    script = Script(monkeypatch, go_on, go_on, during=[go_on, train])
    run(side, policy)
    assert policy.loads == [weights(0).tolist()]
    assert {group.version for group in side.groups} == {0}
    assert begun[0] <= len(side.groups) == sum(policy.asked) <= 4
    assert script.statuses["group", 503] == 0


def test_where_steps_are_faster_than_downloads_a_worker_samples_between_two(side, monkeypatch):
    """It would fetch one newer policy after another, for ever."""
    fetched = []

    def call(self, method, path, **request):
        reply = plain(self, method, path, **request)
        if path.startswith("/policy/"):
            fetched.append(side.record["version"])
            publish(side, fetched[-1] + 1)  # while it is under way
        return reply

    plain = worker_module.TrainerClient.call
    monkeypatch.setattr(worker_module.TrainerClient, "call", call)
    Script(monkeypatch, *[go_on] * 4)
    change(side, SKIP_FLAT_GROUPS=False, PROMPTS_PER_STEP=4)
    publish(side, 0)
    run(side)
    assert fetched[:2] == [0, 1] and len(side.groups) == 4
    assert {group.version for group in side.groups} == {0}


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
    monkeypatch.setattr(worker_module, "ASK_SECONDS", -1)
    change(side, SKIP_FLAT_GROUPS=False, PROMPTS_PER_STEP=3)
    publish(side, 0)

    def train():
        change(side, PROMPTS_PER_STEP=7)
        side.policy.become(weights(0))
        side.publish(9)
        side.finish()

    Script(monkeypatch, go_on, go_on, go_on, during=[go_on, train])
    policy, _ = run(side)
    assert policy.loads == [weights(0).tolist()] and len(side.groups) == 7
    assert {group.version for group in side.groups} == {0, 9}


def test_a_worker_waits_while_the_trainer_has_no_policy_or_no_room(tmp_path, monkeypatch, no_pause):
    """Without a limit: there is an answer, and a step may take long."""
    with serving(tmp_path, PROMPTS_PER_STEP=1, WAIT_LIMIT_SECONDS=0) as side:
        Script(monkeypatch, *[go_on] * 4, lambda: publish(side, 0), *[go_on] * 9)
        run(side)
        assert len(side.groups) == 1


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


# --- The trainer ends and returns --------------------------------------------------------
def test_a_worker_ends_once_the_trainer_is_gone(tmp_path, monkeypatch, no_pause):
    with serving(tmp_path, WAIT_LIMIT_SECONDS=0.2) as side:
        publish(side, 0)
        Script(monkeypatch, go_on, go_on, lambda: end(side))
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


def test_a_process_that_is_started_again_has_another_name():
    """Its groups would have the ids of the first one's, and rank 0 would take none of them."""
    assert worker_module.unique_name() != worker_module.unique_name()
