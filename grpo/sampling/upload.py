"""Uploads groups in a thread of its own, so that sampling goes on meanwhile."""

import contextlib
import itertools
import math
import queue
import threading
import time
from dataclasses import dataclass

from grpo.wire import pack_bodies, pack_group

TOGETHER_SECONDS = 0.02  # a group is uploaded with those that end so soon after the one before
UPLOAD_BYTES = 1 << 18  # of groups in one request, about; a larger group goes alone
UPLOAD_GROUPS = 64  # in one request


# --- Upload -------------------------------------------------------------------------
class Uploader:
    """Uploads groups in a thread of its own, so that sampling goes on meanwhile.

    Those that end soon after one another go together: a request takes 2 ms of Python, which
    sampling would wait for, and the server scores them as one batch.
    """

    def __init__(self, server, answered=lambda: None):
        """`answered` is called for each group that the server has taken."""
        self.server, self.answered, self.waiting = server, answered, queue.Queue(maxsize=64)
        self.replies, self.error = [], None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def put(self, group, *, pool, oldest=0):
        """`pool`: the group is flat, and only of use with another of its prompt, which policy
        version `oldest` or a newer one sampled. Raises what an earlier upload raised."""
        item = Upload(group.id, pack_group(group), int(pool), oldest)
        while True:  # the thread that uploads says what it waits for
            if self.error:
                raise self.error
            with contextlib.suppress(queue.Full):
                return self.waiting.put(item, timeout=1)

    def finish(self):
        """Waits until all is uploaded; -> the server's answers."""
        while self.thread.is_alive():  # the thread that uploads says what it waits for
            with contextlib.suppress(queue.Full):
                self.waiting.put(None, timeout=1)
                self.thread.join()
        if self.error:
            raise self.error
        return self.replies

    def _run(self):
        over = False
        while not over:
            items, over = self._those_that_wait()
            try:
                for _, alike in itertools.groupby(sorted(items, key=together), key=together):
                    self._upload(list(alike))
            except Exception as error:  # noqa: BLE001 (raised where the groups come from)
                self.error = error
                return

    def _those_that_wait(self):
        """-> what put() has given, and what it gives soon after; and whether that is all."""
        items, until, patience = [], math.inf, None
        while len(items) < UPLOAD_GROUPS and sum(len(i.body) for i in items) < UPLOAD_BYTES:
            try:
                item = self.waiting.get(timeout=patience)
            except queue.Empty:
                break
            if item is None:
                return items, True
            items, now = [*items, item], time.monotonic()
            until = min(until, now + 5 * TOGETHER_SECONDS)
            patience = max(0, min(TOGETHER_SECONDS, until - now))
        return items, False

    def _upload(self, items):
        data, query = items[0].body, {"pool": items[0].pool, "oldest": items[0].oldest}
        if len(items) > 1:
            data = b"".join(pack_bodies({item.id: item.body for item in items}))
            query["several"] = 1
        reply = self.server.call("POST", "/upload", data=data, params=query).json()
        for answer in reply["groups"] if len(items) > 1 else [reply]:
            self.replies.append(answer)
            self.answered()


@dataclass
class Upload:
    id: str
    body: bytes
    pool: int
    oldest: int


def together(upload):
    """-> what uploads that go in one request have in common."""
    return upload.pool, upload.oldest, upload.id if len(upload.body) > UPLOAD_BYTES else ""
