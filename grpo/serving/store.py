"""The reference server's groups, in SQLite: what was answered with 200 survives kill -9.

store = Store("runs/ref_store.sqlite", max_bytes=1 << 30)
store.put(group, body)          # an upload     waiting
store.waiting(limit, patience)  # to be scored
store.scored({seq: body})       # with log-probs          -> scored
store.lease(run, limit, ...)    # to the trainer                    -> leased
store.ack(run, ids, step)       # it was trained                              -> trained
store.cover(run, step)          # a checkpoint has what it taught             -> done
store.resume(run, step)         # the run goes on from a checkpoint: later steps are undone
store.drop_old(run, oldest)     # an older policy sampled it                  -> dropped
store.pool(group, body)         # a flat group: pooled, until another of its prompt fits it
"""

import itertools
import json
import os
import sqlite3
import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import torch

from grpo.wire import is_flat, pack_group, unpack_group

STATES = ("waiting", "scored", "leased", "trained", "done", "failed", "pooled", "joined", "dropped")
LEASE_BYTES = 64 << 20  # of groups in one lease, unless a single one is larger: bounds its reply


class StoreFull(Exception):
    """The store holds MAX_STORE_BYTES; the producer should try again later."""


class Store:
    """Groups in SQLite. A group is waiting -> scored -> leased -> trained -> done, or failed with
    an error; too old for its run it is dropped, as for other reasons, which are kept.

    Exactly once is meant for the history that survives. What a step used is kept until a checkpoint
    covers that step; a run that resumes from an earlier one is handed it again, in the same order.
    What the ranks sampled themselves they sample again: those groups give their ids free.
    Groups that are done, dropped or joined with another keep their row without the body, so that a
    late repeat of an upload is recognised and the ledger adds up.
    WAL with synchronous=NORMAL: a committed upload survives the death of the process, though not a
    power cut. The file is locked: a second server, with another model, would score the first one's
    groups.
    """

    def __init__(self, path, max_bytes):
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        self.db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self.path, self.max_bytes = path, max_bytes
        self.dropped = Counter()  # groups of each run that were too old, and its trainer not told
        self.changed = threading.Condition()  # guards the connection, and is told of every change
        self.db.execute("PRAGMA locking_mode=EXCLUSIVE")
        self.db.execute("PRAGMA page_size=32768")  # a body of 1 MB is 32 of them, not 256
        self.db.execute("PRAGMA secure_delete=OFF")  # Debian's overwrites what is deleted, as slow
        try:
            self.db.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            raise SystemExit(f"{path}: {error}; is it another server's? Set STORE") from error
        self.db.execute("PRAGMA synchronous=NORMAL")
        self.db.execute(
            "CREATE TABLE IF NOT EXISTS groups (seq INTEGER PRIMARY KEY, run TEXT, id TEXT,"
            " state TEXT, bytes INTEGER, error TEXT, uploaded REAL, lease_ends REAL,"
            " version INTEGER, item INTEGER, sampler TEXT,"
            " made INTEGER,"  # the ranks' step that sampled or joined it; NULL: workers did
            " step INTEGER, was TEXT,"  # the ranks' step that ended it, and its state before
            " replay INTEGER,"  # the step that used it in a history that was undone
            " UNIQUE (run, id))"
        )
        columns = [row[1] for row in self.db.execute("PRAGMA table_info(groups)")]
        if "replay" not in columns:
            raise SystemExit(f"{path} is an older version's store: finish its runs, or delete it")
        # Apart, as any change of a row writes the whole of it: a lease wrote each body once more
        self.db.execute("CREATE TABLE IF NOT EXISTS bodies (seq INTEGER PRIMARY KEY, body BLOB)")
        self.db.execute(
            "CREATE TRIGGER IF NOT EXISTS ended AFTER UPDATE OF bytes ON groups WHEN NEW.bytes=0"
            " BEGIN DELETE FROM bodies WHERE seq=NEW.seq; END"
        )
        self.db.execute("CREATE INDEX IF NOT EXISTS by_item ON groups (state, run, item)")
        self.db.execute("CREATE INDEX IF NOT EXISTS by_state ON groups (state, run, seq)")
        self.db.execute("CREATE TABLE IF NOT EXISTS reference (facts TEXT)")
        # The answers to some leases died with the server before; whoever has them knows their ids
        self.db.execute("UPDATE groups SET state='scored' WHERE state='leased'")
        self.bytes = self._sum()

    def use_reference(self, facts):
        """Sends groups that another reference model (or temperature) scored back to be scored."""
        facts = json.dumps(facts, sort_keys=True)
        with self.changed:
            if self.db.execute("SELECT facts FROM reference").fetchall() != [(facts,)]:
                self.db.execute(
                    "UPDATE groups SET state='waiting' WHERE state IN ('scored','leased')"
                )
                self.db.execute("UPDATE groups SET was='waiting' WHERE was='scored'")
                self.db.execute("DELETE FROM reference")
                self.db.execute("INSERT INTO reference VALUES (?)", (facts,))

    def reference_weights(self):
        """-> the name of the weights that scored last; "" for a reference model's own."""
        row = self.db.execute("SELECT facts FROM reference").fetchone()
        return json.loads(row[0]).get("weights", "") if row else ""

    def put(self, group, body, state="waiting", reason=None):
        """Stores an uploaded group; -> False if it is there already. Raises StoreFull.

        `state` is another for groups that need no score ("scored"), or are "dropped" for a reason.
        """
        with self.changed:
            if self.known(group):
                return False
            self._insert(group, body, state, reason)
        return True

    def known(self, group):
        where = "SELECT 1 FROM groups WHERE run=? AND id=?"
        return self.db.execute(where, (group.run, group.id)).fetchone() is not None

    def _insert(self, group, body, state, reason=None, made=None):
        self._make_room(len(body))
        made = group.policy_version if group.sampler == "trainer" else made
        with self._together():
            row = self.db.execute(
                "INSERT INTO groups (run, id, state, bytes, uploaded, error, version, item,"
                " sampler, made) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (group.run, group.id, state, len(body), time.time(), reason)
                + (group.policy_version, group.item, group.sampler, made),
            )
            if body:
                self.db.execute("INSERT INTO bodies VALUES (?, ?)", (row.lastrowid, body))
        self.bytes += len(body)
        self.changed.notify_all()

    def pool(self, group, body, oldest):
        """Stores a flat group for later, or joins it with one of its prompt that fits it.

        -> the ids of the groups that came of it, which wait to be scored like others: none, or two
        if a pooled one of the prompt, sampled by policy `oldest` or newer, has other outcomes.
        A repeat of an upload gives the ids again. Raises StoreFull.
        """
        if len(group.id) > 198:
            raise ValueError("the id of a group to be joined has 198 characters at most")
        with self.changed:
            if self.known(group):
                ids = (f"{group.id}+0", f"{group.id}+1")
                where = "SELECT id FROM groups WHERE run=? AND id IN (?, ?)"
                return [row[0] for row in self.db.execute(where, (group.run, *ids))]
            query = "SELECT seq, body FROM groups JOIN bodies USING (seq) WHERE state='pooled'"
            query += " AND run=? AND item=? AND version>=? ORDER BY seq DESC"
            for seq, other in self.db.execute(query, (group.run, group.item, oldest)).fetchall():
                joined = join_flat(unpack_group(other), group)
                if joined:
                    self._join(seq, group, joined)
                    return [new.id for new in joined]
            self._insert(group, body, "pooled")
            return []

    def _join(self, seq, group, joined):
        """Puts `joined` in the place of the pooled group `seq` and of `group`, all or nothing."""
        bodies = [pack_group(new) for new in joined]
        own = group.policy_version if group.sampler == "trainer" else None
        pooled = "SELECT bytes, made FROM groups WHERE seq=?"
        size, others = self.db.execute(pooled, (seq,)).fetchone()
        # What the ranks sampled in an undone step they sample again: the join is undone with it,
        # and a worker's part of it pooled again
        made = max((step for step in (own, others) if step is not None), default=None)
        mine = pack_group(group) if made is not None and own is None else b""
        freed = size if made is None else 0
        self._make_room(sum(map(len, bodies)) + len(mine) - freed, spared=seq)
        with self._together():
            self._end("joined", "seq=?", (seq,), step=made)
            self._insert(group, mine, "joined")
            if mine:
                undo = "UPDATE groups SET step=?, was='pooled' WHERE run=? AND id=?"
                self.db.execute(undo, (made, group.run, group.id))
            for new, body in zip(joined, bodies, strict=True):
                self._insert(new, body, "waiting", made=made)

    @contextmanager
    def together(self):
        """What is stored within is stored all or not at all, and seen by others all at once."""
        with self.changed, self._together():
            yield

    @contextmanager
    def _together(self):
        """What is written within is written all or not at all; within another, it is part of it."""
        if self.db.in_transaction:
            yield
            return
        self.db.execute("BEGIN")
        try:
            yield
            self.db.execute("COMMIT")
        except BaseException:
            if self.db.in_transaction:  # SQLite itself may have ended it: the disk is full
                self.db.execute("ROLLBACK")
            self.bytes = self._sum()
            raise

    def _make_room(self, size, spared=-1):
        """Ends pooled groups, the oldest first, until `size` bytes fit. Raises StoreFull."""
        while self.bytes + size > self.max_bytes:
            query = "SELECT seq FROM groups WHERE state='pooled' AND seq!=? ORDER BY seq LIMIT 1"
            row = self.db.execute(query, (spared,)).fetchone()
            if not row:
                raise StoreFull
            self._end("dropped", "seq=?", row, reason="flat, and there was no room for it")

    def _sum(self):
        return self.db.execute("SELECT IFNULL(SUM(bytes), 0) FROM groups").fetchone()[0]

    def drop_old(self, run, oldest, step=None):
        """Ends the run's groups that a policy before version `oldest` sampled. -> how many, without
        flat ones that found no other. `step` is the ranks', where it is they who ask."""
        where, why = "run=? AND version<? AND state ", {"reason": "too old"}
        with self.changed:
            self._end("dropped", where + "= 'pooled'", (run, oldest), step=step, **why)
            count = self._end("dropped", where + "IN ('waiting', 'scored')", (run, oldest), **why)
            self.dropped[run] += count
        return count

    def drop(self, run, ids, reason):
        """Ends groups that the trainer can't use. -> how many were not ended already."""
        where = "run=? AND id=? AND state IN ('waiting', 'scored', 'leased')"
        with self.changed, self._together():
            return sum(self._end("dropped", where, (run, id), reason=reason) for id in ids)

    def _end(self, state, where, values, *, reason=None, step=None):
        """Ends groups. -> how many. Their bodies are deleted; with a `step`, that of the ranks
        which ended them, only when a checkpoint covers it."""
        query = f"SELECT COUNT(*), IFNULL(SUM(bytes), 0) FROM groups WHERE {where}"
        count, size = self.db.execute(query, values).fetchone()
        if not count:
            return 0
        if step is None:
            change = "bytes=0, step=NULL, was=NULL"  # the trigger deletes the bodies
        else:
            change = f"step={int(step)}, was=REPLACE(state, 'leased', 'scored')"
        query = f"UPDATE groups SET {change}, state=?, error=? WHERE {where}"
        self.db.execute(query, (state, reason, *values))
        self.bytes -= size if step is None else 0
        return count

    def forget(self, run):
        """Ends all of the run's groups: it is over."""
        where = "run=? AND state IN ('waiting', 'scored', 'leased', 'pooled', 'failed')"
        with self.changed, self._together():
            self._end("dropped", where, (run,), reason="the run was over")
            self._cover(run, 2**62)

    # --- Checkpoints --------------------------------------------------------------
    def ack(self, run, ids, step):
        """The groups were trained, by the rollout after `step` updates. -> how many just now.

        Workers' are kept until a checkpoint covers the step; what the ranks sampled they can sample
        again.
        """
        where = "run=? AND id=? AND state NOT IN ('trained', 'done', 'dropped') AND made IS "
        with self.changed, self._together():
            own = sum(self._end("trained", where + "NOT NULL", (run, id)) for id in ids)
            kept = sum(self._end("trained", where + "NULL", (run, id), step=step) for id in ids)
        return own + kept

    def cover(self, run, step):
        """A checkpoint after `step` updates has been saved: what they used is not needed again."""
        with self.changed, self._together():
            self._cover(run, step)

    def _cover(self, run, step):
        where = "run=? AND step<? AND bytes>0"
        query = f"SELECT IFNULL(SUM(bytes), 0) FROM groups WHERE {where}"
        self.bytes -= self.db.execute(query, (run, step)).fetchone()[0]
        self.db.execute(f"UPDATE groups SET bytes=0 WHERE {where}", (run, step))
        done = "UPDATE groups SET state='done' WHERE run=? AND state='trained'"
        self.db.execute(f"{done} AND IFNULL(step, made)<?", (run, step))
        self.changed.notify_all()

    def resume(self, run, step):
        """The run goes on from its checkpoint after `step` updates: undoes what came after it.

        -> how many groups will be handed out again, and how many the ranks will sample again.
        """
        with self.changed, self._together():
            self._cover(run, step)
            again = self._end("dropped", "run=? AND made>=?", (run, step), reason="sampled again")
            rename = "UPDATE groups SET id=id || '~' || seq, made=-1 WHERE run=? AND made>=?"
            self.db.execute(rename, (run, step))
            back = self.db.execute(
                "UPDATE groups SET state=was, replay=step, step=NULL, was=NULL, error=NULL"
                " WHERE run=? AND step>=? AND bytes>0",
                (run, step),
            ).rowcount
            retry = "UPDATE groups SET state='waiting', error=NULL WHERE run=? AND state='failed'"
            self.db.execute(retry, (run,))
            free = "UPDATE groups SET state='scored' WHERE run=? AND state='leased'"
            back += self.db.execute(free, (run,)).rowcount
            self.changed.notify_all()
        return {"handed_out_again": back, "sampled_again": again}

    def ledger(self, run):
        """-> where the run's groups have gone, which adds up: uploaded + regrouped = trained +
        waiting + joined + failed + dropped. `dropped` has counts by reason."""
        where = "FROM groups WHERE run=?"
        with self.changed:
            states = f"SELECT state, error, COUNT(*) {where} GROUP BY state, error"
            rows = self.db.execute(states, (run,)).fetchall()
            by = dict(self.db.execute(f"SELECT sampler, COUNT(*) {where} GROUP BY sampler", (run,)))
        counts, dropped = Counter(), Counter()
        for state, reason, count in rows:
            counts[state] += count
            if state == "dropped":
                dropped[reason or "?"] += count
        return {
            "uploaded": sum(by.values()) - by.get("regrouped", 0),
            "regrouped": by.get("regrouped", 0),
            "trained": counts["trained"] + counts["done"],
            "waiting": sum(counts[s] for s in ("waiting", "scored", "leased", "pooled")),
            "joined": counts["joined"],
            "failed": counts["failed"],
            "dropped": dict(dropped),
        }

    def queued(self, run):
        """-> the run's groups that wait to be scored or to be leased."""
        where = "SELECT COUNT(*) FROM groups WHERE run=? AND state IN ('waiting', 'scored')"
        with self.changed:
            return self.db.execute(where, (run,)).fetchone()[0]

    def waiting(self, limit, patience, size=None):
        """-> up to `limit` (seq, body) to score, oldest first, after at most `patience` seconds;
        no more than `size` bytes of them, unless the first is larger."""
        query = "SELECT seq, bytes FROM groups WHERE state='waiting' ORDER BY seq LIMIT ?"
        body = "SELECT body FROM bodies WHERE seq=?"  # not joined, which would sort bodies, too
        with self.changed:
            rows = self.db.execute(query, (limit,)).fetchall()
            if not rows and self.changed.wait(patience):
                rows = self.db.execute(query, (limit,)).fetchall()
            sizes = itertools.accumulate(bytes for _, bytes in rows)
            fit = sum(size is None or so_far <= size for so_far in sizes)
            chosen = [(seq,) for seq, _ in rows[: max(fit, 1)]]
            return [(seq[0], self.db.execute(body, seq).fetchone()[0]) for seq in chosen]

    def scored(self, bodies):
        """Stores {seq: body with log-probs}, all at once: a lease that waits finds all of them."""
        with self.changed, self._together():
            for seq, body in bodies.items():
                old = "SELECT bytes FROM groups WHERE seq=? AND state='waiting'"
                row = self.db.execute(old, (seq,)).fetchone()
                if row:  # else it was acknowledged meanwhile, and must not come back
                    self.db.execute("UPDATE bodies SET body=? WHERE seq=?", (body, seq))
                    now = "UPDATE groups SET state='scored', bytes=? WHERE seq=?"
                    self.db.execute(now, (len(body), seq))
                    self.bytes += len(body) - row[0]
            self.changed.notify_all()

    def failed(self, seq, error):
        """It can't be scored: its run's next lease says so. It is tried again when the run resumes:
        the cause may have been mended."""
        with self.changed:
            query = "UPDATE groups SET state='failed', error=? WHERE seq=? AND state='waiting'"
            self.db.execute(query, (error, seq))
            self.changed.notify_all()

    def lease(self, run, limit, *, seconds, patience):
        """-> {id: body} of up to `limit` scored groups of the run, oldest first; may be empty.
        Of a few batches' groups those are there first that are scored first, the shortest.

        Raises RuntimeError if scoring one of the run's groups failed: its trainer should know.
        """
        query = (
            "SELECT seq, id, bytes FROM groups WHERE state IN ('scored', 'leased') AND run=?"
            " AND (state='scored' OR lease_ends<?) ORDER BY replay IS NULL, replay, seq LIMIT ?"
        )
        deadline = time.monotonic() + patience
        with self.changed:
            while True:
                error = "SELECT id, error FROM groups WHERE state='failed' AND run=? LIMIT 1"
                if failure := self.db.execute(error, (run,)).fetchone():
                    raise RuntimeError(f"scoring group {failure[0]} failed: {failure[1]}")
                rows = self.db.execute(query, (run, time.time(), limit)).fetchall()
                left = deadline - time.monotonic()
                if rows or left <= 0:
                    break
                self.changed.wait(left)
            bodies, size = {}, 0
            with self._together():  # or each would write the table's and its indices' pages
                for seq, id, bytes in rows:
                    size += bytes
                    if bodies and size > LEASE_BYTES:
                        break
                    body = self.db.execute("SELECT body FROM bodies WHERE seq=?", (seq,))
                    bodies[id] = body.fetchone()[0]
                    self.db.execute(
                        "UPDATE groups SET state='leased', lease_ends=? WHERE seq=?",
                        (time.time() + seconds, seq),
                    )
            if bodies:
                self.changed.notify_all()  # there is room for workers to begin others
        return bodies

    def kept(self, run):
        """-> bytes of the run's groups that were trained and that no checkpoint covers."""
        query = "SELECT IFNULL(SUM(bytes), 0) FROM groups WHERE run=? AND step NOT NULL"
        with self.changed:
            return self.db.execute(query, (run,)).fetchone()[0]

    def newest_run(self):
        """-> the run of the newest upload, or None."""
        with self.changed:
            row = self.db.execute("SELECT run FROM groups ORDER BY seq DESC LIMIT 1").fetchone()
        return row[0] if row else None

    def stats(self):
        """-> counts of groups by state, bytes held, those of groups that were trained among them,
        age in seconds of the oldest waiting."""
        with self.changed:
            kept = self.db.execute("SELECT IFNULL(SUM(bytes), 0) FROM groups WHERE step NOT NULL")
            counts = dict(self.db.execute("SELECT state, COUNT(*) FROM groups GROUP BY state"))
            oldest = self.db.execute(
                "SELECT MIN(uploaded) FROM groups WHERE state='waiting'"
            ).fetchone()[0]
        states = {state: counts.get(state, 0) for state in STATES}
        age = round(time.time() - oldest, 1) if oldest else 0
        sizes = {"bytes": self.bytes, "kept_bytes": kept.fetchone()[0], "max_bytes": self.max_bytes}
        return states | sizes | {"oldest_waiting_s": age}


def join_flat(old, new):
    """-> two groups of the halves of two flat ones, [] if their outcomes are the same.

    All wrong then and all right now tell nothing, each by itself; together they do. Each keeps half
    of either, as many completions as `new` has; log-probs are those of whoever sampled, and the
    policy version that of the older.
    """
    column = new.reward_names.index(new.outcome)
    size = len(new.completion_lengths)
    if old.reward_names != new.reward_names or len(old.completion_lengths) != size:
        return []
    if is_flat([old.rewards[0, column].item(), new.rewards[0, column].item()]):
        return []
    order, half = torch.arange(size), size // 2
    parts = [(order[:half], order[: size - half]), (order[half:], order[size - half :])]
    return [
        replace(
            new,
            id=f"{new.id}+{i}",
            sampler="regrouped",
            skipped={},
            policy_version=min(old.policy_version, new.policy_version),
            ref_logps=None,
            **{
                name: torch.cat([chosen(old, name, a), chosen(new, name, b)])
                for name in PER_COMPLETION
            },
        )
        for i, (a, b) in enumerate(parts)
        if len(a) and len(b)
    ]


PER_COMPLETION = ("completion_ids", "completion_lengths", "sampler_logps", "truncated", "rewards")


def chosen(group, name, which):
    """-> the field's part for the completions `which`."""
    values = getattr(group, name)
    if name in ("completion_ids", "sampler_logps"):
        parts = group.completions(values)
        return torch.cat([parts[i] for i in which.tolist()])
    return values[which]
