"""What every request to the reference server passes: its token, its body, and its refusal.

    app = Gate(live, token=None, max_body_bytes=16 << 20)    # bottle's app; live.py shows refusals

    @app.takes_json("/ack")                                  # POST {"run": "a", "ids": []}
    def ack(run: str, ids: list, step: int = 0): ...         # the types are checked, step may lack

A route is given a body that is whole, or values of the types it names, and may raise: ValueError
for what a client sent (400), StoreFull, and what SQLite and the system raise on a full disk (503).
All else is a bug of ours (500). Whoever is refused gets JSON, {"error": a sentence}.
"""

import errno
import hmac
import inspect
import json
import sqlite3

import bottle

from grpo.serving.store import StoreFull

NO_DISK = (sqlite3.OperationalError, OSError)
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Gate(bottle.Bottle):
    def __init__(self, live, *, token, max_body_bytes):
        """`live` is told of errors, `token` is None or the shared secret."""
        super().__init__()
        self.live, self.token, self.max_body_bytes = live, token, max_body_bytes
        self.add_hook("before_request", self.authorise)
        self.install(self.need_room)

    # --- Who may ask --------------------------------------------------------------
    def authorise(self):
        path, get = bottle.request.path, bottle.request.method in ("GET", "HEAD")
        if not get and "HTTP_ORIGIN" in bottle.request.environ:  # a web page's; no client of ours
            self.refuse(403, "this is no address for web pages to send to")
        if not self.token or (get and path == "/health"):
            return
        # not get_header, which raises if a header is no UTF-8
        sent = bottle.request.environ.get("HTTP_AUTHORIZATION", "")
        if hmac.compare_digest(sent.encode(), f"Bearer {self.token}".encode()):
            return
        # Basic is for people, whose browser adds it to what any site has it send: so only to look
        _, password = bottle.parse_auth(sent) or ("", "")
        if get and hmac.compare_digest(password.encode(), self.token.encode()):
            return
        ask = {"WWW-Authenticate": 'Basic realm="grpo-split"'} if path in ("/", "/live") else {}
        self.refuse(401, "no or wrong token: set GRPO_TOKEN to the server's on this machine", **ask)

    # --- What was sent ------------------------------------------------------------
    def read_body(self):
        text = bottle.request.environ.get("CONTENT_LENGTH") or ""
        length = int(text) if text.isdecimal() and len(text) < 20 else -1
        if not 0 < length <= self.max_body_bytes:
            status = 413 if length > 0 else 411
            self.refuse(status, f"a body of 1 to {self.max_body_bytes} bytes, please")
        # not request.body, which spills what is over 100 KB to a file
        body = bottle.request.environ["wsgi.input"].read(length)
        if len(body) != length:
            self.refuse(400, f"the body ended after {len(body)} of {length} bytes")
        return body

    def read_json(self, kinds, defaults):
        """-> the values of the body's JSON, which must have these names and types; those in
        `defaults` may be missing."""
        try:
            asked = json.loads(self.read_body())
            values = [(defaults if n not in asked else asked)[n] for n in kinds]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            self.refuse(400, f"the body must be JSON with {', '.join(kinds)}: {error!r}")
        for value, (name, kind) in zip(values, kinds.items(), strict=True):
            if type(value) is not kind:
                self.refuse(400, f"{name} must be of type {kind.__name__}")
            if kind is int and not -(2**62) < value < 2**62 and name != "limit":
                self.refuse(400, f"{name} is too large")
        return values

    def read_query(self):
        """-> run and the numbers of the query string."""
        query = bottle.request.query
        try:
            numbers = {k: int(v) for k, v in query.items() if k in ("version", "offset")}
            if not all(abs(n) < 2**62 for n in numbers.values()):
                raise ValueError("too large")
            return query.decode().run or "", numbers
        except ValueError as error:
            self.refuse(400, f"a query of text, where version and offset must be numbers: {error}")

    def takes_json(self, path):
        """A route for POST: its parameters are the names and types that the body's JSON must have,
        but for those with a default. Where it raises ValueError, the client is to blame."""

        def install(route):
            parameters = inspect.signature(route).parameters.values()
            kinds = {p.name: p.annotation for p in parameters}
            defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
            self.post(path, apply=self.blame)(lambda: route(*self.read_json(kinds, defaults)))
            return route

        return install

    # --- What is refused ----------------------------------------------------------
    def blame(self, route):
        """A ValueError in this route is about what was sent (a text that is no UTF-8, too): 400.
        Not in every route: where nothing is sent, it would be ours."""

        def answer(*args, **kwargs):
            try:
                return route(*args, **kwargs)
            except ValueError as error:
                self.refuse(400, str(error))

        return answer

    def need_room(self, route):
        """A full store, and a full disk in any route, is a 503: nothing was stored, and clients
        wait for room."""

        def answer(*args, **kwargs):
            store = self.live.store
            try:
                return route(*args, **kwargs)
            except StoreFull:
                reason = f"the store holds its {store.max_bytes} bytes; if their runs have ended,"
                reason += " stop the server and delete its STORE"
                self.refuse(503, reason, **{"Retry-After": "1"})
            except NO_DISK as error:
                if isinstance(error, OSError) and error.errno not in NO_SPACE:
                    raise
                reason = f"the disk of the store {store.path} is full, or fails: {error}; make room"
                self.refuse(503, f"{reason} there, and all goes on", **{"Retry-After": "5"})

        return answer

    def refuse(self, status, reason, **headers):
        headers["Content-Type"] = "application/json"
        reason = reason[:1000]  # it may quote the body
        if status != 401:  # a browser's first request is one, before it asks for the token
            self.live.error(f"{bottle.request.method} {bottle.request.path}: {reason}")
        raise bottle.HTTPResponse(json.dumps({"error": reason}), status, headers)

    def default_error_handler(self, error):
        """404, 405, and 500 for what nobody foresaw (bottle prints its traceback)."""
        bottle.response.content_type = "application/json"
        if error.exception:
            self.live.error(f"{bottle.request.method} {bottle.request.path}: {error.exception!r}")
        return json.dumps({"error": repr(error.exception) if error.exception else error.body})
