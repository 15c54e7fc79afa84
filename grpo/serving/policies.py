"""What workers ask the reference server for: a run's newest policy, and prompts to sample.

The trainer publishes its policy here: the weights in parts (`write`), then what they are
(`publish`). A worker asks for `work`: it is told the newest policy, and which prompts are its to
sample next. How many is decided here, so that workers are paced and nothing they make grows too
old: the groups that wait, and those that workers have in hand, are not to be more than the run's
`capacity`.

Weights lie in files beside the store, what is known of them in its database: both survive kill -9.
"""

import hashlib
import json
import os
import re
import time
from pathlib import Path

from grpo.wire import sha256_of

WORKER_SECONDS = 120  # a worker not heard of for so long has lost what it had in hand
MAX_WORKERS = 1000  # of which is known when they were heard of last
RECORD = {  # what publish() takes, by type; the policy's file is known by run and version
    "run": str,
    "version": int,  # optimiser updates behind these weights
    "bytes": int,
    "sha256": str,
    "capacity": int,  # groups in hand and waiting, at most
    "oldest": int,  # groups that an older policy sampled are dropped
    "scored": bool,  # whether groups need the reference's log-probs
    "settings": dict,  # the trainer's constants that a worker must have too
    "proof": dict,  # a prompt, a completion, and the publisher's log-probs of it
}


class Hub:
    def __init__(self, store, folder, max_bytes):
        """`folder` holds the policies' files, `max_bytes` bounds one of them."""
        self.store, self.folder, self.max_bytes = store, Path(folder), max_bytes
        self.workers = {}  # name -> {"held", "seen", "version", "groups"}
        os.makedirs(self.folder, exist_ok=True)
        with store.changed:
            store.db.execute(
                "CREATE TABLE IF NOT EXISTS runs (run TEXT PRIMARY KEY, record TEXT,"
                " position INTEGER, published REAL, ended INTEGER)"
            )

    # --- Policies -----------------------------------------------------------------
    def path(self, run, version):
        """-> where that policy lies; nothing of a client's text becomes part of a path."""
        digest = hashlib.sha256(run.encode()).hexdigest()[:16]
        return self.folder / f"{digest}-{int(version):012d}.safetensors"

    def write(self, run, version, offset, part):
        """Takes the next part of a policy's file; -> bytes so far. ValueError if it is not next."""
        draft = self.path(run, version).with_suffix(".part")
        have = draft.stat().st_size if draft.exists() else 0
        if not 0 <= offset <= have:  # less: a repeat, whose answer was lost
            raise ValueError(f"the next part begins at {have}, not at {offset}")
        if offset + len(part) > self.max_bytes:
            raise ValueError(f"a policy has at most MAX_POLICY_BYTES = {self.max_bytes} bytes")
        with open(draft, "r+b" if offset else "wb") as file:
            file.seek(offset)
            file.write(part)
            file.truncate()
        return offset + len(part)

    def publish(self, record):
        """Makes the parts a policy, if they are what `record` (RECORD) says; else ValueError."""
        for name, kind in RECORD.items():
            if type(record.get(name)) is not kind:
                raise ValueError(f"{name} must be of type {kind.__name__}")
            if kind is int and not -(2**62) < record[name] < 2**62:
                raise ValueError(f"{name} is too large")
        if not re.fullmatch("[0-9a-f]{64}", record["sha256"]) or record["capacity"] < 1:
            raise ValueError("sha256 must be 64 hex digits, capacity 1 or more")
        run, version = record["run"], record["version"]
        path = self.path(run, version)
        draft = path.with_suffix(".part")
        if not draft.exists() and path.exists():
            draft = path  # a repeat, whose answer was lost
        if not draft.exists() or draft.stat().st_size != record["bytes"]:
            raise ValueError(f"{record['bytes']} bytes of policy {version} have not all come")
        if sha256_of(draft) != record["sha256"]:
            raise ValueError("the policy was damaged on its way: its SHA-256 differs")
        os.replace(draft, path)
        with self.store.changed:
            self.store.db.execute(
                "INSERT INTO runs VALUES (:run, :record, 0, :now, 0) ON CONFLICT (run) DO UPDATE"
                " SET record=:record, published=:now, ended=0",
                {"run": run, "record": json.dumps(record), "now": time.time()},
            )
            # Workers serve one run at a time, and one that was killed never said that it ended
            self.store.db.execute("UPDATE runs SET ended=1 WHERE run!=?", (run,))
            self.store.changed.notify_all()
        self.store.drop_old(run, record["oldest"])
        mine = path.name.split("-")[0]
        for old in sorted(self.folder.glob(f"{mine}-*"))[:-2]:  # who reads one may finish
            old.unlink(missing_ok=True)

    def resume(self, run, version):
        """The run goes on from that version: newer ones belong to a history that is no more."""
        with self.store.changed:  # it may have ended, and go on with more STEPS
            self.store.db.execute("UPDATE runs SET ended=0 WHERE run=?", (run,))
            if record := self.record(run):
                lag = record["version"] - record["oldest"]
                record["oldest"] = min(record["oldest"], version - lag)
                update = "UPDATE runs SET record=? WHERE run=?"
                self.store.db.execute(update, (json.dumps(record), run))
        first = self.path(run, version + 1).name if version >= 0 else ""
        for path in self.folder.glob(f"{self.path(run, 0).name.split('-')[0]}-*"):
            if path.name >= first:
                path.unlink(missing_ok=True)

    def record(self, run=None):
        """-> the record of the run, or of the one that published last; None if there is none."""
        where = "run=?" if run else "ended=0 ORDER BY published DESC LIMIT 1"
        query = f"SELECT record FROM runs WHERE {where}"
        with self.store.changed:
            row = self.store.db.execute(query, (run,) if run else ()).fetchone()
        return json.loads(row[0]) if row else None

    def end(self, run):
        """The run is over: its workers are told so, and its policies deleted."""
        with self.store.changed:
            self.store.db.execute("UPDATE runs SET ended=1 WHERE run=?", (run,))
            self.store.changed.notify_all()
        for path in self.folder.glob(f"{self.path(run, 0).name.split('-')[0]}-*"):
            path.unlink(missing_ok=True)

    def ended(self, run):
        with self.store.changed:
            row = self.store.db.execute("SELECT ended FROM runs WHERE run=?", (run,)).fetchone()
        return bool(row and row[0])

    # --- Work ---------------------------------------------------------------------
    def work(self, worker, *, held, want, run, version, sha256, patience, pulled=False):
        """-> {"policy": record or None, "first": position, "count": n}: what to sample.

        `held` groups are in the worker's hand, `want` more it could begin, with `version` of `run`,
        whose weights have this `sha256`: a run that was resumed may give a version other ones.
        Prompts are positions in the endless order that the run's seed gives; each is handed out
        once. Where there is a newer policy the count is 0, unless the worker has just `pulled` its
        own: over a slow link it would fetch policies for ever. Waits up to `patience` seconds while
        there is no run, or no room.
        """
        if not 0 < len(worker) <= 200 or not worker.isprintable():
            raise ValueError("a worker's name has 1 to 200 printable characters")
        deadline = time.monotonic() + patience
        while True:
            with self.store.changed:
                self._forget_workers()
                record, count = self.record(), 0
                me = self.workers.setdefault(worker, {"groups": 0, "seen": 0.0})
                me |= {"held": max(0, held), "seen": time.monotonic(), "version": version}
                if record:
                    mine = (run, version, sha256)
                    newer = (record["run"], record["version"], record["sha256"]) != mine
                    if pulled and record["run"] == run and version >= record["oldest"]:
                        newer = False
                    count = 0 if newer else max(0, min(want, self.room(record)))
                    if newer or count:
                        first = self._positions(record["run"], count)
                        me["held"] += count
                        return {"policy": record, "first": first, "count": count}
                left = deadline - time.monotonic()
                if left <= 0:
                    return {"policy": record, "first": 0, "count": 0}
                self.store.changed.wait(left)

    def _forget_workers(self):
        """Keeps the table short, whatever names come."""
        if len(self.workers) > MAX_WORKERS:
            oldest = min(self.workers, key=lambda name: self.workers[name]["seen"])
            del self.workers[oldest]

    def room(self, record):
        """-> groups that may be begun now."""
        now = time.monotonic()
        held = [w["held"] for w in self.workers.values() if now - w["seen"] < WORKER_SECONDS]
        return record["capacity"] - self.store.queued(record["run"]) - sum(held)

    def _positions(self, run, count):
        query = "SELECT position FROM runs WHERE run=?"
        first = self.store.db.execute(query, (run,)).fetchone()[0]
        update = "UPDATE runs SET position=position+? WHERE run=?"
        self.store.db.execute(update, (count, run))
        return first

    def uploaded(self, worker):
        """A group of the worker has been stored; it says itself, when it asks, what it holds."""
        if worker in self.workers:
            me = self.workers[worker]
            me["groups"], me["seen"] = me["groups"] + 1, time.monotonic()

    def stats(self):
        """-> {worker: groups uploaded, in hand, policy version, seconds since it was heard of}."""
        now = time.monotonic()
        with self.store.changed:
            return {
                name: {"groups": w["groups"], "held": w["held"], "version": w["version"]}
                | {"seen_s": round(now - w["seen"], 1)}
                for name, w in self.workers.items()
            }
