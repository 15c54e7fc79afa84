"""The HTTP client that ranks and workers share.

It retries while there is no connection or the other side is full, logs this every 10 s, and gives
up after a time limit.
"""

import math
import os
import time

import requests

from grpo.log import SPEAK_SECONDS, tell
from grpo.stop import stop

# Errors of a call if no server runs, or if the server dies in the middle of its answer
CUT_OFF = (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError)
AGAIN = (502, 503, 504)  # the server is full, or a proxy can't reach it: try again
STOP_SECONDS = 15  # longest wait after a stop was requested; deepspeed kills the process after 30 s


class TooLong(SystemExit):
    """A wait has reached its limit."""


class Refused(SystemExit):
    """The other side of a connection refuses a request, or is no longer the same."""


class Wait:
    """The wait in a polling loop. Logs every 10 s what it waits for. Raises TooLong at its limit,
    which counts from its creation."""

    def __init__(self, what, limit_seconds=math.inf):
        self.what, self.limit = what, limit_seconds
        self.start = self.said = time.monotonic()

    def sleep(self, why, pause=0.5):
        """Sleeps `pause` seconds; `why` is what is still missing. Raises TooLong at the limit, or
        STOP_SECONDS after a stop was requested."""
        now = time.monotonic()
        if now - self.start > self.limit:
            raise TooLong(f"waited {self.limit} s for {self.what}: {why}")
        if stop.asked and now - max(self.start, stop.at) > STOP_SECONDS:
            raise TooLong(f"{stop.asked}: the step can't be finished without {self.what}: {why}")
        if now - self.said > SPEAK_SECONDS:
            self.said = now
            tell(f"waited {now - self.start:.0f} s so far for {self.what}: {why}")
        time.sleep(pause)


def shared_token():
    """Returns the secret GRPO_TOKEN, or None. Raises SystemExit if it can't travel in a header."""
    token = os.environ.get("GRPO_TOKEN", "").strip()  # a file made by `echo` ends with a newline
    if not (token.isascii() and token.isprintable()):
        raise SystemExit("GRPO_TOKEN has characters other than printable ASCII: choose another one")
    return token or None


def text_of(reply):
    """Returns the text of an answer, cut if it is long. Our servers send no web pages."""
    page = reply.text.lstrip().startswith("<")
    return "a web page: does another program have this address?" if page else reply.text[:1000]


class Client:
    """Calls the routes of one server. Each thread needs a separate client."""

    command = ""  # the command that starts the other side
    limit_of_body = ""  # and the constant that limits what it accepts

    def __init__(self, url, wait_limit_seconds):
        self.url, self.limit = url.rstrip("/"), wait_limit_seconds
        self.session = requests.Session()
        self.session.trust_env = False  # no HTTP_PROXY: a proxy seldom knows a cluster's machines
        self.session.verify = os.environ.get("REQUESTS_CA_BUNDLE") or True
        self.session.headers["Accept-Encoding"] = "identity"  # a proxy might compress log-probs
        if token := shared_token():
            self.session.headers["Authorization"] = f"Bearer {token}"

    def read(self, reply, *names):
        """Returns the JSON object of an answer. Raises Refused if it lacks one of the `names`, as
        the answer of another program does."""
        try:
            found = dict(reply.json())
            return {name: found[name] for name in names} and found
        except (ValueError, LookupError, TypeError) as error:
            raise self.stranger(reply) from error

    def stranger(self, reply):
        return Refused(
            f"another program seems to have the address {self.url}: it answered"
            f" {text_of(reply)!r:.200}; start `{self.command}` there, or correct the address"
        )

    def call(self, method, path, *, timeout=10, expected=(), **request) -> requests.Response:
        """Calls a route. Raises Refused if the other side answers with an error status that is
        not `expected`, TooLong if it is unreachable or full for `wait_limit_seconds`."""
        url, wait = self.url + path, None
        request |= {"allow_redirects": False}  # the token is for this address
        while True:
            began = time.monotonic()
            try:
                reply = self.session.request(method, url, timeout=(10, timeout), **request)
            except CUT_OFF as error:
                cause = getattr(error.args and error.args[0], "reason", error)  # urllib3's
                why = f"no answer ({cause!s:.200}); is `{self.command}` running?"
                silent = isinstance(error, requests.ReadTimeout)  # no answer since it was sent
            else:
                if reply.status_code < 300 or reply.status_code in expected:
                    return reply
                if reply.status_code in (404, 405):  # no route of ours
                    raise self.stranger(reply)
                if reply.status_code not in AGAIN:
                    remedy = f"; raise {self.limit_of_body}" if reply.status_code == 413 else ""
                    raise Refused(f"{url} answered {reply.status_code}: {text_of(reply)}{remedy}")
                why, silent = text_of(reply) or f"status {reply.status_code}", True
            # The limit counts from the first failure. A request without an answer in time has
            # failed since it was sent; a connection that broke has failed just now
            wait = wait or Wait(url, self.limit)
            wait.start = min(wait.start, began) if silent else wait.start
            wait.sleep(why)
