"""What every request to the reference server passes: its token, its body, and its refusal.

    app = Gate(live.error, store_path, token=None, max_body_bytes=16 << 20)  # bottle's app

    @app.takes_json("/ack")                               # POST {"run": "a", "ids": []}
    def ack(run: str, ids: list, step: int = 0): ...      # types are checked, step may be missing

A route gets a complete body, or values of the types it names. A refusal is JSON, {"error": a
sentence}; `explain` says which exception of a route becomes which status.
"""

import hmac
import inspect
import json
import sqlite3
import sys

import bottle
import waitress

from grpo.serving.database import NO_SPACE, check_type
from grpo.serving.store import ScoringFailed, StoreFull

READS = ("GET", "HEAD")  # requests that send nothing


class Gate(bottle.Bottle):
    def __init__(self, show_error, store_path, *, token, max_body_bytes):
        """`show_error(text)` is called with each refusal; `token` is None or the shared secret."""
        super().__init__()
        self.show_error, self.store_path = show_error, store_path
        self.token, self.max_body_bytes = token, max_body_bytes
        self.add_hook("before_request", self.authorise)
        self.install(self.explain)

    # --- Authentication -----------------------------------------------------------
    def authorise(self):
        path, get = bottle.request.path, bottle.request.method in READS
        if not get and "HTTP_ORIGIN" in bottle.request.environ:  # a web page, not a client of ours
            self.refuse(403, "web pages may not send requests here")
        if not self.token or (get and path == "/health"):
            return
        # not get_header, which raises if a header is not UTF-8
        sent = bottle.request.environ.get("HTTP_AUTHORIZATION", "")
        if hmac.compare_digest(sent.encode(), f"Bearer {self.token}".encode()):
            return
        # Basic is for people. Browsers add it to whatever any site has them send: so only to look
        _, password = bottle.parse_auth(sent) or ("", "")
        if get and hmac.compare_digest(password.encode(), self.token.encode()):
            return
        seen = path in ("/", "/live", "/group")
        ask = {"WWW-Authenticate": 'Basic realm="grpo-split"'} if seen else {}
        self.refuse(401, "no or wrong token: set GRPO_TOKEN to the server's on this machine", **ask)

    # --- Requests -----------------------------------------------------------------
    def read_body(self):
        length = bottle.request.content_length
        if not 0 < length <= self.max_body_bytes:
            status = 413 if length > 0 else 411
            self.refuse(status, f"a body of 1 to {self.max_body_bytes} bytes, please")
        # not request.body, which spills what is over 100 KB to a file
        return bottle.request.environ["wsgi.input"].read(length)

    def read_json(self, parameters):
        """Returns the value of each parameter in the body's JSON, of its type; those with a default
        may be missing."""
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        try:
            sent = json.loads(self.read_body())
            values = [(sent if p.name in sent else defaults)[p.name] for p in parameters]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            names = ", ".join(p.name for p in parameters)
            self.refuse(400, f"the body must be JSON with {names}: {error!r}")
        for value, p in zip(values, parameters, strict=True):
            check_type(p.name, value, p.annotation)
        return values

    def read_query(self, *required):
        """Returns the query string's run, "" if there is none, and its numbers by name; those
        `required` must be there."""
        query = bottle.request.query
        try:
            numbers = {k: int(v) for k, v in query.items() if k in ("version", "offset", "id")}
            if not all(abs(n) < 2**62 for n in numbers.values()) or set(required) - set(numbers):
                raise ValueError("too large, or missing")
            return query.decode().run or "", numbers
        except ValueError as error:
            self.refuse(400, f"a query of text; version, offset and id must be numbers: {error}")

    def takes_json(self, path):
        """Decorates a route for POST, whose parameters are the names and types that the body's JSON
        must have."""

        def install(route):
            parameters = list(inspect.signature(route).parameters.values())
            self.post(path)(lambda: route(*self.read_json(parameters)))
            return route

        return install

    # --- Refusals -----------------------------------------------------------------
    def explain(self, route):
        """Answers {} where the route returns None, and refuses where it raises: with 400 where the
        client sent a wrong value, 503 where store or disk is full (clients try again), else 500."""

        def answer(*args, **kwargs):
            try:
                result = route(*args, **kwargs)
                return {} if result is None else result
            except ValueError as error:
                if bottle.request.method in READS:  # a bug of ours
                    raise
                self.refuse(400, str(error))
            except ScoringFailed as error:
                self.refuse(500, str(error))
            except StoreFull as error:
                self.refuse(503, str(error), **{"Retry-After": "1"})
            except (sqlite3.OperationalError, OSError) as error:
                if isinstance(error, OSError) and error.errno not in NO_SPACE:
                    raise
                reason = f"the disk of the store {self.store_path} is full, or fails: {error}; make"
                self.refuse(503, f"{reason} room there, and all resumes", **{"Retry-After": "5"})

        return answer

    def refuse(self, status, reason, **headers):
        headers["Content-Type"] = "application/json"
        reason = reason[:1000]  # it may quote the body
        if status != 401:  # a browser's first request is one, before it asks for the token
            self.show_error(f"{bottle.request.method} {bottle.request.path}: {reason}")
        raise bottle.HTTPResponse(json.dumps({"error": reason}), status, headers)

    def default_error_handler(self, error):
        """Answers 404, 405, and 500 for a bug (bottle prints its traceback)."""
        bottle.response.content_type = "application/json"
        if error.exception:
            self.show_error(f"{bottle.request.method} {bottle.request.path}: {error.exception!r}")
        return json.dumps({"error": repr(error.exception) if error.exception else error.body})


def listen(app, host, port, threads, max_body_bytes):
    """Returns the HTTP server; its run() serves."""
    try:
        return waitress.create_server(
            app,
            host=host,
            port=port,
            threads=threads,
            inbuf_overflow=64 << 20,  # bodies stay in memory,
            outbuf_overflow=64 << 20,  # and so do the answers to leases
            recv_bytes=262_144,  # few reads: 2.8 times the uploads
            connection_limit=1000,  # with 100, clients that stall would shut out others
            asyncore_use_poll=True,  # select() ends at 1024 files
            max_request_body_size=max_body_bytes + 1,  # refuses from this many bytes on
        )
    except (OSError, ValueError) as error:
        sys.exit(f"HOST = {host!r}, PORT = {port!r} can't be served: {error}; another server's?")
