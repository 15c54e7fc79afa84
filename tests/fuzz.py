"""Fuzzer of the reference server: a body is taken whole or refused with a reason.

    python tests/fuzz.py 100000                  # the app, called as a WSGI function
    python tests/fuzz.py 100000 --server         # ref_server.py, a process, over sockets
    python tests/fuzz.py 1 --seed 0 --first 4711 # the body of a failure again

A body is a valid group, taken apart and spoiled in one to three ways on its levels: metadata and
tensors, the header that describes them, the header's text, the bytes. One body in ten is left as
it is and must be taken. What is stored is read again by `decode`, which has no
code of wire.py.
"""

import argparse
import collections
import hashlib
import http.client
import json
import math
import random
import statistics
import struct
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from helpers import LIMITS, VOCAB, FakeReference, call, make_group
from processes import command_of, free_port, start

from grpo import wire
from grpo.client import RefServer
from grpo.serving.policies import Policies
from grpo.serving.store import Store
from grpo.tiny_model import make_tokenizer
from ref_server import MAX_BODY_BYTES, make_app
from tasks import arithmetic

DTYPES = {"I32": np.int32, "F32": np.float32, "BOOL": np.bool_}
NAMES = {torch.int32: "I32", torch.float32: "F32", torch.bool: "BOOL"}
OTHER_DTYPES = ["I64", "I16", "I8", "U8", "U16", "U32", "U64", "F64", "F16", "BF16", "F8_E4M3"]
OTHER_DTYPES += ["F4", "F6_E2M3", "C64", "I33", "", 7]
NUMBERS = [0, 1, -1, 7, 255, 2**31 - 1, 2**31, -(2**31), 2**40, 2**62, 2**63 - 1, 2**63, 2**64]
TEXTS = ["", "a", "x" * 200, "x" * 201, "é" * 200, "\ud800", "\udc00\ud800", "a\0b", "a\nb"]
TEXTS += [
    "\u202e",
    "__metadata__",
    "../../etc/passwd",
    "'; DROP TABLE x; --",
    "\U0001f600",
    "x" * 5000,
]
NESTED = [[], {}, [[]], {"a": {}}, [None], ["a", "a"], ["correct"], {"a": math.nan}, {"\n": 1}]
ODD = [None, True, False, 1.5, -0.0, 1e308, math.nan, math.inf, 10**30, *NUMBERS, *TEXTS, *NESTED]
FLOATS = [math.nan, math.inf, -math.inf, 0.5, 1e38, -1e38]
IDS = [-1, VOCAB, 2**31 - 1, -(2**31), 151_936]
MOST_SECONDS = 1.0  # for one body
MOST_GROWTH = 64 << 20  # of the server's memory, over all bodies: allocators keep some


@dataclass
class Case:
    kind: str
    body: bytes
    path: str = "/upload"
    method: str = "POST"
    query: str = ""
    length: str | None = None  # the Content-Length that is claimed; None is the true one
    good: bool = False  # must be answered with 200


# --- Bodies: each level's ways to spoil it ------------------------------------------
def odd_field(draw, meta, tensors):
    meta[draw.choice(list(meta))] = draw.choice(ODD)


def no_field(draw, meta, tensors):
    del meta[draw.choice(list(meta))]


def other_field(draw, meta, tensors):
    meta[draw.choice(TEXTS)] = draw.choice(ODD)


def odd_protocol(draw, meta, tensors):
    meta["protocol"] = draw.choice([1, 3, 2.0, "2", *ODD])


def odd_names(draw, meta, tensors):
    meta["reward_names"] = [draw.choice([*TEXTS, "correct", 1]) for _ in range(draw.randint(0, 3))]
    if meta["reward_names"] and draw.random() < 0.5:
        meta["outcome"] = meta["reward_names"][0]


def odd_skipped(draw, meta, tensors):
    many = draw.choice([1, 1, 1, 101])
    meta["skipped"] = {
        draw.choice(TEXTS) + str(i) * (many > 1): draw.choice(ODD) for i in range(many)
    }


def odd_values(draw, meta, tensors):
    """Numbers that have the right type and do not fit: ids, lengths, log-probs, rewards."""
    name = draw.choice(list(tensors))
    tensor = tensors[name]
    if tensor.dtype == np.bool_:
        tensors[name] = tensor.view(np.uint8) * draw.choice([2, 255])  # claimed to be BOOL
    elif tensor.dtype == np.float32:
        tensor.flat[draw.randrange(tensor.size)] = draw.choice(FLOATS)
    else:
        tensor.flat[draw.randrange(tensor.size)] = draw.choice([0, *IDS])


def lying_lengths(draw, meta, tensors):
    lengths = tensors["completion_lengths"]
    most, total = 2**31 - 1, int(lengths.sum())
    lies = [
        [most, most, total + 2],
        [total + 4, -4],
        [total, 0],
        [total - 1],
        [total + 1],
        [-total],
    ]
    tensors["completion_lengths"] = np.array(draw.choice(lies), np.int32)


def other_shape(draw, meta, tensors):
    """Another number of elements, or of dimensions, with the bytes that it needs."""
    name = draw.choice(list(tensors))
    shape = [draw.choice([0, 1, 2, 3, 7]) for _ in range(draw.randint(0, 4))]
    tensors[name] = np.zeros(shape, tensors[name].dtype)


def no_tensor(draw, meta, tensors):
    del tensors[draw.choice(list(tensors))]


def other_tensor(draw, meta, tensors):
    name = draw.choice(["advantages", "ref_logps", *TEXTS])
    tensors[name] = draw.choice(list(tensors.values()))


def swapped(draw, meta, tensors):
    a, b = draw.choice(list(tensors)), draw.choice(list(tensors))
    tensors[a], tensors[b] = tensors[b], tensors[a]


def too_long(draw, meta, tensors):
    size = draw.choice([LIMITS["max_tokens"], 10_000, 100_000])
    tensors["prompt_ids"] = np.zeros(size, np.int32)


def odd_view(draw, header):
    """A tensor's description that lies about what is there."""
    view = header[draw.choice([name for name in header if name != "__metadata__"])]
    what = draw.choice(list(view))
    if what == "dtype":
        view["dtype"] = draw.choice([*OTHER_DTYPES, *DTYPES])
    elif what == "shape":
        view["shape"] = draw.choice(
            [[], [0], [-1], [2**32, 2**32], [2**63], [1] * 5000, [1.5], None]
        )
        view["shape"] = draw.choice([view["shape"], draw.choices(NUMBERS, k=2)])
    else:
        begin, end = view["data_offsets"]
        lies = [[end, begin], [begin, 2 << 30], [begin, end + 1], [begin + 1, end], [0, 0], [begin]]
        view["data_offsets"] = draw.choice([*lies, draw.choices(NUMBERS, k=2), None, "0"])


def huge_claim(draw, header):
    """A tensor that says it has gigabytes, with or without the offsets to match."""
    view = header[draw.choice([name for name in header if name != "__metadata__"])]
    elements = draw.choice([1 << 29, 1 << 40, 2**62])
    view["shape"] = [elements]
    if draw.random() < 0.5:
        view["data_offsets"] = [0, 4 * elements]


def odd_entry(draw, header):
    header[draw.choice([*header, *TEXTS])] = draw.choice(ODD)


def odd_metadata(draw, header):
    deep = draw.choice([10, 900, 3000, 9000])
    texts = [
        "[" * deep,
        '{"a":' * deep,
        "[" * deep + "]" * deep,
        "9" * 5000,
        "null",
        "[1]",
        "\ud800",
    ]
    whole = header["__metadata__"].get("grpo", "{}")
    texts += [whole[: draw.randrange(len(whole))], whole[:-1] + ', "protocol": 1}', whole * 2]
    header["__metadata__"] = draw.choice([{"grpo": draw.choice(texts)}, {"format": "pt"}, "", None])


def many_tensors(draw, header):
    for i in range(draw.choice([10, 500])):
        header[f"t{i}"] = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}


def key_twice(draw, text):
    key = draw.choice(
        [b'"__metadata__"', b'"prompt_ids"', b'"dtype"', b'"shape"', b'"data_offsets"']
    )
    return text.replace(
        key, key + b":" + draw.choice([b"null", b"[0]", b'"I32"', b"{}"]) + b"," + key, 1
    )


def no_utf8(draw, text):
    at = draw.randrange(len(text))
    return text[:at] + draw.choice([b"\xff", b"\xed\xa0\x80", b"\xc0\x80", b"\0"]) + text[at:]


def surrogate(draw, text):
    return text.replace(b'\\"run\\"', draw.choice([b'\\"\\ud800\\"', b"\\ud800", b"\xf0"]), 1)


def nested(draw, text):
    deep = draw.choice([10, 200, 3000, 30_000])
    return draw.choice([b"[" * deep, b'{"a":' * deep, b"[" * deep + text + b"]" * deep])


def spaces(draw, text):
    return b" " * draw.choice([1, 8, 70_000]) + text + b" " * draw.choice([0, 1, 8])


def wrong_header_length(draw, body):
    size = struct.unpack_from("<Q", body)[0]
    sizes = [0, 1, size - 1, size + 1, size + 8, len(body), 2 << 30, 2**63, 2**64 - 1, 90_000_000]
    return struct.pack("<Q", draw.choice(sizes)) + body[8:]


def truncated(draw, body):
    return body[: draw.choice([1, 7, 8, 9, len(body) - 1, draw.randrange(1, len(body))])]


def padded(draw, body):
    return body + bytes(draw.choice([1, 2, 8, 100_000]))


def flipped_bits(draw, body):
    body = bytearray(body)
    for _ in range(draw.choice([1, 1, 2, 8])):
        body[draw.randrange(len(body))] ^= 1 << draw.randrange(8)
    return bytes(body)


def flipped_header(draw, body):
    body, size = bytearray(body), struct.unpack_from("<Q", body)[0]
    for _ in range(draw.choice([1, 1, 2, 8])):
        body[draw.randrange(8, min(8 + size, len(body)))] = draw.randrange(256)
    return bytes(body)


def moved_piece(draw, body):
    a, b = sorted(draw.choices(range(len(body)), k=2))
    return draw.choice([body[:a] + body[b:], body[:b] + body[a:], body[b:] + body[:b], body + body])


def noise(draw, body):
    return draw.randbytes(len(body))


def other_format(draw, body):
    return draw.choice([b"\x80\x04\x95", b"PK\3\4", b"GET / HTTP/1.1\r\n\r\n", b"{}"]) + body


LEVELS = [
    [odd_field, no_field, other_field, odd_protocol, odd_names, odd_skipped, odd_values, odd_values]
    + [lying_lengths, other_shape, no_tensor, other_tensor, swapped, too_long],
    [odd_view, odd_view, odd_view, huge_claim, odd_entry, odd_metadata, many_tensors],
    [key_twice, no_utf8, surrogate, nested, spaces],
    [wrong_header_length, truncated, padded, flipped_bits, flipped_header, moved_piece, noise]
    + [other_format],
]


# Another way took what it would spoil
SPOILED = suppress(LookupError, ValueError, TypeError, AttributeError, OverflowError, struct.error)


def build(draw, group, ways):
    """-> the group's body, written by hand and spoiled in these `ways`, level by level."""
    meta = {"protocol": wire.GROUP_PROTOCOL} | {name: vars(group)[name] for name in wire.METADATA}
    tensors = {n: vars(group)[n] for n in wire.TENSORS if vars(group)[n] is not None}
    dtypes = {name: NAMES[tensor.dtype] for name, tensor in tensors.items()}
    tensors = {name: tensor.numpy().copy() for name, tensor in tensors.items()}
    for way in ways:
        if way in LEVELS[0]:
            with SPOILED:
                way(draw, meta, tensors)
    header, data = {"__metadata__": {"grpo": json.dumps(meta)}}, b""
    for name, tensor in tensors.items():
        offsets = [len(data), len(data) + tensor.nbytes]
        dtype = dtypes.get(name, "F32")
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        data += tensor.tobytes()
    for way in ways:
        if way in LEVELS[1]:
            with SPOILED:
                way(draw, header)
    text = json.dumps(header).encode()
    for way in ways:
        if way in LEVELS[2]:
            text = way(draw, text)
    body = struct.pack("<Q", len(text)) + text + data
    for way in ways:
        if way in LEVELS[3] and len(body) > 9:
            with SPOILED:
                body = way(draw, body)
    return body


def valid_group(draw, number):
    lengths = [draw.randint(1, 8) for _ in range(draw.choice([1, 2, 3, 8]))]
    item, seed, prompt = draw.randrange(2), draw.randrange(2**31), draw.randint(1, 8)
    return make_group(lengths, seed=seed, prompt=prompt, id=f"fuzz-{number}", run="fuzz", item=item)


def large_case(draw, number):
    """What takes time or memory, if anything does: many short completions, the largest bodies."""
    kind = draw.choice(["zeros", "claim", "completions", "too large"])
    if kind == "zeros":
        return Case("large: zeros", bytes(MAX_BODY_BYTES))
    if kind == "claim":
        text = json.dumps({"a": {"dtype": "U8", "shape": [2 << 30], "data_offsets": [0, 2 << 30]}})
        return Case("large: claim", struct.pack("<Q", len(text)) + text.encode() + bytes(8 << 20))
    if kind == "too large":
        return Case("large: too large", bytes(MAX_BODY_BYTES + 1))
    size = draw.choice([10_000, 100_000, 500_000])
    group = make_group([1] * size, id=f"fuzz-{number}", run="fuzz", item=9)
    return Case("large: completions", wire.pack_group(group))


def several_case(draw, number, spoiled):
    """Several groups in one body: all right, or one or the whole spoiled."""
    groups = [valid_group(draw, f"{number}-{i}") for i in range(draw.randint(1, 4))]
    bodies = {group.id: wire.pack_group(group) for group in groups}
    kind = draw.choice(["valid", "one spoiled", "the whole spoiled", "a group, not several"])
    if kind == "one spoiled":
        bodies[draw.choice([*bodies, "another", "\U0001f600"])] = spoiled
    blob = b"".join(wire.pack_bodies(bodies))
    if kind == "the whole spoiled":
        blob = draw.choice(LEVELS[3])(draw, blob)
    elif kind == "a group, not several":
        blob = draw.choice([spoiled, *bodies.values(), b"".join(wire.pack_bodies({}))])
    return Case(f"several: {kind}", blob, query="several=1", good=kind == "valid")


# --- The other routes ---------------------------------------------------------------
WEIGHTS = bytes(range(256))
RECORD = {"run": "policies", "version": 0, "capacity": 8, "oldest": 0, "scored": True}
RECORD |= {"bytes": len(WEIGHTS), "sha256": hashlib.sha256(WEIGHTS).hexdigest()}
RECORD |= {"settings": {}, "proof": {}}
ASKED = {
    "/lease": {"run": "fuzz", "limit": 2, "oldest": 0, "wait": False},
    "/ack": {"run": "fuzz", "ids": ["fuzz-1"], "step": 0},
    "/work": {
        "worker": "w",
        "held": 0,
        "want": 2,
        "run": "policies",
        "version": 0,
        "sha256": "",
        "pulled": False,
    },
    "/drop": {"run": "fuzz", "ids": ["fuzz-1"], "reason": "too old"},
    "/checkpoint": {"run": "fuzz", "step": 1},
    "/resume": {"run": "fuzz", "step": 1},
    "/log": {"run": "fuzz", "records": [{"step": 1, "reward": 0.5}], "samples": []},
    "/end": {"run": "policies"},
    "/reference": {"run": "policies", "version": -1},
    "/policy": {"record": RECORD},
}


def route_case(draw):
    """A request to another route, with odd values, odd names or a spoiled text."""
    path = draw.choice([*ASKED, "/policy part"])
    if path == "/policy part":
        query = {"run": "policies", "version": 0, "offset": 0}
        if draw.random() < 0.7:
            odd = draw.choice([*NUMBERS, "", "x", "1e3", 10**30, 10**300, "9" * 5000, "\u0669"])
            query[draw.choice(list(query))] = odd
        return Case("PUT /policy", WEIGHTS, "/policy", "PUT", urlencode(query))
    asked = json.loads(json.dumps(ASKED[path]))
    within = asked["record"] if path == "/policy" and draw.random() < 0.8 else asked
    spoil = draw.random()
    if spoil < 0.6:
        deep = draw.choice([10, 400, 900])
        value = draw.choice([*ODD, json.loads("[" * deep + "]" * deep), {"a": [1e400]}])
        within[draw.choice(list(within))] = value
    elif spoil < 0.7:
        del within[draw.choice(list(within))]
    text = json.dumps(asked).encode()
    if spoil > 0.8:
        text = draw.choice([no_utf8, nested, spaces, truncated, flipped_bits, noise])(draw, text)
    return Case(f"POST {path}", text, path)


def make_case(seed, number):
    """-> the request of this number; the same for the same seed."""
    draw = random.Random(f"{seed}/{number}")
    choice = draw.random()
    if choice < 0.002:
        return large_case(draw, number)
    if choice < 0.06:
        return route_case(draw)
    group = valid_group(draw, number)
    if choice < 0.16:
        return Case("valid", wire.pack_group(group), good=True)
    if choice < 0.17:
        odd = draw.choice(["x", "-1", "1e3", "9" * 30, "9" * 5000, "%ff", "%ED%A0%80"])
        query = draw.choice([f"several={odd}", "pool=1"])  # of the latter older clients know
        return Case("query", wire.pack_group(group), query=query)
    if choice < 0.18:
        length = draw.choice(["", "x", "-1", "+5", "1e3", "0", "7", str(2 << 30), "9" * 40])
        return Case("Content-Length", wire.pack_group(group), length=length)
    ways = [draw.choice(draw.choice(LEVELS)) for _ in range(draw.choice([1, 1, 1, 2, 3]))]
    body = build(draw, group, ways)
    if choice < 0.24:
        return several_case(draw, number, body)
    return Case(ways[0].__name__, body)


# --- What must hold -----------------------------------------------------------------
def decode(body):
    """-> (meta, arrays) of a group that was taken in; AssertionError if it should not have been."""
    (size,) = struct.unpack_from("<Q", body)
    header, data = json.loads(body[8 : 8 + size]), body[8 + size :]
    meta, arrays = json.loads(header.pop("__metadata__")["grpo"]), {}
    covered = 0
    for name, view in header.items():
        begin, end = view["data_offsets"]
        assert 0 <= begin <= end <= len(data), f"{name} lies outside"
        arrays[name] = np.frombuffer(data[begin:end], DTYPES[view["dtype"]]).reshape(view["shape"])
        covered += end - begin
    assert covered == len(data), "bytes that no tensor has"
    lengths, names = arrays["completion_lengths"], meta["reward_names"]
    size, tokens = len(lengths), sum(int(n) for n in lengths)
    assert meta["protocol"] == wire.GROUP_PROTOCOL and all(n > 0 for n in lengths)
    assert arrays.keys() - {"ref_logps"} == wire.TENSORS.keys() - {"ref_logps"}
    shapes = {"completion_ids": (tokens,), "sampler_logps": (tokens,), "truncated": (size,)}
    for name, shape in (shapes | {"rewards": (size, len(names))}).items():
        assert arrays[name].shape == shape, f"{name} is {arrays[name].shape}"
    ids = np.concatenate([arrays["prompt_ids"], arrays["completion_ids"]])
    assert ids.min() >= 0 and ids.max() < VOCAB, "ids beyond the vocabulary"
    assert 0 < len(arrays["prompt_ids"]) <= LIMITS["max_tokens"] - int(lengths.max())
    for name in arrays.keys() & {"sampler_logps", "rewards", "ref_logps"}:
        fine = np.isfinite(arrays[name]) | (np.isnan(arrays[name]) & (name == "rewards"))
        assert arrays[name].dtype == np.float32 and fine.all(), name
    assert set(arrays["truncated"].view(np.uint8).tolist()) <= {0, 1}, "a bool that is neither"
    assert meta["outcome"] in names and len(set(names)) == len(names)
    for text in (meta["id"], meta["run"], meta["sampler"], *names, *meta["skipped"]):
        assert 0 < len(text) <= 200 and text.isprintable(), (
            f"a name that can't be printed: {text!r}"
        )
    json.dumps({name: meta[name] for name in wire.METADATA}, allow_nan=False)
    group = wire.unpack_group(body, **LIMITS)
    for name, array in arrays.items():  # the trainer sees the same
        same = np.array_equal(getattr(group, name).numpy(), array, equal_nan=name == "rewards")
        assert same, f"{name} is read otherwise"
    return meta, arrays


def check_answer(case, status, headers, data, seconds, *, app):
    """AssertionError if this is no answer to such a request. `app`: it is the app's, and not of the
    HTTP server before it, whose refusals are plain text."""
    most = MOST_SECONDS + 2 * (case.path == "/reference")  # which waits for the scoring thread
    assert seconds < most, f"it took {seconds:.2f} s"
    assert status in (200, 204) or 400 <= status < 500, f"status {status}: {data[:500]!r}"
    assert not case.good or status == 200, f"a valid group got {status}: {data[:500]!r}"
    if status < 400:
        return
    is_json = dict(headers)["Content-Type"] == "application/json"
    assert is_json or not app, f"a refusal in {headers}"
    reason = json.loads(data)["error"] if is_json else data.decode()
    assert isinstance(reason, str) and " " in reason, f"no sentence: {data!r}"
    assert len(data) < 5000, f"a reason of {len(data)} bytes: {data[:500]!r} ..."


# --- Two servers --------------------------------------------------------------------
class Function:
    """The app, called as a WSGI function in this process."""

    app, batch = True, 200

    def __init__(self, folder):
        self.store = Store(folder / "store.sqlite", max_bytes=256 << 20)
        self.path, self.pid = folder / "store.sqlite", "self"
        settings = {"token": None, "max_body_bytes": MAX_BODY_BYTES}
        policies = Policies(self.store, folder / "policies", max_bytes=10_000)
        self.function = make_app(
            self.store, policies, FakeReference(), lease_seconds=60, lease_wait=0, **settings
        )

    def send(self, case):
        length = str(len(case.body)) if case.length is None else case.length
        environ = {"QUERY_STRING": case.query, "CONTENT_LENGTH": length}
        return call(self.function, case.method, case.path, case.body, **environ)

    def sweep(self, sent):
        """Checks every body that the store has, and ends it."""
        query = "SELECT run, state, body FROM groups JOIN bodies USING (seq)"
        rows = self.store.db.execute(query).fetchall()
        for run, state, body in rows:
            meta, _ = decode(body)
            assert meta["run"] == run and body in sent
            self.store.forget(run)
        assert self.store.bytes == 0, f"the store still counts {self.store.bytes} bytes"
        return collections.Counter(state for _, state, _ in rows)


class Process:
    """ref_server.py with a tiny model, over sockets; what is stored is scored."""

    app, batch = False, 500

    def __init__(self, folder, url, pid):
        self.host, self.pid, self.path = urlsplit(url).netloc, pid, folder / "store.sqlite"
        self.client = RefServer(url, 60)
        self.client.call("GET", "/info")
        self.connection = http.client.HTTPConnection(self.host, timeout=60)

    def send(self, case):
        length = str(len(case.body)) if case.length is None else case.length
        lies = length != str(len(case.body)) or len(case.body) > MAX_BODY_BYTES
        if lies:  # what follows in the connection would not be understood
            self.connection.close()
        body, headers = case.body, {"Content-Length": length}
        if length.isdecimal() and len(body) < int(length) <= MAX_BODY_BYTES:
            body = b""  # it would wait for the rest
        path = f"{case.path}?{case.query}" if case.query else case.path
        for attempt in (1, 2):
            try:
                self.connection.request(case.method, path, body, headers)
            except (BrokenPipeError, ConnectionResetError):
                pass  # refused before it was sent: the answer is there, or the connection was old
            try:
                reply = self.connection.getresponse()
                status, headers, data = reply.status, reply.headers, reply.read()
                break
            except (http.client.HTTPException, ConnectionError):
                self.connection.close()
                if lies:
                    return 400, {"Content-Type": "text/plain"}, b"(cut off, without an answer)"
                assert attempt == 1, "no answer"
        if lies:
            self.connection.close()
        return status, headers, data

    def sweep(self, sent):
        """Waits until all is scored, checks what its trainer would get, and ends it."""
        runs = {decode(body)[0]["run"] for body in sent}
        while (stats := self.client.stats())["waiting"]:
            time.sleep(0.05)
        assert stats["failed"] == 0, "the model could not score what was stored"
        for run in runs:
            for body in self.client.lease(run, 4096, patience=False).values():
                assert "ref_logps" in decode(body)[1]
            self.client.call("POST", "/end", json={"run": run})
        assert self.client.stats()["bytes"] == 0
        return collections.Counter(scored=stats["scored"])


def resident(pid):
    """-> bytes of memory of the process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.split("VmRSS:")[1].split()[0])


def upload_seconds(server, name):
    """-> the median of a valid group's upload."""
    seconds, sent = [], {}
    for i in range(51):
        case = Case("valid", wire.pack_group(make_group(id=f"{name}-{i}", run="fuzz")), good=True)
        start = time.perf_counter()
        assert server.send(case)[0] == 200
        seconds.append(time.perf_counter() - start)
        sent[case.body] = None
    server.sweep(sent)
    return statistics.median(seconds)


def fuzz(server, count, *, seed, first=0):
    """Sends the bodies `first` to `first + count`; -> a dict of what came of them. AssertionError,
    with the seed and number of the body, at the first that is not answered as it must be."""
    kinds, statuses, stored = (collections.Counter() for _ in range(3))
    slowest, sent, start = (0.0, ""), {}, time.monotonic()
    for number in range(first, first + count):
        case = make_case(seed, number)
        begin = time.perf_counter()
        try:
            status, headers, data = server.send(case)
            seconds = time.perf_counter() - begin
            if seconds > MOST_SECONDS:  # is it the body, or another program on this machine?
                begin = time.perf_counter()
                server.send(case)
                seconds = min(seconds, time.perf_counter() - begin)
            check_answer(case, status, headers, data, seconds, app=server.app)
            if case.path == "/upload" and status == 200:
                several = case.query == "several=1"
                for body in wire.unpack_bodies(case.body).values() if several else [case.body]:
                    sent[body] = None
                    decode(body)
            if len(sent) and (number % server.batch == 0 or number == first + count - 1):
                stored += server.sweep(sent)
                sent = {}
        except Exception as error:
            raise AssertionError(f"seed {seed}, body {number} ({case.kind}): {error}") from error
        kinds[case.kind] += 1
        statuses[status] += 1
        slowest = max(slowest, (seconds, case.kind))
    return {"kinds": kinds, "statuses": statuses, "stored": stored, "slowest": slowest} | {
        "seconds": time.monotonic() - start
    }


def measure(server, count, *, seed, first):
    """fuzz() between two looks at the server: its memory, its store, its speed are as before."""
    if count > 1:
        # what the allocator keeps of large bodies is there before, too
        fuzz(server, 500, seed=f"warm {seed}")
        server.send(Case("zeros", bytes(MAX_BODY_BYTES)))
    upload = [upload_seconds(server, "before")]
    memory, disk = [resident(server.pid)], [server.path.stat().st_size]
    result = fuzz(server, count, seed=seed, first=first)
    upload.append(upload_seconds(server, "after"))
    memory.append(resident(server.pid))
    disk.append(server.path.stat().st_size)
    for kind, bodies in sorted(result["kinds"].items()):
        print(f"{bodies:>8}  {kind}")
    print(f"{count} bodies in {result['seconds']:.0f} s; statuses {dict(result['statuses'])}")
    print(f"stored, read again, and ended: {dict(result['stored'])}")
    print(f"slowest: {1e3 * result['slowest'][0]:.0f} ms, {result['slowest'][1]}")
    print(f"memory {memory[0] >> 20} MB before, {memory[1] >> 20} MB after")
    print(f"bodies in the store 0 bytes before and after; its file {disk[0]}, {disk[1]} bytes")
    print(f"a valid upload {1e3 * upload[0]:.2f} ms before, {1e3 * upload[1]:.2f} ms after")
    assert memory[1] - memory[0] < MOST_GROWTH, f"memory grew: {memory}"
    assert upload[1] < 2 * upload[0] + 0.002, f"uploads have slowed down: {upload} s"


def save_model(folder, max_tokens):
    """A random Qwen2 of 32 000 parameters, as in conftest.py."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    config = Qwen2Config(vocab_size=416, max_position_embeddings=max_tokens, **shape, **heads)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    make_tokenizer(arithmetic).save_pretrained(folder)


@contextmanager
def served(folder, *, max_tokens, **constants):
    """Runs ref_server.py with these constants and a tiny model, its store in `folder`; -> the
    process and its address. It is killed at the end."""
    save_model(folder / "model", max_tokens)
    constants |= {"MODEL": str(folder / "model"), "PORT": int(free_port()), "DTYPE": "float32"}
    constants = {"STORE": str(folder / "store.sqlite")} | constants
    command = command_of("ref_server", constants)
    server = start(command, folder / "log", GRPO_TOKEN="")
    try:
        yield server, f"http://127.0.0.1:{constants['PORT']}"
    finally:
        server.kill()
        server.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first body")
    parser.add_argument("--server", action="store_true", help="a process, over sockets")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        if not asked.server:
            measure(Function(folder), asked.count, seed=asked.seed, first=asked.first)
            return
        with served(folder, max_tokens=LIMITS["max_tokens"], LEASE_WAIT_SECONDS=0) as (
            process,
            url,
        ):
            server = Process(folder, url, process.pid)
            measure(server, asked.count, seed=asked.seed, first=asked.first)


if __name__ == "__main__":
    main()
