"""Load on the reference server: many producers, stalled clients, a full store, a full disk.

    python tests/load.py benchmarks/results/load.md                # all, about five minutes
    python tests/load.py load.md --only steady --seconds 10        # one of them, shorter

A real ref_server.py serves a run whose groups need no scores; 64 clients upload groups of 1 MB (64
completions of 2000 tokens), a trainer leases and acknowledges them. Clients are threads that send
bytes made before, so that this process costs the server little. An upload counts from the moment
it was due, so that one slow answer is not hidden by the wait for it.

    steady     each client one group a second, 20 more clients stall half-way through a body
    flat out   each client as fast as it can; the store bounded by MAX_STORE_BYTES
    full store no trainer: 503 and Retry-After, the client waits, says so, and goes on
    full disk  the store on a file system of 64 MB, a tmpfs (root) or a limit of its files
"""

import argparse
import hashlib
import http.client
import json
import os
import resource
import signal
import sqlite3
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch
from fuzz import resident, served
from helpers import make_group
from measure import facts

from grpo.client import RefServer
from grpo.wire import pack_group

CLIENTS, STALLED = 64, 20
COMPLETIONS, TOKENS = 64, 2000  # 8 bytes a token: 1 MB
LEASE = 16  # groups in one lease of the trainer
P99_SECONDS = 0.25  # of an upload, steady
TIMEOUT_SECONDS = 30
RUN = "load"
STORE_BYTES = 256 << 20  # flat out, full store
DISK_BYTES = 64 << 20


def cpu_seconds(pid):
    """-> what the process has used so far: unlike time, not what others on the machine do."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# --- Clients ------------------------------------------------------------------------
class Uploader:
    """Sends one group again and again, under another id each time."""

    def __init__(self, url, name):
        group = make_group([TOKENS] * COMPLETIONS, id="NUMBER__", run=RUN)
        body = pack_group(group)
        at = body.index(b"NUMBER__")
        self.parts, self.size = (body[:at], memoryview(body)[at + 8 :]), len(body)
        self.name, self.number = name, 0
        self.connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=TIMEOUT_SECONDS)

    def begin(self):
        """Sends the request's head and the body's first bytes."""
        self.connection.putrequest("POST", "/upload", skip_accept_encoding=True)
        self.connection.putheader("Content-Length", str(self.size))
        self.connection.endheaders()
        first, rest = self.parts
        self.connection.send(first + f"{self.name[:2]}{self.number:06d}".encode())
        return rest

    def upload(self):
        """-> (status, Retry-After, reason); the number stays the same until it is stored."""
        self.connection.send(self.begin())
        reply = self.connection.getresponse()
        answer = json.loads(reply.read())
        if reply.status == 200:
            assert answer == {"stored": True}, answer
            self.number += 1
        return reply.status, reply.headers.get("Retry-After"), answer.get("error", "")


class Load:
    """Clients, trainer, and a look at the server every second, in threads, until `stop`."""

    def __init__(self, url, pid):
        self.url, self.pid, self.stop = url, pid, threading.Event()
        self.lock, self.start, self.failures = threading.Lock(), time.monotonic(), []
        self.uploads, self.full, self.memory, self.leased = [], [], [], 0
        self.threads, self.cpu = [], -cpu_seconds(pid)

    def go(self, function, *args):
        def run():
            try:
                function(*args)
            except (OSError, http.client.HTTPException, AssertionError) as error:
                if not self.stop.is_set():
                    self.failures.append(f"{function.__name__}: {error!r}")

        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()

    def produce(self, number, period):
        """One group each `period` seconds (0: as fast as they are taken)."""
        uploader = Uploader(self.url, f"{number:02d}-client")
        due = time.monotonic() + number / CLIENTS * (period or 1)
        while not self.stop.wait(max(0.0, due - time.monotonic())):
            try:
                status, after, reason = uploader.upload()
            except TimeoutError:
                self.failures.append(f"client {number} timed out")
                return
            now = time.monotonic()
            if status == 503:
                assert after and reason, "a 503 without Retry-After, or without a sentence"
                with self.lock:
                    self.full.append((now - self.start, reason))
                self.stop.wait(float(after))
                due = time.monotonic() if not period else due
                continue
            assert status == 200, (status, reason)
            with self.lock:
                self.uploads.append((now - self.start, now - due))
            due = due + period if period else now

    def stall(self, number):
        """Half a body, and then nothing; once more when the server has had enough of it."""
        while not self.stop.is_set():
            uploader = Uploader(self.url, f"{number + CLIENTS}-stalled")
            rest = uploader.begin()
            uploader.connection.send(rest[: uploader.size // 2])
            uploader.connection.sock.settimeout(1)
            while not self.stop.is_set():
                with suppress(TimeoutError):
                    if uploader.connection.sock.recv(1) == b"":
                        break

    def train(self):
        """Leases and acknowledges; each step has its checkpoint."""
        step = 0
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=TIMEOUT_SECONDS)
        while not self.stop.is_set():
            connection.request("POST", "/lease", json.dumps({"run": RUN, "limit": LEASE}))
            reply = connection.getresponse()
            blobs = reply.read()
            if reply.status == 503:
                self.stop.wait(1)
            if reply.status != 200:
                continue
            (size,) = struct.unpack_from("<Q", blobs)
            ids = [id for id in json.loads(blobs[8 : 8 + size]) if id != "__metadata__"]
            connection.request("POST", "/ack", json.dumps({"run": RUN, "ids": ids, "step": step}))
            assert json.loads(connection.getresponse().read())["acknowledged"] == len(ids)
            step += 1
            connection.request("POST", "/checkpoint", json.dumps({"run": RUN, "step": step}))
            connection.getresponse().read()
            self.leased += len(ids)

    def watch(self):
        while not self.stop.wait(1):
            self.memory.append(resident(self.pid) >> 20)

    def run(self, seconds):
        self.stop.wait(seconds)
        self.cpu += cpu_seconds(self.pid)
        self.stop.set()
        for thread in self.threads:
            thread.join(TIMEOUT_SECONDS)


def publish(url):
    """Makes RUN one whose groups need no scores, as without a KL penalty."""
    weights = b"weights"
    record = {"run": RUN, "version": 0, "bytes": len(weights), "capacity": 1000, "oldest": 0}
    record |= {"sha256": hashlib.sha256(weights).hexdigest(), "scored": False}
    server = RefServer(url, 60)
    query = {"run": RUN, "version": 0, "offset": 0}
    server.call("PUT", "/policy", params=query, data=weights)
    server.call("POST", "/policy", json={"record": record | {"settings": {}, "proof": {}}})
    return server


# --- Scenarios: -> a row of the table, and a list of what should not have been -------
@contextmanager
def server_with_run(**constants):
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/tmp")) as folder:
        folder = Path(folder)
        with served(folder, max_tokens=4096, **constants) as (process, url):
            server = publish(url)
            try:
                yield process, url, server
            except BaseException:
                print((folder / "log").read_text()[-3000:])
                raise


def table_row(name, load, seconds):
    """-> the row, and throughput and memory over time."""
    latencies = sorted(1e3 * latency for _, latency in load.uploads)
    p50, p99 = (statistics.quantiles(latencies, n=100, method="inclusive")[i] for i in (49, 98))
    rates = [
        sum(10 * k <= t < 10 * (k + 1) for t, _ in load.uploads) / 10
        for k in range(int(seconds) // 10)
    ]
    cpu = f"{1e3 * load.cpu / len(latencies):.1f}" if load.cpu > 0 else ""
    row = [name, len(latencies), cpu, f"{p50:.0f}", f"{p99:.0f}", f"{latencies[-1]:.0f}"]
    row += [len([f for f in load.failures if "timed out" in f]), len(load.full)]
    row += [" ".join(f"{rate:.0f}" for rate in rates) or f"{len(latencies) / seconds:.0f}"]
    row += [" ".join(str(m) for m in load.memory[9::10])]
    return row, p99 / 1e3, rates


def steady(seconds):
    with server_with_run() as (process, url, _):
        load = Load(url, process.pid)
        load.go(load.watch)
        load.go(load.train)
        for number in range(STALLED):
            load.go(load.stall, number)
        for number in range(CLIENTS):
            load.go(load.produce, number, 1.0)
        load.run(seconds)
    row, p99, _ = table_row("steady", load, seconds)
    wrong = list(load.failures)
    if p99 > P99_SECONDS:
        wrong.append(f"p99 of an upload is {1e3 * p99:.0f} ms")
    if len(load.uploads) < 0.95 * CLIENTS * (seconds - 1):
        wrong.append(f"{len(load.uploads)} uploads in {seconds} s")
    return row, wrong


def flat_out(seconds):
    with server_with_run(MAX_STORE_BYTES=STORE_BYTES) as (process, url, server):
        load = Load(url, process.pid)
        load.go(load.watch)
        load.go(load.train)
        for number in range(CLIENTS):
            load.go(load.produce, number, 0)
        load.run(seconds)
        stats = server.stats()
    row, _, rates = table_row("flat out", load, seconds)
    wrong = list(load.failures)
    if stats["bytes"] > STORE_BYTES:
        wrong.append(f"the store holds {stats['bytes']} bytes")
    if len(load.memory) > 30 and load.memory[-1] > 1.2 * max(load.memory[10:30]):
        wrong.append("memory grows")
    if len(rates) > 3 and min(rates[1:]) < 0.5 * statistics.median(rates[1:]):
        wrong.append("throughput is not flat")
    return row, wrong


def full_store(seconds):
    """Producers wait, and say so, until a trainer makes room."""
    with server_with_run(MAX_STORE_BYTES=16 << 20) as (process, url, server):
        load, uploader = Load(url, process.pid), Uploader(url, "99-client")
        load.go(load.watch)
        start, answer = time.monotonic(), (200,)
        while answer[0] == 200:
            answer = uploader.upload()
            load.uploads.append((time.monotonic() - load.start, time.monotonic() - start))
            start = time.monotonic()
        status, after, reason = answer
        wrong = [] if (status, after) == (503, "1") else [f"{status}, Retry-After {after}"]
        print(f"full store: {reason}")
        group = make_group([TOKENS] * COMPLETIONS, id="waits", run=RUN)
        threading.Timer(12, load.go, [load.train]).start()
        reply = RefServer(url, 60).call("POST", "/upload", data=pack_group(group))
        if reply.json() != {"stored": True} or time.monotonic() - start < 11:
            wrong.append(f"the producer that waited got {reply.text}")
        load.full.append((0, reason))
        held = server.stats()["bytes"]
        load.stop.set()
    if held > 16 << 20:
        wrong.append(f"the store holds {held} bytes")
    return table_row("full store", load, seconds)[0], wrong + load.failures


@contextmanager
def small_disk():
    """-> (folder, free): a file system of DISK_BYTES, of which a file takes half; free(pid) ends
    that. Without root it is a limit on how large the server's files may become."""
    with tempfile.TemporaryDirectory() as folder:
        if os.geteuid() == 0:
            mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", folder]
            subprocess.run(mount, check=True)
            try:
                ballast = Path(folder, "ballast")
                ballast.write_bytes(bytes(DISK_BYTES // 2))
                yield Path(folder), lambda pid: ballast.unlink()
            finally:
                subprocess.run(["umount", "-l", folder], check=True)
        else:
            endless = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (DISK_BYTES // 4, before[1]))
            try:  # the server inherits it
                yield (
                    Path(folder),
                    lambda pid: resource.prlimit(pid, resource.RLIMIT_FSIZE, endless),
                )
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)


def full_disk(seconds):
    """A 503 that says so; then room again, and everything that was answered with 200 is there."""
    wrong = []
    with small_disk() as (disk, free), server_with_run(STORE=str(disk / "store.sqlite")) as context:
        process, url, server = context
        load, uploader = Load(url, process.pid), Uploader(url, "00-client")
        load.go(load.watch)

        def fill(most):
            answer = (200,)
            while answer[0] == 200 and uploader.number < most:
                start = time.monotonic()
                answer = uploader.upload()
                load.uploads.append((start - load.start, time.monotonic() - start))
            return answer

        status, after, reason = fill(DISK_BYTES >> 20)
        print(f"full disk, after {uploader.number} groups: {status}, Retry-After {after}: {reason}")
        if status != 503 or not after or "disk" not in reason or str(disk) not in reason:
            wrong.append(f"a full disk is answered {status}: {reason}")
        for _ in range(20):  # it stays so, and nothing breaks
            if uploader.upload()[0] != 503:
                wrong.append("an upload fits after all")
                break
        load.full += [(0, reason)] * 21
        if server.call("GET", "/stats").json()["scored"] != uploader.number:
            wrong.append(f"{server.stats()} after {uploader.number} uploads")
        free(process.pid)
        stored = uploader.number
        if fill(stored + 5)[0] != 200:
            wrong.append("no upload is taken when there is room again")
        load.go(load.train)
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while load.leased < uploader.number and time.monotonic() < deadline:
            time.sleep(0.1)
        if load.leased != uploader.number or process.poll() is not None:
            wrong.append(f"{load.leased} of {uploader.number} groups came back")
        load.stop.set()
        process.send_signal(signal.SIGTERM)
        process.wait(TIMEOUT_SECONDS)
        db = sqlite3.connect(disk / "store.sqlite")
        (check,) = db.execute("PRAGMA integrity_check").fetchone()
        db.close()
        if check != "ok":
            wrong.append(f"integrity_check: {check}")
    return table_row("full disk", load, seconds)[0], wrong + load.failures


# --- Main ---------------------------------------------------------------------------
SCENARIOS = {"steady": (steady, 60), "flat": (flat_out, 120)}
SCENARIOS |= {"store": (full_store, 1), "disk": (full_disk, 1)}
HEAD = "| scenario | uploads | server's CPU ms each | p50 ms | p99 ms | max ms | timeouts | 503s"
HEAD += " | uploads/s, each 10 s | server's memory, MB, each 10 s |\n"
HEAD += "|---" * HEAD.count(" | ") + "|---|\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", type=Path, help="where to write the table")
    parser.add_argument("--only", choices=SCENARIOS)
    parser.add_argument("--seconds", type=float, help="of steady and flat out")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    rows, wrong = [], []
    for name in [asked.only] if asked.only else SCENARIOS:
        scenario, seconds = SCENARIOS[name]
        row, reasons = scenario(asked.seconds or seconds)
        rows.append("| " + " | ".join(map(str, row)) + " |")
        wrong += [f"{name}: {reason}" for reason in reasons]
        print(rows[-1], flush=True)
    what = facts("waitress", "bottle").replace("benchmarks/load.py", "tests/load.py")
    what += f" {CLIENTS} clients, groups of 1 MB, SQLite {sqlite3.sqlite_version}.\n\n"
    asked.table.write_text(what + HEAD + "\n".join(rows) + "\n")
    sys.exit("\n".join(wrong) if wrong else 0)


if __name__ == "__main__":
    main()
