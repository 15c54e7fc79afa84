"""Uploads groups in a thread of its own, so that sampling continues meanwhile."""

import contextlib
import math
import queue
import time

from grpo.log import in_background
from grpo.wire import pack_bodies, pack_group

TOGETHER_SECONDS = 0.02  # a group is uploaded with those that end so soon after the one before
UPLOAD_BYTES = 1 << 18  # of groups in one request, about; a larger group goes alone
UPLOAD_GROUPS = 64  # in one request


class Uploader:
    """Groups that end soon after one another go together: a request takes 2 ms of Python, for which
    sampling would wait, and the server scores them as one batch. `put` and `finish` raise what
    fails in the thread."""

    def __init__(self, server, answered=lambda: None):
        """`answered` is called, in that thread, for each group that the server has taken."""
        self.server, self.answered, self.waiting = server, answered, queue.Queue(maxsize=64)
        self.replies, self.error = [], None
        self.thread = in_background(self._run)

    def put(self, group):
        upload = group.id, pack_group(group)
        while not self.error:  # the thread that uploads says what it waits for
            with contextlib.suppress(queue.Full):
                return self.waiting.put(upload, timeout=1)
        raise self.error

    def finish(self):
        """Waits until all is uploaded; returns the server's replies, one for each group."""
        while self.thread.is_alive():
            with contextlib.suppress(queue.Full):
                self.waiting.put(None, timeout=1)
                self.thread.join()
        if self.error:
            raise self.error
        return self.replies

    def _run(self):
        over = False
        try:
            while not over:
                uploads, over = self._next()
                small = {id: body for id, body in uploads if len(body) <= UPLOAD_BYTES}
                large = [{id: body} for id, body in uploads if id not in small]
                for request in filter(None, [small, *large]):
                    self._send(request)
        except Exception as error:  # noqa: BLE001 (raised where the groups come from)
            self.error = error

    def _next(self):
        """Returns the next upload and those that come soon after, and whether they are the last."""
        uploads, end, patience = [], math.inf, None
        while len(uploads) < UPLOAD_GROUPS and sum(len(u[1]) for u in uploads) < UPLOAD_BYTES:
            try:
                upload = self.waiting.get(timeout=patience)
            except queue.Empty:
                break
            if upload is None:
                return uploads, True
            uploads.append(upload)
            now = time.monotonic()
            end = min(end, now + 5 * TOGETHER_SECONDS)
            patience = max(0, min(TOGETHER_SECONDS, end - now))
        return uploads, False

    def _send(self, bodies):
        data = b"".join(pack_bodies(bodies))
        reply = self.server.call("POST", "/upload", data=data, params={"several": 1}).json()
        for answer in reply["groups"]:
            self.replies.append(answer)
            self.answered()
