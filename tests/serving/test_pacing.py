"""Pacing: workers get prompts while there is room for their groups, which are counted."""

import json
import random
import threading
import time
from urllib.parse import urlencode

import pytest
from helpers import (
    SHA256,
    InProcess,
    ask,
    call,
    done,
    files,
    make_group,
    publish,
    record_of,
    refused,
)

from grpo.serving import pacing as pacing_module
from grpo.serving.pacing import WORKER_SECONDS, Pacing
from grpo.wire import pack_group


# --- Work --------------------------------------------------------------------------
@pytest.fixture
def pacing(store, policies):
    return Pacing(store, policies, patience=0)


def test_prompts_are_handed_out_once(policies, pacing):
    publish(policies, capacity=100)
    answers = [ask(pacing, name, held=4 * turn) for turn in range(3) for name in "abc"]
    assert [(a["first"], a["count"]) for a in answers] == [(4 * i, 4) for i in range(9)]
    publish(policies, 1, capacity=100)
    assert ask(pacing, version=1)["first"] == 36  # a new policy goes on with the same epoch


def test_a_newer_policy_comes_before_work(policies, pacing):
    publish(policies, 0)
    nothing = {"first": 0, "count": 0}
    assert ask(pacing, run="", version=-1) == {"policy": record_of(0)} | nothing
    publish(policies, 5, oldest=1)
    policy = ask(pacing, version=0)["policy"]
    assert policy["version"] == 5 and ask(pacing, version=0)["count"] == 0
    assert ask(pacing, run="other", version=5)["count"] == 0  # the same number of another run
    assert ask(pacing, version=5) == {"policy": record_of(5, oldest=1), "first": 0, "count": 4}


def test_groups_in_hand_and_waiting_are_never_more_than_the_capacity(policies, pacing, store):
    publish(policies, capacity=8)
    assert [ask(pacing, "a")["count"], ask(pacing, "b", want=6)["count"]] == [4, 4]
    assert ask(pacing, "c") == {"policy": record_of(capacity=8), "first": 0, "count": 0}
    for seed in range(3):  # a's come: they wait, and are not in hand
        pacing.uploaded("a")
        store.put(make_group(seed=seed), pack_group(make_group(seed=seed)))
    assert ask(pacing, "c")["count"] == 0
    ask(pacing, "a", held=1, want=0)  # who samples says what it still holds
    for seq, body in store.waiting(9, 0):
        store.scored({seq: body})
    assert ask(pacing, "c")["count"] == 0
    store.lease("run", 2, seconds=60, patience=0)  # they are in training: room for two others
    assert ask(pacing, "c")["count"] == 2
    assert ask(pacing, "c", held=2)["count"] == 0
    assert ask(pacing, "b", held=1)["count"] == 3  # of its four, three were flat


def test_other_runs_groups_take_no_room(policies, pacing, store):
    publish(policies, capacity=2)
    for seed in range(5):
        store.put(make_group(seed=seed, run="old"), b"body")
    assert ask(pacing)["count"] == 2


def test_pacing_holds_whatever_workers_do(policies, pacing, store):
    """At random: ask, upload, skip, lease; in hand and waiting are never above the capacity."""
    rng, capacity, seen, seed = random.Random(0), 12, [], 0
    publish(policies, capacity=capacity)
    held = {name: 0 for name in "abcd"}
    for _ in range(600):
        name, act = rng.choice("abcd"), rng.random()
        if act < 0.4:
            answer = ask(pacing, name, held=held[name], want=rng.randint(0, 5))
            seen += range(answer["first"], answer["first"] + answer["count"])
            held[name] += answer["count"]
        elif act < 0.8 and held[name]:
            held[name] -= 1
            if rng.random() < 0.7:  # else it was flat: pacing hears of it with the next question
                store.put(make_group(seed=(seed := seed + 1)), b"body")
                pacing.uploaded(name)
        elif act >= 0.8:
            for seq, body in store.waiting(2, 0):
                store.scored({seq: body})
            done(store, list(store.lease("run", 3, seconds=60, patience=0)))
        assert sum(held.values()) + store.queued("run") <= capacity
    assert seen == list(range(len(seen))) and len(seen) > 100


def test_what_a_dead_worker_had_in_hand_is_given_up_after_a_while(policies, pacing, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(pacing_module.time, "monotonic", lambda: now[0])
    publish(policies, capacity=4)
    assert ask(pacing, "dead")["count"] == 4
    now[0] += WORKER_SECONDS - 1
    assert ask(pacing, "b")["count"] == 0
    now[0] += 1
    assert ask(pacing, "b") == {"policy": record_of(capacity=4), "first": 4, "count": 4}
    # It was not dead: what it still holds counts again, and is not handed out to others
    assert ask(pacing, "dead", held=4)["count"] == 0
    assert pacing.stats()["dead"] == {"groups": 0, "held": 4, "version": 0, "seen_s": 0.0}


def test_who_uploads_is_alive(policies, pacing, store, monkeypatch):
    """Long completions: a worker whose rows all run asks for nothing, for minutes."""
    now = [1000.0]
    monkeypatch.setattr(pacing_module.time, "monotonic", lambda: now[0])
    publish(policies, capacity=4)
    assert ask(pacing, "slow")["count"] == 4
    now[0] += WORKER_SECONDS - 1
    pacing.uploaded("slow")
    store.put(make_group(), b"body")
    now[0] += 2
    assert ask(pacing, "b")["count"] == 0


def test_names_of_workers_are_bounded_in_length_and_number(policies, pacing, monkeypatch):
    monkeypatch.setattr(pacing_module, "MAX_WORKERS", 10)
    publish(policies)
    for name in ("", "x" * 201, "a\nb"):
        with pytest.raises(ValueError, match="a worker's name"):
            ask(pacing, name)
    for number in range(30):
        ask(pacing, f"worker {number}", want=0)
    workers = pacing.workers
    assert len(workers) <= 11 and "worker 29" in workers and "worker 0" not in workers


def test_a_resumed_runs_version_may_have_other_weights(policies, pacing):
    publish(policies, 3)
    assert ask(pacing, version=3, sha256="of the run that died")["count"] == 0
    assert ask(pacing, version=3)["count"] == 4


def test_what_is_sampled_before_the_resumed_policy_has_come_is_not_too_old(app, policies):
    """The undone history's record says that its oldest policies are newer than the checkpoint."""
    publish(policies, 40, oldest=36)
    assert upload(app, make_group(seed=1, policy_version=30))["dropped"]
    policies.resume("run", 30)
    assert upload(app, make_group(seed=2, policy_version=30)) == {"stored": True}
    assert policies.record("run")["oldest"] == 26


def test_a_run_that_had_ended_may_go_on(app, policies):
    publish(policies)
    policies.end("run")
    assert upload(app, make_group(seed=1))["dropped"]
    policies.resume("run", 0)
    assert upload(app, make_group(seed=2)) == {"stored": True}


def test_policies_of_a_history_that_is_no_more_are_deleted(policies):
    publish(policies, 5)
    publish(policies, 6)
    publish(policies, 0, run="other")
    policies.resume("run", 5)
    assert len(files(policies)) == 2
    publish(policies, 5)  # again, and it stays
    assert policies.path("run", 5).exists() and not policies.path("run", 6).exists()


def test_a_run_that_has_ended_has_no_work(app, policies, pacing):
    assert ask(pacing) == {"policy": None, "first": 0, "count": 0}
    publish(policies, run="first")
    publish(policies, run="run")
    assert call(app, "POST", "/end", {"run": "run"})[0] == 200
    assert ask(pacing)["policy"] is None  # the first was killed, or it would have said so
    assert call(app, "POST", "/end", {"run": "unknown"})[0] == 200
    assert ask(pacing)["policy"] is None and policies.record("run") == record_of()
    publish(policies, 1)
    assert ask(pacing)["policy"]["version"] == 1  # it is not over, after all


@pytest.mark.parametrize("what", ["publish", "lease"])
def test_who_waits_for_work_is_woken(policies, pacing, store, what):
    if what == "lease":
        publish(policies, capacity=1)
        store.put(make_group(), b"body", "scored")
    got = []
    waiter = threading.Thread(target=lambda: got.append(ask(pacing, patience=20)))
    waiter.start()
    time.sleep(0.1)
    assert not got
    started = time.monotonic()
    if what == "lease":
        assert store.lease("run", 1, seconds=60, patience=0)
    else:
        publish(policies)
    waiter.join(10)
    assert got[0]["policy"]["version"] == 0 and time.monotonic() - started < 5
    assert got[0]["count"] == (1 if what == "lease" else 4)


def test_work_over_http(app, policies):
    client = InProcess(app)
    asked = {"held": 0, "want": 3, "run": "", "version": -1, "sha256": ""}
    assert client.work("w", **asked) == {"policy": None, "first": 0, "count": 0}
    publish(policies)
    assert client.work("w", **asked)["policy"] == record_of()
    answer = client.work("w", **asked | {"run": "run", "version": 0, "sha256": SHA256})
    assert answer == {"policy": record_of(), "first": 0, "count": 3}
    (worker,) = client.stats()["workers"].items()
    assert worker[0] == "w" and worker[1]["held"] == 3
    assert b'"held": 3' in call(app, "GET", "/live")[2]


@pytest.mark.parametrize("change", [
    {"worker": 1},
    {"worker": None},
    {"held": "0"},
    {"want": 1.0},
    {"want": True},
    {"run": None},
    {"version": 2**70},
    {"held": 2**64},
])  # fmt: skip
def test_a_question_for_work_that_makes_no_sense_is_refused(app, policies, change):
    publish(policies)
    asked = {"worker": "w", "held": 0, "want": 3, "run": "run", "version": 0}
    assert refused(call(app, "POST", "/work", asked | change), 400)
    assert json.loads(call(app, "GET", "/stats")[2])["workers"] == {}


@pytest.mark.parametrize("route", ["/work", "/end", "/reference"])
def test_half_a_surrogate_breaks_nothing(app, policies, route):
    """JSON can write it, UTF-8 can't: neither the answer nor later ones may fail for it."""
    publish(policies)
    body = {"worker": "\ud800", "held": 0, "want": 3, "run": "\ud800", "version": 0}
    assert call(app, "POST", route, body)[0] in (200, 400)
    assert call(app, "GET", "/stats")[0] == call(app, "GET", "/live")[0] == 200


# --- Uploads of workers ------------------------------------------------------------
def upload(app, group, **query):
    answer = call(app, "POST", "/upload", pack_group(group), QUERY_STRING=urlencode(query))
    assert answer[0] == 200, answer
    return json.loads(answer[2])


def test_a_group_that_is_too_old_is_refused_politely(app, policies, store):
    """The worker goes on: it could not know."""
    publish(policies, 9, oldest=5)
    old, due = (make_group(seed=version, policy_version=version) for version in (4, 5))
    assert upload(app, old) == {"stored": True, "dropped": True}
    assert upload(app, old) == {"stored": False, "dropped": True}
    assert upload(app, due) == {"stored": True}
    stats = store.stats()
    assert (stats["dropped"], stats["waiting"], stats["bytes"]) == (1, 1, len(pack_group(due)))
    publish(policies, 10, oldest=6)
    assert store.stats()["dropped"] == 2 and store.bytes == 0


def test_a_run_without_a_reference_gets_its_groups_at_once(app, policies, store):
    publish(policies, scored=False)
    group = make_group(sampler="worker")
    upload(app, group)
    body = pack_group(group)
    assert store.lease("run", 1, seconds=60, patience=0) == {"group-000": body}


def test_an_upload_is_counted_and_in_hand_until_the_worker_asks(app, policies):
    publish(policies)
    asked = {"held": 0, "want": 4, "run": "run", "version": 0, "sha256": SHA256}
    assert InProcess(app).work("worker", **asked)["count"] == 4
    upload(app, make_group(sampler="worker"))
    upload(app, make_group(seed=1, sampler="nobody knows"))
    workers = json.loads(call(app, "GET", "/stats")[2])["workers"]
    expected = {"groups": 1, "held": 4, "version": 0, "seen_s": 0}
    assert workers["worker"] | {"seen_s": 0} == expected and len(workers) == 1


def test_a_client_that_still_offers_flat_groups_to_be_joined_is_told_to_be_updated(app):
    answer = call(app, "POST", "/upload", pack_group(make_group()), QUERY_STRING="pool=1&oldest=3")
    assert refused(answer, 400) == "regrouping (?pool=1) was removed: update this client"
    assert upload(app, make_group(), pool=0, oldest=3) == {"stored": True}  # and all else is taken
    assert call(app, "POST", "/lease", {"run": "run", "limit": 1, "step": 3})[0] == 204


def test_a_published_policy_becomes_the_reference(app, policies):
    publish(policies, 3)
    client = InProcess(app)
    client.set_reference("run", 3)
    assert client.call("GET", "/info").json()["weights"] == "run@3"
    with pytest.raises(RuntimeError, match="refused .400.*run@4 can't be the reference"):
        client.set_reference("run", 4)
    client.set_reference("run", -1)
    assert client.call("GET", "/info").json()["weights"] == ""
