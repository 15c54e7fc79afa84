"""Scoring: plain log-probs however they are batched; a reference that is refreshed."""

import errno
import shutil
import sqlite3
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import safetensors.torch
import torch
from helpers import VOCAB, lease, make_group, mark_scored, put
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo.forward import CompletionModel
from grpo.sampling.policy import load_policy
from grpo.serving.scoring import Reference, score_groups, score_sequences
from grpo.weights import trained_weights
from grpo.wire import PROTOCOL, pack_group, unpack_group

# --- Scoring -----------------------------------------------------------------------
TOLERANCE = 1e-5  # float32 on both sides; measured: 4e-6


@pytest.fixture
def model(tiny):
    return AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()


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
    """-> all that score_sequences yields, in the order of the rows."""
    logps = {}
    for batch in score_sequences(model, prompts, completions, **settings):
        assert not batch.keys() & logps.keys()
        logps |= batch
    return [logps.pop(row) for row in range(len(prompts))] + list(logps)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("budget", [1, 60, 100_000])
def test_score_sequences_is_the_plain_log_softmax_whatever_the_batches(
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
    return lambda prompts, completions: score_sequences(model, prompts, completions, **settings)


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


# --- A reference that follows the policy -------------------------------------------
@pytest.fixture
def reference(store, tiny, tmp_path):
    """-> reference(): the Reference around the store, as after a start of the server."""
    (tmp_path / "policies").mkdir()
    settings = {"model": str(tiny), "dtype": "float32", "temperature": 1.0, "budget": 500}
    settings["share_prompts"] = True
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


def test_a_kill_before_the_store_knows_the_new_reference_leaves_the_former(
    store, reference, tiny, tmp_path, monkeypatch
):
    for number in (1, 2):
        moved_policy(tiny, tmp_path / str(number), lora_rank=4 * (number - 1))
    ours = reference()
    replace(ours, tmp_path / "1", "run@1")
    before, scores = dict(ours.info), scores_of(ours)
    monkeypatch.setattr(ours, "_announce", lambda weights: sys.exit("killed"))
    ours.requests.put((tmp_path / "2", "run@2", Future()))
    with pytest.raises(SystemExit):
        ours.load_requested()
    again = reference()
    assert again.info == before and torch.equal(scores_of(again), scores)


def test_a_full_disk_refuses_a_reference_until_there_is_room(
    store, reference, tiny, tmp_path, monkeypatch
):
    moved_policy(tiny, tmp_path / "policy")
    ours = reference()
    before, scores = dict(ours.info), scores_of(ours)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    def said_by_sqlite(*_):
        raise sqlite3.OperationalError("database or disk is full")

    for module, name, error in ((shutil, "copy", full), (store, "use_reference", said_by_sqlite)):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, error)
            with pytest.raises((OSError, sqlite3.OperationalError)):  # 503: the client tries again
                replace(ours, tmp_path / "policy", "run@1")
        assert ours.info == before and torch.equal(scores_of(ours), scores)
        assert not list(ours.folder.glob("reference-*"))
    replace(ours, tmp_path / "policy", "run@1")
    assert ours.info["weights"] == "run@1"


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
