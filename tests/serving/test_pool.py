"""Regrouping: two zero-variance groups of a prompt become two others; old groups are dropped."""

import contextlib
import random
import sqlite3

import pytest
import torch
from helpers import done, flat, make_group

from grpo.serving.pool import add_flat, join_flat
from grpo.serving.store import STATES, Store, StoreFull
from grpo.wire import pack_group, unpack_group


def assert_bytes(store):
    query = "SELECT IFNULL(SUM(bytes), 0), IFNULL(SUM(LENGTH(body)), 0) FROM groups"
    query += " LEFT JOIN bodies USING (seq)"
    assert store.db.execute(query).fetchone() == (store.bytes, store.bytes)


def pool(store, group, oldest=0):
    ids = add_flat(store, group, pack_group(group), oldest)
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
    store.drop_old("run", 3, step=9)
    assert store.report_dropped("run") == 4  # not the flat one, which nobody was waiting for
    assert_bytes(store)
    stats = store.stats()
    assert (stats["dropped"], stats["pooled"]) == (5, 0)
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
    """At random: put, pool, score, fail, drop, lease, acknowledge."""
    path, rng = tmp_path / "store.sqlite", random.Random(0)
    store = Store(path, 30_000)
    for seed in range(300):
        group = flat(rng.choice([1, -1]), seed, item=rng.randint(0, 3), policy_version=seed)
        try:
            if rng.random() < 0.7:
                add_flat(store, group, pack_group(group), seed - 40)
            else:
                store.put(group, pack_group(group), rng.choice(["waiting", "scored"]))
        except StoreFull:
            store.drop_old("run", seed - 10, step=seed)
        for seq, body in store.waiting(rng.randint(0, 3), 0):
            store.scored({seq: body * 2}) if rng.random() < 0.9 else store.failed(seq, "error")
        ids = [id for (id,) in store.db.execute("SELECT id FROM groups WHERE state='failed'")]
        done(store, ids)
        done(store, list(store.lease("run", 2, seconds=60, patience=0)))
        store.drop_old("run", seed - 60, step=seed)
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
