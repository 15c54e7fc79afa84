"""The page for people: what it shows, who may see it, and what a real browser makes of it."""

import base64
import json
import math
import queue
import re
import threading
from types import SimpleNamespace
from urllib.parse import urlencode

import pytest
import requests
from helpers import (
    INFO,
    InProcess,
    app_of,
    call,
    make_group,
    mark_scored,
    member,
    post,
    put,
    record,
    refused,
    sample,
)

from docs import page
from grpo.serving import dashboard, runs
from grpo.serving.dashboard import Live
from grpo.training import metrics
from grpo.wire import pack_group


@pytest.fixture
def app(store, tmp_path):
    return app_of(store, tmp_path)[0]


def look(app, run="", **query):
    """-> GET /live's answer, with the curves of rewards and KL."""
    query = urlencode({"run": run, "metric": ["reward", "kl"]} | query, doseq=True)
    status, headers, body = call(app, "GET", "/live", QUERY_STRING=query)
    assert (status, headers["Content-Type"]) == (200, "application/json")
    return json.loads(body)


# --- What happens in the server -----------------------------------------------------
def test_errors_are_counted_and_bounded():
    live = Live()
    for n in range(25):
        live.error(f"error {n}")
    assert list(live.errors) == [f"error {n}" for n in range(5, 25)]
    live.error("error 5")  # a repeat: counted, and hides no other
    assert len(live.errors) == 20 and live.errors["error 5"][0] == 2
    live.error("x" * 10**6)
    assert max(map(len, live.errors)) < 540


def test_rates_are_of_the_last_minute(monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(dashboard.time, "monotonic", lambda: clock[0])
    live = Live()
    for _ in range(10):
        clock[0] += 1
        live.uploaded(300)
    assert live.rates() == {"groups_per_s": 1.0, "tokens_per_s": 300.0}  # since the start
    clock[0] += 55
    assert live.rates()["groups_per_s"] == pytest.approx(5 / 60, abs=0.01)
    clock[0] += 100
    assert live.rates() == {"groups_per_s": 0, "tokens_per_s": 0}
    live.uploaded(60)
    assert live.rates()["tokens_per_s"] == 1


# --- Routes -------------------------------------------------------------------------
BAD_POSTS = {
    "run must have": {"run": ""},
    "printable": {"run": "a\nb"},
    "200 printable": {"run": "\ud800"},
    "of type str": {"run": 5},
    "of type list": {"records": {}},
    "type list": {"samples": "x"},
    "a record must be a dict": {"records": [5]},
    "with a step": {"records": [{"reward": 1.0}]},
    "a step of 0 or more": {"records": [{"step": -1}]},
    "step of 0": {"records": [{"step": 1.5}]},
    "'reward' of a record must be a finite number": {"records": [{"step": 1, "reward": math.nan}]},
    "'kl' of a record must": {"records": [{"step": 1, "kl": "<b>"}]},
    "'a' of a record must": {"records": [{"step": 1, "a": True}]},
    "'b' of a record must": {"records": [{"step": 1, "b": 10**400}]},
    "at most 200 numbers": {"records": [{"step": 1} | dict.fromkeys(map(str, range(300)), 1)]},
    "at most 4000 records": {"records": [{"step": 1}] * 4001},
    "100 samples": {"samples": [sample()] * 101},
    "a sample must be a dict": {"samples": [None]},
    "with a step of 0": {"samples": [sample(step="1")]},
    "completion must be a text": {"samples": [sample(completion=["x"])]},
    "of a sample's rewards must be a finite": {"samples": [sample(rewards={"format": math.inf})]},
    "rewards must be at most 50": {"samples": [sample(rewards=[1.0])]},
    "'advantage' of a sample must be": {"samples": [sample(advantage="<b>")]},
    "'policy_version' of a sample must": {"samples": [sample(policy_version=[])]},
    "'number' of a sample must": {"samples": [member(number="0")]},
    "item must be a dict": {"samples": [member(item=["x"])]},
    "steps must be 0 or more": {"steps": -1},
    "steps must be of type int": {"steps": "9"},
}


@pytest.mark.parametrize("reason", BAD_POSTS)
def test_a_post_that_is_not_what_it_should_be_is_refused_whole(app, store, reason):
    body = {"run": "run", "records": [record(1)], "samples": [sample()]} | BAD_POSTS[reason]
    assert reason in refused(call(app, "POST", "/log", body), 400)
    now = look(app)
    assert now["runs"] == [] and now["errors"][0]["text"].startswith("POST /log: ")
    assert store.db.execute("SELECT COUNT(*) FROM logged").fetchone() == (0,)


def test_before_anything_has_happened(app):
    now = look(app)
    assert now["run"] == ""
    assert now["step"] is now["policy_version"] is now["oldest_s"] is None
    assert now["runs"] == now["errors"] == now["groups"] == [] and now["workers"] == {}
    assert now["server"] | INFO == now["server"] and set(now["states"].values()) == {0}
    assert call(app, "GET", "/health")[::2] == (200, b'{"ok": true}')


def test_what_the_page_is_told(app, store):
    assert call(app, "POST", "/upload", pack_group(make_group(seed=0)))[0] == 200
    assert call(app, "POST", "/upload", pack_group(make_group(seed=0)))[0] == 200  # a repeat
    mark_scored(store)
    put(store, 1)
    call(app, "POST", "/upload", b"no group")
    work = {"worker": "w", "held": 0, "want": 1, "run": "", "version": -1, "sha256": ""}
    call(app, "POST", "/work", work)
    post(app, "first", [record(1)])
    records = [record(step, kl=1 / 3, time=10 * step) for step in range(1, 2001)]
    post(app, "second", records, [member(2000)], steps=3000)
    now = look(app)
    assert (now["states"]["waiting"], now["states"]["scored"]) == (1, 1)
    assert 0 <= now["oldest"]["waiting"] <= now["oldest"]["scored"] == now["oldest_s"] < 60
    assert 0 < now["rates"]["groups_per_s"] <= 1
    assert now["rates"]["tokens_per_s"] == pytest.approx(6 * now["rates"]["groups_per_s"], abs=0.1)
    assert "safetensors" in now["errors"][0]["text"] and list(now["workers"]) == ["w"]
    assert [run["name"] for run in now["runs"]] == ["second", "first"]
    assert (now["run"], now["step"], now["steps"]) == ("second", 2000, 3000)
    assert (now["status"], now["step_seconds"]) == ("running", 10) and now["heard_s"] < 60
    kl = now["curves"]["second"]["kl"]
    assert (len(kl["steps"]), kl["steps"][0], kl["steps"][-1]) == (400, 1, 2000)
    assert kl["values"][0] == 0.3333 and now["last"]["reward"] == 20
    ((number, step, count),) = now["groups"]
    group = json.loads(call(app, "GET", "/group", QUERY_STRING=f"id={number}")[2])
    assert (step, count) == (2000, 1) and group["prompt"] == "<|user|>1 + 1?"
    assert call(app, "GET", "/group", QUERY_STRING="id=99")[::2] == (
        404,
        b'{"error": "no such group"}',
    )
    assert "id must be" in refused(call(app, "GET", "/group", QUERY_STRING="id=x"), 400)
    assert look(app, "first")["step"] == 1 and look(app, "nobody")["run"] == "second"
    both = look(app, "first", **{"with": ["second", "x"], "metric": ["kl", "reward"]})["curves"]
    assert (list(both), list(both["second"])) == (["first", "second"], ["kl", "reward"])


def test_a_run_that_ended_is_told_from_one_that_is_gone(app, monkeypatch):
    for run in ("well", "dead"):
        post(app, run, [record(1)])
    assert [run["status"] for run in look(app)["runs"]] == ["running", "running"]
    monkeypatch.setattr(runs, "GONE_SECONDS", -1)
    call(app, "POST", "/end", {"run": "well"})
    assert (look(app, "well")["status"], look(app, "dead")["status"]) == ("ended", "gone")
    call(app, "POST", "/resume", {"run": "well", "step": 1})
    assert look(app, "well")["status"] == "gone"


def test_the_page_allows_nothing_but_itself(app):
    status, headers, html = call(app, "GET", "/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; ") and "connect-src 'self'" in policy
    assert "script-src 'sha256-" in policy and "http" not in policy
    for sent in (headers, call(app, "GET", "/live")[1]):
        assert sent["X-Content-Type-Options"] == "nosniff"
        assert sent["Cache-Control"] == "no-store"
    for word in (b"innerHTML", b"outerHTML", b"insertAdjacent", b"document.write", b"eval("):
        assert word not in html
    assert not re.search(rb"(src|href)=(?!\"data:,\")", html)


def basic(text):
    return "Basic " + base64.b64encode(text.encode()).decode()


def test_a_browser_gets_in_with_the_token_as_password(store, tmp_path):
    app, _ = app_of(store, tmp_path, token="sécret")
    for path in ("/", "/live", "/group"):
        for sent in (None, basic("any:secret"), basic(":"), basic("sécret"), "Basic é", "basic !"):
            answer = call(app, "GET", path, HTTP_AUTHORIZATION=sent)
            assert "GRPO_TOKEN" in refused(answer, 401)
            assert answer[1]["Www-Authenticate"] == 'Basic realm="grpo-split"'
        for user in ("", "any", "sécret"):
            sent = basic(f"{user}:sécret")
            got = call(app, "GET", path, HTTP_AUTHORIZATION=sent, QUERY_STRING="id=1")[0]
            assert got == (404 if path == "/group" else 200)
    assert "Www-Authenticate" not in call(app, "GET", "/stats")[1]
    assert call(app, "GET", "/stats", HTTP_AUTHORIZATION=basic(":sécret"))[0] == 200
    assert call(app, "GET", "/health")[0] == 200  # for who asks whether the server lives
    assert b"cret" not in call(app, "GET", "/live", HTTP_AUTHORIZATION="Bearer sécret")[2]


@pytest.mark.parametrize("route", ["/log", "/end", "/ack", "/lease", "/health"])
def test_what_a_browser_adds_by_itself_changes_nothing(store, tmp_path, route):
    """Another site's form may post here, and the browser would send the password along."""
    app, _ = app_of(store, tmp_path, token="secret")
    body = {"run": "run", "records": [], "samples": [], "ids": [], "limit": 1}
    answer = call(app, "POST", route, body, HTTP_AUTHORIZATION=basic(":secret"))
    assert "GRPO_TOKEN" in refused(answer, 401)


# --- The client ---------------------------------------------------------------------
def test_no_web_page_may_send_anything(app, store):
    """Without a token too: any site can have a browser post to 127.0.0.1."""
    put(store, 0)
    for route in ("/end", "/ack", "/upload", "/resume"):
        body = {"run": "run", "ids": ["group-000"], "step": 0}
        answer = call(app, "POST", route, body, HTTP_ORIGIN="http://elsewhere.example")
        assert "web pages may not send" in refused(answer, 403)
    assert store.stats()["waiting"] == 1
    assert call(app, "GET", "/live", HTTP_ORIGIN="null")[0] == 200


def test_what_a_trainer_logs_is_shown(app):
    server = InProcess(app)
    server.log("run", [record(1)], [sample()])
    server.log("run", [record(2)], [])
    now = look(app)
    assert now["curves"]["run"]["reward"] == {"steps": [1, 2], "values": [0.01, 0.02]}
    assert [step for _, step, _ in now["groups"]] == [1]


def test_a_trainer_that_logs_nothing_is_heard_of(monkeypatch):
    monkeypatch.setattr(metrics, "BEAT_SECONDS", 0.01)
    posts = queue.SimpleQueue()

    def log(run, records, samples, steps):
        posts.put((run, [r["step"] for r in records], [s["number"] for s in samples], steps))
        if records:
            threading.Event().wait()  # the thread beats no more

    server = SimpleNamespace(copy=lambda: SimpleNamespace(log=log))
    page = metrics.Page(server, "run", steps=7)
    for _ in range(3):
        assert posts.get(timeout=10) == ("run", [], [], 7)
    for number in range(16):
        page.put("samples.jsonl", {"number": number})
    page.put("metrics.jsonl", {"step": 1})
    seen = []
    while not (post := posts.get(timeout=10))[1]:
        seen += post[2]
    assert seen + post[2] == list(range(16)) and post[1] == [1]


def test_what_is_logged_while_the_server_is_down_is_shown_later(app, no_pause):
    server, downs = InProcess(app), iter(range(3))
    answers = server.session.request

    def down_at_first(*args, **request):
        if next(downs, None) is not None:
            raise requests.ConnectTimeout
        return answers(*args, **request)

    server.session.request = down_at_first
    for step in range(1, 4):
        server.log("run", [record(step)], [])
    assert look(app)["curves"]["run"]["reward"]["steps"] == [1, 2, 3]


def test_what_is_refused_is_said_and_not_sent_again(app, capsys):
    server = InProcess(app)
    server.log("run", [record(1, kl=1e31)], [])
    assert "'kl' of a record must be a finite number" in capsys.readouterr().out
    server.log("run", [record(2)], [])
    assert look(app)["curves"]["run"]["reward"]["steps"] == [2]


# --- Its picture in docs/ --------------------------------------------------------------
def test_without_a_browser_the_script_of_the_picture_says_what_to_install(monkeypatch):
    monkeypatch.setattr(page, "CHROMIUM", None)
    with pytest.raises(SystemExit, match="apt-get install chromium"):
        page.main("0")
