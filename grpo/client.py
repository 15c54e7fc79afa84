"""The reference server as its clients see it: trainer and workers. Every wait says what for, every
10 seconds, and ends with an error some time."""

import contextlib
import json
import os
import time
from pathlib import Path

import requests

from grpo.stop import stop
from grpo.wire import PROTOCOL, sha256_of, unpack_bodies

STOP_SECONDS = 25  # a wait, once this process was asked to end; deepspeed kills it after 30
PART_BYTES = 8 << 20  # of a policy, in one request; below the server's MAX_BODY_BYTES
LOG_PAUSE_SECONDS = 30  # after a POST /log that failed
UNLOGGED_RECORDS = 1000  # kept meanwhile; the server takes 4000 in one post

# What a call raises while the server is down, or when it dies in the middle of its reply
CUT_OFF = (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError)


class RefServer:
    """Calls of the server's routes. One thread at a time may use it."""

    def __init__(self, url, wait_limit_seconds):
        self.url, self.limit, self.agreed = url.rstrip("/"), wait_limit_seconds, None
        self.info, self.regroups = {}, False  # what check() was told; the use of flat groups
        self.dropped = 0  # groups that lease() was told were too old
        self.unlogged, self.log_after = [], 0.0  # records that log() still has to send, and when
        self.session = requests.Session()
        self.session.trust_env = False  # no HTTP_PROXY, which seldom knows a cluster's machines
        if token := os.environ.get("GRPO_TOKEN"):
            self.session.headers["Authorization"] = f"Bearer {token}"

    def twin(self):
        """-> another client of the same server, for another thread."""
        twin = RefServer(self.url, self.limit)
        twin.agreed = self.agreed
        return twin

    def call(self, method, path, **request):
        """-> the response. Waits while there is no connection or no room; raises RuntimeError if
        the server refuses, or after `wait_limit_seconds`."""
        wait, request = Wait(f"{self.url}{path}", self.limit), {"timeout": 60} | request
        while True:
            try:
                reply = self.session.request(method, self.url + path, **request)
            except CUT_OFF as error:
                wait.turn(f"no answer ({type(error).__name__}); is `python ref_server.py` running?")
                continue
            if reply.status_code == 503:
                wait.turn(f"the server has no room: {reply.text}")
                continue
            if not reply.ok:
                raise RuntimeError(f"{self.url}{path} refused ({reply.status_code}): {reply.text}")
            return reply

    def check(self, model, facts):
        """-> what /info says; SystemExit if its log-probs would not fit the policy `model`."""
        try:
            info, mine = self.call("GET", "/info").json(), facts | {"protocol": PROTOCOL}
            if type(info) is not dict:
                raise ValueError("its /info is no JSON object")
        except (requests.RequestException, ValueError) as error:
            raise SystemExit(f"REF_SERVER = {self.url!r} is no ref_server.py: {error}") from error
        except RuntimeError as error:  # the wrong token, or nobody there
            raise SystemExit(str(error)) from error
        self.agreed, self.info = info.get("facts"), info
        self.regroups = bool(info.get("regroup"))
        wrong = [name for name in mine if info.get(name) != mine[name]]
        if wrong:
            differ = ", ".join(f"{name} {info.get(name)} and not {mine[name]}" for name in wrong)
            raise SystemExit(
                f"the reference {info.get('model')} at {self.url} does not fit the policy {model}:"
                f" it has {differ}. Tokenizer, temperature and protocol must be the same on both"
                " sides"
            )
        return info

    def lease(self, run, limit, *, oldest=0, step=0, patience=True):
        """-> {id: body} of up to `limit` of the run's scored groups; {} if there is none yet.

        Without `patience` the server answers at once. Groups that a policy before version `oldest`
        sampled are dropped, and counted in `dropped`; `step` is the updates made so far.
        """
        ask = {"run": run, "limit": limit, "oldest": oldest, "step": step, "wait": patience}
        reply = self.call("POST", "/lease", json=ask)
        self.dropped += int(reply.headers.get("X-Dropped", 0))
        if reply.status_code == 204:
            return {}
        if self.agreed and reply.headers.get("X-Facts") != self.agreed:
            raise RuntimeError(f"{self.url} now serves another reference model or temperature")
        return unpack_bodies(reply.content, max_header_bytes=len(reply.content))

    def stats(self):
        return self.call("GET", "/stats").json()

    def log(self, run, records, samples):
        """Shows metrics and completions on the server's page, if it is there to take them.

        Training neither ends nor waits for a page: one try of 5 s, and after a failure none for 30.
        Records are kept meanwhile, so that the curves have no gap.
        """
        self.unlogged = (self.unlogged + records)[-UNLOGGED_RECORDS:]
        if time.monotonic() < self.log_after:
            return
        body = json.dumps({"run": run, "records": self.unlogged, "samples": samples}).encode()
        try:
            reply = self.session.request("POST", f"{self.url}/log", data=body, timeout=5)
        except requests.RequestException:
            self.log_after = time.monotonic() + LOG_PAUSE_SECONDS
            return
        if not reply.ok:
            self.log_after = time.monotonic() + LOG_PAUSE_SECONDS
            print(f"{self.url}/log refused ({reply.status_code}): {reply.text}", flush=True)
        if reply.status_code < 500:  # what was refused once is refused again
            self.unlogged = []

    # --- Steps --------------------------------------------------------------------
    def ack(self, run, ids, step):
        """These groups were trained, after `step` updates. -> whether the server's store is half
        full of what no checkpoint covers."""
        ask = {"run": run, "ids": list(ids), "step": step}
        reply = self.call("POST", "/ack", json=ask).json()
        return 2 * reply["kept_bytes"] > reply["max_bytes"]

    def drop(self, run, ids, reason):
        self.call("POST", "/drop", json={"run": run, "ids": list(ids), "reason": reason})

    def checkpoint(self, run, step):
        """A checkpoint after `step` updates has been saved."""
        self.call("POST", "/checkpoint", json={"run": run, "step": step})

    def resume(self, run, step):
        """The run goes on from that checkpoint. -> counts of what the server undid."""
        return self.call("POST", "/resume", json={"run": run, "step": step}).json()

    # --- Policies -----------------------------------------------------------------
    def publish(self, path, record):
        """Sends the policy file `path`, in parts, and its record (hub.RECORD)."""
        query = {"run": record["run"], "version": record["version"]}
        with open(path, "rb") as file:
            while part := file.read(PART_BYTES):
                at = {"offset": file.tell() - len(part)}
                self.call("PUT", "/policy", params=query | at, data=part)
        record |= {"bytes": Path(path).stat().st_size, "sha256": sha256_of(path)}
        self.call("POST", "/policy", json={"record": record}, timeout=600)  # it is hashed there

    def fetch(self, record, path):
        """Downloads the policy of `record` to the file `path`, whole and checked.

        A connection that breaks is taken up again where it broke. -> False if the policy is gone,
        as a newer one has come. RuntimeError if what came is not what was published.
        """
        query = {"run": record["run"], "version": record["version"]}
        wait, path = Wait(f"policy {record['version']} from {self.url}", self.limit), Path(path)
        path.unlink(missing_ok=True)
        have = 0
        while have < record["bytes"]:
            # in parts, as a long answer would keep one of the server's few threads
            part = f"bytes={have}-{min(have + PART_BYTES, record['bytes']) - 1}"
            ask = {"params": query, "headers": {"Range": part}, "stream": True}
            try:
                with self.session.get(f"{self.url}/policy", timeout=60, **ask) as reply:
                    if reply.status_code == 404:
                        return False
                    if reply.status_code != 206:
                        raise RuntimeError(f"GET /policy: {reply.status_code}: {reply.text}")
                    with open(path, "ab") as file:
                        for part in reply.iter_content(1 << 20):
                            have += file.write(part)
                            wait.moved()
                            wait.turn(f"{have} of {record['bytes']} bytes have come", pause=0)
            except CUT_OFF as error:
                wait.turn(f"the connection broke ({type(error).__name__}) after {have} bytes")
        if sha256_of(path) != record["sha256"]:
            raise RuntimeError(f"policy {record['version']} was damaged on its way: wrong SHA-256")
        return True

    def work(self, worker, *, held, want, run, version, sha256, pulled=False):
        """-> {"policy", "first", "count"}: see Hub.work."""
        ask = {"worker": worker, "held": held, "want": want, "run": run, "version": version}
        ask |= {"sha256": sha256, "pulled": pulled}
        return self.call("POST", "/work", json=ask).json()

    def end(self, run):
        """Says that the run is over; where the server is not there to hear it, says so here."""
        twin = self.twin()
        twin.limit = min(self.limit, 120)  # it may be starting
        try:
            twin.call("POST", "/end", json={"run": run})
        except RuntimeError as error:
            print(f"the server does not know that the run {run} is over: {error}", flush=True)

    def set_reference(self, run, version):
        """Makes that policy the reference; version -1: the server's own model again."""
        reply = self.call("POST", "/reference", json={"run": run, "version": version}, timeout=600)
        self.agreed = reply.json()["facts"]


class Wait:
    """A wait that says every 10 s what it is for, and ends with an error."""

    def __init__(self, what, limit_seconds):
        self.what, self.limit = what, limit_seconds
        self.start = self.said = time.monotonic()

    def moved(self):
        """Something came: the limit counts from now."""
        self.start = time.monotonic()

    def turn(self, why, pause=0.5):
        now = time.monotonic()
        if now - self.start > self.limit:
            raise RuntimeError(f"waited {self.limit} s for {self.what}: {why}")
        if stop.asked and now - max(self.start, stop.at) > STOP_SECONDS:
            what = f"the step can't be finished without {self.what}: {why}"
            raise RuntimeError(
                f"ended by {stop.asked} without a checkpoint of the last steps: {what}"
            )
        if now - self.said > 10:
            self.said = now
            with contextlib.suppress(OSError):  # whoever read it may be gone, by the same Ctrl-C
                print(f"waiting for {self.what} since {now - self.start:.0f} s: {why}", flush=True)
        time.sleep(pause)
