"""The reference server: its store, its scoring, its routes as a WSGI function, and the process."""

import errno
import io
import json
import os
import re
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlencode

import pytest
import requests
import safetensors.torch
import torch
from test_wire import VOCAB, make_group
from transformers import AutoModelForCausalLM, AutoTokenizer

import ref_server
from grpo.client import RefServer
from grpo.forward import CompletionModel
from grpo.sampling.policy import load_policy
from grpo.serving import database
from grpo.serving import store as store_module
from grpo.serving.policies import Policies
from grpo.serving.scoring import Reference, score_groups, score_rows
from grpo.serving.store import TRANSITIONS, Store, StoreFull
from grpo.weights import trained_weights
from grpo.wire import PROTOCOL, pack_bodies, pack_group, unpack_group
from ref_server import make_app

LATE = 2**40  # a step
HERE = Path(__file__).parent
TOLERANCE = 1e-5  # float32 on both sides; measured: 4e-6


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "store.sqlite", max_bytes=100_000)
    yield store
    store.db.close()


@pytest.fixture
def model(tiny):
    return AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()


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


# --- The store ----------------------------------------------------------------------
def test_every_state_is_reached_and_only_what_has_ended_stays_so():
    states = set(store_module.STATES)
    sources = {state for before, _, _ in TRANSITIONS.values() for state in before.split()}
    targets = {after for _, after, _ in TRANSITIONS.values()} - {store_module.BEFORE}
    assert sources <= states and targets | {"pooled"} == states
    left = [before for event, (before, _, _) in TRANSITIONS.items() if event != "resample"]
    assert {state for before in left for state in before.split()} == states - {"done"}


def test_groups_come_out_oldest_first_and_once(store):
    """The newest first would starve old groups, and train them hundreds of steps later."""
    bodies = put(store, 2, 0, 1)
    assert [body for _, body in store.waiting(2, 0)] == list(bodies.values())[:2]
    assert lease(store) == {}  # nothing is scored yet
    mark_scored(store)
    assert list(lease(store, limit=2)) == ["group-002", "group-000"]
    assert lease(store) == {"group-001": bodies["group-001"] + b"scored"}
    assert lease(store) == {}


def test_runs_are_kept_apart(store):
    put(store, 0, run="a")
    put(store, 0, run="b")
    mark_scored(store)
    assert len(lease(store, "a")) == 1 and done(store, ["group-000"], "a") == 1
    assert len(lease(store, "b")) == 1


def test_the_same_id_again_changes_nothing_even_when_it_is_done(store):
    put(store, 0)
    again = make_group(seed=0)
    assert not store.put(again, b"other body") and len(store.waiting(9, 0)[0][1]) > 100
    mark_scored(store)
    lease(store)
    assert done(store, ["group-000", "unknown"]) == 1
    assert not store.put(again, b"other body")  # late, after its step
    assert done(store, ["group-000"]) == 0
    assert lease(store) == {} and store.waiting(9, 0) == []


def test_a_full_store_refuses_until_something_is_done(store):
    """Without a bound it would grow for as long as producers are faster than the trainer."""
    put(store, 0)
    store.max_bytes = store.bytes + 10
    with pytest.raises(StoreFull):
        put(store, 1)
    assert not store.put(make_group(seed=0), b"known: no room needed" * 10)
    mark_scored(store)
    done(store, list(lease(store)))
    assert store.bytes == 0
    put(store, 1)


def test_a_lease_that_runs_out_is_handed_out_again(store):
    put(store, 0)
    mark_scored(store)
    first = lease(store, seconds=0.05)
    assert lease(store) == {}
    time.sleep(0.06)
    assert lease(store) == first


def test_a_lease_is_bounded_in_bytes_but_gives_one_at_least(store, monkeypatch):
    bodies = put(store, 0, 1, 2)
    size = len(bodies["group-000"]) + len(b"scored")
    mark_scored(store)
    monkeypatch.setattr(store_module, "LEASE_BYTES", 2 * size + 5)
    assert list(lease(store)) == ["group-000", "group-001"]
    monkeypatch.setattr(store_module, "LEASE_BYTES", 5)
    assert list(lease(store)) == ["group-002"]


def test_a_failed_group_is_told_to_its_run_alone(store):
    put(store, 0, 1)
    put(store, 0, run="other")
    (seq, body_of_it), *others = store.waiting(9, 0)
    store.failed(seq, "ValueError: too strange")  # it may be tried again
    for seq, body in others:
        store.scored({seq: body})
    with pytest.raises(RuntimeError, match="group-000 failed: ValueError: too strange"):
        lease(store)
    assert len(lease(store, "other")) == 1
    assert store.stats()["failed"] == 1
    assert store.bytes == sum(len(body) for _, body in [(seq, body_of_it), *others])
    done(store, ["group-000"])  # who knows about it may go on
    assert list(lease(store)) == ["group-001"]


def test_a_group_acknowledged_while_it_is_scored_stays_done(store):
    """Or it would be handed out, and trained, once more."""
    put(store, 0)
    ((seq, body),) = store.waiting(9, 0)
    done(store, ["group-000"])
    store.scored({seq: body})
    assert lease(store) == {} and store.stats()["done"] == 1 and store.bytes == 0


def test_another_reference_scores_again_what_is_not_done(store):
    store.use_reference({"model": "a", "temperature": 1.0})
    put(store, 0, 1, 2)
    mark_scored(store)
    lease(store, limit=1)
    done(store, list(lease(store, limit=1)))
    store.use_reference({"temperature": 1.0, "model": "a"})
    assert store.stats()["waiting"] == 0
    store.use_reference({"model": "b", "temperature": 1.0})
    counts = store.stats()
    assert (counts["waiting"], counts["done"]) == (2, 1)


def test_stats_count(store):
    assert store.stats()["oldest_waiting_s"] == 0
    bodies = put(store, 0, 1)
    stats = store.stats()
    assert (stats["waiting"], stats["bytes"]) == (2, sum(map(len, bodies.values())))
    assert 0 <= stats["oldest_waiting_s"] < 5


def test_all_is_there_when_it_is_opened_again(tmp_path):
    path = tmp_path / "deep" / "store.sqlite"
    first = Store(path, 100_000)
    bodies = put(first, 0, 1, 2)
    mark_scored(first)
    leased = lease(first, limit=1, seconds=0)
    first.ack("run", ["group-001"], 5)
    counts = first.stats()
    first.db.close()
    second = Store(path, 100_000)
    # the answer to a lease may have died with the server: it is handed out again
    counts |= {"scored": counts["scored"] + 1, "leased": 0}
    assert second.stats() | {"oldest_waiting_s": 0} == counts
    assert lease(second) == leased | {"group-002": bodies["group-002"] + b"scored"}
    second.db.close()


HOLD = """
import sys, time
from grpo.serving.store import Store
from test_wire import make_group
store = Store(sys.argv[1], 100_000)
for seed in range(50):
    store.put(make_group(seed=seed), b"body %d" % seed)
    print("put", flush=True)
time.sleep(60)
"""


def test_what_was_put_survives_kill_9_and_meanwhile_nobody_else_opens_the_store(
    tmp_path, monkeypatch
):
    path = tmp_path / "store.sqlite"
    paths = os.pathsep.join([str(HERE), str(HERE.parent)])
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, path],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": paths},
    )
    try:
        for _ in range(50):
            assert holder.stdout.readline() == b"put\n"
        connect = partial(sqlite3.connect, timeout=0.1)
        monkeypatch.setattr(database.sqlite3, "connect", connect)
        with pytest.raises(SystemExit, match="locked; is it another server's"):
            Store(path, 100_000)
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    store = Store(path, 100_000)
    assert [body for _, body in store.waiting(99, 0)] == [b"body %d" % i for i in range(50)]
    store.db.close()


@pytest.mark.parametrize("what", ["lease", "waiting"])
def test_who_waits_is_woken(store, what):
    """No wake-up is lost: the answer comes with the change, long before the patience ends."""
    calls = {"lease": lambda: lease(store, patience=20), "waiting": lambda: store.waiting(9, 20)}
    if what == "lease":
        put(store, 0)
    got = []
    waiter = threading.Thread(target=lambda: got.append(calls[what]()))
    waiter.start()
    time.sleep(0.1)
    assert not got
    started = time.monotonic()
    put(store, 1) if what == "waiting" else mark_scored(store)
    waiter.join(10)
    assert len(got[0]) == 1 and time.monotonic() - started < 5


def test_a_lease_fails_while_it_waits(store):
    put(store, 0)
    threading.Timer(0.1, store.failed, (1, "ValueError: no")).start()
    with pytest.raises(RuntimeError, match="ValueError: no"):
        lease(store, patience=20)


def test_many_threads_at_once_lose_and_double_nothing(tmp_path):
    store, got = Store(tmp_path / "store.sqlite", 10**7), []

    def produce(worker):
        for i in range(25):
            put(store, 100 * worker + i)

    def consume():
        while len(got) < 100:
            bodies = lease(store, limit=7, patience=0.05)
            got.extend(bodies)
            done(store, list(bodies))

    threads = [threading.Thread(target=produce, args=(worker,)) for worker in range(4)]
    threads += [threading.Thread(target=consume) for _ in range(3)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 20
    while len(got) < 100 and time.monotonic() < deadline:
        mark_scored(store)
        time.sleep(0.005)
    for thread in threads:
        thread.join(20)
    assert len(got) == len(set(got)) == 100 and store.bytes == 0 and store.stats()["done"] == 100
    store.db.close()


# --- Scoring ------------------------------------------------------------------------
def rows_of(lengths, seed=0):
    """-> random prompts and completions; `lengths` are (prompt, completion) pairs."""
    draw = torch.Generator().manual_seed(seed)
    ids = [[torch.randint(0, VOCAB, (n,), generator=draw).tolist() for n in x] for x in lengths]
    return [p for p, _ in ids], [c for _, c in ids]


MIXED = [(5, 7), (1, 1), (12, 3), (5, 30), (2, 9), (40, 1), (3, 3)]


@torch.no_grad()
def plain_logps(model, prompts, completions, temperature):
    """One row at a time, all logits, log_softmax: what anybody would write."""
    result = []
    for p, c in zip(prompts, completions, strict=True):
        logits = model(input_ids=torch.tensor([p + c])).logits[0, :, :VOCAB]
        log_probs = torch.log_softmax(logits / temperature, dim=-1)
        result.append(torch.stack([log_probs[len(p) - 1 + t, token] for t, token in enumerate(c)]))
    return result


def scores(model, prompts, completions, **settings):
    """-> all that score_rows yields, in the order of the rows."""
    logps = {}
    for batch in score_rows(model, prompts, completions, **settings):
        assert not batch.keys() & logps.keys()
        logps |= batch
    return [logps.pop(row) for row in range(len(prompts))] + list(logps)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("budget", [1, 60, 100_000])
def test_score_rows_is_the_plain_log_softmax_whatever_the_batches(
    model, budget, share, temperature
):
    """In float32, at the sampling temperature, and of one part of the batch after another."""
    prompts, completions = rows_of(MIXED)
    shared = CompletionModel(model, share_prompts=share)
    settings = {"budget": budget, "temperature": temperature, "vocab_size": VOCAB}
    got = scores(shared, prompts, completions, **settings)
    for ours, plain in zip(got, plain_logps(model, prompts, completions, temperature), strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, plain, rtol=0, atol=TOLERANCE)


def test_scored_log_probs_own_their_memory(model):
    """A view would keep the whole batch."""
    prompts, completions = rows_of(MIXED)
    model = CompletionModel(model, share_prompts=True)
    settings = {"budget": 1000, "temperature": 1.0, "vocab_size": VOCAB}
    for logps in scores(model, prompts, completions, **settings):
        assert logps.untyped_storage().nbytes() == 4 * len(logps)


class SmallMemory(torch.nn.Module):
    """A CompletionModel with room for `rows` rows at once."""

    def __init__(self, model, rows):
        super().__init__()
        self.model, self.rows, self.batches = model, rows, []
        self.shares, self.head = model.shares, model.head

    def forward(self, prompts, completions):
        self.batches.append(len(prompts))
        if len(prompts) > self.rows:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.model(prompts, completions)


def test_a_batch_that_does_not_fit_is_halved(model):
    """Out of memory is not the end: only a row that does not fit alone is."""
    prompts, completions = rows_of(MIXED)
    model = CompletionModel(model, share_prompts=True)
    settings = {"budget": 100_000, "temperature": 1.0, "vocab_size": VOCAB}
    small = SmallMemory(model, rows=2)
    got = scores(small, prompts, completions, **settings)
    assert small.batches == [7, 3, 1, 2, 4, 2, 2]
    for ours, whole in zip(got, scores(model, prompts, completions, **settings), strict=True):
        torch.testing.assert_close(ours, whole, rtol=0, atol=TOLERANCE)
    with pytest.raises(torch.OutOfMemoryError):
        scores(SmallMemory(model, rows=0), prompts, completions, **settings)


def scorer(model, **settings):
    settings = {"budget": 500, "temperature": 1.0, "vocab_size": VOCAB} | settings
    model = CompletionModel(model, share_prompts=True)
    return lambda prompts, completions: score_rows(model, prompts, completions, **settings)


def test_score_groups_adds_ref_logps_and_nothing_else(store, model):
    bodies = put(store, 0, 1, 2)
    score_groups(store, store.waiting(9, 0), scorer(model))
    for id, body in lease(store).items():
        before, after = unpack_group(bodies[id]), unpack_group(body)
        prompts = [after.prompt_ids.tolist()] * 3
        completions = [ids.tolist() for ids in after.completions(after.completion_ids)]
        plain = torch.cat(plain_logps(model, prompts, completions, 1.0))
        torch.testing.assert_close(after.ref_logps, plain, rtol=0, atol=TOLERANCE)
        after.ref_logps = None
        assert pack_group(after) == pack_group(before)


def test_a_group_that_raises_is_failed_and_the_others_go_on(store, model):
    """One bad upload must not end the scoring loop while /upload goes on to answer."""
    put(store, 0, 1)
    put(store, 2, run="other")
    poison = unpack_group(store.waiting(9, 0)[0][1]).completion_ids.tolist()[:3]

    def score(prompts, completions):
        if poison in completions:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return scorer(model)(prompts, completions)

    score_groups(store, store.waiting(9, 0), score)
    with pytest.raises(RuntimeError, match="group-000 failed: OutOfMemoryError: CUDA out"):
        lease(store)
    assert store.stats()["scored"] == 2 and len(lease(store, "other")) == 1


def test_a_group_can_be_leased_before_those_with_it_are_scored(store, model):
    """The trainer works on the shortest while the server scores on."""
    for n in (60, 3, 30):
        group = make_group([n] * 3, seed=n)
        store.put(group, pack_group(group))
    leased = []

    def score(prompts, completions):
        for batch in scorer(model, budget=150)(prompts, completions):
            leased.append(list(lease(store)))
            yield batch

    score_groups(store, store.waiting(9, 0), score)
    leased.append(list(lease(store)))
    assert [ids for ids in leased if ids] == [["group-003"], ["group-030"], ["group-060"]]


def test_a_full_disk_fails_no_group(store, model, monkeypatch):
    put(store, 0, 1)

    def full(bodies):
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch, pytest.raises(sqlite3.OperationalError):
        patch.setattr(store, "scored", full)
        score_groups(store, store.waiting(9, 0), scorer(model))
    assert store.stats()["waiting"] == 2
    score_groups(store, store.waiting(9, 0), scorer(model))
    assert len(lease(store)) == 2


@pytest.mark.parametrize("kind", ["garbled", "other vocabulary", "not finite"])
def test_what_the_model_can_not_score_is_failed(store, model, kind):
    """A body stored under another protocol or model must not end the server at each start."""
    put(store, 0)
    ids = torch.full((6,), VOCAB - 1, dtype=torch.int32)
    bad = make_group(seed=1, run="bad", completion_ids=ids)
    store.put(bad, b"garbled" if kind == "garbled" else pack_group(bad))
    limits = {"vocab_size": VOCAB - 1 if kind == "other vocabulary" else VOCAB}

    def score(prompts, completions):
        for batch in scorer(model)(prompts, completions):
            for row, logps in batch.items():
                if completions[row] == [VOCAB - 1] * 3:
                    logps += torch.nan
            yield batch

    good = unpack_group(store.waiting(1, 0)[0][1])
    assert max(good.prompt_ids.max(), good.completion_ids.max()) < VOCAB - 1
    score_groups(store, store.waiting(9, 0), score, **limits)
    reason = {"garbled": "safetensors", "other vocabulary": "0..393", "not finite": "not finite"}
    with pytest.raises(RuntimeError, match=f"group-001 failed: ValueError: .*{reason[kind]}"):
        lease(store, "bad")
    assert list(lease(store)) == ["group-000"]


# --- A reference that follows the policy --------------------------------------------
@pytest.fixture
def reference(store, tiny, tmp_path):
    """-> reference(): the Reference around the store, as after a start of the server."""
    (tmp_path / "policies").mkdir()
    settings = {"model": str(tiny), "dtype": "float32", "temperature": 1.0, "share_prompts": True}
    return lambda: Reference(store, tmp_path / "policies", **settings)


def replace(reference, path, weights):
    """Calls replace() as a route does, and load_requested() as the scoring thread does."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(reference.replace, path, weights)
        while not asked.done():
            reference.load_requested()
            time.sleep(0.001)
    return asked.result()


def moved_policy(tiny, path, **changes):
    """Saves what a trainer would publish after some steps; -> its model."""
    policy = load_policy(str(tiny), AutoTokenizer.from_pretrained(tiny), "float32", **changes)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    safetensors.torch.save_file(trained_weights(policy.model), path)
    return policy.model


def scores_of(reference):
    prompts, completions = rows_of(MIXED)
    settings = {"budget": 500, "temperature": 1.0, "vocab_size": VOCAB}
    return torch.cat(scores(reference.model, prompts, completions, **settings))


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_policy_becomes_the_reference_outlasts_a_restart_and_goes(
    store, reference, model, tiny, tmp_path, lora_rank
):
    path = tmp_path / "policy.safetensors"
    policy = moved_policy(tiny, path, lora_rank=lora_rank)
    own, theirs = (torch.cat(plain_logps(m, *rows_of(MIXED), 1.0)) for m in (model, policy))
    assert (own - theirs).abs().max() > 0.1
    ours = reference()
    first = dict(ours.info)
    assert (first["weights"], first["model"], first["protocol"]) == ("", str(tiny), PROTOCOL)
    torch.testing.assert_close(scores_of(ours), own, rtol=0, atol=TOLERANCE)
    put(store, 0)
    mark_scored(store)
    replace(ours, path, "run@3")
    assert ours.info["weights"] == "run@3" and ours.info["facts"] != first["facts"]
    assert store.stats()["waiting"] == 1  # what the former one scored is scored again
    torch.testing.assert_close(scores_of(ours), theirs, rtol=0, atol=2 * TOLERANCE)
    replace(ours, tmp_path / "gone", "run@3")  # it is that already: a repeat, answer lost
    path.unlink()  # the run goes on, and only its newest policies are kept
    again = reference()
    assert again.info == ours.info
    torch.testing.assert_close(scores_of(again), theirs, rtol=0, atol=2 * TOLERANCE)
    replace(again, None, "")
    assert again.info == first == reference().info
    torch.testing.assert_close(scores_of(again), own, rtol=0, atol=TOLERANCE)


def test_what_can_not_be_the_reference_leaves_it_as_it_was(store, reference, tiny, tmp_path):
    ours = reference()
    before, scores = dict(ours.info), scores_of(ours)
    bad = tmp_path / "bad.safetensors"
    safetensors.torch.save_file({"other": torch.zeros(1)}, bad)
    (tmp_path / "garbled").write_bytes(b"no safetensors")
    for name in ("bad.safetensors", "garbled", "gone"):
        with pytest.raises(ValueError, match="run@1 can't be the reference"):
            replace(ours, tmp_path / name, "run@1")
    assert ours.info == before and torch.equal(scores_of(ours), scores)
    assert reference().info == before


# --- Routes -------------------------------------------------------------------------
INFO = {"model": "fake", "vocab_size": VOCAB, "tokenizer": "ab", "temperature": 1.0}
INFO |= {"protocol": PROTOCOL, "weights": "", "facts": "0123456789abcdef"}


class FakeReference:
    """In place of the model: knows what it is, and takes every policy that exists."""

    def __init__(self):
        self.info, self.max_tokens, self.replaced = INFO, 256, []

    def replace(self, path, weights):
        if path and not path.exists():
            raise ValueError(f"{weights} can't be the reference: no file")
        self.replaced.append((path, weights))
        self.info = INFO | {"weights": weights}


@pytest.fixture
def policies(store, tmp_path):
    return Policies(store, tmp_path / "policies", max_bytes=10_000)


@pytest.fixture
def app(store, policies):
    """-> app(**changes): the WSGI app around the store."""
    settings = {"token": None, "max_body_bytes": 5000, "regroup": True}
    settings |= {"lease_seconds": 60, "lease_wait": 0}
    reference = FakeReference()
    return lambda **changes: make_app(store, policies, reference, **settings | changes)


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
        self.session = SimpleNamespace(request=self.request, get=partial(self.request, "GET"))

    def twin(self):
        twin = InProcess(self.app, self.limit, self.after)
        twin.agreed = self.agreed
        return twin

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


def test_a_group_goes_round(app, store):
    app, body = app(), pack_group(make_group())
    assert call(app, "POST", "/upload", body)[::2] == (200, b'{"stored": true}')
    assert call(app, "POST", "/upload", body)[::2] == (200, b'{"stored": false}')
    wanted = {"run": "run", "limit": 5}
    assert call(app, "POST", "/lease", wanted)[::2] == (204, b"")
    mark_scored(store)
    status, headers, blobs = call(app, "POST", "/lease", wanted)
    assert (status, headers["Content-Type"]) == (200, "application/octet-stream")
    (blob,) = safetensors.torch.load(blobs).values()
    assert blob.numpy().tobytes() == body + b"scored"
    assert call(app, "POST", "/lease", wanted)[0] == 204
    done = {"run": "run", "ids": ["group-000"], "step": 3}
    assert call(app, "POST", "/ack", done)[::2] == (
        200,
        b'{"acknowledged": 1, "kept_bytes": 0, "max_bytes": 100000}',
    )
    assert json.loads(call(app, "POST", "/ack", done)[2])["acknowledged"] == 0


def test_several_groups_come_in_one_body_all_or_none(app, store):
    app, groups = app(), [make_group(seed=i) for i in (2, 0, 1)]  # answered in this order
    blob = b"".join(pack_bodies({group.id: pack_group(group) for group in groups}))
    several = {"QUERY_STRING": "several=1"}
    status, _, answer = call(app, "POST", "/upload", blob, **several)
    assert (status, json.loads(answer)) == (200, {"groups": 3 * [{"stored": True}]})
    stored = [row[0] for row in store.db.execute("SELECT id FROM groups ORDER BY seq")]
    assert stored == [group.id for group in groups]
    again = json.loads(call(app, "POST", "/upload", blob, **several)[2])
    assert again == {"groups": 3 * [{"stored": False}]}
    broken = {"new": pack_group(make_group(seed=3)), "broken": b"no group"}
    answer = call(app, "POST", "/upload", b"".join(pack_bodies(broken)), **several)
    assert "not a safetensors blob with a group" in refused(answer, 400)
    for none in (b"no blob", pack_group(groups[0]), b"".join(pack_bodies({}))):
        assert "blob of groups" in refused(call(app, "POST", "/upload", none, **several), 400)
    assert store.stats()["waiting"] == 3


def test_several_groups_that_do_not_fit_are_none_of_them_stored(app, store):
    """Not the first of them, and the others when the client asks again."""
    app, bodies = app(), {f"{i}": pack_group(make_group(seed=i)) for i in range(3)}
    store.max_bytes = 2 * len(bodies["0"])
    blob = b"".join(pack_bodies(bodies))
    answer = call(app, "POST", "/upload", blob, QUERY_STRING="several=1")
    assert "the store holds its" in refused(answer, 503)
    assert store.stats()["waiting"] == store.bytes == 0
    store.max_bytes *= 2
    assert call(app, "POST", "/upload", blob, QUERY_STRING="several=1")[0] == 200
    assert len(store.waiting(9, 0)) == 3


@pytest.mark.parametrize("path", ["/stats", "/live", "/policy"])
def test_a_query_that_is_no_text_is_refused_with_a_sentence(app, path):
    status, _, body = call(app(), "GET", path, QUERY_STRING="run=%ff")
    assert status == 400 and b"a query of text" in body


def test_info_and_stats(app, store):
    app = app()
    put(store, 0)
    assert json.loads(call(app, "GET", "/info")[2]) == INFO | {"regroup": True}
    stats = json.loads(call(app, "GET", "/stats")[2])
    assert stats["waiting"] == 1 and stats["workers"] == {}


def test_a_malformed_upload_is_refused_with_the_reason(app, store):
    """It must not be answered as a good one is."""
    app = app()
    nan = pack_group(make_group(rewards=torch.full((3, 2), torch.nan)))
    assert refused(call(app, "POST", "/upload", nan), 400) == "rewards must be finite"
    foreign = pack_group(make_group(prompt_ids=torch.tensor([VOCAB], dtype=torch.int32)))
    assert "0..394" in refused(call(app, "POST", "/upload", foreign), 400)
    long = pack_group(make_group(prompt=254))
    assert "context of 256" in refused(call(app, "POST", "/upload", long), 400)
    assert "safetensors" in refused(call(app, "POST", "/upload", b"\x80\x04pickle"), 400)
    assert sum(store.stats()[state] for state in ("waiting", "failed")) == 0


def test_lengths_are_checked_before_anything_is_read(app):
    app = app(max_body_bytes=100)
    assert "1 to 100 bytes" in refused(call(app, "POST", "/upload", b"x" * 101), 413)
    assert "1 to 100 bytes" in refused(call(app, "POST", "/lease", b" " * 101), 413)
    assert refused(call(app, "POST", "/upload", b"x", CONTENT_LENGTH=None), 411)
    assert refused(call(app, "POST", "/upload", b"", CONTENT_LENGTH="0"), 411)
    reason = refused(call(app, "POST", "/upload", b"x" * 50, CONTENT_LENGTH="60"), 400)
    assert reason == "the body ended after 50 of 60 bytes"


@pytest.mark.parametrize("length", ["x", "1e3", "-1", "+5", " ", "9" * 5000])
def test_a_length_that_is_no_number_is_refused(app, length):
    assert refused(call(app(), "POST", "/upload", b"x", CONTENT_LENGTH=length), 411)


def test_a_reason_that_quotes_the_body_is_cut(app):
    long = pack_group(make_group(reward_names=["x" * 2000] * 2))
    reason = refused(call(app(), "POST", "/upload", long), 400)
    assert reason.startswith("reward_names must differ") and len(reason) == 1000


def test_a_full_store_says_when_to_come_back(app, store):
    """Without back-pressure half of all groups would stay in memory for ever."""
    store.max_bytes = 10
    answer = call(app(), "POST", "/upload", pack_group(make_group()))
    assert "10 bytes" in refused(answer, 503) and answer[1]["Retry-After"] == "1"


def test_a_full_disk_is_told_and_harms_nothing(app, store):
    """It was a 500, and the end of the scoring thread. SQLite says "full" of a page count, too."""
    app, bodies = app(max_body_bytes=500_000), put(store, 0)
    store.max_bytes = 1_000_000
    (pages,) = store.db.execute("PRAGMA page_count").fetchone()
    store.db.execute(f"PRAGMA max_page_count={pages}")
    before, large = store.stats()["bytes"], pack_group(make_group((200,) * 200, seed=1))
    answer = call(app, "POST", "/upload", large)
    assert f"{store.path} is full" in refused(answer, 503) and answer[1]["Retry-After"] == "5"
    assert store.stats()["bytes"] == before and not store.db.connection.in_transaction
    assert [body for _, body in store.waiting(9, 0)] == list(bodies.values())
    store.db.execute("PRAGMA max_page_count=100000")
    assert call(app, "POST", "/upload", large)[0] == 200


@pytest.mark.parametrize("code, status", [(errno.ENOSPC, 503), (errno.EACCES, 500)])
def test_a_disk_without_room_for_a_policy_is_told_too(app, policies, monkeypatch, code, status):
    def write(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(policies, "write", write)
    query = "run=run&version=0&offset=0"
    assert os.strerror(code) in refused(
        call(app(), "PUT", "/policy", b"x", QUERY_STRING=query), status
    )


BAD_JSON = [
    b"not json",
    b"\xff\xfe",
    b"[]",
    b"1",
    b'"run"',
    b"null",
    b"[" * 4000,
    b'{"run": "run"}',
    b'{"limit": 1, "ids": []}',
    b'{"run": 1, "limit": 1, "ids": []}',
    b'{"run": ["run"], "limit": 1, "ids": []}',
    b'{"run": "run", "limit": true, "ids": {}}',
    b'{"run": "run", "limit": 1.0, "ids": "group-000"}',
    b'{"run": "run", "limit": "1", "ids": null}',
    b'{"run": "run", "limit": NaN, "ids": NaN}',
    b'{"run": "run", "limit": Infinity, "ids": 1}',
    b'{"run": "\\ud800", "limit": 1, "ids": ["a"]}',
    b'{"run": "run", "limit": 1, "ids": 1, "oldest": "0"}',
    b'{"run": "run", "limit": 1, "ids": 1, "oldest": 9223372036854775808}',
    b'{"run": "run", "limit": 1, "ids": 1, "wait": 1}',
]


@pytest.mark.parametrize("route", ["/lease", "/ack"])
@pytest.mark.parametrize("body", BAD_JSON)
def test_bad_json_is_refused_with_the_reason(app, store, route, body):
    put(store, 0)
    mark_scored(store)
    assert refused(call(app(), "POST", route, body), 400)
    assert store.stats()["scored"] == 1


def test_ids_of_any_kind_end_no_lease_but_their_own(app, store):
    put(store, 0)
    odd = {
        "run": "run",
        "ids": [None, {}, [], 1e400, "'; DROP TABLE groups; --", 10**30],
        "step": 1,
    }
    assert json.loads(call(app(), "POST", "/ack", odd)[2])["acknowledged"] == 0
    half = {"run": "run", "ids": ["\ud800"], "step": 0, "reason": "half a letter"}
    assert refused(call(app(), "POST", "/ack", half), 400)
    assert refused(call(app(), "POST", "/drop", half), 400)
    assert store.stats()["waiting"] == 1


@pytest.mark.parametrize("limit", [0, -1, -(10**30), 10**30])
def test_a_strange_limit_is_brought_into_range(app, store, limit):
    put(store, 0, 1)
    mark_scored(store)
    _, _, blobs = call(app(), "POST", "/lease", {"run": "run", "limit": limit})
    assert len(safetensors.torch.load(blobs)) == (2 if limit > 0 else 1)


def test_a_failed_group_ends_its_runs_lease_with_500(app, store):
    """After an error in scoring the lease must not answer "nothing yet" for ever."""
    put(store, 0)
    store.failed(1, "ValueError: no")
    answer = call(app(), "POST", "/lease", {"run": "run", "limit": 1})
    assert refused(answer, 500) == "scoring group group-000 failed: ValueError: no"


def test_what_nobody_foresaw_is_told_in_json_too(app, store):
    app = app()
    assert "Not found" in refused(call(app, "GET", "/nothing"), 404)
    assert "not allowed" in refused(call(app, "GET", "/upload"), 405)
    store.db.close()  # as a disk that fails would
    reason = refused(call(app, "POST", "/upload", pack_group(make_group())), 500)
    assert "ProgrammingError" in reason


ROUTES = "GET /info,GET /stats,GET /,GET /no,POST /upload,POST /lease,POST /ack,POST /reference"
ROUTES += ",PUT /policy,POST /policy,GET /policy,POST /work,POST /end,GET /live,POST /log"


@pytest.mark.parametrize("route", ROUTES.split(","))
def test_every_route_asks_for_the_token(app, route):
    """Or whoever finds the port could read and write."""
    app = app(token="sécret")
    for sent in (None, "", "Bearer ", "Bearer secret", "Bearer sécret2", "sécret"):
        answer = call(app, *route.split(), b"x", HTTP_AUTHORIZATION=sent)
        assert "GRPO_TOKEN" in refused(answer, 401)
    assert call(app, *route.split(), b"x", HTTP_AUTHORIZATION="Bearer sécret")[0] != 401


# --- The process --------------------------------------------------------------------
@pytest.mark.parametrize(
    ("constant", "value"),
    [
        ("TEMPERATURE", 0),
        ("TEMPERATURE", "1"),
        ("DTYPE", "float16"),
        ("SCORE_BATCH_TOKENS", 0),
        ("SHARE_PROMPTS", "yes"),
        ("MODEL", None),
        ("STORE", ""),
        ("PORT", 65536),
        ("PORT", "59875"),
        ("THREADS", 0),
        ("LEASE_WAIT_SECONDS", 120),
        ("LEASE_SECONDS", float("nan")),
        ("MAX_BODY_BYTES", 1 << 10),
        ("MAX_STORE_BYTES", 1 << 20),
        ("MAX_POLICY_BYTES", 1e9),
    ],
)
def test_a_bad_constant_of_the_server_is_named_with_its_value(
    constant, value, monkeypatch, tmp_path
):
    monkeypatch.setattr(ref_server, "MODEL", str(tmp_path / "none"))
    monkeypatch.setattr(ref_server, constant, value)
    with pytest.raises(SystemExit, match=re.escape(f"{constant} = {value!r} must be")):
        ref_server.main()


def test_a_server_that_can_not_start_says_why_and_ends(tiny, tmp_path, monkeypatch):
    """On 0.0.0.0 it must not serve without authentication."""
    monkeypatch.delenv("GRPO_TOKEN", raising=False)
    monkeypatch.setattr(ref_server.signal, "signal", lambda *_: None)
    cases = [
        ({"MODEL": str(tiny), "HOST": "0.0.0.0"}, "set GRPO_TOKEN here and at the trainer$"),
        ({"MODEL": str(tmp_path / "no_model"), "HOST": "127.0.0.1"}, "no_model"),
    ]
    monkeypatch.setattr(ref_server, "STORE", str(tmp_path / "store.sqlite"))
    for constants, sentence in cases:
        for name, value in constants.items():
            monkeypatch.setattr(ref_server, name, value)
        with pytest.raises(SystemExit, match=sentence):
            ref_server.main()
    assert not list(tmp_path.iterdir())
