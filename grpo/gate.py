"""Checks every HTTP request, at ref_server.py and at the trainer's rank 0: token, body, size.

    app = Gate(token=None, max_body_bytes=16 << 20)      # a bottle app
    server = listen(app, "127.0.0.1", 59875, threads=8)  # server.run() serves

A refusal is JSON, {"error": a sentence}: 400 for a malformed request, 401 for a wrong token, 404,
405, 411, 413, and 503 with Retry-After if the server is full, after which clients try again.
"""

import contextlib
import hmac
import json
import os
import sys
import threading
import time
from collections import deque
from concurrent.futures import wait
from urllib.parse import urlsplit

import bottle
from waitress.channel import HTTPChannel
from waitress.parser import HTTPRequestParser, ParsingError
from waitress.server import TcpWSGIServer
from waitress.task import ErrorTask

READS = ("GET", "HEAD")  # the methods that send nothing
LOCAL = ("127.0.0.1", "localhost", "::1")


class Busy(Exception):
    """The server is full: the client should try again."""


class Gate(bottle.Bottle):
    def __init__(self, *, token, max_body_bytes):
        """`token` is None or the shared secret."""
        super().__init__()
        self.token, self.max_body_bytes = token, max_body_bytes
        self.add_hook("before_request", self.authorise)
        self.install(self.explain)
        self.get("/health", callback=lambda: {"ok": True})

    def authorise(self):
        reads, environ = bottle.request.method in READS, bottle.request.environ
        if not reads and "HTTP_ORIGIN" in environ:  # sent by a web page in somebody's browser
            self.refuse(403, "web pages may not send requests here")
        if not self.token and not is_local(environ.get("HTTP_HOST", "localhost")):
            self.refuse(403, "without GRPO_TOKEN requests must name 127.0.0.1 or localhost")
        if not self.token or (reads and bottle.request.path == "/health"):
            return
        sent = environ.get("HTTP_AUTHORIZATION", "")  # get_header raises if it is not UTF-8
        if not hmac.compare_digest(sent.encode(), f"Bearer {self.token}".encode()):
            self.refuse(401, "the token is missing or wrong: set the same GRPO_TOKEN on both sides")

    # --- What routes read and answer ------------------------------------------------
    def body_length(self):
        """Returns the number of bytes of the request's body, before it is read."""
        length = bottle.request.content_length
        if not 0 < length <= self.max_body_bytes:
            status = 413 if length > 0 else 411
            self.refuse(status, f"the body must have between 1 and {self.max_body_bytes} bytes")
        return length

    def read_body(self):
        length = self.body_length()
        # Not request.body, which writes more than 100 KB to a file
        body = bottle.request.environ["wsgi.input"].read(length)
        if len(body) < length:
            self.refuse(400, f"the body ended after {len(body)} of {length} bytes")
        return body

    def read_number(self, name, most):
        """Returns a whole number from 0 to `most` from the query string."""
        text = bottle.request.query.get(name, "")
        if not (text.isascii() and text.isdecimal() and len(text) < 19 and int(text) <= most):
            raise ValueError(f"the query must have {name}, a whole number from 0 to {most}")
        return int(text)

    def read_text(self, name):
        """Returns a text from the query string, "" if it is missing."""
        return bottle.request.query.decode().get(name, "")

    def result_of(self, future, seconds):
        """Returns a future's result. Cancels the future and raises Busy if it takes longer than
        `seconds`, or if the client has closed the connection."""
        # With channel_request_lookahead, waitress knows whether the client has closed its socket
        gone = bottle.request.environ.get("waitress.client_disconnected", lambda: False)
        end = time.monotonic() + seconds
        while not wait([future], timeout=max(0, min(1, end - time.monotonic()))).done:
            if gone() or time.monotonic() >= end:
                future.cancel()
                raise Busy(f"there is no result after {seconds} s")
        return future.result()

    def blob(self, data, **headers):
        """Returns an answer with these bytes."""
        headers["Content-Type"] = "application/octet-stream"
        return bottle.HTTPResponse(data, 200, headers)

    def file(self, path):
        """Returns an answer with a file, or with the part that a Range header asks for."""
        return bottle.static_file(path.name, root=path.parent, mimetype="application/octet-stream")

    # --- Refusals -------------------------------------------------------------------
    def explain(self, route):
        """Wraps a route: answers {} if it returns None, and an error status if it raises."""

        def answer(*args, **kwargs):
            try:
                result = route(*args, **kwargs)
                return {} if result is None else result
            except ValueError as error:
                self.refuse(400, str(error))
            except Busy as error:
                self.refuse(503, str(error), **{"Retry-After": "1"})
            except RuntimeError as error:
                self.refuse(500, str(error))

        return answer

    def refuse(self, status, reason, **headers):
        headers["Content-Type"] = "application/json"
        raise bottle.HTTPResponse(json.dumps({"error": reason[:1000]}), status, headers)

    def default_error_handler(self, error):
        """Answers 404, 405, and 500 for a bug (bottle prints its traceback)."""
        bottle.response.content_type = "application/json"
        reason = repr(error.exception) if error.exception else error.body
        return json.dumps({"error": reason[:1000]})


class Refusal(ErrorTask):
    """Waitress's own refusals, which the app never sees, as JSON; its 501 becomes 400."""

    def execute(self):
        error = self.request.error
        data = json.dumps({"error": f"{error.reason}: {error.body}"}).encode()
        self.status = "400 Bad Request" if error.code == 501 else f"{error.code} {error.reason}"
        self.response_headers.append(("Content-Type", "application/json"))
        self.set_close_on_finish()
        self.content_length = len(data)
        self.write(data)


class Parser(HTTPRequestParser):
    path = ""  # else waitress fails to log a malformed request whose client has left

    def parse_header(self, header_plus):
        try:
            super().parse_header(header_plus)
        except ValueError as error:  # from urlsplit; waitress would print it and not answer
            raise ParsingError(str(error)) from error


class Channel(HTTPChannel):
    parser_class, error_task_class = Parser, Refusal


class Server(TcpWSGIServer):
    channel_class = Channel

    def handle_accept(self):
        """Accepts all waiting connections. Waitress accepts one per round of its loop, so /health
        would wait until 64 large bodies are read."""
        number = -1
        while number < len(self._map) < self.adj.connection_limit:
            number = len(self._map)
            super().handle_accept()

    def stop(self):
        """Stops serving, and frees the address."""
        closed = threading.Event()

        def close():
            for channel in list(self.active_channels.values()):
                channel.handle_close()
            self.close()
            closed.set()

        if self.accepting:  # not closed yet
            # The polling thread must close them: a socket that is being polled stays open
            self.task_dispatcher.shutdown()
            self.trigger.pull_trigger(close)
            closed.wait(5)


class Waiting:
    """A queue of requests that wait for an answer, oldest first, limited in number and bytes. A
    request has a length and a future `answer`."""

    def __init__(self, most_requests, most_bytes):
        self.most_requests, self.most_bytes = most_requests, most_bytes
        self.sizes = []  # bytes of each request that has no answer yet
        self.queue, self.changed = deque(), threading.Condition()

    @contextlib.contextmanager
    def room_for(self, size):
        """Reserves space for a request of `size` bytes in the block. Raises Busy if it is full."""
        with self.changed:
            number, total = len(self.sizes), sum(self.sizes)
            if number >= self.most_requests or number and total + size > self.most_bytes:
                raise Busy(f"{number} requests of {total} bytes wait for an answer")
            self.sizes.append(size)
        try:
            yield
        finally:
            with self.changed:
                self.sizes.remove(size)

    def put(self, request):
        with self.changed:
            # Cancelled requests have given up their space and must not accumulate in the queue
            self.queue = deque(r for r in self.queue if not r.answer.cancelled())
            self.queue.append(request)
            self.changed.notify()

    def take(self, length, timeout):
        """Returns requests with a total of about `length`, without cancelled ones; [] if none comes
        within `timeout` seconds."""
        taken = []
        with self.changed:
            self.changed.wait_for(lambda: self.queue, timeout)
            while self.queue and sum(map(len, taken)) < length:
                request = self.queue.popleft()
                if request.answer.set_running_or_notify_cancel():
                    taken.append(request)
        return taken


def is_local(host):
    """Returns whether a Host header names this machine. With another name that leads here (DNS
    rebinding), a web page could read the answers."""
    with contextlib.suppress(ValueError):
        return urlsplit(f"//{host}").hostname in LOCAL
    return False


def token_for(host, constant):
    """Returns GRPO_TOKEN or None. Raises SystemExit if it is missing and other machines can reach
    the host."""
    token = os.environ.get("GRPO_TOKEN")
    if host not in LOCAL and not token:
        sys.exit(
            f"{constant} = {host!r} can be reached from other machines: set the"
            " environment variable GRPO_TOKEN to the same secret text on every machine"
        )
    return token


def listen(app, host, port, threads):
    """Returns the HTTP server; run() serves. Raises SystemExit if the address can't be used."""
    try:
        return Server(
            app,
            host=host,
            port=port,
            threads=threads,
            inbuf_overflow=64 << 20,  # bodies stay in memory
            outbuf_overflow=64 << 20,  # answers too
            recv_bytes=65_536,  # bytes read from a socket before the next one is read
            connection_limit=1000,  # with 100, stalled clients would shut out others
            asyncore_use_poll=True,  # select() ends at 1024 files
            channel_request_lookahead=1,  # see result_of
            max_request_body_size=app.max_body_bytes + 1,  # refuses from this many bytes on
        )
    except (OSError, ValueError) as error:
        sys.exit(f"http://{host}:{port} can't be served: {error}; does another process serve it?")
