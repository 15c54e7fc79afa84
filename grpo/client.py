"""The reference server's client, for trainer and workers: a method a route. No wait is silent, and
each has a limit."""

import math
import os
from pathlib import Path
from urllib.parse import unquote

import requests

from grpo.log import say
from grpo.stop import Wait
from grpo.wire import PROTOCOL, sha256_of, unpack_bodies

PART_BYTES = 8 << 20  # of a policy, in one request; below the server's MAX_BODY_BYTES

# What a call raises while the server is down, or when it dies in the middle of its reply
CUT_OFF = (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError)


class RefServer:
    """A client of the server. One thread at a time may use it."""

    def __init__(self, url, wait_limit_seconds):
        self.url, self.limit = url.rstrip("/"), wait_limit_seconds
        self.agreed_hash = None  # of the reference that check() accepted
        self.info = {}  # /info's answer
        self.dropped = 0  # groups that were too old, counted by lease()
        self.session = requests.Session()
        self.session.trust_env = False  # no HTTP_PROXY, which seldom knows a cluster's machines
        if token := os.environ.get("GRPO_TOKEN"):
            self.session.headers["Authorization"] = f"Bearer {token}"

    def copy(self):
        """Returns a second client of the same server, for another thread."""
        second = RefServer(self.url, self.limit)
        second.agreed_hash = self.agreed_hash
        return second

    def call(
        self, method, path, *, timeout=60, limit=math.inf, expected=(), **request
    ) -> requests.Response:
        """Calls a route. Waits while there is no connection or no room (503).

        Raises RuntimeError if the server refuses by a status that is not `expected`, or after
        `limit` or `wait_limit_seconds`.
        """
        url = self.url + path
        wait = Wait(url, min(limit, self.limit))
        while True:
            try:
                reply = self.session.request(method, url, timeout=timeout, **request)
            except CUT_OFF as error:
                wait.turn(f"no answer ({type(error).__name__}); is `python ref_server.py` running?")
                continue
            if reply.ok or reply.status_code in expected:
                return reply
            if reply.status_code != 503:
                raise RuntimeError(f"{url} refused ({reply.status_code}): {reply.text}")
            wait.turn(f"the server has no room: {reply.text}")

    def post(self, path, *, timeout=60, **body) -> requests.Response:
        return self.call("POST", path, timeout=timeout, json=body)

    def check(self, model, facts):
        """Returns /info's answer. `facts` (of the tokenizer, and the temperature) are the policy's.

        Raises SystemExit if the reference's log-probs would not fit the policy `model`.
        """
        mine = facts | {"protocol": PROTOCOL}
        try:
            info = self.call("GET", "/info").json()
            if type(info) is not dict:
                raise ValueError("its /info is not a JSON object")
        except (requests.RequestException, ValueError) as error:
            raise SystemExit(f"REF_SERVER = {self.url!r} is another server: {error}") from error
        except RuntimeError as error:  # the wrong token, or nobody there
            raise SystemExit(str(error)) from error
        wrong = [f"{k} {info.get(k)} and not {v}" for k, v in mine.items() if info.get(k) != v]
        if wrong:
            raise SystemExit(
                f"the reference {info.get('model')} at {self.url} does not fit the policy {model}:"
                f" it has {', '.join(wrong)}. Tokenizer, temperature and protocol must be the same"
                " on both sides"
            )
        self.agreed_hash, self.info = info.get("facts"), info
        return info

    # --- Groups -------------------------------------------------------------------
    def lease(self, run, limit, *, oldest=0, patience=True):
        """Returns {id: body} of up to `limit` of the run's scored groups; {} if there is none yet.

        Without `patience` the server answers at once. Groups that a policy before version `oldest`
        sampled are dropped, and counted in `dropped`.
        """
        reply = self.post("/lease", run=run, limit=limit, oldest=oldest, wait=patience)
        self.dropped += int(reply.headers.get("X-Dropped", 0))
        if reply.status_code == 204:
            return {}
        if self.agreed_hash and reply.headers.get("X-Facts") != self.agreed_hash:
            raise RuntimeError(f"{self.url} now serves another reference model or temperature")
        return unpack_bodies(reply.content, max_header_bytes=len(reply.content))

    def ack(self, run, ids, step):
        """Reports groups as trained, by the rollout after `step` updates.

        Returns whether groups that no checkpoint covers fill half of the server's store.
        """
        reply = self.post("/ack", run=run, ids=list(ids), step=step).json()
        return 2 * reply["kept_bytes"] > reply["max_bytes"]

    def drop(self, run, ids, reason):
        self.post("/drop", run=run, ids=list(ids), reason=reason)

    def stats(self):
        return self.call("GET", "/stats").json()

    # --- Runs ---------------------------------------------------------------------
    def checkpoint(self, run, step):
        """Reports a checkpoint after `step` updates as saved."""
        self.post("/checkpoint", run=run, step=step)

    def resume(self, run, step):
        """Resumes the run from that checkpoint. Returns counts of what the server undid."""
        return self.post("/resume", run=run, step=step).json()

    def end(self, run):
        """Ends the run: its workers need not wait for it."""
        try:
            self.call("POST", "/end", limit=120, json={"run": run})  # the server may be starting
        except RuntimeError as error:
            say(f"the server does not know that the run {run} is over: {error}")

    def log(self, run, records, samples, steps=0):
        """Shows metrics and completions on the server's page, of a run of so many steps."""
        try:
            self.post("/log", run=run, records=records, samples=samples, steps=steps)
        except RuntimeError as error:  # the run can do without a page
            say(f"not on the page: {error}")

    # --- Policies -----------------------------------------------------------------
    def publish(self, path, record):
        """Sends the policy file `path` in parts, then `record` (policies.RECORD), to which it adds
        size and hash."""
        at = {"run": record["run"], "version": record["version"]}
        with open(path, "rb") as file:
            while part := file.read(PART_BYTES):
                offset = file.tell() - len(part)
                self.call("PUT", "/policy", params=at | {"offset": offset}, data=part)
        record |= {"bytes": Path(path).stat().st_size, "sha256": sha256_of(path)}
        self.post("/policy", timeout=600, record=record)  # it is hashed there

    def fetch(self, record, path):
        """Returns the path of the policy of `record`: that of the server's own file if this machine
        has it; else `path`, to which it is downloaded in parts: one that is cut off is asked for
        again, and a long answer would hold one of the server's threads.

        Returns None if the policy is gone, as a newer one has come. Raises RuntimeError if the
        file differs from what was published.
        """
        at = {"run": record["run"], "version": record["version"]}
        wait = Wait(f"policy {record['version']} from {self.url}", math.inf)
        path = Path(path)
        path.unlink(missing_ok=True)  # not emptied: vLLM may still have the old file mapped
        with open(path, "wb") as file:
            while (have := file.tell()) < record["bytes"]:
                part = {"Range": f"bytes={have}-{min(have + PART_BYTES, record['bytes']) - 1}"}
                reply = self.call("GET", "/policy", params=at, headers=part, expected=[404])
                if reply.status_code == 404:
                    return None
                servers = Path(unquote(reply.headers.get("X-Path", "")))
                if not have and holds(servers, record):
                    return servers
                file.write(reply.content)
                wait.turn(f"{file.tell()} of {record['bytes']} bytes have come", pause=0)
        if sha256_of(path) != record["sha256"]:
            raise RuntimeError(f"policy {record['version']} was damaged on its way: wrong SHA-256")
        return path

    def work(self, worker, **asked):
        """Returns {"policy", "first", "count"}, what to sample. Arguments: Pacing.work."""
        return self.post("/work", worker=worker, **asked).json()

    def set_reference(self, run, version):
        """Makes that policy the reference; version -1: the server's own model again."""
        reply = self.post("/reference", timeout=600, run=run, version=version)
        self.agreed_hash = reply.json()["facts"]


def holds(path, record):
    """Whether this is the file of the policy of `record`. The path alone says nothing: it may be
    one of another machine."""
    try:
        same = path.is_file() and path.stat().st_size == record["bytes"]
        return same and sha256_of(path) == record["sha256"]
    except OSError:  # it is not for us to read, or was deleted meanwhile
        return False
