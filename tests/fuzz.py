"""Fuzzer of both HTTP servers: ref_server.py, a process, and rank 0's routes for workers.

    python tests/fuzz.py 100000      # prints a table; eight minutes

Requests are malformed by structure (tensors, ids, lengths, query, method, path, headers, token) and
by mutation of bytes. Three in four go through http.client, the others as raw bytes over a socket,
with framing that no client would send. Each refusal must be a sentence in JSON with a status below
500, or 503; memory must stay flat, and in the end both servers must still serve.
"""

import argparse
import collections
import contextlib
import gc
import http.client
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
from types import SimpleNamespace
from urllib.parse import quote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import numpy as np
import psutil
import torch
from fakes import tiny_policy
from helpers import VOCAB, make_group
from processes import server_process
from safetensors.numpy import save

from demo import free_port
from grpo.client import RefServer, Trainer
from grpo.training.workers import Workers
from grpo.wire import METADATA, PROTOCOL, TENSORS, ids_by_sequence, pack_group, pack_ids, unpack_ids

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
def arrays_of(draw, route):
    """-> (metadata, {name: array}) of a valid body."""
    if route == "/group":
        group = run_group(draw)
        fields = vars(group)
        meta = {"protocol": PROTOCOL} | {name: fields[name] for name in METADATA}
        return meta, {n: fields[n].numpy().copy() for n in TENSORS if fields[n] is not None}
    lengths = [[draw.randint(1, 9) for _ in range(draw.randint(1, 4))] for _ in "ab"]
    groups = [make_group(sizes, seed=draw.randrange(99)) for sizes in lengths]
    tensors = unpack_ids(pack_ids(groups), vocab_size=VOCAB, max_tokens=None)
    return None, {name: tensor.numpy().copy() for name, tensor in tensors.items()}


def run_group(draw):
    """-> a group that rank 0's routes take."""
    changes = {"reward_names": ["correct", "format"], "item": 0, "policy_version": 0}
    changes["sampler"] = "fuzzer"
    group = make_group([3, 2], seed=draw.randrange(2**31), prompt=2, **changes)
    group.prompt_ids[:] = torch.tensor([5, 6])
    group.id = f"fuzz-{draw.randrange(2**60)}"
    return group


def spoil_arrays(draw, meta, arrays):
    name = draw.choice(list(arrays))
    array, way = arrays[name], draw.randrange(8)
    if way == 0 or not array.size:
        del arrays[name]
    elif way == 1:
        arrays[draw.choice(["advantages", "ref_logps", "", "__metadata_"])] = array
    elif way == 2:
        arrays[name] = np.zeros([draw.choice([0, 1, 2, 7])] * draw.randrange(4), array.dtype)
    elif way == 3:
        arrays[name] = np.zeros_like(
            array, draw.choice([np.int64, np.uint8, np.float64, np.float16])
        )
    elif way == 4 and meta:
        meta[draw.choice(list(meta))] = draw.choice(ODD)
    elif array.dtype == np.float32:
        array.flat[draw.randrange(array.size)] = draw.choice([np.nan, np.inf, 1e38])
    elif array.dtype == np.int32:
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


def body_for(draw, route, way):
    """-> a body for the route, spoiled on one level: "tensors", "header", "bytes" or "valid"."""
    meta, arrays = arrays_of(draw, route)
    if way == "tensors":
        for _ in range(draw.choice([1, 1, 2])):
            spoil_arrays(draw, meta, arrays)
    body = save(arrays, {"grpo": json.dumps(meta)} if meta else None)
    if way == "header":
        size = struct.unpack_from("<Q", body)[0]
        header = json.loads(body[8 : 8 + size])
        spoil_header(draw, header)
        text = json.dumps(header).encode()
        body = struct.pack("<Q", len(text)) + text + body[8 + size :]
    return bytes(spoil_bytes(draw, body) if way == "bytes" else body)


# --- Requests -------------------------------------------------------------------------
def http_case(draw, routes):
    """-> (kind, method, path, body, headers) for http.client."""
    way = draw.choice(["tensors", "tensors", "header", "bytes", "bytes", "route", "headers"])
    if way in ("tensors", "header", "bytes"):
        return way, "POST", *post_of(draw, routes, way), {}
    path, body = post_of(draw, routes, "valid")
    if way == "route":
        wait = draw.choice(["", "-1", "1e3", "1.5", "9" * 30, "%ff", "%00", "\u0669", "x" * 5000])
        name = draw.choice([*TEXTS[2:-1], "%ff"]).encode("utf-8", "surrogatepass")
        paths = ["/", "//", "/%ff%00", "/score", "/group", "/policy", "/policy/", "/info?wait=1"]
        paths += ["/../etc/passwd", f"/score?wait={quote(wait)}", f"/policy?worker={quote(name)}"]
        paths += ["/" + "x" * 3000, "/policy/" + "0" * 64]
        method = draw.choice(METHODS)
        return way, method, draw.choice(paths), draw.choice([b"", b"x", body]), {}
    size = draw.choice(["1" * 30, str(65 << 20), "0x10", "-5", "+5", "1e3", "", "٣".encode()])
    odd = {"Content-Length": size, "Transfer-Encoding": draw.choice(["gzip", "x", "chunked, gzip"])}
    odd |= {"Authorization": "Bearer \xff", "Origin": "http://evil", "Host": "x" * 300}
    odd |= {"Range": draw.choice(["bytes=9-1", "bytes=-", "x"]), "If-Modified-Since": "x" * 99}
    odd |= {"Expect": "200-maybe", "X": "y" * draw.choice([1, 300_000]), "A B": "c"}
    name = draw.choice(list(odd))
    return way, draw.choice(["POST", "GET"]), path, body, {name: odd[name]}


def post_of(draw, routes, way):
    route = draw.choice(routes)
    return f"{route}?wait=9" if route == "/score" else route, body_for(draw, route, way)


def raw_case(draw, routes):
    """-> bytes to send as they are."""
    path, body = post_of(draw, routes, "bytes")
    length = f"Content-Length: {len(body)}"
    heads = [
        f"POST {path} HTTP/1.1\r\n{length}\r\n{length}1",
        f"POST {path} HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
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
class Target:
    """A server, and what it has answered."""

    def __init__(self, url, pid, routes):
        self.host, self.pid, self.routes = urlsplit(url).netloc, pid, routes
        self.connection = http.client.HTTPConnection(self.host, timeout=30)
        self.parked = collections.deque()  # (connection, what was sent)
        self.statuses, self.kinds = collections.Counter(), collections.Counter()

    def send(self, draw):
        if draw.random() < 0.25:
            kind = "raw"
            self.send_raw(raw_case(draw, self.routes))
        else:
            kind, method, path, body, headers = http_case(draw, self.routes)
            status, text = self.send_http(method, path, body, headers)
            self.check(kind, status, b"" if method == "HEAD" else text, (method, path, headers))
        self.kinds[kind] += 1

    def check(self, kind, status, text, request):
        self.statuses[status] += 1
        assert status != "closed" or kind in ("raw", "headers"), f"{kind}: no answer to {request!a}"
        assert status in (200, 206, "closed") or 400 <= status < 500 or status == 503, (
            f"{kind}: {status} {text[:300]!r} for {request!a:.600}"
        )
        if text and status not in (200, 206, "closed"):
            reason = json.loads(text)["error"]
            assert isinstance(reason, str) and " " in reason and len(text) < 9000, text

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
        with contextlib.suppress(
            ConnectionError
        ):  # it has refused, and closed, before all was sent
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
            self.check("raw", status, text, data)

    def memory(self):
        return psutil.Process(self.pid).memory_info().rss


# --- The two servers ------------------------------------------------------------------
def rank_0(model):
    """-> the Workers of a run with a tiny policy, which serve from now on, and their URL."""
    url = f"http://127.0.0.1:{free_port()}"
    c = SimpleNamespace(TRAINER=url, PROMPTS_PER_STEP=4, GROUP_SIZE=2, MAX_COMPLETION_TOKENS=8)
    c.REWARD_WEIGHTS, c.OUTCOME, c.MAX_PROMPT_TOKENS = {"correct": 1, "format": 1}, "correct", 8
    c.MAX_STALENESS, c.TRAINER_SAMPLES, c.WAIT_LIMIT_SECONDS = 4, True, 5
    c.RUN_DIR = Path(model).parent / "run_of_rank_0"
    recipe = SimpleNamespace(prompts=[(0, {}, [5, 6])], c=c, settings=dict)
    workers = Workers(c, recipe, tiny_policy(model), "run")
    workers.publish(0)
    workers.finish()
    return workers, url


def serve_rank_0(model, log, sender):
    """In a process of its own: serves until it is killed, and trains what it gets."""
    with open(log, "a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    gc.freeze()
    workers, url = rank_0(model)
    sender.send(url)
    while True:
        workers.take(0)
        time.sleep(0.05)


def check_scores(url, policy):
    """ref_server.py still gives the right log-probs."""
    client = RefServer(url, 30)
    client.info = client.call("GET", "/info").json()
    group = make_group([5, 2, 3])
    (found,) = client.score([group])
    tensors = unpack_ids(pack_ids([group]), vocab_size=VOCAB, max_tokens=None)
    sequences = zip(*ids_by_sequence(tensors), strict=True)
    expected = [logp for pair in sequences for logp in policy.logps(*pair)]
    assert torch.allclose(found, torch.tensor(expected), atol=1e-4)


def check_workers(url, folder):
    """Rank 0 still serves its policy and takes a group."""
    trainer = Trainer(url, 30)
    record, _ = trainer.policy("last")
    assert trainer.fetch(record, folder / "policy.safetensors")
    assert trainer.put_group(pack_group(run_group(random.Random()))) == ""


def fuzz(target, count, seed):
    """Sends requests. AssertionError, with its number, at the first that is answered wrongly."""
    for number in range(count):
        try:
            target.send(random.Random(f"{seed}/{number}"))
        except Exception as error:
            raise AssertionError(f"seed {seed}, request {number}: {error!r}") from error
    while target.parked:
        target.check_raw()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("count", type=int, help="requests, half of them to each server")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    from measure import facts
    from processes import NURSERY
    from tiny import make_tiny

    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        model = make_tiny(folder / "model")
        receiver, sender = NURSERY.Pipe(duplex=False)
        rank = NURSERY.Process(
            target=serve_rank_0, args=(model, folder / "rank.log", sender), daemon=True
        )
        rank.start()
        with server_process(folder, model, DTYPE="float32") as (server, url):
            check_scores(url, tiny_policy(model))
            trainer_url = receiver.recv()
            targets = {"ref_server.py": Target(url, server.pid, ["/score"])}
            targets["rank 0"] = Target(trainer_url, rank.pid, ["/group"])
            for name, target in targets.items():
                # glibc keeps pieces for each of 64 threads, which fill slowly, and then no more
                fuzz(target, asked.count // 10, f"warm {asked.seed}")
                target.statuses.clear()
                memory, start = [target.memory()], time.monotonic()
                for part in range(5):
                    fuzz(target, asked.count // 10, f"{asked.seed}.{part}")
                    memory.append(target.memory())
                grown = memory[-1] - memory[0]
                answers = sorted(target.statuses.items(), key=str)
                row = [name, asked.count // 2, ", ".join(f"{n} x {s}" for s, n in answers)]
                row += [" ".join(str(m >> 20) for m in memory), f"{grown / 2**20:+.1f}"]
                rows.append([*row, f"{time.monotonic() - start:.0f}"])
                assert grown < MOST_GROWTH, rows
            check_scores(url, tiny_policy(model))
            check_workers(trainer_url, folder)
            for log in folder.glob("*.log"):
                text = log.read_text()
                assert "Traceback" not in text and "uncaptured" not in text, text[-3000:]
        rank.kill()
    print(facts("waitress", "bottle").replace("benchmarks/fuzz.py", "tests/fuzz.py"))
    print(
        "\n| server | requests | answers | MB after warm-up and each fifth | growth, MB | seconds |"
    )
    print("|---|---|---|---|---|---|")
    for row in rows:
        print("| " + " | ".join(map(str, row)) + " |")


if __name__ == "__main__":
    main()
