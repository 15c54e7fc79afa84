"""The reference server's groups, in SQLite: what was answered with 200 survives kill -9.

store = Store("runs/ref_store.sqlite", max_bytes=1 << 30)
store.put(group, body)          # an upload     waiting
store.waiting(limit, patience)  # to be scored
store.scored(seq, body)         # with log-probs          -> scored
store.lease(run, limit, ...)    # to the trainer                    -> leased
store.ack(run, ids)             # it was trained                              -> done
"""

import json
import os
import sqlite3
import threading
import time

LEASE_BYTES = 64 << 20  # of groups in one lease, unless a single one is larger: bounds its reply


class StoreFull(Exception):
    """The store holds MAX_STORE_BYTES; the producer should try again later."""


class Store:
    """Groups in SQLite. A group is waiting -> scored -> leased -> done, or failed with an error.

    Done groups keep their row without the body, so that a late repeat of an upload is recognised.
    WAL with synchronous=NORMAL: a committed upload survives the death of the process, though not a
    power cut. The file is locked: a second server, with another model, would score the first one's
    groups.
    """

    def __init__(self, path, max_bytes):
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        self.db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self.max_bytes = max_bytes
        self.changed = threading.Condition()  # guards the connection, and is told of every change
        self.db.execute("PRAGMA locking_mode=EXCLUSIVE")
        try:
            self.db.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            raise SystemExit(f"{path}: {error}; is it another server's? Set STORE") from error
        self.db.execute("PRAGMA synchronous=NORMAL")
        self.db.execute(
            "CREATE TABLE IF NOT EXISTS groups (seq INTEGER PRIMARY KEY, run TEXT, id TEXT,"
            " state TEXT, body BLOB, bytes INTEGER, error TEXT, uploaded REAL, lease_ends REAL,"
            " UNIQUE (run, id))"
        )
        self.db.execute("CREATE INDEX IF NOT EXISTS by_state ON groups (state, run, seq)")
        self.db.execute("CREATE TABLE IF NOT EXISTS reference (facts TEXT)")
        self.bytes = self.db.execute("SELECT IFNULL(SUM(bytes), 0) FROM groups").fetchone()[0]

    def use_reference(self, facts):
        """Sends groups that another reference model (or temperature) scored back to be scored."""
        facts = json.dumps(facts, sort_keys=True)
        with self.changed:
            if self.db.execute("SELECT facts FROM reference").fetchall() != [(facts,)]:
                self.db.execute(
                    "UPDATE groups SET state='waiting' WHERE state IN ('scored','leased')"
                )
                self.db.execute("DELETE FROM reference")
                self.db.execute("INSERT INTO reference VALUES (?)", (facts,))

    def put(self, group, body):
        """Stores an uploaded group; -> False if it is there already. Raises StoreFull."""
        with self.changed:
            known = "SELECT 1 FROM groups WHERE run=? AND id=?"
            if self.db.execute(known, (group.run, group.id)).fetchone():
                return False
            if self.bytes + len(body) > self.max_bytes:
                raise StoreFull
            self.db.execute(
                "INSERT INTO groups (run, id, state, body, bytes, uploaded)"
                " VALUES (?, ?, 'waiting', ?, ?, ?)",
                (group.run, group.id, body, len(body), time.time()),
            )
            self.bytes += len(body)
            self.changed.notify_all()
        return True

    def waiting(self, limit, patience):
        """-> up to `limit` (seq, body) to score, oldest first, after at most `patience` seconds."""
        query = "SELECT seq, body FROM groups WHERE state='waiting' ORDER BY seq LIMIT ?"
        with self.changed:
            rows = self.db.execute(query, (limit,)).fetchall()
            if not rows and self.changed.wait(patience):
                rows = self.db.execute(query, (limit,)).fetchall()
        return rows

    def scored(self, seq, body):
        self._update(seq, "scored", body, None)

    def failed(self, seq, error):
        self._update(seq, "failed", b"", error)

    def _update(self, seq, state, body, error):
        with self.changed:
            old = "SELECT bytes FROM groups WHERE seq=? AND state='waiting'"
            row = self.db.execute(old, (seq,)).fetchone()
            if not row:  # acknowledged meanwhile: it must not come back
                return
            self.db.execute(
                "UPDATE groups SET state=?, body=?, bytes=?, error=? WHERE seq=?",
                (state, body, len(body), error, seq),
            )
            self.bytes += len(body) - row[0]
            self.changed.notify_all()

    def lease(self, run, limit, *, seconds, patience):
        """-> {id: body} of up to `limit` scored groups of the run, oldest first; may be empty.

        Raises RuntimeError if scoring one of the run's groups failed: its trainer should know.
        """
        query = (
            "SELECT seq, id, bytes FROM groups WHERE state IN ('scored', 'leased') AND run=?"
            " AND (state='scored' OR lease_ends<?) ORDER BY seq LIMIT ?"
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
            for seq, id, bytes in rows:
                size += bytes
                if bodies and size > LEASE_BYTES:
                    break
                body = self.db.execute("SELECT body FROM groups WHERE seq=?", (seq,))
                bodies[id] = body.fetchone()[0]
                self.db.execute(
                    "UPDATE groups SET state='leased', lease_ends=? WHERE seq=?",
                    (time.time() + seconds, seq),
                )
        return bodies

    def ack(self, run, ids):
        """Ends the groups' way: they were trained. -> how many were not done already."""
        with self.changed:
            done = 0
            for id in ids:
                where = "WHERE run=? AND id=? AND state!='done'"
                row = self.db.execute(f"SELECT bytes FROM groups {where}", (run, id)).fetchone()
                if row:
                    self.db.execute(
                        f"UPDATE groups SET state='done', body=NULL, bytes=0 {where}", (run, id)
                    )
                    self.bytes -= row[0]
                    done += 1
        return done

    def stats(self):
        """-> counts of groups by state, bytes held, age in seconds of the oldest waiting."""
        with self.changed:
            counts = dict(self.db.execute("SELECT state, COUNT(*) FROM groups GROUP BY state"))
            oldest = self.db.execute(
                "SELECT MIN(uploaded) FROM groups WHERE state='waiting'"
            ).fetchone()[0]
        states = {s: counts.get(s, 0) for s in ("waiting", "scored", "leased", "done", "failed")}
        age = round(time.time() - oldest, 1) if oldest else 0
        return states | {"bytes": self.bytes, "max_bytes": self.max_bytes, "oldest_waiting_s": age}
