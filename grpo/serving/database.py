"""The server's SQLite file: one connection that all threads share, its lock, its transactions.

    db = Database("runs/ref_store.sqlite")
    with db.transaction():           # atomic; meanwhile no other thread reads or writes
        db.execute("UPDATE ...", values)
    with db.changed:                 # the lock alone, to look and to wait for the next change
        if not db.rows("SELECT ..."):
            db.changed.wait(5)

The store, the published policies and the page's curves have their tables in it.
"""

import errno
import os
import sqlite3
import threading
from contextlib import contextmanager

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of an OSError: the disk is full


class Database:
    """A transaction survives the death of the process, but not a power cut (WAL with
    synchronous=NORMAL). The file is locked: a second server, with another model, would score the
    first one's groups."""

    def __init__(self, path):
        """Raises SystemExit if another process has the file open."""
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        self.connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self.changed = threading.Condition()  # the lock; notified after each transaction
        self.execute, self.executescript = self.connection.execute, self.connection.executescript
        self.close = self.connection.close
        self.execute("PRAGMA locking_mode=EXCLUSIVE")
        self.execute("PRAGMA page_size=32768")  # a body of 1 MB is 32 pages, not 256
        self.execute("PRAGMA secure_delete=OFF")  # Debian's overwrites what is deleted: slow
        try:
            self.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            raise SystemExit(f"{path}: {error}; is it another server's? Set STORE") from error
        self.execute("PRAGMA synchronous=NORMAL")

    @contextmanager
    def transaction(self):
        """Commits when the block ends and rolls back if it raises. A transaction within another is
        part of that one."""
        with self.changed:
            if self.connection.in_transaction:
                yield
                return
            self.execute("BEGIN")
            try:
                yield
                self.execute("COMMIT")
            except BaseException:
                if self.connection.in_transaction:  # a full disk makes SQLite itself roll back
                    self.execute("ROLLBACK")
                raise
            self.changed.notify_all()

    def rows(self, query, values=()):
        with self.changed:  # no other thread's transaction is half done
            return self.execute(query, values).fetchall()

    def value(self, query, values=()):
        """Returns the first column of the first row; None if there is no row."""
        rows = self.rows(query, values)
        return rows[0][0] if rows else None


def check_type(name, value, kind):
    """Raises ValueError for a value of another type, or an integer that SQLite can't store."""
    if type(value) is not kind:
        raise ValueError(f"{name} must be of type {kind.__name__}")
    if kind is int and not -(2**62) < value < 2**62:
        raise ValueError(f"{name} is too large")
