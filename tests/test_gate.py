"""The gate: tokens, refusals, and addresses."""

import pytest
from helpers import call, refused

from grpo.gate import Busy, Gate, listen, token_for


def an_app(token=None):
    app = Gate(token=token)

    @app.post("/echo")
    def echo():
        return app.blob(app.read_body(), seen=app.query("n"))

    @app.get("/raise/<kind>")
    def fail(kind):
        raise {"value": ValueError, "busy": Busy, "runtime": RuntimeError, "bug": KeyError}[kind](
            "a reason of several words"
        )

    return app


def test_without_the_token_only_health_answers():
    app, right = an_app("secret"), {"HTTP_AUTHORIZATION": "Bearer secret"}
    assert call(app, "GET", "/health")[0] == 200
    for wrong in ({}, {"HTTP_AUTHORIZATION": "Bearer s\xff"}, {"HTTP_AUTHORIZATION": "secret"}):
        refused(call(app, "POST", "/echo", b"x", **wrong), 401)
    assert call(app, "POST", "/echo", b"x", QUERY_STRING="n=%C3%A9", **right)[2] == b"x"
    refused(call(app, "GET", "/no/such/route", **right), 404)


def test_a_web_page_can_not_send_requests():
    refused(call(an_app(), "POST", "/echo", b"x", HTTP_ORIGIN="https://evil.example"), 403)


@pytest.mark.parametrize("host", ["evil.example", "[::1", "127.0.0.1.evil.example:59875"])
def test_a_name_that_leads_here_is_refused_without_a_token(host):
    refused(call(an_app(), "GET", "/health", HTTP_HOST=host), 403)
    assert call(an_app(), "GET", "/health", HTTP_HOST="localhost:59875")[0] == 200
    right = {"HTTP_HOST": host, "HTTP_AUTHORIZATION": "Bearer secret"}
    assert call(an_app("secret"), "GET", "/health", **right)[0] == 200


def test_an_address_that_others_reach_needs_a_token(monkeypatch):
    monkeypatch.delenv("GRPO_TOKEN", raising=False)
    assert token_for("127.0.0.1", "HOST") is token_for("localhost", "HOST") is None
    for host in ("0.0.0.0", "gpu01", ""):
        with pytest.raises(SystemExit, match="GRPO_TOKEN"):
            token_for(host, "HOST")
    monkeypatch.setenv("GRPO_TOKEN", "secret\n")
    assert token_for("gpu01", "HOST") == "secret"
    for token in ("sécret", "a\nb"):  # it can't travel in a header
        monkeypatch.setenv("GRPO_TOKEN", token)
        with pytest.raises(SystemExit, match="GRPO_TOKEN.*ASCII") as error:
            token_for("127.0.0.1", "HOST")
        assert token not in str(error.value)


def test_each_failure_has_its_status_and_a_sentence():
    app = an_app()
    for kind, status in {"value": 400, "busy": 503, "runtime": 500, "bug": 500}.items():
        assert " " in refused(call(app, "GET", f"/raise/{kind}"), status)
    assert len(refused(call(app, "GET", "/" + "x" * 9000), 404)) <= 1000
    refused(call(app, "PUT", "/echo", b"x"), 405)


def test_an_address_that_is_taken_is_a_sentence():
    first = listen(an_app(), "127.0.0.1", 0, 1, 100)
    try:
        with pytest.raises(SystemExit, match=str(first.effective_port)):
            listen(an_app(), "127.0.0.1", first.effective_port, 1, 100)
    finally:
        first.close()
