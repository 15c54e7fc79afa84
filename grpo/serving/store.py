"""The reference server's groups, in SQLite: what was answered with 200 survives kill -9.

    store = Store("runs/ref_store.sqlite", max_bytes=1 << 30)
    store.put(group, body)          # an upload, once per id                        -> waiting
    store.waiting(limit, patience)  # the next groups to score ...
    store.scored({seq: body})       # ... and with their log-probs                  -> scored
    store.lease(run, limit, ...)    # to the trainer, for a while                   -> leased
    store.ack(run, ids, step)       # an optimiser step used them                   -> trained
    store.cover(run, step)          # a checkpoint holds what that step learned     -> done
    store.resume(run, step)         # the run resumes from a checkpoint: later steps are undone

In the history that survives, each group is trained exactly once: what a worker sampled is kept
until a checkpoint covers the step that used it, and a run that resumes from an earlier one gets it
again, in the same order; the ranks sample theirs again, under the same ids. Rows are never deleted,
so that a late repeat of an upload is recognised and the ledger adds up.
"""

import itertools
import json
import time
from collections import Counter

from grpo.serving.database import Database

LEASE_BYTES = 64 << 20  # of groups in one lease, unless a single one is larger: bounds its reply

STATES = ("waiting", "scored", "leased", "trained", "done", "failed", "dropped")
BEFORE = "the state before"  # the column `was` holds it

# An upload begins as waiting; as scored, where it needs no log-probs of the reference; as dropped,
# where it comes too late. A body kept "until covered" stays until a checkpoint covers the step that
# trained the group, and is deleted at once if no such step is given.
# fmt: off
TRANSITIONS = {
    # event:    (from states,                     to state,  body)
    # scoring, and again where another reference model is served
    "score":    ("waiting",                      "scored",  "kept"),
    "fail":     ("waiting",                      "failed",  "kept"),
    "rescore":  ("scored leased",                "waiting", "kept"),
    # training; a lease may run out, or be lost with a server or trainer that died
    "lease":    ("scored leased",                "leased",  "kept"),
    "release":  ("leased",                       "scored",  "kept"),
    "train":    ("waiting scored leased failed", "trained", "until covered"),
    "cover":    ("trained",                      "done",    "deleted"),
    # a run resumes: groups of later steps are as before, or the ranks sample them again
    "undo":     ("trained",                      BEFORE,    "kept"),
    "resample": (" ".join(STATES),               "dropped", "deleted"),
    "retry":    ("failed",                       "waiting", "kept"),
    # too old a policy sampled it; the trainer can't use it; the run is over
    "expire":   ("waiting scored",               "dropped", "deleted"),
    "drop":     ("waiting scored leased",        "dropped", "deleted"),
    "forget":   ("waiting scored leased failed", "dropped", "deleted"),
}
# fmt: on

SCHEMA = """
CREATE TABLE IF NOT EXISTS groups (
    seq INTEGER PRIMARY KEY, run TEXT, id TEXT, state TEXT, bytes INTEGER, error TEXT,
    uploaded REAL, lease_ends REAL, version INTEGER,
    made INTEGER,    -- the ranks' step that sampled it; NULL: workers sampled it
    step INTEGER,    -- the ranks' step that trained it, while its body is kept ...
    was TEXT,        -- ... and its state before
    replay INTEGER,  -- the step that used it in a history that was undone
    UNIQUE (run, id));
-- apart: SQLite rewrites a whole row when a column changes, and a lease would rewrite each body
CREATE TABLE IF NOT EXISTS bodies (seq INTEGER PRIMARY KEY, body BLOB);
CREATE TRIGGER IF NOT EXISTS ended AFTER UPDATE OF bytes ON groups WHEN NEW.bytes=0
    BEGIN DELETE FROM bodies WHERE seq=NEW.seq; END;
CREATE INDEX IF NOT EXISTS by_state ON groups (state, run, seq);
CREATE INDEX IF NOT EXISTS by_bytes ON groups (bytes) WHERE bytes>0;
CREATE TABLE IF NOT EXISTS reference (facts TEXT);
-- an older server kept flat groups as pooled, to join two of them, which were then joined
UPDATE groups SET state='dropped', error=IFNULL(error, 'regrouping was removed'), bytes=0,
    step=NULL, was=NULL WHERE state IN ('pooled', 'joined') OR was='pooled';
"""


class StoreFull(Exception):
    """There is no room for an upload: the client should try again later."""


class ScoringFailed(RuntimeError):
    """A group of the run could not be scored: its trainer should know."""


class Store:
    def __init__(self, path, max_bytes):
        """Raises SystemExit if another server has the store open, or an older version made it."""
        self.db, self.path, self.max_bytes = Database(path), path, max_bytes
        columns = [row[1] for row in self.db.rows("PRAGMA table_info(groups)")]
        if columns and "replay" not in columns:
            raise SystemExit(f"{path} is an older version's store: finish its runs, or delete it")
        self.transaction = self.db.transaction
        self.db.executescript(SCHEMA)
        self.unreported = Counter()  # run -> groups too old, until report_dropped
        with self.transaction():  # answers to leases died with the server before
            self.move("release")

    # --- Changes ------------------------------------------------------------------
    def move(self, event, where="1", values=(), **columns):
        """Applies a transition to the groups of `where` that are in a state for it, and sets more
        `columns`. Returns how many. Call it in a transaction."""
        sources, target, body = TRANSITIONS[event]
        where += " AND state IN ('" + sources.replace(" ", "', '") + "')"
        changes = ["state=was" if target is BEFORE else f"state='{target}'"]
        columns = {"error": None} | columns
        if body == "until covered" and columns.get("step") is not None:
            changes.append("was=REPLACE(state, 'leased', 'scored')")
        elif body != "kept":
            columns |= {"bytes": 0, "step": None, "was": None}  # the trigger deletes the bodies
        changes += [f"{name}=?" for name in columns]
        query = f"UPDATE groups SET {', '.join(changes)} WHERE {where}"
        return self.db.execute(query, (*columns.values(), *values)).rowcount

    # --- Uploads ------------------------------------------------------------------
    def put(self, group, body, state="waiting", reason=None):
        """Stores an uploaded group; returns False if it is there already. Raises StoreFull."""
        with self.transaction():
            known = "SELECT 1 FROM groups WHERE run=? AND id=?"
            if self.db.rows(known, (group.run, group.id)):
                return False
            if self.bytes + len(body) > self.max_bytes:
                raise StoreFull(
                    f"the store holds its {self.max_bytes} bytes; if their runs have ended, stop"
                    " the server and delete its STORE"
                )
            version = group.policy_version
            made = version if group.sampler == "trainer" else None
            seq = self.db.execute(
                "INSERT INTO groups (run, id, state, bytes, uploaded, error, version, made)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (group.run, group.id, state, len(body), time.time(), reason, version, made),
            ).lastrowid
            if body:
                self.db.execute("INSERT INTO bodies VALUES (?, ?)", (seq, body))
        return True

    def refuse(self, group, reason):
        """Stores an upload that comes too late, without its body; returns False for a repeat."""
        return self.put(group, b"", "dropped", reason)

    # --- Scoring ------------------------------------------------------------------
    def waiting(self, limit, patience, size=float("inf")):
        """Returns up to `limit` (seq, body) to score, oldest first, of at most `size` bytes (but
        one at least); waits up to `patience` seconds for the first."""
        query = "SELECT seq, bytes FROM groups WHERE state='waiting' ORDER BY seq LIMIT ?"
        with self.db.changed:
            groups = self.db.rows(query, (limit,))
            if not groups and self.db.changed.wait(patience):
                groups = self.db.rows(query, (limit,))
            return [(seq, self._body(seq)) for seq, _ in first_of(groups, size)]

    def scored(self, bodies):
        """Stores {seq: body with log-probs}, all at once: a lease that waits finds all of them."""
        with self.transaction():
            for seq, body in bodies.items():
                # else it was acknowledged or dropped meanwhile, and must not come back
                if self.move("score", "seq=?", (seq,), bytes=len(body)):
                    self.db.execute("UPDATE bodies SET body=? WHERE seq=?", (body, seq))

    def failed(self, seq, error):
        """Marks a group that can't be scored: its run's next lease raises the error."""
        with self.transaction():
            self.move("fail", "seq=?", (seq,), error=error)

    def use_reference(self, info):
        """Sends groups that another reference model (or temperature) scored back to be scored."""
        facts = json.dumps(info, sort_keys=True)
        with self.transaction():
            if self.db.rows("SELECT facts FROM reference") != [(facts,)]:
                self.move("rescore")
                self.db.execute("UPDATE groups SET was='waiting' WHERE was='scored'")
                self.db.execute("DELETE FROM reference")
                self.db.execute("INSERT INTO reference VALUES (?)", (facts,))

    def rescore(self, run):
        """Sends the run's groups back to be scored."""
        self.move("rescore", "run=?", (run,))

    def reference_weights(self):
        """Returns the name of the weights that scored last; "" for the reference model's own."""
        return json.loads(self.db.value("SELECT facts FROM reference") or "{}").get("weights", "")

    # --- Training -----------------------------------------------------------------
    def lease(self, run, limit, *, seconds, patience):
        """Returns {id: body} of up to `limit` scored groups of the run, oldest first; for `seconds`
        nobody else gets them. Waits up to `patience` seconds for the first; may be empty. Raises
        ScoringFailed."""
        deadline, bodies = time.monotonic() + patience, {}
        with self.db.changed:
            while not (groups := self._leasable(run, limit)):
                if (left := deadline - time.monotonic()) <= 0:
                    return {}
                self.db.changed.wait(left)
            with self.transaction():  # one for all, or each would write the same pages
                for seq, id, _ in first_of(groups, LEASE_BYTES):
                    self.move("lease", "seq=?", (seq,), lease_ends=time.time() + seconds)
                    bodies[id] = self._body(seq)
        return bodies

    def _leasable(self, run, limit):
        failed = "SELECT id, error FROM groups WHERE state='failed' AND run=? LIMIT 1"
        if failures := self.db.rows(failed, (run,)):
            raise ScoringFailed("scoring group {} failed: {}".format(*failures[0]))
        return self.db.rows(
            "SELECT seq, id, bytes FROM groups WHERE state IN ('scored', 'leased') AND run=?"
            " AND (state='scored' OR lease_ends<?) ORDER BY replay IS NULL, replay, seq LIMIT ?",
            (run, time.time(), limit),
        )

    def ack(self, run, ids, step):
        """Marks groups as trained, after `step` updates; returns how many were not yet. The ranks'
        own bodies are deleted, as they can sample them again; workers' are kept for now."""
        with self.transaction():
            own, workers = "run=? AND id=? AND made NOT NULL", "run=? AND id=? AND made IS NULL"
            count = sum(self.move("train", own, (run, id)) for id in ids)
            return count + sum(self.move("train", workers, (run, id), step=step) for id in ids)

    def drop_old(self, run, oldest):
        """Drops groups that a policy before version `oldest` sampled."""
        with self.transaction():
            old = "run=? AND version<?"
            self.unreported[run] += self.move("expire", old, (run, oldest), error="too old")

    def count_dropped(self, run):
        """Counts an upload that came too late."""
        with self.db.changed:
            self.unreported[run] += 1

    def report_dropped(self, run):
        """Returns how many groups of the run were dropped as too old since the last call."""
        with self.db.changed:
            return self.unreported.pop(run, 0)

    def drop(self, run, ids, reason):
        """Drops groups that the trainer can't use. Returns how many had not ended already."""
        with self.transaction():
            return sum(self.move("drop", "run=? AND id=?", (run, id), error=reason) for id in ids)

    # --- Checkpoints --------------------------------------------------------------
    def cover(self, run, step):
        """A checkpoint after `step` updates is saved: the bodies that they used can go."""
        with self.transaction():
            self.move("cover", "run=? AND IFNULL(step, made)<?", (run, step))

    def resume(self, run, step):
        """Undoes what came after the run's checkpoint after `step` updates. Returns how many groups
        will be leased again, and how many the ranks sample again."""
        with self.transaction():
            self.cover(run, step)
            own, undone = "run=? AND made>=?", "run=? AND step>=?"
            again = self.move("resample", own, (run, step), error="sampled again")
            rename = f"UPDATE groups SET id=id || '~' || seq, made=-1 WHERE {own}"
            self.db.execute(rename, (run, step))
            self.db.execute(f"UPDATE groups SET replay=step WHERE {undone}", (run, step))
            back = self.move("undo", undone, (run, step), step=None, was=None)
            back += self.move("release", "run=?", (run,))
            self.move("retry", "run=?", (run,))
        return {"handed_out_again": back, "sampled_again": again}

    def forget(self, run):
        """Drops what a run that is over has not trained, and every body of it."""
        with self.transaction():
            self.move("forget", "run=?", (run,), error="the run was over")
            self.cover(run, 2**62)

    # --- What there is ------------------------------------------------------------
    @property
    def bytes(self):
        """The size of all bodies."""
        return self._sum("1")

    def _sum(self, where, values=()):
        query = f"SELECT IFNULL(SUM(bytes), 0) FROM groups WHERE bytes>0 AND {where}"
        return self.db.value(query, values)

    def _body(self, seq):
        # not by a join, which would sort bodies, too
        return self.db.value("SELECT body FROM bodies WHERE seq=?", (seq,))

    def queued(self, run):
        """Returns how many groups of the run wait to be scored or leased."""
        query = "SELECT COUNT(*) FROM groups WHERE run=? AND state IN ('waiting', 'scored')"
        return self.db.value(query, (run,))

    def kept(self, run):
        """Returns the bytes of the run's trained groups that no checkpoint covers."""
        return self._sum("run=? AND step NOT NULL", (run,))

    def newest_run(self):
        """Returns the run of the newest upload, or None."""
        return self.db.value("SELECT run FROM groups ORDER BY seq DESC LIMIT 1")

    def ages(self):
        """Returns {state: seconds since the oldest upload in it} of what is not yet trained."""
        query = "SELECT state, MIN(uploaded) FROM groups WHERE state IN"
        rows = self.db.rows(f"{query} ('waiting', 'scored', 'leased') GROUP BY state")
        return {state: round(max(0, time.time() - uploaded), 1) for state, uploaded in rows}

    def stats(self):
        """Returns the number of groups in each state, the bytes of all bodies and of those that
        wait for a checkpoint, and the age in seconds of the oldest group that is not scored."""
        with self.db.changed:
            counts = dict(self.db.rows("SELECT state, COUNT(*) FROM groups GROUP BY state"))
            return {state: counts.get(state, 0) for state in STATES} | {
                "bytes": self.bytes,
                "kept_bytes": self._sum("step NOT NULL"),
                "max_bytes": self.max_bytes,
                "oldest_waiting_s": self.ages().get("waiting", 0),
            }

    def ledger(self, run):
        """Returns where the run's groups have gone, which adds up: uploaded = trained + waiting +
        failed + dropped. `dropped` has counts by reason."""
        query = "SELECT state, error, COUNT(*) FROM groups WHERE run=? GROUP BY 1, 2"
        counts, dropped = Counter(), Counter()
        for state, reason, count in self.db.rows(query, (run,)):
            counts[state] += count
            if state == "dropped":
                dropped[reason or "?"] += count
        return {
            "uploaded": counts.total(),
            "trained": counts["trained"] + counts["done"],
            "waiting": counts["waiting"] + counts["scored"] + counts["leased"],
            "failed": counts["failed"],
            "dropped": dict(dropped),
        }


def first_of(groups, size):
    """Returns the first of these rows, whose last column is their bytes: as many as `size` bytes
    allow, but one at least."""
    sums = itertools.accumulate(row[-1] for row in groups)
    return groups[: max(1, sum(so_far <= size for so_far in sums))]
