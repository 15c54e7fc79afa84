"""Publishing: at which steps, and the weights as they were at that step."""

from types import SimpleNamespace

import pytest
import torch
from fakes import PROMPTS, Post, a_recipe, move, tiny_policy

from grpo.proof import check_proof
from grpo.training import publish as publish_module
from grpo.training.checkpoint import Progress
from grpo.training.exchange import Inbox
from grpo.training.metrics import Clock
from grpo.training.publish import PolicySender, Publishing, reference_at_start
from grpo.weights import trained_weights

# --- Publishing --------------------------------------------------------------------
ARRIVED = ("finish",)
FIRST = [("send", 0, -4), ARRIVED]  # before anything is sampled


class Record(list):
    """Notes what is called: [(name, arguments)]."""

    def __bool__(self):
        return True

    def __getattr__(self, name):
        return lambda *arguments, **named: self.append((name, *arguments, *named.values()))


def refer(step):
    return "set_reference", "run", step


def a_publishing(monkeypatch, *, publish, refresh, there="", rank=0):
    """-> Publishing every so many steps, at a server whose reference is `there`; and a Record of
    what it calls of that, and of a PolicySender."""
    calls = Record()
    calls.info, calls.url = {"weights": there, "model": "ours"}, "http://server"
    monkeypatch.setattr(publish_module, "PolicySender", lambda *_, **__: calls)
    steps = {"PUBLISH_STEPS": publish, "REFERENCE_REFRESH_STEPS": refresh, "MAX_STALENESS": 4}
    steps |= {"UPDATES_PER_ROLLOUT": 1, "PROMPTS_PER_STEP": 3, "KL_BETA": 0.04}
    constants = SimpleNamespace(**steps, MODEL="ours", RUN_DIR="runs/a")
    inbox = None if rank else Inbox(calls, "run", 1)
    publishing = Publishing(constants, None, None, inbox)
    calls.clear()
    return publishing, calls


@pytest.mark.parametrize(
    ("publish", "refresh", "expected"),
    [
        (1, 0, [*FIRST, ("send", 2, -2), ("send", 4, 0), ("send", 6, 2)]),
        (3, 0, [*FIRST, ("send", 4, 0), ("send", 6, 2)]),
        # at the start they are the same anyway, but may be of different shape
        (0, 4, [*FIRST, refer(0), ("save", 4), ("send", 4, 0), ARRIVED, refer(4)]),
        (4, 4, [*FIRST, ARRIVED, refer(0), ("send", 4, 0), ("save", 4), ARRIVED, refer(4)]),
    ],
)
def test_the_policy_is_published_when_its_steps_are_passed(
    monkeypatch, alone, publish, refresh, expected
):
    """With two updates on each rollout a step may be jumped over, and is made up for."""
    publishing, calls = a_publishing(monkeypatch, publish=publish, refresh=refresh)
    progress, clock, inbox = Progress("run"), Clock(), publishing.inbox
    publishing.begin(progress)
    for before, progress.step in [(0, 2), (2, 4), (4, 6)]:
        inbox.groups, inbox.seen = {"waits": None}, {"waits", "trained"}
        publishing.publish_if_due(progress, before, clock)
        publishing.refresh_if_due(progress, before, lambda: calls.append(("save", progress.step)))
        # what waits here is scored again by a new reference, and handed out again
        waits = set() if calls[-1] == refer(progress.step) else {"waits"}
        assert inbox.seen == waits | {"trained"} and {*inbox.groups} == waits
    assert calls == expected and progress.reference == refresh


def test_other_ranks_publish_nothing_and_save_with_the_first(monkeypatch, alone):
    publishing, calls = a_publishing(monkeypatch, publish=1, refresh=1, rank=1)
    publishing.begin(Progress("run"))
    publishing.publish_if_due(Progress("run", 1), 0, Clock())
    publishing.refresh_if_due(Progress("run", 1), 0, lambda: calls.append("save"))
    publishing.finish()
    assert calls == ["save"]


@pytest.mark.parametrize(
    ("there", "reference", "expected"),
    [
        ("run@4", 4, []),  # as it was left
        ("run@4", 6, [("send", 6, 2), ARRIVED, refer(6)]),
        ("run@4", 0, [refer(-1)]),  # the server's own model
        ("", 4, SystemExit),  # the server's files are gone, and the run's checkpoint has no step 4
    ],
)
def test_a_run_that_goes_on_has_the_reference_it_had(
    monkeypatch, alone, there, reference, expected
):
    publishing, calls = a_publishing(monkeypatch, publish=0, refresh=2, there=there)
    progress = Progress("run", 6, reference=reference)
    if expected is SystemExit:
        with pytest.raises(SystemExit, match="policy of step 4; the server at http://server no"):
            publishing.begin(progress)
    else:
        publishing.begin(progress)
        assert calls == expected


@pytest.mark.parametrize(
    ("reference", "refreshes", "serves", "own_model", "expected"),
    [
        (0, False, "", False, "keep"),
        (0, False, "another@3", True, "own model"),  # another run's policy is the reference
        (4, True, "run@4", False, "keep"),
        (6, True, "run@4", False, "publish"),  # the newest step's, which the trainer has
        (0, True, "run@4", True, "own model"),  # the run's first policy is the server's own model
        (0, True, "run@4", False, "lost"),
        (4, True, "", True, "lost"),
    ],
)
def test_what_becomes_of_the_reference_at_the_start(
    reference, refreshes, serves, own_model, expected
):
    progress = Progress("run", 6, reference=reference)
    settings = {"refreshes": refreshes, "serves": serves, "own_model": own_model}
    assert reference_at_start(progress, **settings) == expected


# --- PolicySender ---------------------------------------------------------------------
def test_what_is_published_is_the_policy_as_it_was(tiny):
    """The trainer's next step changes the weights while they are on their way."""
    policy, post = tiny_policy(tiny), Post()
    recipe = a_recipe(PROMPTS)
    sender = PolicySender(post, "run", recipe, policy, capacity=9, scored=True)
    before = trained_weights(policy.model)
    post.ready.clear()
    sender.send(3, oldest=-1)
    move(policy.model, 0.05)
    assert post.got == []  # training has gone on meanwhile
    post.ready.set()
    sender.send(4, oldest=0)
    sender.finish()
    (first, record), (second, later) = post.got
    assert first.keys() == before.keys()
    assert all(torch.equal(first[name], before[name]) for name in before)
    assert all(torch.equal(second[n], p) for n, p in trained_weights(policy.model).items())
    proof = record.pop("proof")
    assert record == {
        "run": "run",
        "version": 3,
        "oldest": -1,
        "capacity": 9,
        "scored": True,
        "settings": recipe.settings(),
    }
    assert (later["version"], later["oldest"]) == (4, 0)
    mine = tiny_policy(tiny)
    assert check_proof(mine, {"version": 3, "proof": proof}) < 1e-6
    with pytest.raises(RuntimeError):
        check_proof(mine, later)


def test_a_policy_that_could_not_be_sent_ends_the_run(tiny):
    post = Post()
    sender = PolicySender(
        post, "run", a_recipe(PROMPTS), tiny_policy(tiny), capacity=9, scored=True
    )
    sender.finish()  # nothing was begun
    post.error = RuntimeError("refused (400): SHA-256 differs")
    sender.send(0, oldest=0)
    with pytest.raises(RuntimeError, match="SHA-256 differs"):
        sender.send(1, oldest=0)
    with pytest.raises(RuntimeError, match="SHA-256 differs"):
        sender.finish()


def test_a_lora_policy_sends_its_adapters_alone(tiny):
    policy, post = tiny_policy(tiny, lora_rank=2), Post()
    sender = PolicySender(post, "run", a_recipe(PROMPTS), policy, capacity=9, scored=True)
    sender.send(0, oldest=0)
    sender.finish()
    assert all(".lora_" in name for name in post.got[0][0]) and len(post.got[0][0]) == 28
