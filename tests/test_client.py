"""The server's client: retries, refusals, and sentences that say what to do."""

import json
import random
import socket
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from helpers import Replies, reply
from transformers import AutoTokenizer

from grpo.client import RefServer
from grpo.wire import PROTOCOL, tokenizer_facts


# --- Client ------------------------------------------------------------------------
class FakeSession:
    def __init__(self, *replies):
        self.replies, self.headers = list(replies), {}

    def request(self, method, url, **_):
        status, body = self.replies.pop(0)
        return SimpleNamespace(
            status_code=status,
            ok=status < 400,
            text=json.dumps(body),
            json=lambda: body,
            headers={},
        )


def a_client(*replies, limit=60):
    client = RefServer("http://127.0.0.1:9", limit)
    client.session = FakeSession(*replies)
    return client


def test_a_reference_that_does_not_fit_is_refused_in_a_sentence(tiny):
    facts = tokenizer_facts(AutoTokenizer.from_pretrained(tiny)) | {"temperature": 1.0}
    info = facts | {"protocol": PROTOCOL, "model": "theirs"}
    assert a_client((200, info)).check("ours", facts) == info
    for wrong in ({"tokenizer": "0123"}, {"vocab_size": 9}, {"temperature": 0.9}, {"protocol": 0}):
        with pytest.raises(SystemExit, match=f"does not fit the policy ours.*{next(iter(wrong))}"):
            a_client((200, info | wrong)).check("ours", facts)


def test_a_reference_that_changes_in_mid_run_is_refused(tiny):
    facts = tokenizer_facts(AutoTokenizer.from_pretrained(tiny)) | {"temperature": 1.0}
    client = a_client(
        (200, facts | {"protocol": PROTOCOL, "model": "theirs", "facts": "a"}), (200, {})
    )
    client.check("ours", facts)
    with pytest.raises(RuntimeError, match="another reference model or temperature"):
        client.lease("run", 1)


@pytest.mark.parametrize("answer", [[], "<html>"])
def test_an_address_where_something_else_answers_is_said(answer):
    with pytest.raises(SystemExit, match="is another server"):
        a_client((200, answer)).check("ours", {})
    with pytest.raises(SystemExit, match="is another server"):
        RefServer("nonsense://x", 60).check("ours", {})


def test_a_full_store_is_waited_for_and_a_refusal_is_raised(monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    assert a_client((503, {"error": "full"}), (200, {})).call("POST", "/upload").ok
    with pytest.raises(RuntimeError, match=r"refused \(400\).*rewards must be finite"):
        a_client((400, {"error": "rewards must be finite"})).call("POST", "/upload")


def test_no_server_is_an_error_that_says_what_to_start(monkeypatch, capsys):
    """A dead server must not look like an empty queue, and be waited for, for ever."""
    clock = random.Random(0)
    now = [0.0]
    fake = {"monotonic": lambda: now[0]}  # of waits alone: other threads sleep, too
    fake["sleep"] = lambda s: now.__setitem__(0, now[0] + 3 + clock.random())
    monkeypatch.setattr("grpo.stop.time", SimpleNamespace(**fake))
    client = RefServer("http://127.0.0.1:9", 40)  # a port where nothing listens
    with pytest.raises(RuntimeError, match="waited 40 s for .*ref_server.py"):
        client.call("GET", "/info")
    assert capsys.readouterr().err.count("waiting for http://127.0.0.1:9/info") >= 3


# --- Tokenizer facts and the client ------------------------------------------------
def test_a_call_goes_on_when_the_server_dies_in_the_middle_of_its_reply(no_pause):
    server = Replies(reply(200, b"half", length=8), b"", reply(200, b"complete"))
    assert RefServer(server.url, 20).call("GET", "/info").content == b"complete"


def test_a_call_waits_while_the_store_is_full(no_pause):
    server = Replies(reply(503, b"full", headers="Retry-After: 1\r\n"), reply(200, b"{}"))
    assert RefServer(server.url, 20).call("POST", "/upload", data=b"x").ok
    assert len(server.requests) == 2


def test_a_refusal_is_raised_at_once_with_its_reason():
    """simple_GRPO's bare `except: return None` on the network made any error look like no data."""
    server = Replies(reply(400, b'{"error": "rewards must be finite"}'))
    with pytest.raises(RuntimeError, match=r"refused \(400\).*rewards must be finite"):
        RefServer(server.url, 20).call("POST", "/upload", data=b"x")


def test_a_wait_for_a_server_that_is_not_there_ends_with_a_sentence():
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    with pytest.raises(RuntimeError, match=r"no answer \(ConnectionError\); is `python ref_server"):
        RefServer(f"http://127.0.0.1:{port}", 0.1).call("GET", "/info")


def test_the_clients_proxy_is_not_asked(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody there
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = Replies(reply(200, b"{}"))
    assert RefServer(server.url, 0.1).call("GET", "/info").ok


def test_the_clients_token_travels(monkeypatch):
    monkeypatch.setenv("GRPO_TOKEN", "secret")
    server = Replies(reply(200, b"{}"))
    RefServer(server.url, 5).call("GET", "/info")
    assert b"Authorization: Bearer secret\r\n" in server.requests[0]


@pytest.mark.parametrize("name", ["protocol", "vocab_size", "tokenizer", "temperature"])
def test_check_refuses_a_reference_that_does_not_fit(name):
    """Log-probs of other ids, or at another temperature, would be finite numbers too."""
    facts = {"vocab_size": 395, "tokenizer": "ab", "temperature": 1.0}
    info = facts | {"protocol": PROTOCOL, "model": "ref"}
    server = Replies(reply(200, json.dumps(info).encode()))
    assert RefServer(server.url, 5).check("policy", facts) == info
    server = Replies(reply(200, json.dumps(info | {name: 0.9}).encode()))
    with pytest.raises(SystemExit, match=f"{name} 0.9 and not"):
        RefServer(server.url, 5).check("policy", facts)


def test_a_wrong_token_and_a_missing_server_are_sentences_before_anything_starts():
    refusal = reply(401, b'{"error": "no or wrong token: set GRPO_TOKEN"}')
    with pytest.raises(SystemExit, match="wrong token: set GRPO_TOKEN"):
        RefServer(Replies(refusal).url, 5).check("model", {})
    with pytest.raises(SystemExit, match="waited 0 s for .* is `python ref_server.py` running"):
        RefServer("http://127.0.0.1:9", 0).check("model", {})


def blobs(*, headers="", **bodies):
    """-> /lease's reply: a tensor of bytes for each group."""
    tensors = {k: torch.frombuffer(bytearray(b), dtype=torch.uint8) for k, b in bodies.items()}
    return reply(200, safetensors.torch.save(tensors), headers=headers)


def test_a_lease_gives_bodies_by_id_and_counts_what_was_too_old():
    server = Replies(
        blobs(c=b"third", a=b"1", headers="X-Dropped: 2\r\n"),
        reply(204, b"", headers="X-Dropped: 3\r\n"),
    )
    trainer = RefServer(server.url, 5)
    assert trainer.lease("run", 7, oldest=4) == {"c": b"third", "a": b"1"}
    assert trainer.lease("run", 7, patience=False) == {} and trainer.dropped == 5
    asked = [json.loads(request.split(b"\r\n")[-1]) for request in server.requests]
    assert asked == [
        {"run": "run", "limit": 7, "oldest": 4, "wait": True},
        {"run": "run", "limit": 7, "oldest": 0, "wait": False},
    ]


def test_a_second_client_expects_the_same_reference(monkeypatch):
    """Threads of the trainer each have a client; all must notice another reference."""
    monkeypatch.setenv("GRPO_TOKEN", "secret")
    server = Replies(blobs(a=b"1", headers="X-Facts: other\r\n"))
    first = RefServer(server.url + "/", 5)
    first.agreed_hash = "ours"
    second = first.copy()
    assert second.session is not first.session
    with pytest.raises(RuntimeError, match="another reference model"):
        second.lease("run", 1)
    assert b"Authorization: Bearer secret\r\n" in server.requests[0]
