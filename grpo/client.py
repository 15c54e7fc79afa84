"""HTTP clients, a method for each route: RefServer for ranks, Trainer for workers.

Both wait while there is no connection or no room, say so every 10 s, and give up at a limit.
"""

import json
import os
import socket
import time

import requests
from requests.adapters import HTTPAdapter

from grpo.stop import Wait
from grpo.wire import MAX_WAIT_SECONDS, check_facts, facts_of, pack_ids, sha256_of, unpack_logps

PART_BYTES = 8 << 20  # of a policy, in one request
# What a call raises while nobody serves, or if the server dies in the middle of its answer
CUT_OFF = (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError)
AGAIN = (502, 503, 504)  # no room; or a proxy's answer while the server behind it is away
# A server may score for minutes, but a machine that is gone must be noticed: TCP asks it after 10 s
# of silence, and gives up 20 s later
PROBES = {"TCP_NODELAY": 1, "TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}


class Probing(HTTPAdapter):
    def init_poolmanager(self, *args, **kwargs):
        options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
        for name, value in PROBES.items():
            if hasattr(socket, name):  # macOS lacks TCP_KEEPIDLE
                options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
        super().init_poolmanager(*args, socket_options=options, **kwargs)


class Client:
    """What both clients share. Each thread needs a client of its own."""

    command = ""  # that starts the other side

    def __init__(self, url, wait_limit_seconds):
        self.url, self.limit = url.rstrip("/"), wait_limit_seconds
        self.state = ""  # why the current call waits; "" if it does not
        self.speaks = True  # False: another thread says what this client waits for
        self.session = requests.Session()
        self.session.trust_env = False  # no HTTP_PROXY, which seldom knows a cluster's machines
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, Probing())
        if token := os.environ.get("GRPO_TOKEN"):
            self.session.headers["Authorization"] = f"Bearer {token}"

    def call(self, method, path, *, timeout=10, expected=(), **request) -> requests.Response:
        """Calls a route. Raises RuntimeError if the other side refuses by a status that is not
        `expected`, or TooLong if it is away or has no room for `wait_limit_seconds`."""
        url, wait = self.url + path, None
        while True:
            began = time.monotonic()
            try:
                reply = self.session.request(method, url, timeout=(10, timeout), **request)
            except CUT_OFF as error:
                self.state = f"no answer ({type(error).__name__}); does `{self.command}` run?"
                silent = isinstance(error, requests.ReadTimeout)  # it hangs since the request
            else:
                if reply.ok or reply.status_code in expected:
                    self.state = ""
                    return reply
                if reply.status_code not in AGAIN:
                    remedy = "; raise its MAX_BODY_BYTES" if reply.status_code == 413 else ""
                    raise RuntimeError(f"{url} refused ({reply.status_code}): {reply.text}{remedy}")
                self.state, silent = reply.text or f"status {reply.status_code}", True
            # The limit counts from the first failure on. A request that was answered too late, or
            # not at all, has failed since it was sent; one that was cut off has not
            wait = wait or Wait(url, self.limit, speaks=self.speaks)
            if silent:
                wait.start = min(wait.start, began)
            wait.sleep(self.state)


class RefServer(Client):
    """The client of ref_server.py."""

    command = "python ref_server.py"
    info = None  # /info's answer, once check() has accepted it

    def check(self, model, tokenizer, temperature):
        """Raises SystemExit if the reference's log-probs would not fit the policy `model`."""
        try:
            info = self.call("GET", "/info").json()
            if type(info) is not dict:
                raise ValueError("its /info is not a JSON object")
        except (requests.RequestException, ValueError, RuntimeError) as error:
            raise SystemExit(f"REF_SERVER = {self.url!r} can't be used: {error}") from error
        where = f"{info.get('model')} at {self.url}"
        check_facts(info, facts_of(tokenizer, temperature), where, model)
        self.info = info

    def score(self, groups):
        """Returns the reference's log-probs (N,) of each group."""
        body, patience = pack_ids(groups), {"wait": min(int(self.limit), MAX_WAIT_SECONDS)}
        reply = self.call("POST", "/score", data=body, params=patience, timeout=self.limit + 30)
        now = json.loads(reply.headers.get("X-Info", "null"))
        if now != self.info:
            raise RuntimeError(
                f"{self.url} now serves another reference, {now}, than at the start, {self.info}:"
                " start it again with the former one"
            )
        return unpack_logps(reply.content, groups)


class Trainer(Client):
    """A worker's client of the trainer's rank 0 (grpo/training/workers.py)."""

    command = "deepspeed grpo_ref_split.py PUBLISH_STEPS=1"

    def policy(self, worker):
        """Returns (the newest policy's record or None, how many groups `worker` may begin)."""
        answer = self.call("GET", "/policy", params={"worker": worker}).json()
        return answer["policy"], answer["room"]

    def fetch(self, record, path):
        """Downloads the policy of `record` to `path`. Returns False if it is not there any more.
        What is cut off is asked for again from where it ended."""
        path.unlink(missing_ok=True)  # not emptied: vLLM may still have the old file mapped
        with open(path, "wb") as file:
            while (have := file.tell()) < record["bytes"]:
                part = {"Range": f"bytes={have}-{min(have + PART_BYTES, record['bytes']) - 1}"}
                reply = self.call(
                    "GET", f"/policy/{record['sha256']}", headers=part, timeout=60, expected=[404]
                )
                if reply.status_code == 404:
                    return False
                file.write(reply.content)
        if sha256_of(path) != record["sha256"]:
            raise RuntimeError(f"policy {record['version']} was damaged on its way: wrong SHA-256")
        return True

    def put_group(self, body):
        """Hands over a group. Returns "", or why the trainer does not want it. Waits for room
        without a limit: the trainer's step or evaluation may take long."""
        wait = Wait(f"room for a group at {self.url}")
        while not (reply := self.call("POST", "/group", data=body, timeout=60, expected=[503])).ok:
            wait.sleep(reply.text)
        return reply.json()["refused"]
