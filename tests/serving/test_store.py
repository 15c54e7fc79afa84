"""The store: every group comes out once, also after kill -9."""

import os
import random
import sqlite3
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from helpers import done, lease, make_group, mark_scored, put

from grpo.serving import database
from grpo.serving import store as store_module
from grpo.serving.store import TRANSITIONS, Store, StoreFull
from grpo.wire import pack_group

HERE = Path(__file__).parent.parent


def assert_bytes(store):
    query = "SELECT IFNULL(SUM(bytes), 0), IFNULL(SUM(LENGTH(body)), 0) FROM groups"
    query += " LEFT JOIN bodies USING (seq)"
    assert store.db.execute(query).fetchone() == (store.bytes, store.bytes)


def test_every_state_is_reached_and_only_what_has_ended_stays_so():
    states = set(store_module.STATES)
    sources = {state for before, _, _ in TRANSITIONS.values() for state in before.split()}
    targets = {after for _, after, _ in TRANSITIONS.values()} - {store_module.BEFORE}
    assert sources <= states == targets
    left = [before for event, (before, _, _) in TRANSITIONS.items() if event != "resample"]
    ended = {"done", "dropped"}
    assert {state for before in left for state in before.split()} == states - ended


def test_groups_come_out_oldest_first_and_once(store):
    """The newest first would starve old groups, and train them hundreds of steps later."""
    bodies = put(store, 2, 0, 1)
    assert [body for _, body in store.waiting(2, 0)] == list(bodies.values())[:2]
    assert lease(store) == {}  # nothing is scored yet
    mark_scored(store)
    assert list(lease(store, limit=2)) == ["group-002", "group-000"]
    assert lease(store) == {"group-001": bodies["group-001"] + b"scored"}
    assert lease(store) == {}


def test_runs_are_kept_apart(store):
    put(store, 0, run="a")
    put(store, 0, run="b")
    mark_scored(store)
    assert len(lease(store, "a")) == 1 and done(store, ["group-000"], "a") == 1
    assert len(lease(store, "b")) == 1


def test_the_same_id_again_changes_nothing_even_when_it_is_done(store):
    put(store, 0)
    again = make_group(seed=0)
    assert not store.put(again, b"other body") and len(store.waiting(9, 0)[0][1]) > 100
    mark_scored(store)
    lease(store)
    assert done(store, ["group-000", "unknown"]) == 1
    assert not store.put(again, b"other body")  # late, after its step
    assert done(store, ["group-000"]) == 0
    assert lease(store) == {} and store.waiting(9, 0) == []


def test_a_full_store_refuses_until_something_is_done(store):
    """Without a bound it would grow for as long as producers are faster than the trainer."""
    put(store, 0)
    store.max_bytes = store.bytes + 10
    with pytest.raises(StoreFull):
        put(store, 1)
    assert not store.put(make_group(seed=0), b"known: no room needed" * 10)
    mark_scored(store)
    done(store, list(lease(store)))
    assert store.bytes == 0
    put(store, 1)


def test_a_lease_that_runs_out_is_handed_out_again(store):
    put(store, 0)
    mark_scored(store)
    first = lease(store, seconds=0.05)
    assert lease(store) == {}
    time.sleep(0.06)
    assert lease(store) == first


def test_a_lease_is_bounded_in_bytes_but_gives_one_at_least(store, monkeypatch):
    bodies = put(store, 0, 1, 2)
    size = len(bodies["group-000"]) + len(b"scored")
    mark_scored(store)
    monkeypatch.setattr(store_module, "LEASE_BYTES", 2 * size + 5)
    assert list(lease(store)) == ["group-000", "group-001"]
    monkeypatch.setattr(store_module, "LEASE_BYTES", 5)
    assert list(lease(store)) == ["group-002"]


def test_a_failed_group_is_told_to_its_run_alone(store):
    put(store, 0, 1)
    put(store, 0, run="other")
    (seq, body_of_it), *others = store.waiting(9, 0)
    store.failed(seq, "ValueError: too strange")  # it may be tried again
    for seq, body in others:
        store.scored({seq: body})
    with pytest.raises(RuntimeError, match="group-000 failed: ValueError: too strange"):
        lease(store)
    assert len(lease(store, "other")) == 1
    assert store.stats()["failed"] == 1
    assert store.bytes == sum(len(body) for _, body in [(seq, body_of_it), *others])
    done(store, ["group-000"])  # who knows about it may go on
    assert list(lease(store)) == ["group-001"]


def test_a_group_acknowledged_while_it_is_scored_stays_done(store):
    """Or it would be handed out, and trained, once more."""
    put(store, 0)
    ((seq, body),) = store.waiting(9, 0)
    done(store, ["group-000"])
    store.scored({seq: body})
    assert lease(store) == {} and store.stats()["done"] == 1 and store.bytes == 0


def test_another_reference_scores_again_what_is_not_done(store):
    store.use_reference({"model": "a", "temperature": 1.0})
    put(store, 0, 1, 2)
    mark_scored(store)
    lease(store, limit=1)
    done(store, list(lease(store, limit=1)))
    store.use_reference({"temperature": 1.0, "model": "a"})
    assert store.stats()["waiting"] == 0
    store.use_reference({"model": "b", "temperature": 1.0})
    counts = store.stats()
    assert (counts["waiting"], counts["done"]) == (2, 1)


def test_stats_count(store):
    assert store.stats()["oldest_waiting_s"] == 0
    bodies = put(store, 0, 1)
    stats = store.stats()
    assert (stats["waiting"], stats["bytes"]) == (2, sum(map(len, bodies.values())))
    assert 0 <= stats["oldest_waiting_s"] < 5


def test_old_groups_are_dropped_wherever_they_wait(store):
    """All but what is leased, done or failed; of this run alone."""
    for seed, version in enumerate([1, 2, 3, 1, 2, 3]):
        state = "waiting" if seed < 3 else "scored"
        store.put(make_group(seed=seed, policy_version=version), b"x" * 10, state)
    store.put(make_group(seed=7, policy_version=1, run="other"), b"x" * 10)
    for seed, state in ((8, "leased"), (9, "failed")):
        store.put(make_group(seed=seed, policy_version=1), b"x" * 10, state)
    store.drop_old("run", 3)
    assert store.report_dropped("run") == 4
    assert_bytes(store)
    stats = store.stats()
    assert stats["dropped"] == 4
    assert (stats["waiting"], stats["scored"], stats["leased"], stats["failed"]) == (2, 1, 1, 1)
    store.drop_old("run", 3)
    store.drop_old("nobody", 99)
    assert store.report_dropped("run") == store.report_dropped("nobody") == 0
    assert not store.put(make_group(seed=0, policy_version=1), b"late again")
    store.drop_old("run", -4)  # the first steps
    assert store.report_dropped("run") == 0


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
    """At random: put, score, fail, drop, lease, acknowledge."""
    path, rng = tmp_path / "store.sqlite", random.Random(0)
    store = Store(path, 30_000)
    for seed in range(300):
        group = make_group(seed=seed, policy_version=seed)
        try:
            store.put(group, pack_group(group), rng.choice(["waiting", "scored"]))
        except StoreFull:
            store.drop_old("run", seed - 10)
        for seq, body in store.waiting(rng.randint(0, 3), 0):
            store.scored({seq: body * 2}) if rng.random() < 0.9 else store.failed(seq, "error")
        ids = [id for (id,) in store.db.execute("SELECT id FROM groups WHERE state='failed'")]
        done(store, ids)
        if rng.random() < 0.3:
            done(store, list(lease(store, limit=2)))
        store.drop_old("run", seed - 60)
        assert_bytes(store)
    stats = store.stats()
    assert min(stats["done"], stats["dropped"]) > 10
    store.db.close()
    again = Store(path, 30_000)
    assert again.stats() | {"oldest_waiting_s": 0} == stats | {"oldest_waiting_s": 0}
    again.db.close()


def test_all_is_there_when_it_is_opened_again(tmp_path):
    path = tmp_path / "deep" / "store.sqlite"
    first = Store(path, 100_000)
    bodies = put(first, 0, 1, 2)
    mark_scored(first)
    leased = lease(first, limit=1, seconds=0)
    first.ack("run", ["group-001"], 5)
    counts = first.stats()
    first.db.close()
    second = Store(path, 100_000)
    # the answer to a lease may have died with the server: it is handed out again
    counts |= {"scored": counts["scored"] + 1, "leased": 0}
    assert second.stats() | {"oldest_waiting_s": 0} == counts
    assert lease(second) == leased | {"group-002": bodies["group-002"] + b"scored"}
    second.db.close()


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


WITH_REGROUPING = """
CREATE TABLE groups (
    seq INTEGER PRIMARY KEY, run TEXT, id TEXT, state TEXT, bytes INTEGER, error TEXT,
    uploaded REAL, lease_ends REAL, version INTEGER, item INTEGER, sampler TEXT,
    made INTEGER, step INTEGER, was TEXT, replay INTEGER, UNIQUE (run, id));
CREATE TABLE bodies (seq INTEGER PRIMARY KEY, body BLOB);
CREATE INDEX by_item ON groups (state, run, item);
INSERT INTO groups (id, state, bytes, error, sampler, made, step, was) VALUES
    ('flat',     'pooled',  4, NULL,      'worker',    NULL, NULL, NULL),
    ('ranks',    'joined',  0, NULL,      'trainer',   5,    NULL, NULL),
    ('half',     'joined',  4, NULL,      'worker',    NULL, 5,    'pooled'),
    ('covered',  'joined',  0, NULL,      'worker',    NULL, 2,    'pooled'),
    ('old',      'dropped', 4, 'too old', 'worker',    NULL, 5,    'pooled'),
    ('half+0',   'scored',  4, NULL,      'regrouped', 5,    NULL, NULL),
    ('half+1',   'trained', 0, NULL,      'regrouped', 5,    NULL, NULL),
    ('theirs',   'trained', 4, NULL,      'worker',    NULL, 5,    'scored');
UPDATE groups SET run='run', uploaded=0, version=4, item=3;
INSERT INTO bodies SELECT seq, CAST('body' AS BLOB) FROM groups WHERE bytes>0;
"""


def test_a_store_with_regrouping_in_it_is_opened_and_its_flat_groups_are_dropped(tmp_path):
    path = tmp_path / "store.sqlite"
    old = sqlite3.connect(path)
    old.executescript(WITH_REGROUPING)
    old.close()
    for _ in range(2):
        store = Store(path, 1000)
        assert_bytes(store)
        gone = {"regrouping was removed": 4, "too old": 1}
        counts = {"uploaded": 8, "trained": 2, "waiting": 1, "failed": 0, "dropped": gone}
        assert store.ledger("run") == counts
        store.db.close()
    store = Store(path, 1000)
    assert store.resume("run", 5) == {"handed_out_again": 1, "sampled_again": 3}
    assert lease(store) == {"theirs": b"body"}
    assert store.put(make_group(seed=1), b"new") and not store.put(make_group(id="flat"), b"late")
    assert_bytes(store)
    store.db.close()


HOLD = """
import sys, time
from grpo.serving.store import Store
from helpers import make_group
store = Store(sys.argv[1], 100_000)
for seed in range(50):
    store.put(make_group(seed=seed), b"body %d" % seed)
    print("put", flush=True)
time.sleep(60)
"""


def test_what_was_put_survives_kill_9_and_meanwhile_nobody_else_opens_the_store(
    tmp_path, monkeypatch
):
    path = tmp_path / "store.sqlite"
    paths = os.pathsep.join([str(HERE), str(HERE.parent)])
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, path],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": paths},
    )
    try:
        for _ in range(50):
            assert holder.stdout.readline() == b"put\n"
        connect = partial(sqlite3.connect, timeout=0.1)
        monkeypatch.setattr(database.sqlite3, "connect", connect)
        with pytest.raises(SystemExit, match="locked; is it another server's"):
            Store(path, 100_000)
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    store = Store(path, 100_000)
    assert [body for _, body in store.waiting(99, 0)] == [b"body %d" % i for i in range(50)]
    store.db.close()


@pytest.mark.parametrize("what", ["lease", "waiting"])
def test_who_waits_is_woken(store, what):
    """No wake-up is lost: the answer comes with the change, long before the patience ends."""
    calls = {"lease": lambda: lease(store, patience=20), "waiting": lambda: store.waiting(9, 20)}
    if what == "lease":
        put(store, 0)
    got = []
    waiter = threading.Thread(target=lambda: got.append(calls[what]()))
    waiter.start()
    time.sleep(0.1)
    assert not got
    started = time.monotonic()
    put(store, 1) if what == "waiting" else mark_scored(store)
    waiter.join(10)
    assert len(got[0]) == 1 and time.monotonic() - started < 5


def test_a_lease_fails_while_it_waits(store):
    put(store, 0)
    threading.Timer(0.1, store.failed, (1, "ValueError: no")).start()
    with pytest.raises(RuntimeError, match="ValueError: no"):
        lease(store, patience=20)


def test_many_threads_at_once_lose_and_double_nothing(tmp_path):
    store, got = Store(tmp_path / "store.sqlite", 10**7), []

    def produce(worker):
        for i in range(25):
            put(store, 100 * worker + i)

    def consume():
        while len(got) < 100:
            bodies = lease(store, limit=7, patience=0.05)
            got.extend(bodies)
            done(store, list(bodies))

    threads = [threading.Thread(target=produce, args=(worker,)) for worker in range(4)]
    threads += [threading.Thread(target=consume) for _ in range(3)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 20
    while len(got) < 100 and time.monotonic() < deadline:
        mark_scored(store)
        time.sleep(0.005)
    for thread in threads:
        thread.join(20)
    assert len(got) == len(set(got)) == 100 and store.bytes == 0 and store.stats()["done"] == 100
    store.db.close()
