"""ref_server.py: the app as a function, its scores, and a real socket."""

import contextlib
import json
import re
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
import torch
from fakes import own_logps, tiny_policy
from helpers import LIMITS, VOCAB, call, make_group, refused
from processes import PATIENCE, command_of, start

import ref_server
from grpo.gate import listen
from grpo.log import in_background
from grpo.remote import ReferenceClient
from grpo.wire import facts_of, pack_ids, unpack_ids, unpack_logps, weights_of
from ref_server import Reference, make_app

INFO = {"model": "theirs", "dtype": "float32"}
THREADS = 8


def fake_score(tensors, temperature):
    """-> the ids by the temperature as log-probs; an id of 13 can't be scored."""
    if 13 in (ids := tensors["completion_ids"]):
        raise RuntimeError("an unlucky number")
    return -ids.float() / temperature


def ids_group(*ids):
    group = make_group([len(ids)])
    group.samples[0].ids = list(ids)
    return group


def tensors_of(*groups):
    return unpack_ids(pack_ids(groups), **LIMITS)


@pytest.fixture
def app():
    return make_app(fake_score, INFO, LIMITS, THREADS, None)


def score_of(app, *groups, query="wait=100&temperature=1"):
    return call(app, "POST", "/score", pack_ids(groups), QUERY_STRING=query)


# --- Routes -----------------------------------------------------------------------------
def test_ids_go_in_and_log_probs_come_out_with_the_name_of_their_model(app):
    groups = [ids_group(1, 2, 3), ids_group(4)]
    status, headers, body = score_of(app, *groups, query="wait=100&temperature=0.5")
    assert status == 200 and json.loads(headers["X-Info"]) == INFO
    assert [part.tolist() for part in unpack_logps(body, groups)] == [[-2, -4, -6], [-8]]
    assert json.loads(call(app, "GET", "/info")[2]) == INFO


def test_what_is_malformed_is_the_clients_fault(app):
    for _ in range(2 * THREADS):  # each gives its place back
        refused(score_of(app, ids_group(VOCAB)), 400)
    refused(score_of(app, make_group([300])), 400)  # longer than the model's context
    for wait in ("soon", "", "1e999", "-1e999", "nan", "-1", "1e300"):
        assert refused(score_of(app, make_group(), query=f"wait={wait}&temperature=1"), 400)
    for temperature in ("hot", "", "inf", "nan", "-1", "0"):
        query = f"wait=1&temperature={temperature}"
        assert refused(score_of(app, make_group(), query=query), 400)
    assert "completion_lengths" in refused(score_of(app, make_group((1, 0))), 400)


def test_a_request_that_can_not_be_scored_fails_alone(app):
    assert "unlucky" in refused(score_of(app, ids_group(13)), 500)  # its sender hears why
    assert score_of(app, ids_group(1))[0] == 200


# --- Scores -----------------------------------------------------------------------------
@pytest.fixture
def reference(tiny):
    return Reference(ref_server.server_constants({"MODEL": str(tiny), "SCORE_BATCH_TOKENS": 40}))


def test_scores_are_the_models_own_log_probs(reference, tiny):
    """Whatever is scored together: in float32 by rounding alone, 1e-5 at most."""
    policy, last = tiny_policy(tiny), make_group((20, 2), seed=7)
    groups = [make_group((3, 1, 9), seed=i, prompt=5 - i) for i in (0, 3)]
    for own in (groups, [last]):
        right = torch.cat([own_logps(policy, group) for group in own])
        assert torch.allclose(reference.score(tensors_of(*own), 1.0), right, atol=2e-5)
    facts = facts_of(policy.tokenizer)
    assert reference.info == facts | {
        "model": str(tiny),
        "dtype": "float32",
        "bits": 16,
        "weights": weights_of(tiny_policy(tiny).model),
        "context": LIMITS["max_tokens"],
    }
    assert reference.limits == LIMITS


def test_a_batch_that_does_not_fit_is_halved(reference, tiny, monkeypatch):
    from grpo import reference as module

    run, sizes = module.score_batch, []

    def small(model, prompts, *others):
        sizes.append(len(prompts))
        if len(prompts) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(model, prompts, *others)

    monkeypatch.setattr(module, "score_batch", small)
    most, group = 1, make_group((3, 1, 2, 4))
    logps = reference.score(tensors_of(group), 1.0)
    assert sorted(sizes) == [1, 1, 1, 1, 2, 2, 4]
    assert torch.allclose(logps, own_logps(tiny_policy(tiny), group), atol=2e-5)
    most = 0
    with pytest.raises(RuntimeError, match="OutOfMemoryError"):
        reference.score(tensors_of(group), 1.0)


def test_log_probs_that_are_not_finite_are_never_sent(reference):
    with torch.no_grad():
        reference.model.model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(RuntimeError, match="finite"):
        reference.score(tensors_of(make_group()), 1.0)


def test_a_device_that_is_broken_ends_the_process(reference, monkeypatch, capfd):
    def broken(*_, **__):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(ref_server, "accelerator", lambda: "cuda")
    monkeypatch.setattr(ref_server, "score_groups", broken)
    monkeypatch.setattr(torch.accelerator, "synchronize", broken)
    monkeypatch.setattr("grpo.stop.os._exit", sys.exit)
    with pytest.raises(SystemExit, match="1"):
        reference.score(tensors_of(make_group()), 1.0)
    assert "the device is broken: CUDA error: an illegal" in capfd.readouterr().err


# --- A socket --------------------------------------------------------------------------
def test_a_full_server_says_so_and_still_answers_health():
    """Of 8 threads 4 wait for answers; the first request is scored once others were refused."""
    scored, begun, go = [], threading.Event(), threading.Event()

    def score(tensors, temperature):
        begun.set()
        go.wait()
        scored.append(temperature)
        return fake_score(tensors, temperature)

    group = make_group()
    http = listen(make_app(score, INFO, LIMITS, THREADS, None), "127.0.0.1", 0, 8, 10**6)
    in_background(http.run)
    url = f"http://127.0.0.1:{http.effective_port}"

    def post(number, seconds=60):
        where = f"{url}/score?wait={seconds}&temperature={number}"
        return requests.post(where, pack_ids([group]), timeout=60)

    with ThreadPoolExecutor(4) as pool:
        replies = [pool.submit(post, 1)]
        begun.wait()
        assert post(5, 0).status_code == 503  # and it is not scored later
        replies += [pool.submit(post, number) for number in (2, 3, 4)]
        time.sleep(1)  # until they have arrived
        assert "4 requests wait" in post(5).text
        assert ReferenceClient(url, 5).call("GET", "/health").ok
        go.set()
        assert [reply.result().status_code for reply in replies] == [200] * 4
    assert scored[0] == 1 and sorted(scored) == [1, 2, 3, 4]
    assert requests.post(f"{url}/score", b"x" * (10**6 + 1), timeout=60).status_code == 413
    http.stop()


LOADS = """
import os, signal, sys, ref_server
ref_server.Reference = lambda c: os.kill(os.getpid(), signal.Signals[sys.argv.pop()])
ref_server.main(PORT=0)
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_a_server_that_a_signal_ends_says_so_also_while_it_loads(name, tmp_path):
    (tmp_path / "loads.py").write_text(LOADS)
    process = start([sys.executable, tmp_path / "loads.py", name], tmp_path / "log")
    assert process.wait(PATIENCE) == 1 and f"ended by {name}" in (tmp_path / "log").read_text()


def has_ipv6():
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as found:
        return not found.bind(("::1", 0))
    return False


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_the_url_that_a_server_prints_is_one_that_a_client_accepts(tiny, tmp_path):
    log, preset = tmp_path / "log", {"MODEL": str(tiny), "HOST": "[::1]", "PORT": 0}
    process = start(command_of("ref_server", preset), log)
    while not (url := re.search(r"serving .* on (\S+)", log.read_text())):
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    client = ReferenceClient(url[1], 1)
    assert client.call("GET", "/info").json()["model"] == str(tiny)
    assert requests.get(f"{url[1]}/health", timeout=60).ok
