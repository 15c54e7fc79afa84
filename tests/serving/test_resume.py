"""The store when a run resumes: nothing is lost, trained twice or left behind."""

import random

import helpers
import pytest
from helpers import done, lease, make_group, mark_scored

from grpo.serving.store import Store
from grpo.wire import pack_group


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "store.sqlite", max_bytes=10**6)
    yield store
    store.db.close()


def put(store, *seeds):
    """Stores groups of a worker; -> their bodies by id."""
    return helpers.put(store, *seeds, sampler="worker")


def adds_up(store, run="run"):
    """-> the ledger, having checked that it adds up and that the bytes are what is there."""
    ledger = store.ledger(run)
    ends = ("trained", "waiting", "failed")
    total = sum(ledger[name] for name in ends) + sum(ledger["dropped"].values())
    assert ledger["uploaded"] == total, ledger
    (held,) = store.db.execute("SELECT IFNULL(SUM(LENGTH(body)), 0) FROM bodies").fetchone()
    (said,) = store.db.execute("SELECT IFNULL(SUM(bytes), 0) FROM groups").fetchone()
    assert held == said == store.bytes
    return ledger


def test_what_workers_sampled_is_kept_until_a_checkpoint_covers_it(store):
    put(store, 0, 1, 2, 3)
    mark_scored(store)
    order = list(lease(store))
    assert store.ack("run", order[:2], 5) == 2 and store.ack("run", order[2:], 6) == 2
    assert store.ack("run", order, 7) == 0  # once is all
    assert store.stats()["trained"] == 4 and store.stats()["kept_bytes"] == store.bytes > 0
    store.cover("run", 6)  # the checkpoint after 6 updates: the rollout after 5 is in it
    assert (store.stats()["done"], store.stats()["trained"]) == (2, 2)
    assert adds_up(store)["trained"] == 4
    store.cover("run", 7)
    assert store.bytes == 0 and lease(store) == {} and adds_up(store)["trained"] == 4


def test_a_run_that_resumes_is_handed_the_same_in_the_same_order(store):
    bodies = put(store, 3, 1, 0, 2, 4)
    mark_scored(store)
    first, second = list(lease(store, limit=2)), list(lease(store, limit=2))
    store.ack("run", second, 5)  # not the order of upload
    store.ack("run", first, 6)
    held = list(lease(store))  # and one was in the trainer's hands
    assert store.resume("run", 5) == {"handed_out_again": 5, "sampled_again": 0}
    again = lease(store)
    assert list(again) == second + first + held
    assert all(again[id] == bodies[id] + b"scored" for id in again)
    adds_up(store)


def test_what_a_checkpoint_covers_is_not_handed_out_again(store):
    put(store, 0, 1, 2)
    mark_scored(store)
    a, b, c = lease(store)
    for step, id in enumerate((a, b, c)):
        store.ack("run", [id], step)
    assert store.resume("run", 2)["handed_out_again"] == 1
    assert list(lease(store)) == [c]
    assert store.resume("run", 2)["handed_out_again"] == 1  # and once more
    counts = {"uploaded": 3, "trained": 2, "waiting": 1, "failed": 0, "dropped": {}}
    assert adds_up(store) == counts


def test_what_the_ranks_sampled_is_sampled_again_under_the_same_ids(store):
    groups = [make_group(seed=s, sampler="trainer", policy_version=s) for s in range(3)]
    for group in groups:
        store.put(group, pack_group(group))
    mark_scored(store)
    leased = list(lease(store))
    for step, id in enumerate(leased):
        store.ack("run", [id], step)
    assert store.bytes == 0  # they need not be kept
    assert store.resume("run", 1) == {"handed_out_again": 0, "sampled_again": 2}
    assert lease(store) == {}
    assert [store.put(g, pack_group(g)) for g in groups] == [False, True, True]
    assert len(store.waiting(9, 0)) == 2
    ledger = adds_up(store)
    assert ledger["dropped"] == {"sampled again": 2} and ledger["uploaded"] == 5


def test_a_group_that_could_not_be_scored_is_tried_again_when_the_run_resumes(store):
    put(store, 0)
    ((seq, body),) = store.waiting(9, 0)
    store.failed(seq, "out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        lease(store)
    assert adds_up(store)["failed"] == 1
    store.resume("run", 0)
    assert store.waiting(9, 0) == [(seq, body)]
    assert lease(store) == {}


def test_what_other_runs_left_does_not_hasten_a_checkpoint(store):
    put(store, 0, 1)
    mark_scored(store)
    store.ack("run", list(lease(store)), 0)
    assert store.kept("run") == store.bytes > 0 and store.kept("other") == 0


def test_a_run_that_is_over_leaves_nothing_behind(store):
    put(store, 0, 1, 2)
    mark_scored(store)
    store.ack("run", list(lease(store, limit=1)), 0)
    lease(store, limit=1)
    store.forget("run")
    assert store.bytes == 0
    assert adds_up(store)["trained"] == 1
    assert store.ledger("run")["dropped"] == {"the run was over": 2}


def test_another_reference_scores_again_what_is_handed_out_again(store):
    put(store, 0)
    mark_scored(store)
    store.ack("run", list(lease(store)), 5)
    store.use_reference({"model": "other"})
    store.resume("run", 5)
    assert store.stats()["waiting"] == 1 and lease(store) == {}


def test_the_ledger_adds_up_whatever_happens(store, monkeypatch):
    """Random uploads, leases, checkpoints, crashes: what is trained in the history that survives is
    trained once, and nothing is left in nobody's hands."""
    draw, made, step, checkpointed = random.Random(0), 0, 0, 0
    trained = {}  # id -> step, in the history that survives
    held = []
    for _ in range(600):
        what = draw.choice(
            ["upload", "upload", "lease", "train", "train", "save", "crash", "server"]
        )
        if what == "upload":
            made += bool(put(store, made))
            mark_scored(store)
        elif what == "lease":
            held += list(lease(store, limit=draw.randint(1, 3)))
        elif what == "train" and held:
            assert not trained.keys() & set(held), "trained twice"
            store.ack("run", held, step)
            trained |= dict.fromkeys(held, step)
            step, held = step + 1, []
        elif what == "save":
            checkpointed = step
            store.cover("run", step)
        elif what == "crash":
            step, held = checkpointed, []
            trained = {id: at for id, at in trained.items() if at < step}
            store.resume("run", step)
        elif what == "server":
            free = "UPDATE groups SET state='scored' WHERE state='leased'"  # as Store() does
            store.db.execute(free)
            held = []
        assert adds_up(store)["uploaded"] == made
        assert store.ledger("run")["trained"] == len(trained)
    assert made > 100 and len(trained) > 30
    left = list(lease(store, limit=999))
    assert len(left) + len(trained) == made and not trained.keys() & set(left)
    assert done(store, left) == len(left) and store.bytes == 0
