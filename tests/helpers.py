"""What tests of the wire and the server share: a group, the store, the app as a function."""

import hashlib
import io
import json
import socket
import struct
import threading
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlencode

import requests
import torch

from grpo.client import RefServer
from grpo.serving.policies import Policies
from grpo.wire import PROTOCOL, Group, pack_group
from ref_server import make_app

VOCAB = 395  # the tiny tokenizer's
LIMITS = {"vocab_size": VOCAB, "max_tokens": 256}


def make_group(lengths=(3, 1, 2), *, seed=0, prompt=4, **changes):
    """-> a random valid Group with completions of these lengths; `changes` replace its fields."""
    draw, tokens = torch.Generator().manual_seed(seed), sum(lengths)
    fields = {
        "id": f"group-{seed:03d}",
        "run": "run",
        "policy_version": 7,
        "item": 3,
        "sampler": "trainer",
        "outcome": "correct",
        "skipped": {"groups": 2, "reward_format": -0.5},
        "reward_names": ["correct", "format"],
        "prompt_ids": torch.randint(0, VOCAB, (prompt,), generator=draw, dtype=torch.int32),
        "completion_ids": torch.randint(0, VOCAB, (tokens,), generator=draw, dtype=torch.int32),
        "completion_lengths": torch.tensor(lengths, dtype=torch.int32),
        "sampler_logps": -torch.rand(tokens, generator=draw),
        "truncated": torch.rand(len(lengths), generator=draw) < 0.5,
        "rewards": torch.rand(len(lengths), 2, generator=draw),
    }
    return Group(**fields | changes)


def raw(header, data=b""):
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(header)) + header + data


class Replies:
    """A server on a free port that sends one canned reply to each connection in turn."""

    def __init__(self, *replies):
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.requests = []
        threading.Thread(target=self.run, args=(replies,), daemon=True).start()

    def run(self, replies):
        for reply in replies:
            connection, _ = self.socket.accept()
            with connection, connection.makefile("rb") as request:
                head = list(iter(request.readline, b"\r\n"))
                length = [int(line[15:]) for line in head if line.startswith(b"Content-Length:")]
                self.requests.append(b"".join(head) + request.read(sum(length)))
                connection.sendall(reply)
        self.socket.close()


def reply(status, body, length=None, headers=""):
    length = len(body) if length is None else length
    head = f"HTTP/1.1 {status} X\r\nContent-Length: {length}\r\nConnection: close\r\n{headers}\r\n"
    return head.encode() + body


LATE = 2**40  # a step


def put(store, *seeds, **changes):
    """Stores a small group for each seed; -> their bodies by id."""
    groups = [make_group(seed=seed, **changes) for seed in seeds]
    bodies = {group.id: pack_group(group) for group in groups}
    for group in groups:
        assert store.put(group, bodies[group.id])
    return bodies


def mark_scored(store):
    for seq, body in store.waiting(100, 0):
        store.scored({seq: body + b"scored"})


def done(store, ids, run="run"):
    """They were trained, and a checkpoint covers that. -> how many just now."""
    count = store.ack(run, ids, LATE)
    store.cover(run, LATE + 1)
    return count


def lease(store, run="run", limit=100, seconds=60, patience=0):
    return store.lease(run, limit, seconds=seconds, patience=patience)


INFO = {"model": "fake", "vocab_size": VOCAB, "tokenizer": "ab", "temperature": 1.0}
INFO |= {"protocol": PROTOCOL, "weights": "", "facts": "0123456789abcdef"}


class FakeReference:
    """In place of the model: knows what it is, and takes every policy that exists."""

    def __init__(self):
        self.info, self.limits, self.replaced = INFO, LIMITS, []

    def replace(self, path, weights):
        if path and not path.exists():
            raise ValueError(f"{weights} can't be the reference: no file")
        self.replaced.append((path, weights))
        self.info = INFO | {"weights": weights}


def call(app, method, path, body=b"", **environ):
    """Calls the WSGI function without a socket; -> (status, headers, body)."""
    if not isinstance(body, bytes):
        body = json.dumps(body).encode()
    answer, errors = {}, io.StringIO()

    def start_response(status, headers, exc_info=None):
        answer.update(status=int(status[:3]), headers=dict(headers))

    environ = {
        "REQUEST_METHOD": method,
        "PATH_INFO": path,
        "SERVER_NAME": "test",
        "SERVER_PORT": "80",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "QUERY_STRING": "",
        "wsgi.url_scheme": "http",
        "wsgi.input": io.BytesIO(body),
        "wsgi.errors": errors,
        "CONTENT_LENGTH": str(len(body)),
    } | environ
    environ = {k: v for k, v in environ.items() if v is not None}
    data = b"".join(app(environ, start_response))
    return answer["status"], answer["headers"], data


class InProcess(RefServer):
    """The trainer's client of an app that is called as a function; `after` runs after each call."""

    def __init__(self, app, limit=5, after=lambda: None):
        super().__init__("http://in.process", limit)
        self.app, self.after = app, after
        self.session = SimpleNamespace(request=self.request)

    def copy(self):
        second = InProcess(self.app, self.limit, self.after)
        second.agreed_hash = self.agreed_hash
        return second

    def request(self, method, url, *, params=(), data=b"", json=None, headers=(), **_):
        names = {f"HTTP_{k.upper().replace('-', '_')}": v for k, v in dict(headers).items()}
        names["QUERY_STRING"] = urlencode(dict(params))
        path = url.removeprefix(self.url)
        data = data.read() if hasattr(data, "read") else data
        status, headers, body = call(
            self.app, method, path, data if json is None else json, **names
        )
        self.after()
        reply = requests.Response()
        reply.status_code, reply.raw = status, io.BytesIO(body)
        reply.headers.update(headers)
        return reply


def refused(answer, status):
    """-> the reason in a JSON refusal with this status."""
    assert (answer[0], answer[1]["Content-Type"]) == (status, "application/json"), answer
    return json.loads(answer[2])["error"]


MAX_POLICY = 1000
WEIGHTS = bytes(range(256)) * 3
SHA256 = hashlib.sha256(WEIGHTS).hexdigest()


def record_of(version=0, weights=WEIGHTS, **changes):
    record = {"run": "run", "version": version, "capacity": 8, "oldest": 0, "scored": True}
    record |= {"bytes": len(weights), "sha256": hashlib.sha256(weights).hexdigest()}
    return record | {"settings": {"SEED": 0}, "proof": {"logps": [-1.0]}} | changes


def publish(policies, version=0, weights=WEIGHTS, **changes):
    record = record_of(version, weights, **changes)
    policies.write(record["run"], version, 0, weights)
    policies.publish(record)
    return record


def files(policies):
    return sorted(path.name for path in policies.folder.iterdir())


def ask(pacing, worker="a", *, held=0, want=4, run="run", version=0, sha256=SHA256, patience=0):
    pacing.patience = patience
    return pacing.work(worker, held, want, run, version, sha256)


def record(step, **metrics):
    """-> a line of metrics.jsonl."""
    return {"step": step, "reward": step / 100, "accuracy": 0.5} | metrics


def sample(step=1, **changes):
    """-> a line of samples.jsonl, as an earlier version wrote it."""
    facts = {"step": step, "question": "1 + 1?", "answer": "2", "completion": "<answer>2</answer>"}
    facts |= {"rewards": {"correctness": 1.0, "format": 1.25}, "advantage": 0.35}
    return facts | {"truncated": False, "sampler": "trainer", "policy_version": 0} | changes


def member(step=1, number=0, **changes):
    """-> a line of samples.jsonl: completion `number` of a group."""
    facts = {"group": f"{step:06d}-0000-0001", "number": number, "prompt": "<|user|>1 + 1?"}
    facts |= {"item": {"question": "1 + 1?", "kind": "sum"}, "flat": False}
    return sample(step) | facts | changes


def app_of(store, folder, token=None, reference=None):
    """-> the server's app on the store, and its policies."""
    policies = Policies(store, Path(folder, "policies"), max_bytes=10_000)
    settings = {"token": token, "max_body_bytes": 10**7}
    settings |= {"lease_seconds": 60, "lease_wait": 0}
    return make_app(store, policies, reference or FakeReference(), **settings), policies


def post(app, run="run", records=(), samples=(), **more):
    """-> the answer to what a trainer logs."""
    body = {"run": run, "records": list(records), "samples": list(samples)} | more
    return call(app, "POST", "/log", body)
