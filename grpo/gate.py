"""Checks every HTTP request, at ref_server.py and at the trainer's rank 0: token, body, size.

    app = Gate(token=None)  # a bottle app
    server = listen(app, "127.0.0.1", 59875, threads=8, max_body_bytes=16 << 20)
    server.run()

A refusal of the app is JSON, {"error": a sentence}: 400 for a malformed request, 401 for a wrong
token, 404, 405, and 503 if the server is full, after which clients try again.
"""

import contextlib
import hmac
import json
import resource
import sys
import threading
from urllib.parse import urlsplit

import bottle
from waitress.server import TcpWSGIServer

from grpo.client import shared_token

LOCAL = ("127.0.0.1", "localhost", "::1")


class Busy(Exception):
    """The server is full: the client should try again."""


class Gate(bottle.Bottle):
    def __init__(self, *, token):
        """`token` is None or the shared secret."""
        super().__init__()
        self.token = token
        self.add_hook("before_request", self.authorise)
        self.install(self.explain)
        self.get("/health", callback=lambda: {"ok": True})

    def authorise(self):
        request = bottle.request
        if "HTTP_ORIGIN" in request.environ:  # a web page in a browser on this machine
            self.refuse(403, "requests of web pages are refused")
        if not self.token and not is_local(request.environ.get("HTTP_HOST", "localhost")):
            self.refuse(403, "without GRPO_TOKEN the URL's host must be 127.0.0.1 or localhost")
        if not self.token or request.path == "/health":
            return
        if not has_token(request.environ.get("HTTP_AUTHORIZATION"), self.token):
            self.refuse(401, "the token is missing or wrong: set the same GRPO_TOKEN on both sides")

    # --- What routes read and answer ------------------------------------------------
    def read_body(self):
        # Not request.body, which writes more than 100 KB to a file
        return bottle.request.environ["wsgi.input"].read()

    def query(self, name):
        """Returns a text from the query string, "" if it is missing."""
        return bottle.request.query.decode().get(name, "")

    def blob(self, data, **headers):
        """Returns an answer with these bytes."""
        headers["Content-Type"] = "application/octet-stream"
        return bottle.HTTPResponse(data, 200, headers)

    # --- Refusals -------------------------------------------------------------------
    def explain(self, route):
        """Wraps a route: answers an error status if it raises."""

        def answer(*args, **kwargs):
            try:
                return route(*args, **kwargs)
            except ValueError as error:
                self.refuse(400, str(error))
            except Busy as error:
                self.refuse(503, str(error))
            except RuntimeError as error:
                self.refuse(500, str(error))

        return answer

    def refuse(self, status, reason):
        headers = {"Content-Type": "application/json"}
        raise bottle.HTTPResponse(json.dumps({"error": reason[:1000]}), status, headers)

    def default_error_handler(self, error):
        """Answers 404, 405, and 500 for a bug (bottle prints its traceback)."""
        bottle.response.content_type = "application/json"
        reason = repr(error.exception) if error.exception else error.body
        return json.dumps({"error": reason[:1000]})


class Server(TcpWSGIServer):
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


def has_token(header, token):
    """Returns whether an Authorization header, or None, has the token."""
    return hmac.compare_digest((header or "").encode(), f"Bearer {token}".encode())


def is_local(host):
    """Returns whether a Host header names this machine. With another name that leads here (DNS
    rebinding), a web page could read the answers."""
    with contextlib.suppress(ValueError):
        return urlsplit(f"//{host}").hostname in LOCAL
    return False


def token_for(host, constant):
    """Returns GRPO_TOKEN or None. Raises SystemExit if it is missing and other machines can reach
    the host."""
    token = shared_token()
    if host not in LOCAL and not token:
        sys.exit(
            f"{constant} = {host!r} can be reached from other machines: set the"
            " environment variable GRPO_TOKEN to the same secret text on every machine"
        )
    return token


def url_of(host, port):
    """Returns the URL of an address; IPv6's is in brackets.

    >>> url_of("127.0.0.1", 59875), url_of("::1", 59875)
    ('http://127.0.0.1:59875', 'http://[::1]:59875')
    """
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def listen(app, host, port, threads, max_body_bytes):
    """Returns the HTTP server; run() serves. Raises SystemExit if the address can't be used."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        return Server(
            app,
            host=host,
            port=port,
            threads=threads,
            inbuf_overflow=64 << 20,  # bodies stay in memory
            outbuf_overflow=64 << 20,  # answers too
            recv_bytes=65_536,  # bytes read from a socket before the next one is read
            connection_limit=min(1000, files // 2),  # a rank keeps its connection
            asyncore_use_poll=True,  # select() ends at 1024 files
            max_request_body_size=max_body_bytes + 1,  # refuses from this many bytes on
        )
    except (OSError, ValueError) as error:
        sys.exit(f"can't listen at {url_of(host, port)} ({error}): is the port in use?")
