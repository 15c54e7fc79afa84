"""The clients: what they wait for, what they refuse, and for how long."""

import contextlib
import json
from types import SimpleNamespace

import pytest
import requests
import torch
from helpers import Replies, make_group, reply

from grpo.client import Refused, TooLong
from grpo.remote import ReferenceClient
from grpo.wire import facts_of, pack_logps

INFO = {"model": "theirs", "dtype": "float32"}
OURS = SimpleNamespace(
    MODEL="ours", TEMPERATURE=1.0, MAX_PROMPT_TOKENS=90, MAX_COMPLETION_TOKENS=10
)


def answer(groups, info=INFO):
    """-> the server's reply to POST /score."""
    body = pack_logps(-torch.rand(sum(len(group.ids) for group in groups)))
    return reply(200, body, headers=f"X-Info: {json.dumps(info)}\r\n")


def a_client(*replies, limit=20):
    """-> (a client that has seen INFO, the server with these replies)."""
    server = Replies(*replies)
    client = ReferenceClient(server.url, limit)
    client.info = INFO
    return client, server


@pytest.fixture
def clock(monkeypatch):
    """-> the time that waits see, which passes only while they sleep."""
    now = SimpleNamespace(seconds=0.0)

    def sleep(seconds):
        now.seconds += max(seconds, 0.5)

    fake = SimpleNamespace(monotonic=lambda: now.seconds, sleep=sleep)
    monkeypatch.setattr("grpo.client.time", fake)
    return now


# --- What is waited for -----------------------------------------------------------------
def test_a_server_that_is_not_there_is_waited_for_until_the_limit(clock, capsys):
    with pytest.raises(TooLong, match=r"python ref_server\.py"):
        ReferenceClient("http://127.0.0.1:9", 40).call("GET", "/info")
    assert 40 <= clock.seconds < 42
    assert capsys.readouterr().err.count("http://127.0.0.1:9/info") == 3  # every 10 s


@pytest.mark.parametrize(
    "failure, seconds", [("cut off", 3000), ("no room", 2000), ("hangs", 2000)]
)
def test_the_limit_counts_from_the_first_failure_on(clock, failure, seconds):
    """A request that was cut off failed then; one that got no room or no answer has waited."""

    def slow(*_, timeout, **__):
        assert None not in timeout  # or it would hang with the server
        clock.seconds += 1000
        if failure == "no room":
            return SimpleNamespace(ok=False, status_code=503, text="full")
        raise requests.ReadTimeout if failure == "hangs" else requests.ConnectionError

    client = ReferenceClient("http://127.0.0.1:9", 1500)
    client.session.request = slow
    with pytest.raises(TooLong):
        client.call("GET", "/info")
    assert clock.seconds == pytest.approx(seconds, abs=5)


@pytest.mark.parametrize("failures", ["busy", "cut", "silent", "a proxy's"])
def test_a_failure_is_asked_again_and_leaves_no_trace(failures, no_pause):
    group = make_group()
    first = {
        "busy": reply(503, b'{"error": "full"}'),
        "cut": reply(200, b"half", length=80),
        "silent": b"",
        "a proxy's": reply(502, b""),
    }[failures]
    client, server = a_client(first, first, answer([group]))
    (logps,) = client.score([group], 0.5)
    assert logps.shape == (6,) and len(server.requests) == 3
    assert b"/score?wait=20&temperature=0.5 " in server.requests[0] == server.requests[2]


# --- What is refused --------------------------------------------------------------------
def test_a_refusal_is_raised_at_once_with_its_reason():
    """simple_GRPO's bare `except: return None` on the network made any error look like no data."""
    client, _ = a_client(reply(400, b'{"error": "token ids must lie in 0..394"}'))
    with pytest.raises(Refused, match=r"400.*token ids must lie"):
        client.score([make_group()], 1.0)


HASHED = INFO | {"weights": "a"}


@pytest.mark.parametrize("before, now, refused", [
    (HASHED, HASHED | {"model": "another", "weights": "c"}, True), (HASHED, None, True),
    (HASHED, HASHED | {"dtype": "bfloat16"}, True), (HASHED, HASHED | {"weights": "b"}, True),
    (HASHED, HASHED | {"model": "copy"}, False),
])  # fmt: skip
def test_a_server_that_came_back_with_another_model_is_refused(before, now, refused, no_pause):
    group = make_group()
    client, _ = a_client(b"", answer([group], info=now))
    client.info = before
    with pytest.raises(Refused, match="theirs") if refused else contextlib.nullcontext():
        assert client.score([group], 1.0)


def test_a_reference_that_does_not_fit_is_refused_with_what_differs(tokenizer):
    """Log-probs of other ids would be finite numbers too."""
    info = facts_of(tokenizer) | INFO
    client, _ = a_client(reply(200, json.dumps(info).encode()))
    client.check(OURS, tokenizer)
    assert client.info == info
    for name in ("tokenizer", "vocab_size", "protocol"):
        client, _ = a_client(reply(200, json.dumps(info | {name: 0.25}).encode()))
        with pytest.raises(SystemExit, match=f"{name} 0.25"):
            client.check(OURS, tokenizer)
    for context in (100, None):  # None: the model's configuration has no number
        a_client(reply(200, json.dumps(info | {"context": context}).encode()))[0].check(
            OURS, tokenizer
        )
    client, _ = a_client(reply(200, json.dumps(info | {"context": 99}).encode()))
    with pytest.raises(SystemExit, match="= 100 exceed the context of theirs .* 99 tokens"):
        client.check(OURS, tokenizer)


def test_another_server_no_server_and_a_wrong_token_end_before_anything_starts(tokenizer):
    for text in (b"<html>", b"\xff", b"5"):
        with pytest.raises(SystemExit, match="REF_SERVER"):
            a_client(reply(200, text))[0].check(OURS, tokenizer)
    page = b"\n<!DOCTYPE html>" + b"<p>nothing here</p>" * 999
    for status, text in (200, page), (404, page), (404, b"nothing here" * 999):
        with pytest.raises(SystemExit, match="REF_SERVER.*another program") as error:
            a_client(reply(status, text))[0].check(OURS, tokenizer)
        assert len(str(error.value)) < 1200
    with pytest.raises(SystemExit, match="REF_SERVER"):
        ReferenceClient("nonsense://x", 1).check(OURS, tokenizer)
    with pytest.raises(SystemExit, match="401"):
        a_client(reply(401, b'{"error": "no or wrong token"}'))[0].check(OURS, tokenizer)
    with pytest.raises(SystemExit, match=r"ref_server\.py"):
        ReferenceClient("http://127.0.0.1:9", 0).check(OURS, tokenizer)


# --- What travels -----------------------------------------------------------------------
def test_the_token_travels_and_no_proxy_is_asked(monkeypatch):
    monkeypatch.setenv("GRPO_TOKEN", " secret\n")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody there
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    client, server = a_client(reply(200, b"{}"))
    client.call("GET", "/info")
    assert b"Authorization: Bearer secret\r\n" in server.requests[0]
    assert b"Accept-Encoding: identity\r\n" in server.requests[0]


def test_no_redirect_is_followed_as_the_token_is_for_this_address():
    other = Replies(reply(200, b"{}"))
    client, _ = a_client(reply(302, b"", headers=f"Location: {other.url}\r\n"))
    with pytest.raises(Refused, match="answered 302"):
        client.call("GET", "/info")
    assert not other.requests
