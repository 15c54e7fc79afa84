"""HTTP clients with a method per route: ReferenceClient for ranks, TrainerClient for workers.

Both retry while there is no connection or the other side is full. They log this every 10 s and give
up after a time limit.
"""

import json
import os
import socket
import time

import requests
from requests.adapters import HTTPAdapter

from grpo.stop import Refused, Wait
from grpo.wire import check_facts, facts_of, pack_ids, sha256_of, unpack_logps

# Errors of a call if no server runs, or if the server dies in the middle of its answer
CUT_OFF = (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError)
AGAIN = (502, 503, 504)  # the server is full, or a proxy can't reach it: try again
# A server may score for minutes, but a dead machine must be noticed. TCP probes it after 10 s of
# silence and gives up 20 s later; higher numbers notice it later
PROBES = {"TCP_NODELAY": 1, "TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}


class Probing(HTTPAdapter):
    def init_poolmanager(self, *args, **kwargs):
        options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
        for name, value in PROBES.items():
            if hasattr(socket, name):  # macOS lacks TCP_KEEPIDLE
                options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
        super().init_poolmanager(*args, socket_options=options, **kwargs)


def text_of(reply):
    """Returns the text of an answer, cut if it is long. Our servers send no web pages."""
    page = reply.text.lstrip().startswith("<")
    return "a web page: does another program have this address?" if page else reply.text[:1000]


class Client:
    """What both clients share. Each thread needs a client of its own."""

    command = ""  # the command that starts the other side
    limit_of_body = ""  # and the constant that limits what it accepts

    def __init__(self, url, wait_limit_seconds):
        self.url, self.limit = url.rstrip("/"), wait_limit_seconds
        self.session = requests.Session()
        self.session.trust_env = False  # no HTTP_PROXY: a proxy seldom knows a cluster's machines
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, Probing())
        if token := os.environ.get("GRPO_TOKEN"):
            self.session.headers["Authorization"] = f"Bearer {token}"

    def call(self, method, path, *, timeout=10, expected=(), **request) -> requests.Response:
        """Calls a route. Raises Refused if the other side answers with an error status that is
        not `expected`, TooLong if it is unreachable or full for `wait_limit_seconds`."""
        url, wait = self.url + path, None
        while True:
            began = time.monotonic()
            try:
                reply = self.session.request(method, url, timeout=(10, timeout), **request)
            except CUT_OFF as error:
                why = f"no answer ({type(error).__name__}); is `{self.command}` running?"
                silent = isinstance(error, requests.ReadTimeout)  # no answer since it was sent
            else:
                if reply.ok or reply.status_code in expected:
                    return reply
                if reply.status_code not in AGAIN:
                    remedy = f"; raise {self.limit_of_body}" if reply.status_code == 413 else ""
                    raise Refused(f"{url} answered {reply.status_code}: {text_of(reply)}{remedy}")
                why, silent = text_of(reply) or f"status {reply.status_code}", True
            # The limit counts from the first failure. A request without an answer in time has
            # failed since it was sent; a connection that broke has failed just now
            wait = wait or Wait(url, self.limit)
            wait.start = min(wait.start, began) if silent else wait.start
            wait.sleep(why)


class ReferenceClient(Client):
    """The client of ref_server.py."""

    command = "python ref_server.py"
    limit_of_body = "MAX_BODY_BYTES of ref_server.py"
    info = None  # /info's answer, once check() has accepted it

    def check(self, model, tokenizer, temperature):
        """Raises SystemExit if the reference does not fit the policy `model`."""
        reply = None
        try:
            reply = self.call("GET", "/info")
            info = dict(reply.json())
        except (requests.RequestException, ValueError, TypeError, RuntimeError) as error:
            why = f"it answered /info with {text_of(reply)}" if reply else error
            raise SystemExit(f"REF_SERVER = {self.url!r} can't be used: {why}") from error
        where = f"{info.get('model')} at {self.url}"
        check_facts(info, facts_of(tokenizer, temperature), where, model)
        self.info = info

    def score(self, groups):
        """Returns the reference's log-probs (N,) of each group."""
        body, patience = pack_ids(groups), {"wait": self.limit}
        reply = self.call("POST", "/score", data=body, params=patience, timeout=self.limit + 30)
        now = json.loads(reply.headers.get("X-Info", "null"))
        if now != self.info:
            raise Refused(
                f"{self.url} now serves the reference {now}; at the start it was {self.info}:"
                " restart the server with that one"
            )
        return unpack_logps(reply.content, groups)


class TrainerClient(Client):
    """A worker's client of the trainer's rank 0 (grpo/options/workers.py)."""

    command = "deepspeed grpo_ref_split.py PUBLISH_STEPS=1"
    limit_of_body = "MAX_GROUP_BYTES in grpo/options/workers.py"

    def policy(self, worker):
        """Returns (the newest policy's record or None, how many groups `worker` may begin)."""
        answer = self.call("GET", "/policy", params={"worker": worker}).json()
        return answer["policy"], answer["room"]

    def fetch(self, record, path):
        """Downloads the policy of `record` to `path`. Returns False if it is no longer served, or
        if the connection breaks."""
        where = f"/policy/{record['sha256']}"
        reply = self.call("GET", where, timeout=60, expected=[404], stream=True)
        if reply.status_code == 404:
            return False
        try:
            with reply, open(path, "wb") as file:
                file.writelines(reply.iter_content(1 << 20))
        except CUT_OFF:
            return False
        if sha256_of(path) != record["sha256"]:
            raise RuntimeError(f"policy {record['version']} was damaged in transit: wrong SHA-256")
        return True

    def put_group(self, body):
        """Sends a group. Returns "", or why the trainer refused it. Waits without a limit while the
        trainer's queue is full, as a step or an evaluation may take long."""
        wait = Wait(f"space for a group in the queue of {self.url}")
        while not (reply := self.call("POST", "/group", data=body, timeout=60, expected=[503])).ok:
            wait.sleep(reply.text)
        return reply.json()["refused"]
