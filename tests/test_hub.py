"""The server for workers: policies go up and down whole, work is paced, flat groups are joined.

Routes are called as WSGI functions: no sockets.
"""

import contextlib
import hashlib
import json
import random
import sqlite3
import threading
import time
from urllib.parse import urlencode

import pytest
import torch
from test_server import INFO, FakeReference, InProcess, call, done, refused
from test_wire import make_group

from grpo.serving import pacing as pacing_module
from grpo.serving.pacing import WORKER_SECONDS, Pacing
from grpo.serving.policies import RECORD, Policies
from grpo.serving.pool import Pool, join_flat
from grpo.serving.store import STATES, Store, StoreFull
from grpo.wire import pack_group, unpack_group
from ref_server import make_app

MAX_POLICY = 1000
WEIGHTS = bytes(range(256)) * 3
SHA256 = hashlib.sha256(WEIGHTS).hexdigest()


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "store.sqlite", max_bytes=100_000)
    yield store
    store.db.close()


@pytest.fixture
def policies(store, tmp_path):
    return Policies(store, tmp_path / "policies", MAX_POLICY)


@pytest.fixture
def pacing(store, policies):
    return Pacing(store, policies, patience=0)


@pytest.fixture
def app(store, policies):
    settings = {"token": None, "max_body_bytes": 5000, "regroup": True}
    return make_app(store, policies, FakeReference(), lease_seconds=60, lease_wait=0, **settings)


def record_of(version=0, weights=WEIGHTS, **changes):
    record = {"run": "run", "version": version, "capacity": 8, "oldest": 0, "scored": True}
    record |= {"bytes": len(weights), "sha256": hashlib.sha256(weights).hexdigest()}
    return record | {"settings": {"SEED": 0}, "proof": {"logps": [-1.0]}} | changes


def publish(policies, version=0, weights=WEIGHTS, **changes):
    record = record_of(version, weights, **changes)
    policies.write(record["run"], version, 0, weights)
    policies.publish(record)
    return record


def put_part(app, part, **query):
    query = {"run": "run", "version": 0, "offset": 0} | query
    query = urlencode({k: v for k, v in query.items() if v is not None})
    return call(app, "PUT", "/policy", part, QUERY_STRING=query)


def get_policy(app, run="run", version=0, **headers):
    query = urlencode({"run": run, "version": version})
    return call(app, "GET", "/policy", QUERY_STRING=query, **headers)


def commit(app, record):
    return call(app, "POST", "/policy", {"record": record})


def files(policies):
    return sorted(path.name for path in policies.folder.iterdir())


# --- Policies: up -------------------------------------------------------------------
def test_a_policy_goes_up_in_parts_and_is_there_when_all_have_come(app, policies):
    for offset in range(0, len(WEIGHTS), 300):
        part = WEIGHTS[offset : offset + 300]
        status, _, answer = put_part(app, part, offset=offset)
        assert (status, json.loads(answer)) == (200, {"bytes": offset + len(part)})
        assert policies.record() is None and get_policy(app)[0] == 404
    assert commit(app, record_of())[::2] == (200, b'{"version": 0}')
    assert get_policy(app)[::2] == (200, WEIGHTS)
    assert policies.record() == policies.record("run") == record_of()
    assert len(files(policies)) == 1  # no part is left


def test_an_upload_that_broke_off_begins_again(app):
    put_part(app, b"of a trainer that died" * 9)
    put_part(app, WEIGHTS[:500])
    put_part(app, WEIGHTS[500:], offset=500)
    assert commit(app, record_of())[0] == 200 and get_policy(app)[2] == WEIGHTS


def test_a_part_whose_answer_was_lost_may_be_sent_again(app):
    """The client repeats a request when the connection breaks: the part is there already."""
    put_part(app, WEIGHTS[:500])
    assert put_part(app, WEIGHTS[500:600], offset=500)[0] == 200
    assert put_part(app, WEIGHTS[500:600], offset=500)[0] == 200
    put_part(app, WEIGHTS[600:], offset=600)
    assert commit(app, record_of())[0] == 200 and get_policy(app)[2] == WEIGHTS


@pytest.mark.parametrize("odd", ["x", "", 2**62, -(10**30), 10**300])
@pytest.mark.parametrize("name", ["version", "offset"])
def test_a_version_or_offset_that_is_no_number_of_ours_is_refused(app, policies, name, odd):
    assert "must be numbers" in refused(put_part(app, WEIGHTS, **{name: odd}), 400)
    assert files(policies) == []


@pytest.mark.parametrize("offset", [501, 10**9, -1])
def test_a_part_that_is_not_next_is_refused(app, offset):
    put_part(app, WEIGHTS[:500])
    reason = refused(put_part(app, WEIGHTS[500:], offset=offset), 400)
    assert f"not at {offset}" in reason
    assert put_part(app, WEIGHTS[500:], offset=500)[0] == 200  # which changed nothing


def test_a_policy_that_is_too_large_is_refused_with_the_constant(app):
    put_part(app, b"x" * 600)
    reason = refused(put_part(app, b"x" * 401, offset=600), 400)
    assert "MAX_POLICY_BYTES = 1000" in reason
    assert put_part(app, b"x" * 400, offset=600)[0] == 200
    assert "1 to 5000 bytes" in refused(put_part(app, b"x" * 5001), 413)
    assert refused(put_part(app, b""), 411)


@pytest.mark.parametrize("query", [
    {"version": None},
    {"offset": None},
    {"version": "one"},
    {"offset": "0x10"},
    {"offset": "9" * 5000},
    {"version": "1.5"},
])  # fmt: skip
def test_a_part_without_its_place_is_refused(app, policies, query):
    assert refused(put_part(app, WEIGHTS, **query), 400)
    assert files(policies) == []


BAD_RECORDS = {
    "a byte is missing": ({"bytes": len(WEIGHTS) + 1}, "769 bytes of policy 0 have not all come"),
    "one too many came": ({"bytes": len(WEIGHTS) - 1}, "767 bytes .* have not all come"),
    "another version": ({"version": 1}, "of policy 1 have not all come"),
    "another run": ({"run": "other"}, "have not all come"),
    "damaged": ({"sha256": "0" * 64}, "SHA-256 differs"),
    "no hash": ({"sha256": None}, "sha256 must be of type str"),
    "hash that is none": ({"sha256": "../" * 21 + "a"}, "64 hex digits"),
    "hash in capitals": ({"sha256": "A" * 64}, "64 hex digits"),
    "no room for anybody": ({"capacity": 0}, "capacity 1 or more"),
    "a flag as number": ({"version": True}, "version must be of type int"),
    "a number as flag": ({"scored": 1}, "scored must be of type bool"),
    "a float": ({"oldest": 0.0}, "oldest must be of type int"),
    "settings as list": ({"settings": []}, "settings must be of type dict"),
    "proof null": ({"proof": None}, "proof must be of type dict"),
    "half a surrogate": ({"run": "\ud800"}, "surrogates not allowed"),
}


@pytest.mark.parametrize("name", BAD_RECORDS)
def test_a_record_that_lies_is_refused_and_nothing_is_published(app, policies, name):
    changes, reason = BAD_RECORDS[name]
    put_part(app, WEIGHTS)
    with pytest.raises(ValueError, match=reason):
        policies.publish(record_of(**changes))
    assert refused(commit(app, record_of(**changes)), 400)
    assert policies.record() is None and get_policy(app)[0] == 404
    assert commit(app, record_of())[0] == 200  # the parts are still there


def test_a_record_is_an_object_with_all_its_fields(app, policies):
    put_part(app, WEIGHTS)
    for body in (b"", b"[]", b'{"record": []}', b'{"record": null}', b"{}", b"no json"):
        assert refused(call(app, "POST", "/policy", body), 400 if body else 411)
    for name in RECORD:
        record = record_of()
        del record[name]
        assert f"{name} must be of type" in refused(commit(app, record), 400)
    assert policies.record() is None


def test_a_commit_whose_answer_was_lost_is_the_same_as_once(app, policies):
    for version in range(3):
        put_part(app, WEIGHTS, version=version)
        assert commit(app, record_of(version))[0] == 200
        assert commit(app, record_of(version))[::2] == (200, b'{"version": %d}' % version)
    assert len(files(policies)) == 2 and get_policy(app, version=2)[2] == WEIGHTS


NAMES = ["../../evil", "..", "/etc/passwd", "a/b", "a\\b", "模型 ü", "a\0b", ".", "x" * 200, " "]


@pytest.mark.parametrize("run", NAMES)
def test_no_name_of_a_run_becomes_a_path(app, policies, tmp_path, run):
    before = sorted(path.name for path in tmp_path.iterdir())
    assert put_part(app, WEIGHTS, run=run)[0] == 200
    assert commit(app, record_of(run=run))[0] == 200
    assert get_policy(app, run)[::2] == (200, WEIGHTS)
    (name,) = files(policies)
    assert name.isascii() and set(name) <= set("0123456789abcdef-.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert policies.record()["run"] == run
    for other in NAMES:
        assert (policies.path(other, 0) == policies.path(run, 0)) == (other == run)


# --- Policies: down -----------------------------------------------------------------
@pytest.mark.parametrize(("asked", "status", "expected"), [
    (None, 200, WEIGHTS),
    ("bytes=0-", 206, WEIGHTS),
    ("bytes=500-", 206, WEIGHTS[500:]),
    ("bytes=10-19", 206, WEIGHTS[10:20]),
    ("bytes=767-", 206, WEIGHTS[767:]),
    ("bytes=768-", 416, None),
])  # fmt: skip
def test_a_policy_comes_in_the_range_that_is_asked_for(app, policies, asked, status, expected):
    publish(policies)
    got, headers, body = get_policy(app, HTTP_RANGE=asked)
    assert got == status
    if expected:
        assert body == expected and int(headers["Content-Length"]) == len(expected)
    if status == 206:
        first = len(WEIGHTS) - len(expected) if asked.endswith("-") else 10
        last = first + len(expected) - 1
        assert headers["Content-Range"] == f"bytes {first}-{last}/{len(WEIGHTS)}"


@pytest.mark.parametrize(
    "query", ["run=run&version=7", "run=no&version=0", "run=run", "", "run=%ff"]
)
def test_a_policy_that_is_gone_is_not_found(app, policies, query):
    publish(policies)
    answer = call(app, "GET", "/policy", QUERY_STRING=query)
    assert refused(answer, 400 if "%ff" in query else 404)


def test_only_the_two_newest_of_a_run_are_kept(app, policies):
    publish(policies, 3, run="other")
    for version in (8, 9, 10, 100, 1000):
        publish(policies, version, b"weights of %d" % version)
    assert [get_policy(app, version=v)[0] for v in (8, 9, 10, 100, 1000)] == [404] * 3 + [200] * 2
    assert get_policy(app, version=1000)[2] == b"weights of 1000"
    assert get_policy(app, "other", 3)[0] == 200 and len(files(policies)) == 3


def test_who_reads_a_policy_may_finish_though_it_is_deleted(app, policies):
    publish(policies, 0)
    with open(policies.path("run", 0), "rb") as file:
        for version in (1, 2):
            publish(policies, version)
        assert get_policy(app, version=0)[0] == 404 and file.read() == WEIGHTS


def test_all_of_it_is_there_when_it_is_opened_again(tmp_path):
    first = Store(tmp_path / "store.sqlite", 10_000)
    policies = Policies(first, tmp_path / "policies", MAX_POLICY)
    publish(policies, 4)
    policies.write("run", 5, 0, WEIGHTS[:100])
    assert ask(Pacing(first, policies, 0), version=4, want=3)["count"] == 3
    first.db.close()
    second = Store(tmp_path / "store.sqlite", 10_000)
    policies = Policies(second, tmp_path / "policies", MAX_POLICY)
    assert policies.record() == record_of(4) and policies.path("run", 4).read_bytes() == WEIGHTS
    answer = ask(Pacing(second, policies, 0), version=4, want=2)
    assert answer == {"policy": record_of(4), "first": 3, "count": 2}
    assert policies.write("run", 5, 100, WEIGHTS[100:]) == len(WEIGHTS)  # goes on where it was
    policies.publish(record_of(5))
    second.db.close()


# --- Work ---------------------------------------------------------------------------
def ask(pacing, worker="a", *, held=0, want=4, run="run", version=0, sha256=SHA256, patience=0):
    pacing.patience = patience
    return pacing.work(worker, held, want, run, version, sha256)


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


# --- Uploads of workers -------------------------------------------------------------
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
    upload(app, make_group())
    body = pack_group(make_group())
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


def test_flat_groups_are_pooled_only_where_asked_and_allowed(store, policies):
    settings = {"token": None, "max_body_bytes": 5000, "lease_seconds": 60, "lease_wait": 0}
    reference = FakeReference()
    off, on = (make_app(store, policies, reference, regroup=r, **settings) for r in (False, True))
    assert json.loads(call(off, "GET", "/info")[2]) == INFO | {"regroup": False}
    assert upload(off, flat(1, 0), pool=1) == {"stored": False, "joined": []}
    assert upload(on, flat(1, 1), pool=0) == {"stored": True}  # SKIP_FLAT_GROUPS = False
    assert upload(on, make_group(seed=2), pool=1) == {"stored": True}  # it is not flat at all
    assert upload(on, flat(1, 3), pool=1) == {"stored": True, "joined": []}
    assert upload(on, flat(-1, 4), pool=1) == {
        "stored": True,
        "joined": ["group-004+0", "group-004+1"],
    }
    stats = store.stats()
    assert (stats["waiting"], stats["pooled"], stats["joined"]) == (4, 0, 2)


def test_a_published_policy_becomes_the_reference(app, policies):
    publish(policies, 3)
    client = InProcess(app)
    client.set_reference("run", 3)
    assert client.call("GET", "/info").json()["weights"] == "run@3"
    with pytest.raises(RuntimeError, match="refused .400.*run@4 can't be the reference"):
        client.set_reference("run", 4)
    client.set_reference("run", -1)
    assert client.call("GET", "/info").json()["weights"] == ""


# --- The store ----------------------------------------------------------------------
def flat(outcome, seed, lengths=(3, 1, 2), **changes):
    """-> a group whose completions are all right (1) or all wrong (-1)."""
    draw = torch.Generator().manual_seed(1000 + seed)
    rewards = torch.stack(
        [torch.full((len(lengths),), float(outcome)), torch.rand(len(lengths), generator=draw)], 1
    )
    prompt_ids = torch.tensor([5, 6, 7], dtype=torch.int32)
    return make_group(lengths, seed=seed, rewards=rewards, prompt_ids=prompt_ids, **changes)


def assert_bytes(store):
    query = "SELECT IFNULL(SUM(bytes), 0), IFNULL(SUM(LENGTH(body)), 0) FROM groups"
    query += " LEFT JOIN bodies USING (seq)"
    assert store.db.execute(query).fetchone() == (store.bytes, store.bytes)


def pool(store, group, oldest=0):
    ids = Pool(store).add(group, pack_group(group), oldest)
    assert_bytes(store)
    return ids


def completions_of(*groups):
    """-> every completion with all that belongs to it, sorted."""
    return sorted(
        (ids.tolist(), logps.tolist(), rewards, truncated)
        for g in groups
        for ids, logps, rewards, truncated in zip(
            g.completions(g.completion_ids),
            g.completions(g.sampler_logps),
            g.rewards.tolist(),
            g.truncated.tolist(),
            strict=True,
        )
    )


@pytest.mark.parametrize("lengths", [
    [(3, 1), (2, 5)],
    [(3, 1, 2), (1, 1, 9)],
    [(1, 2, 3, 4), (5, 6, 7, 8)],
    [(2, 2, 2, 2, 2), (1, 3, 5, 7, 9)],
])  # fmt: skip
@pytest.mark.parametrize("outcome", [1, -1])
def test_two_flat_groups_of_other_outcomes_become_two_that_are_not(store, lengths, outcome):
    old = flat(outcome, 0, lengths[0], policy_version=4)
    new = flat(-outcome, 1, lengths[1], policy_version=6, sampler="worker")
    assert pool(store, old) == []
    assert pool(store, new) == ["group-001+0", "group-001+1"]
    groups = [unpack_group(body, vocab_size=395, max_tokens=99) for _, body in store.waiting(9, 0)]
    assert [g.id for g in groups] == ["group-001+0", "group-001+1"]
    assert completions_of(*groups) == completions_of(old, new)  # each exactly once, and whole
    for g in groups:
        assert len(g.completion_lengths) == len(lengths[0]) and not g.flat
        assert (g.policy_version, g.item, g.run) == (4, old.item, "run")
        assert (g.sampler, g.outcome, g.ref_logps) == ("regrouped", "correct", None)
        assert torch.equal(g.prompt_ids, new.prompt_ids)
    counts = {k: n for k, n in store.stats().items() if n and k in STATES}
    assert counts == {"waiting": 2, "joined": 2}
    assert_bytes(store)
    store.cover("run", 5)  # till then the join might be undone, as one of them is the ranks'
    assert store.bytes == sum(len(pack_group(g)) for g in groups)


def test_a_completion_alone_is_nothing_to_compare():
    assert join_flat(flat(1, 0, (3,)), flat(-1, 1, (2,))) == []


def test_what_does_not_fit_stays_pooled(store):
    pool(store, flat(1, 0))
    assert pool(store, flat(1, 1)) == []  # the same outcome
    assert pool(store, flat(-1, 2, item=4)) == []  # another prompt
    assert pool(store, flat(-1, 3, run="other")) == []  # another run
    assert pool(store, flat(-1, 4, (2, 2))) == []  # another GROUP_SIZE
    assert pool(store, flat(-1, 5, reward_names=["correct", "length"])) == []
    assert store.stats()["pooled"] == 6 and store.waiting(9, 0) == []
    assert len(pool(store, flat(-1, 6))) == 2  # the newest that fits
    assert {g.id for g in pooled(store)} == {f"group-00{i}" for i in (0, 2, 3, 4, 5)}


def pooled(store):
    query = "SELECT body FROM groups JOIN bodies USING (seq) WHERE state='pooled'"
    return [unpack_group(body) for (body,) in store.db.execute(query)]


def test_what_is_too_old_is_not_joined(store):
    pool(store, flat(1, 0, policy_version=4))
    assert pool(store, flat(-1, 1, policy_version=9), oldest=5) == []
    assert pool(store, flat(1, 2, policy_version=9), oldest=5) != []
    assert [g.id for g in pooled(store)] == ["group-000"]


def test_pooling_the_same_group_again_changes_nothing(store):
    first, second = flat(1, 0), flat(-1, 1)
    for _ in range(2):
        assert pool(store, first) == []
    assert store.stats()["pooled"] == 1  # not joined with itself either
    for _ in range(3):
        assert sorted(pool(store, second)) == ["group-001+0", "group-001+1"]
        assert pool(store, first) == []
    stats = store.stats()
    assert (stats["waiting"], stats["pooled"], stats["joined"]) == (2, 0, 2)
    done(store, ["group-001+0", "group-001+1"])
    assert sorted(pool(store, second)) == ["group-001+0", "group-001+1"] and store.bytes == 0
    assert not store.put(second, pack_group(second))


@pytest.mark.parametrize("room", [0.5, 1.5])
def test_a_store_without_room_for_both_halves_joins_nothing(store, room):
    """The producer comes again: no completion may be lost by then, or trained twice."""
    first, second = flat(1, 0), flat(-1, 1)
    pool(store, first)
    store.max_bytes = store.bytes + int(room * len(pack_group(second)))
    if room < 1:  # joined they would need all of it
        for _ in range(2):
            with pytest.raises(StoreFull):
                pool(store, second)
            assert_bytes(store)
            assert store.stats()["waiting"] == 0 and len(pooled(store)) == 1
    else:  # room for a half, or for both once the pooled one has gone
        with contextlib.suppress(StoreFull):
            pool(store, second)
    store.max_bytes = 100_000
    assert len(pool(store, second)) == 2 and pooled(store) == []
    groups = [unpack_group(body) for _, body in store.waiting(9, 0)]
    assert completions_of(*groups) == completions_of(first, second)


def test_old_groups_are_dropped_wherever_they_wait(store):
    """All but what is leased, done or failed; of this run alone."""
    for seed, version in enumerate([1, 2, 3, 1, 2, 3]):
        state = "waiting" if seed < 3 else "scored"
        store.put(make_group(seed=seed, policy_version=version), b"x" * 10, state)
    pool(store, flat(1, 6, policy_version=1))
    store.put(make_group(seed=7, policy_version=1, run="other"), b"x" * 10)
    for seed, state in ((8, "leased"), (9, "failed")):
        store.put(make_group(seed=seed, policy_version=1), b"x" * 10, state)
    assert store.drop_old("run", 3) == 4
    Pool(store).drop_old("run", 3, None)  # the flat one, which nobody was waiting for
    assert_bytes(store)
    stats = store.stats()
    assert (stats["dropped"], stats["pooled"]) == (5, 0)
    assert (stats["waiting"], stats["scored"], stats["leased"], stats["failed"]) == (2, 1, 1, 1)
    assert store.drop_old("run", 3) == store.drop_old("nobody", 99) == 0
    assert not store.put(make_group(seed=0, policy_version=1), b"late again")
    assert store.drop_old("run", -4) == 0  # the first steps


def test_a_group_that_is_dropped_while_it_is_scored_stays_dropped(store):
    store.put(make_group(), b"body")
    ((seq, body),) = store.waiting(9, 0)
    store.drop_old("run", 99)
    store.scored({seq: body + b"scored"})
    store.failed(seq, "too late")
    assert_bytes(store)
    assert store.stats()["dropped"] == 1 and store.bytes == 0
    assert store.lease("run", 9, seconds=60, patience=0) == {}


def test_a_group_may_come_in_another_state(store):
    assert store.put(make_group(), b"scored already", "scored")
    assert store.put(make_group(seed=1), b"", "dropped")
    assert not store.put(make_group(seed=1), b"body", "scored")
    assert_bytes(store)
    assert store.waiting(9, 0) == [] and store.queued("run") == 1
    leased = store.lease("run", 9, seconds=60, patience=0)
    assert leased == {"group-000": b"scored already"} and store.queued("run") == 0


def test_bytes_are_right_at_all_times_and_when_it_is_opened_again(tmp_path):
    """At random: put, pool, score, fail, drop, lease, acknowledge."""
    path, rng = tmp_path / "store.sqlite", random.Random(0)
    store = Store(path, 30_000)
    for seed in range(300):
        group = flat(rng.choice([1, -1]), seed, item=rng.randint(0, 3), policy_version=seed)
        try:
            if rng.random() < 0.7:
                Pool(store).add(group, pack_group(group), seed - 40)
            else:
                store.put(group, pack_group(group), rng.choice(["waiting", "scored"]))
        except StoreFull:
            store.drop_old("run", seed - 10)
            Pool(store).drop_old("run", seed - 10, None)
        for seq, body in store.waiting(rng.randint(0, 3), 0):
            store.scored({seq: body * 2}) if rng.random() < 0.9 else store.failed(seq, "error")
        ids = [id for (id,) in store.db.execute("SELECT id FROM groups WHERE state='failed'")]
        done(store, ids)
        done(store, list(store.lease("run", 2, seconds=60, patience=0)))
        store.drop_old("run", seed - 60)
        Pool(store).drop_old("run", seed - 60, None)
        assert_bytes(store)
    stats = store.stats()
    assert min(stats[state] for state in ("done", "joined", "dropped")) > 10
    store.db.close()
    again = Store(path, 30_000)
    assert again.stats() | {"oldest_waiting_s": 0} == stats | {"oldest_waiting_s": 0}
    again.db.close()


def test_the_store_of_an_older_version_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "store.sqlite"
    old = sqlite3.connect(path)
    old.execute(
        "CREATE TABLE groups (seq INTEGER PRIMARY KEY, run TEXT, id TEXT, state TEXT, body BLOB,"
        " bytes INTEGER, error TEXT, uploaded REAL, lease_ends REAL, UNIQUE (run, id))"
    )
    old.execute("INSERT INTO groups (run, id, state) VALUES ('run', 'a', 'waiting')")
    old.commit()
    old.close()
    with pytest.raises(SystemExit, match="older version's store: finish its runs, or delete it"):
        Store(path, 1000)
    # the connection that was refused is still open, and locks the file
    old = sqlite3.connect(f"file:{path}?immutable=1", uri=True)
    assert old.execute("SELECT id, state FROM groups").fetchall() == [("a", "waiting")]
    old.close()
