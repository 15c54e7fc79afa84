"""The gate: tokens, bodies, queries, refusals, and the queue of requests that wait."""

import json
import threading
import time
from concurrent.futures import Future

import pytest
from helpers import call, refused

from grpo.gate import Busy, Gate, Waiting, listen, token_for

MOST = 100


def an_app(token=None):
    app, answer = Gate(token=token, max_body_bytes=MOST), Future()

    @app.post("/echo")
    def echo():
        return app.blob(app.read_body(), seen=str(app.read_number("n", most=9)))

    @app.get("/raise/<kind>")
    def fail(kind):
        raise {"value": ValueError, "busy": Busy, "runtime": RuntimeError, "bug": KeyError}[kind](
            "a reason of several words"
        )

    app.get("/wait", callback=lambda: {"result": app.result_of(answer, app.read_number("n", 9))})
    app.get("/nothing", callback=lambda: None)
    app.answer = answer
    return app


# --- Who may ask ------------------------------------------------------------------------
def test_without_the_token_only_health_answers():
    app, right = an_app("secret"), {"HTTP_AUTHORIZATION": "Bearer secret"}
    assert call(app, "GET", "/health")[0] == 200
    for path in ("/nothing", "/no/such/route"):
        for wrong in ({}, {"HTTP_AUTHORIZATION": "Bearer s\xff"}, {"HTTP_AUTHORIZATION": "secret"}):
            refused(call(app, "GET", path, **wrong), 401)
    refused(call(app, "POST", "/health"), 401)
    assert call(app, "GET", "/nothing", **right)[0] == 200
    refused(call(app, "GET", "/no/such/route", **right), 404)


def test_a_web_page_may_read_but_not_send():
    app, page = an_app(), {"HTTP_ORIGIN": "http://elsewhere"}
    refused(call(app, "POST", "/echo", b"x", QUERY_STRING="n=1", **page), 403)
    assert call(app, "GET", "/health", **page)[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "[::1", "127.0.0.1.evil.example:59875"])
def test_a_name_that_leads_here_is_refused_without_a_token(host):
    refused(call(an_app(), "GET", "/nothing", HTTP_HOST=host), 403)
    assert call(an_app(), "GET", "/nothing", HTTP_HOST="localhost:59875")[0] == 200
    right = {"HTTP_HOST": host, "HTTP_AUTHORIZATION": "Bearer secret"}
    assert call(an_app("secret"), "GET", "/nothing", **right)[0] == 200


def test_an_address_that_others_reach_needs_a_token(monkeypatch):
    monkeypatch.delenv("GRPO_TOKEN", raising=False)
    assert token_for("127.0.0.1", "HOST") is token_for("localhost", "HOST") is None
    for host in ("0.0.0.0", "gpu01", ""):
        with pytest.raises(SystemExit, match="GRPO_TOKEN"):
            token_for(host, "HOST")
    monkeypatch.setenv("GRPO_TOKEN", "secret")
    assert token_for("gpu01", "HOST") == "secret"


# --- What is asked ----------------------------------------------------------------------
def test_a_body_comes_whole_or_is_refused():
    app, good = an_app(), {"QUERY_STRING": "n=1"}
    status, headers, body = call(app, "POST", "/echo", b"x" * MOST, **good)
    assert (status, body, headers["Seen"]) == (200, b"x" * MOST, "1")
    refused(call(app, "POST", "/echo", b"x" * (MOST + 1), **good), 413)
    for length in (None, "", "0", "-1"):
        refused(call(app, "POST", "/echo", b"x", **good | {"CONTENT_LENGTH": length}), 411)
    for length in ("2", "x", "1e1"):
        refused(call(app, "POST", "/echo", b"x", **good | {"CONTENT_LENGTH": length}), 400)


def test_a_number_of_the_query_is_whole_and_bounded():
    for query in ("", "n=", "n=10", "n=-1", "n=1.0", "n=%D9%A3", "n=" + "1" * 5000, "n=%ff"):
        refused(call(an_app(), "POST", "/echo", b"x", QUERY_STRING=query), 400)


# --- Answers ----------------------------------------------------------------------------
def test_each_failure_has_its_status_and_a_sentence():
    app = an_app()
    for kind, status in {"value": 400, "busy": 503, "runtime": 500, "bug": 500}.items():
        answer = call(app, "GET", f"/raise/{kind}")
        assert " " in refused(answer, status)
        assert ("Retry-After" in answer[1]) == (status == 503)
    assert call(app, "GET", "/nothing")[2] == b"{}"
    assert len(refused(call(app, "GET", "/" + "x" * 9000), 404)) <= 1000
    refused(call(app, "PUT", "/echo", b"x"), 405)


def test_a_result_comes_as_soon_as_it_is_there_and_one_that_is_late_is_cancelled():
    app, start = an_app(), time.monotonic()
    threading.Timer(0.1, app.answer.set_result, [3]).start()
    answer = call(app, "GET", "/wait", QUERY_STRING="n=9")
    assert json.loads(answer[2]) == {"result": 3} and time.monotonic() - start < 5
    late = an_app()
    refused(call(late, "GET", "/wait", QUERY_STRING="n=0"), 503)
    assert late.answer.cancelled()


# --- The queue --------------------------------------------------------------------------
class Request:
    def __init__(self):
        self.answer = Future()

    def __len__(self):
        return 5


def test_the_queue_is_bounded_in_requests_and_in_bytes():
    waiting = Waiting(2, most_bytes=10)
    # One is always taken, whatever its size
    with waiting.room_for(99), pytest.raises(Busy), waiting.room_for(1):
        pass
    with waiting.room_for(5), waiting.room_for(5), pytest.raises(Busy), waiting.room_for(0):
        pass
    with pytest.raises(ZeroDivisionError), waiting.room_for(10):
        raise ZeroDivisionError
    assert waiting.sizes == []


def test_requests_are_taken_in_their_order_up_to_a_length_without_those_cancelled():
    waiting, requests = Waiting(9, 99), [Request() for _ in range(5)]
    for request in requests:
        waiting.put(request)
    requests[1].answer.cancel()
    assert waiting.take(10, timeout=0) == [requests[0], requests[2]]
    assert waiting.take(11, timeout=0) == requests[3:] and waiting.take(1, timeout=0) == []
    assert not requests[0].answer.cancel()  # it is being answered
    start = time.monotonic()
    threading.Timer(0.1, waiting.put, [Request()]).start()
    assert len(waiting.take(1, timeout=9)) == 1 and time.monotonic() - start < 5


def test_what_is_cancelled_does_not_pile_up_while_nobody_takes():
    """Their room is given back at once: a client with wait=0 could fill the memory."""
    waiting = Waiting(2, 10)
    for _ in range(1000):
        with waiting.room_for(5):
            waiting.put(request := Request())
        request.answer.cancel()
    assert len(waiting.queue) == 1


def test_an_address_that_is_taken_is_a_sentence():
    first = listen(an_app(), "127.0.0.1", 0, 1)
    try:
        with pytest.raises(SystemExit, match=str(first.effective_port)):
            listen(an_app(), "127.0.0.1", first.effective_port, 1)
    finally:
        first.close()
