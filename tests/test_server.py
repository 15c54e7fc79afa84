"""ref_server.py: the app as a function, its queue, its scores, and a real socket."""

import json
import socket
import threading
import time

import pytest
import torch
from fakes import tiny_policy
from helpers import LIMITS, VOCAB, call, make_group, refused

import ref_server
from grpo.client import RefServer
from grpo.gate import Waiting, listen
from grpo.log import in_background
from grpo.wire import facts_of, pack_ids, unpack_ids, unpack_logps
from ref_server import Reference, Request, answer_all, make_app

INFO = {"model": "theirs", "dtype": "float32"}


def fake_score(requests):
    """Answers with the ids as log-probs; an id of 13 can't be scored."""
    ids = [request.tensors["completion_ids"] for request in requests]
    if any(13 in part for part in ids):
        raise RuntimeError("an unlucky number")
    for request, part in zip(requests, ids, strict=True):
        request.answer.set_result(-part.float())


def ids_group(*ids):
    group = make_group([len(ids)])
    group.completion_ids[:] = torch.tensor(ids)
    return group


def a_request(*groups):
    return Request(unpack_ids(pack_ids(groups), **LIMITS))


@pytest.fixture
def server():
    """-> (app, queue) of a server whose main thread is a thread here."""
    waiting, end = Waiting(4, 10_000), threading.Event()

    def score():
        while not end.is_set():
            if requests := waiting.take(100, timeout=0.05):
                answer_all(requests, fake_score)

    thread = in_background(score)
    yield make_app(waiting, INFO, LIMITS, None), waiting
    end.set()
    thread.join()


def score_of(app, *groups, query="wait=20"):
    return call(app, "POST", "/score", pack_ids(groups), QUERY_STRING=query)


# --- Routes -----------------------------------------------------------------------------
def test_ids_go_in_and_log_probs_come_out_with_the_name_of_their_model(server):
    groups = [ids_group(1, 2, 3), ids_group(4)]
    status, headers, body = score_of(server[0], *groups)
    assert status == 200 and json.loads(headers["X-Info"]) == INFO
    assert [part.tolist() for part in unpack_logps(body, groups)] == [[-1, -2, -3], [-4]]
    assert json.loads(call(server[0], "GET", "/info")[2]) == INFO


def test_what_is_malformed_is_the_clients_fault(server):
    app, waiting = server
    refused(score_of(app, ids_group(VOCAB)), 400)
    refused(score_of(app, make_group([300])), 400)  # longer than the model's context
    refused(score_of(app, make_group(), query="wait=86401"), 400)
    assert waiting.sizes == []  # each has given its room back


def test_one_poisoned_request_fails_alone(server, capfd):
    waiting, requests = Waiting(9, 10_000), [ids_group(1), ids_group(2, 13), ids_group(3)]
    requests = [a_request(group) for group in requests]
    answer_all(requests, fake_score)
    assert requests[0].answer.result().tolist() == [-1]
    assert requests[2].answer.result().tolist() == [-3]
    with pytest.raises(RuntimeError, match="unlucky"):
        requests[1].answer.result()
    assert waiting.take(1, 0) == [] and "Traceback" in capfd.readouterr().err
    assert "unlucky" in refused(score_of(server[0], ids_group(13)), 500)  # its sender hears why
    assert score_of(server[0], ids_group(1))[0] == 200


def test_a_device_that_is_broken_ends_the_process(monkeypatch):
    monkeypatch.setattr(ref_server, "accelerator", lambda: "cuda")

    def broken():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.accelerator, "synchronize", broken)
    with pytest.raises(RuntimeError, match="illegal"):
        answer_all([a_request(ids_group(13))], fake_score)


# --- Scores -----------------------------------------------------------------------------
@pytest.fixture
def reference(tiny, monkeypatch):
    constants = {"MODEL": str(tiny), "DTYPE": "float32", "SCORE_BATCH_TOKENS": 40}
    for name, value in constants.items():
        monkeypatch.setattr(ref_server, name, value)
    return Reference()


def expected(policy, group):
    """-> the policy's own log-probs of a group, sequence by sequence."""
    prompt, parts = group.prompt_ids.tolist(), group.completions(group.completion_ids)
    return torch.tensor([logp for ids in parts for logp in policy.logps(prompt, ids.tolist())])


def test_scores_are_the_models_own_log_probs(reference, tiny):
    """Whatever is scored together: in float32 by rounding alone, 1e-5 at most."""
    policy, last = tiny_policy(tiny), make_group((20, 2), seed=7)
    groups = [make_group((3, 1, 9), seed=i, prompt=5 - i) for i in (0, 3)]
    requests = [a_request(*groups), a_request(last)]
    reference.score(requests)
    for request, own in zip(requests, (groups, [last]), strict=True):
        right = torch.cat([expected(policy, group) for group in own])
        assert torch.allclose(request.answer.result(), right, atol=2e-5)
    facts = facts_of(policy.tokenizer, 1.0)
    assert reference.info == facts | {"model": str(tiny), "dtype": "float32"}
    assert reference.limits == LIMITS


def test_a_batch_that_does_not_fit_is_halved(reference, tiny, monkeypatch):
    from grpo import scoring

    run, sizes = scoring.score_batch, []

    def small(model, prompts, *others):
        sizes.append(len(prompts))
        if len(prompts) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(model, prompts, *others)

    monkeypatch.setattr(scoring, "score_batch", small)
    most, group = 1, make_group((3, 1, 2, 4))
    reference.score([request := a_request(group)])
    assert sorted(sizes) == [1, 1, 1, 1, 2, 2, 4]
    assert torch.allclose(request.answer.result(), expected(tiny_policy(tiny), group), atol=2e-5)
    most, request = 0, a_request(group)
    answer_all([request], reference.score)
    with pytest.raises(RuntimeError, match="OutOfMemoryError"):
        request.answer.result()


def test_log_probs_that_are_not_finite_are_never_sent(reference):
    with torch.no_grad():
        reference.model.model.model.norm.weight.fill_(torch.nan)
    answer_all([request := a_request(make_group())], reference.score)
    with pytest.raises(RuntimeError, match="finite"):
        request.answer.result()


# --- A socket ---------------------------------------------------------------------------
@pytest.fixture
def served():
    """-> (queue, port) of a server of 8 threads that nobody scores for."""
    waiting = Waiting(8 - 4, 10**6)
    http = listen(make_app(waiting, INFO, LIMITS, None), "127.0.0.1", 0, threads=8)
    in_background(http.run)
    yield waiting, int(http.effective_port)
    http.close()
    http.task_dispatcher.shutdown(timeout=0.1)


def post(port, body, length=None):
    """-> a connection on which a request to score was sent."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=10)
    head = f"POST /score?wait=60 HTTP/1.1\r\nContent-Length: {length or len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def wait_until(holds):
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_a_client_has_left_is_cancelled(served):
    waiting, port = served
    connection = post(port, pack_ids([make_group()]))
    wait_until(lambda: waiting.queue)
    connection.close()
    wait_until(waiting.queue[0].answer.cancelled)
    wait_until(lambda: not waiting.sizes)
    assert waiting.take(10, timeout=0) == []


def test_requests_that_wait_and_clients_that_stall_never_starve_health(served):
    waiting, port = served
    body = pack_ids([make_group()])
    connections = [post(port, body) for _ in range(12)]
    connections += [post(port, body[:9], len(body)) for _ in range(12)]  # they send no more
    wait_until(lambda: len(waiting.queue) == 4)
    slowest, client = 0, RefServer(f"http://127.0.0.1:{port}", 5)
    for path in ("/health", "/info") * 5:
        start = time.monotonic()
        assert client.call("GET", path).ok
        slowest = max(slowest, time.monotonic() - start)
    assert slowest < 0.5  # a loaded machine; tests/load.py measures it
    answer_all(waiting.take(10**6, timeout=1), fake_score)
    statuses = sorted(int(c.recv(9999)[9:12]) for c in connections[:12])
    assert statuses == [200] * 4 + [503] * 8
    for connection in connections:
        connection.close()


REFUSED = {
    "POST http://[::1/score HTTP/1.1": 400,
    "POST /score HTTP/1.1\r\nTransfer-Encoding: gzip": 400,
    "POST /score HTTP/1.1\r\nContent-Length: 99999999": 413,
    "GET /info HTTP/1.1\r\nX: " + "x" * 300_000: 431,
}


def test_what_waitress_refuses_is_a_sentence_too(served):
    for head, status in REFUSED.items():
        with socket.create_connection(("127.0.0.1", served[1]), timeout=10) as connection:
            connection.sendall(head.encode() + b"\r\n\r\n")
            reply = b"".join(iter(lambda c=connection: c.recv(9999), b""))
        assert int(reply[9:12]) == status
        assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]
