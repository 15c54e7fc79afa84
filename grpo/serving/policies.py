"""The policies that trainers publish, for workers to fetch.

    policies = Policies(store, "runs/ref_store.sqlite.policies", max_bytes=64 << 30)
    policies.write(run, version, offset, part)  # the weights, in parts
    policies.publish(record)                    # what they are (RECORD): from now on the newest
    policies.path(run, version)                 # the file, while it is one of the run's two newest

Weights are files beside the store; the records are in its database. Both survive kill -9.
"""

import hashlib
import json
import re
import time
from pathlib import Path

from grpo.serving.database import check_type
from grpo.wire import sha256_of

RECORD = {  # what publish() takes, by type
    "run": str,
    "version": int,  # optimiser updates behind these weights
    "bytes": int,
    "sha256": str,
    "capacity": int,  # groups outstanding at workers and waiting here, at most
    "oldest": int,  # groups that an older policy sampled are dropped
    "scored": bool,  # whether groups need the reference's log-probs
    "settings": dict,  # the trainer's constants that a worker must have too
    "proof": dict,  # a prompt, a completion, and the publisher's log-probs of it
}


class Policies:
    def __init__(self, store, folder, max_bytes):
        """`folder` holds the files; one of them has at most `max_bytes`."""
        self.store, self.db = store, store.db
        self.folder, self.max_bytes = Path(folder), max_bytes
        self.folder.mkdir(parents=True, exist_ok=True)
        self.db.execute(
            "CREATE TABLE IF NOT EXISTS runs (run TEXT PRIMARY KEY, record TEXT,"
            " position INTEGER, published REAL, ended INTEGER)"
        )

    # --- Files --------------------------------------------------------------------
    def path(self, run, version):
        """Returns the policy's file. Its name contains no text from a client."""
        digest = hashlib.sha256(run.encode()).hexdigest()[:16]
        return self.folder / f"{digest}-{version:012d}.safetensors"

    def files(self, run):
        """Returns the run's files and drafts, the oldest version first."""
        digest = self.path(run, 0).name.split("-")[0]
        return sorted(self.folder.glob(f"{digest}-*"))

    def write(self, run, version, offset, part):
        """Writes the next part of a policy's file; returns its bytes so far. Raises ValueError if
        the part is not the next, or too large."""
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

    # --- Runs ---------------------------------------------------------------------
    def publish(self, record):
        """Makes the parts the run's newest policy; drops groups that are too old now. Raises
        ValueError if the parts are not what `record` says."""
        check_record(record)
        run, version = record["run"], record["version"]
        path = self.path(run, version)
        draft = path.with_suffix(".part")
        if not draft.exists() and path.exists():
            draft = path  # a repeat, whose answer was lost
        if not draft.exists() or draft.stat().st_size != record["bytes"]:
            raise ValueError(f"{record['bytes']} bytes of policy {version} have not all come")
        if sha256_of(draft) != record["sha256"]:
            raise ValueError("the policy was damaged on its way: its SHA-256 differs")
        draft.replace(path)
        before = self.record(run)
        with self.db.transaction():
            if before and record["scored"] and not before["scored"]:
                self.store.rescore(run)  # KL_BETA was 0: they have no log-probs of the reference
            self.db.execute(
                "INSERT INTO runs VALUES (:run, :record, 0, :now, 0) ON CONFLICT (run) DO UPDATE"
                " SET record=:record, published=:now, ended=0",
                {"run": run, "record": json.dumps(record), "now": time.time()},
            )
            # Workers serve one run at a time, and one that was killed never said that it ended
            self.db.execute("UPDATE runs SET ended=1 WHERE run!=?", (run,))
            self.store.drop_old(run, record["oldest"])
        for old in self.files(run)[:-2]:  # who reads one may finish
            old.unlink(missing_ok=True)

    def resume(self, run, version):
        """Resumes the run from that version: newer policies belong to steps that were undone."""
        with self.db.transaction():  # the run may have ended, and resume with more STEPS
            self.db.execute("UPDATE runs SET ended=0 WHERE run=?", (run,))
            if record := self.record(run):
                lag = record["version"] - record["oldest"]
                record["oldest"] = min(record["oldest"], version - lag)
                changed = json.dumps(record), run
                self.db.execute("UPDATE runs SET record=? WHERE run=?", changed)
        first = self.path(run, version + 1).name
        for path in self.files(run):
            if path.name >= first:
                path.unlink(missing_ok=True)

    def end(self, run):
        """Ends the run: workers get no prompts of it, and its policies are deleted."""
        with self.db.transaction():
            self.db.execute("UPDATE runs SET ended=1 WHERE run=?", (run,))
        for path in self.files(run):
            path.unlink(missing_ok=True)

    def ended(self, run):
        return bool(self.db.value("SELECT ended FROM runs WHERE run=?", (run,)))

    def record(self, run=None):
        """Returns the record of the run, or of the one that published last, or None."""
        where = "run=?" if run else "ended=0 ORDER BY published DESC LIMIT 1"
        query = f"SELECT record FROM runs WHERE {where}"
        text = self.db.value(query, (run,) if run else ())
        return json.loads(text) if text else None

    def take_prompts(self, run, count):
        """Returns the first of the run's next `count` prompts, a position in the endless order that
        its seed gives; nobody else gets them."""
        with self.db.transaction():
            first = self.db.value("SELECT position FROM runs WHERE run=?", (run,))
            self.db.execute("UPDATE runs SET position=position+? WHERE run=?", (count, run))
        return first


def check_record(record):
    for name, kind in RECORD.items():
        check_type(name, record.get(name), kind)
    if not re.fullmatch("[0-9a-f]{64}", record["sha256"]) or record["capacity"] < 1:
        raise ValueError("sha256 must be 64 hex digits, capacity 1 or more")
