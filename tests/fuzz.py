"""Fuzzer of both HTTP servers: ref_server.py, a process, and rank 0's routes for workers.

    python tests/fuzz.py 100000      # prints a table; eight minutes

Requests are malformed by structure (tensors, ids, lengths, query, method, path, headers, token) and
by mutation of bytes. Three in four go through http.client, the others as raw bytes over a socket,
with framing that no client would send. Each refusal must be a sentence in JSON with a status below
500, or 503; memory must stay flat, and in the end both servers must still serve.
"""

import collections
import contextlib
import http.client
import io
import json
import os
import random
import re
import socket
import struct
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import quote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import numpy as np
import psutil
import torch
from fakes import tiny_policy
from helpers import VOCAB, make_group, raw
from processes import server_process
from safetensors.numpy import load, save
from trainer_side import publish, sample_of, serving

from grpo.client import RefServer, Trainer
from grpo.wire import pack_ids

PARKED = 20  # raw requests whose answer is read later: some never get one
MOST_GROWTH = 30 << 20  # bytes of a server's memory
NUMBERS = [0, 1, -1, 7, 2**31 - 1, 2**31, 2**62, 2**63, 2**64, 10**400, 1.5, True, None]
TEXTS = ["", "a", "x" * 201, "\ud800", "a\0b", "a\nb", "../../etc/passwd", "é" * 300, "組" * 70_000]
ODD = [*NUMBERS, *TEXTS, [], {}, [[]], {"a": {}}, ["a", "a"], [None]]
IDS = [-1, VOCAB, 2**31 - 1, -(2**31)]
METHODS = ["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "TRACE", "BREW"]
DTYPES = ["I64", "U8", "F64", "BF16", "F4", "I33", "", 7, "I32", "F32", "BOOL"]
SHAPES = [[], [0], [-1], [2**32, 2**32], [2**63], [1] * 5000, [1.5], None, [1 << 40], [3]]


# --- Bodies ---------------------------------------------------------------------------
def spoil_arrays(draw, meta, arrays):
    name = draw.choice(list(arrays))
    array, way = arrays[name], draw.randrange(8)
    if way == 1:
        arrays[draw.choice(["advantages", "ref_logps", "own", "", "__metadata_"])] = array
    elif way == 2:
        arrays[name] = np.zeros([draw.choice([0, 1, 2, 7])] * draw.randrange(4), array.dtype)
    elif way == 3:
        other = draw.choice([np.int64, np.uint8, np.float64, np.float16])
        arrays[name] = np.zeros_like(array, other)
    elif way == 4 and meta:
        meta[draw.choice(list(meta))] = draw.choice(ODD)
    elif way > 4 and array.size and array.dtype == np.float32:
        array.flat[draw.randrange(array.size)] = draw.choice([np.nan, np.inf, 1e38])
    elif way > 4 and array.size and array.dtype == np.int32:
        array.flat[draw.randrange(array.size)] = draw.choice([0, *IDS])
    else:
        del arrays[name]


def spoil_header(draw, header):
    view = header[draw.choice([name for name in header if name != "__metadata__"])]
    what = draw.choice(["dtype", "shape", "data_offsets", "entry", "many", "metadata"])
    if what == "entry":
        header[draw.choice(["x", *header])] = draw.choice(ODD)
    elif what == "many":
        for i in range(draw.choice([10, 3000])):
            header[f"t{i}"] = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    elif what == "metadata":
        text = draw.choice(["[" * 9000, '{"a":' * 9000, "9" * 5000, "null", "[1]", "\ud800", "{"])
        header["__metadata__"] = draw.choice([{"grpo": text}, "", None, {"format": "pt"}])
    elif what == "data_offsets":
        begin, end = view[what]
        lies = [[end, begin], [begin, 2 << 30], [begin, end + 1], [0, 0], [begin], None, "0"]
        view[what] = draw.choice([*lies, draw.choices(NUMBERS[:9], k=2)])
    else:
        view[what] = draw.choice(DTYPES if what == "dtype" else SHAPES)


def spoil_bytes(draw, body):
    body, way = bytearray(body), draw.randrange(7)
    if way == 0:
        sizes = [0, 1, len(body), 2 << 30, 2**63, 2**64 - 1, 90_000_000]
        return struct.pack("<Q", draw.choice(sizes)) + body[8:]
    if way == 1:
        return body[: draw.choice([1, 7, 8, 9, len(body) - 1, draw.randrange(1, len(body))])]
    if way == 2:
        return body + bytes(draw.choice([1, 8, 100_000]))
    if way == 3:
        return draw.randbytes(draw.choice([1, 8, 1000]))
    if way == 4:
        a, b = sorted(draw.choices(range(len(body)), k=2))
        return body[:a] + body[b:] or b"x"
    for _ in range(draw.choice([1, 1, 2, 8])):
        body[draw.randrange(len(body) if way == 5 else min(300, len(body)))] = draw.randrange(256)
    return body


def spoiled(draw, body, way):
    """-> the body, spoiled on one level: "tensors", "header" or "bytes"."""
    (size,) = struct.unpack_from("<Q", body)
    header = json.loads(body[8 : 8 + size])
    if way == "tensors":
        arrays = {name: array.copy() for name, array in load(body).items()}
        meta = json.loads(header.get("__metadata__", {}).get("grpo", "null"))
        for _ in range(draw.choice([1, 1, 2])):
            spoil_arrays(draw, meta, arrays)
        return save(arrays, meta and {"grpo": json.dumps(meta)})
    if way == "header":
        spoil_header(draw, header)
        return raw(header, body[8 + size :])
    return bytes(spoil_bytes(draw, body))


# --- Requests -------------------------------------------------------------------------
def http_case(draw, path, body):
    """-> (method, path, body, headers) for http.client."""
    way = draw.choice(["tensors", "tensors", "header", "bytes", "bytes", "route", "headers"])
    if way == "route":
        wait = draw.choice(["", "-1", "1e3", "1.5", "9" * 30, "%ff", "%00", "\u0669", "x" * 5000])
        name = draw.choice([*TEXTS[2:-1], "%ff"]).encode("utf-8", "surrogatepass")
        paths = ["/", "//", "/%ff%00", "/score", "/group", "/policy", "/policy/", "/info?wait=1"]
        paths += ["/../etc/passwd", f"/score?wait={quote(wait)}", f"/policy?worker={quote(name)}"]
        paths += ["/" + "x" * 3000, "/policy/" + "0" * 64]
        return draw.choice(METHODS), draw.choice(paths), draw.choice([b"", b"x", body]), {}
    if way != "headers":
        return "POST", path, spoiled(draw, body, way), {}
    size = draw.choice(["1" * 30, str(65 << 20), "0x10", "-5", "+5", "1e3", "", "٣".encode()])
    odd = {"Content-Length": size, "Transfer-Encoding": draw.choice(["gzip", "x", "chunked, gzip"])}
    odd |= {"Authorization": "Bearer \xff", "Origin": "http://evil", "Host": "x" * 300}
    odd |= {"Range": draw.choice(["bytes=9-1", "bytes=-", "x"]), "If-Modified-Since": "x" * 99}
    odd |= {"Expect": "200-maybe", "X": "y" * draw.choice([1, 300_000]), "A B": "c"}
    name = draw.choice(list(odd))
    return draw.choice(["POST", "GET"]), path, body, {name: odd[name]}


def raw_case(draw, path, body):
    """-> bytes to send as they are."""
    body = spoiled(draw, body, "bytes")
    length = f"Content-Length: {len(body)}"
    heads = [
        f"POST {path} HTTP/1.1\r\n{length}\r\n{length}1",
        f"POST {path} HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
        f"POST {path} HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc",
        f"POST {path} HTTP/1.1\r\nTransfer-Encoding: deflate\r\n{length}",
        f"POST {path} HTTP/1.1\r\nContent-Length: {draw.choice(ODD)!a}",
        f"POST {path}\r\n{length}",
        f"{path} POST HTTP/9.9\r\n{length}",
        f"POST {path} HTTP/1.1\n{length}\n",
        f"POST http://[::1{path} HTTP/1.1\r\n{length}",
        f"POST {path} HTTP/1.1\r\n: x\r\n{length}",
        f"POST {path} HTTP/1.1\r\nX: a\r\n b\r\n{length}",
        f"POST {path} HTTP/1.1\r\nX\0: \x01\r\n{length}",
        f"GET /{'%' * draw.choice([1, 5000])} HTTP/1.0",
        "\x16\x03\x01\x02\x00\x01\x00",
        "\r\n" * 50,
    ]
    text = draw.choice(heads).encode("utf-8", "surrogatepass") + b"\r\n\r\n" + body
    return bytes(spoil_bytes(draw, text)) if draw.random() < 0.3 else text


# --- Answers --------------------------------------------------------------------------
def check(status, text, request):
    """Raises AssertionError or ValueError if this is not how a malformed request is answered."""
    said = f"{status} {text[:300]!r} for {request!a:.600}"
    assert status in (200, 206, "closed") or 400 <= status < 500 or status == 503, said
    if text and status not in (200, 206, "closed"):
        reason = json.loads(text)["error"]
        assert isinstance(reason, str) and " " in reason and len(text) < 9000, said


class Target:
    """A server, the process `pid`, and how often it has answered with each status. `path` is where
    it takes the body `valid(draw)`; `rest` is called now and then."""

    def __init__(self, url, pid, path, valid, rest=lambda: None):
        self.host, self.pid, self.path = urlsplit(url).netloc, pid, path
        self.valid, self.rest = valid, rest
        self.connection = http.client.HTTPConnection(self.host, timeout=30)
        self.parked = collections.deque()  # (connection, what was sent)
        self.statuses = collections.Counter()

    def fuzz(self, count, seed):
        """Sends requests, a fifth more at first; -> memory in bytes after these, and after each
        fifth. AssertionError, with its number, at the first that is answered wrongly, or if memory
        grows."""
        memory, part = [], count // 5
        for number in range(6 * part):
            try:
                self.send(random.Random(f"{seed}/{number}"))
            except Exception as error:
                raise AssertionError(f"seed {seed}, request {number}: {error!r}") from error
            if number % 50 == 0:
                self.rest()
            if number + 1 == part:  # glibc keeps pieces for each of 64 threads, which fill slowly
                self.statuses.clear()
            if (number + 1) % part == 0:
                memory.append(psutil.Process(self.pid).memory_info().rss)
        while self.parked:
            self.check_raw()
        assert memory[-1] - memory[0] < MOST_GROWTH, memory
        return memory

    def send(self, draw):
        if draw.random() < 0.25:
            self.send_raw(raw_case(draw, self.path, self.valid(draw)))
            return
        method, path, body, headers = http_case(draw, self.path, self.valid(draw))
        status, text = self.send_http(method, path, body, headers)
        self.statuses[status] += 1
        assert status != "closed" or headers, f"no answer to {method} {path!a:.600}"
        check(status, b"" if method == "HEAD" else text, (method, path, headers))

    def send_http(self, method, path, body, headers):
        for _ in range(2):  # the server may have closed the connection after its last answer
            try:
                self.connection.putrequest(method, path, skip_host="Host" in headers)
                if not headers.keys() & {"Content-Length", "Transfer-Encoding"}:
                    self.connection.putheader("Content-Length", str(len(body)))
                for name, value in headers.items():
                    self.connection.putheader(name, value)
                self.connection.endheaders(body)
                with self.connection.getresponse() as reply:
                    text = reply.read()
                if headers:  # what follows in the connection may be read otherwise
                    self.connection.close()
                return reply.status, text
            except (ConnectionError, http.client.HTTPException):
                self.connection.close()
                if headers:  # refused before all was sent
                    break
        return "closed", b""

    def send_raw(self, data):
        """Sends bytes on a connection of their own; checks those of PARKED requests ago, which the
        server has answered, or it waits for the rest of them."""
        connection = socket.create_connection(self.host.split(":"), timeout=30)
        with contextlib.suppress(ConnectionError):  # refused, and closed, before all was sent
            connection.sendall(data)
        self.parked.append((connection, data))
        if len(self.parked) > PARKED:
            self.check_raw()

    def check_raw(self):
        connection, data = self.parked.popleft()
        answer = b""
        with connection:
            try:
                connection.shutdown(socket.SHUT_WR)
                answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
            except TimeoutError:
                raise
            except OSError:  # as above
                pass
        parts = re.split(rb"(?=HTTP/1\.[01] \d{3} )", answer)[1:]
        found = [(int(p[9:12]), p.partition(b"\r\n\r\n")[2]) for p in parts]
        for status, text in found or [("closed", b"")]:
            self.statuses[status] += 1
            check(status, text, data)


# --- The two servers ------------------------------------------------------------------
@contextlib.contextmanager
def reference(folder, model):
    """Runs ref_server.py while the block runs; -> its Target. It still scores in the end."""

    def groups(draw):
        lengths = [[draw.randint(1, 9) for _ in range(draw.randint(1, 4))] for _ in "ab"]
        return pack_ids([make_group(sizes, seed=draw.randrange(99)) for sizes in lengths])

    with server_process(folder, model, DTYPE="float32") as (process, url):
        client, group, policy = RefServer(url, 60), make_group([5, 2, 3]), tiny_policy(model)
        client.info = client.call("GET", "/info").json()  # waits until it serves
        yield Target(url, process.pid, "/score?wait=9", groups)
        prompt, parts = group.prompt_ids.tolist(), group.completions(group.completion_ids)
        expected = [x for part in parts for x in policy.logps(prompt, part.tolist())]
        assert torch.allclose(client.score([group])[0], torch.tensor(expected), atol=1e-4)
    assert not re.search("Traceback|uncaptured", (folder / "server.log").read_text())


@contextlib.contextmanager
def rank_0(folder, model):
    """Rank 0's routes in this process; -> their Target. They still take groups in the end."""
    log = io.StringIO()
    with contextlib.redirect_stderr(log), serving(folder / "run", TRAINER_SAMPLES=True) as workers:
        publish(workers, 0)
        url = workers.c.TRAINER

        def group(draw):
            return sample_of(workers, id=str(draw.random()))

        yield Target(url, os.getpid(), "/group", group, rest=lambda: workers.take(0))
        workers.take(0)
        trainer = Trainer(url, 30)
        assert trainer.fetch(trainer.policy("last")[0], folder / "policy")
        assert trainer.put_group(sample_of(workers)) == ""
        assert [group.id for group in workers.take(0)] == ["me-0"]
    assert "Traceback" not in log.getvalue(), log.getvalue()[-3000:]


SERVERS = {"ref_server.py": reference, "rank 0": rank_0}
HEAD = "server | requests | answers | MB after warm-up and each fifth | growth, MB | seconds"


def main(count, seed=0):
    from measure import facts
    from tiny import make_tiny

    torch.set_num_threads(1)
    print(facts("waitress", "bottle").replace("benchmarks/fuzz.py", "tests/fuzz.py"))
    print(f"\n| {HEAD} |\n|{'---|' * 6}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny(Path(folder, "model"))
        for name, serve in SERVERS.items():
            with serve(Path(folder), model) as target:
                start = time.monotonic()
                memory = target.fuzz(count // 2, seed)
                seconds = time.monotonic() - start
            answers = ", ".join(f"{n} x {s}" for s, n in sorted(target.statuses.items(), key=str))
            sizes, grown = " ".join(str(m >> 20) for m in memory), (memory[-1] - memory[0]) / 2**20
            row = name, count // 2, answers, sizes, f"{grown:+.1f}", f"{seconds:.0f}"
            print("| " + " | ".join(map(str, row)) + " |", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
