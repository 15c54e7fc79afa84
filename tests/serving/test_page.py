"""The page for people: what it shows, who may see it, and what a real browser makes of it."""

import base64
import contextlib
import itertools
import json
import math
import re
import sqlite3
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests
import waitress
from helpers import INFO, FakeReference, InProcess, call, make_group, mark_scored, put, refused

from docs import page
from docs.page import CHROMIUM, browse
from grpo.serving import dashboard as live_module
from grpo.serving.dashboard import Live
from grpo.serving.policies import Policies
from grpo.serving.store import Store
from grpo.wire import pack_group
from ref_server import make_app


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "store.sqlite", max_bytes=10**6)
    yield store
    store.db.close()


def app_of(store, folder, token=None, reference=None):
    hub = Policies(store, Path(folder, "policies"), max_bytes=10_000)
    settings = {"token": token, "max_body_bytes": 10**7}
    settings |= {"lease_seconds": 60, "lease_wait": 0}
    return make_app(store, hub, reference or FakeReference(), **settings), hub


@pytest.fixture
def app(store, tmp_path):
    return app_of(store, tmp_path)[0]


def record(step, **metrics):
    return {"step": step, "reward": step / 100, "accuracy": 0.5} | metrics


def sample(step=1, **changes):
    """As RunFolder.log_samples writes it."""
    facts = {"step": step, "question": "1 + 1?", "answer": "2", "completion": "<answer>2</answer>"}
    facts |= {"rewards": {"correctness": 1.0, "format": 1.25}, "advantage": 0.35}
    return facts | {"truncated": False, "sampler": "trainer", "policy_version": 0} | changes


def look(app, run=""):
    status, headers, body = call(app, "GET", "/live", QUERY_STRING=f"run={run}")
    assert (status, headers["Content-Type"]) == (200, "application/json")
    return json.loads(body)


def post(app, run="run", records=(), samples=()):
    body = {"run": run, "records": list(records), "samples": list(samples)}
    return call(app, "POST", "/log", body)


def answer_of(live, run="run"):
    """-> GET /live's answer where there are no policies and no workers."""
    nobody = SimpleNamespace(record=lambda run: None, ended=lambda run: False, stats=dict)
    return live.snapshot(run, nobody, nobody, {})


def steps_of(live, run="run", curve="reward"):
    return answer_of(live, run)["curves"][curve]["steps"]


# --- What is kept -------------------------------------------------------------------
def test_a_post_that_the_disk_had_no_room_for_is_written_when_it_is_repeated(store, monkeypatch):
    live, execute = Live(store), store.db.execute
    live.log("run", [record(step) for step in range(1, 6)], [])

    def full(query, *values):
        if query.startswith("INSERT"):
            raise sqlite3.OperationalError("database or disk is full")
        return execute(query, *values)

    with monkeypatch.context() as patch:
        patch.setattr(store.db, "execute", full)
        for _ in range(2):
            with pytest.raises(sqlite3.OperationalError):
                live.log("run", [record(3)], [sample()])  # the run resumed from a checkpoint
    assert steps_of(live) == steps_of(Live(store)) == [1, 2, 3, 4, 5]
    assert answer_of(live)["samples"] == []
    live.log("run", [record(3), record(4)], [])
    assert steps_of(live) == steps_of(Live(store)) == [1, 2, 3, 4]


def test_curves_survive_a_restart_of_the_server(store):
    live = Live(store)
    live.log("old", [record(1)], [])
    live.log("run", [{"step": 0, "eval_accuracy": 0.25}, record(1, kl=0.5, entropy=2)], [sample()])
    live.log("run", [{"step": 1, "eval_accuracy": 0.75}, record(2)], [])
    now, again = answer_of(live), answer_of(Live(store), "")
    assert again["runs"] == ["run", "old"]  # the one that logged last is shown
    assert again["curves"] == now["curves"] == {
        "reward": {"steps": [1, 2], "values": [0.01, 0.02]},
        "accuracy": {"steps": [1, 2], "values": [0.5, 0.5]},
        "eval_accuracy": {"steps": [0, 1], "values": [0.25, 0.75]},
        "kl": {"steps": [1], "values": [0.5]},
        "completion_tokens": {"steps": [], "values": []},
    }  # fmt: skip
    assert again["last"] == now["last"] == record(2)
    assert again["step"] == 2 and 0 <= again["logged_s"] < 60


def test_an_earlier_versions_store_opens_without_its_curves(store):
    store.db.execute("CREATE TABLE curves (run TEXT, curve TEXT, step INTEGER, value REAL)")
    store.db.execute("INSERT INTO curves VALUES ('run', 'reward', 1, 0.5)")
    live = Live(store)
    assert answer_of(live)["runs"] == []
    live.log("run", [record(2)], [])
    assert steps_of(live) == [2]


def test_a_trainer_that_resumes_undoes_what_came_after_its_checkpoint(store):
    live = Live(store)
    live.log("run", [record(step, kl=1) for step in range(1, 11)], [])
    live.log("run", [{"step": 10, "eval_accuracy": 0.5}], [])
    assert steps_of(live) == list(range(1, 11))  # an evaluation follows its step, and undoes none
    live.log("run", [record(7, reward=-1)], [])
    for now in (live, Live(store)):
        assert steps_of(now) == list(range(1, 8)) and answer_of(now)["step"] == 7
        assert answer_of(now)["curves"]["reward"]["values"][-1] == -1
        assert steps_of(now, curve="kl") == list(range(1, 8))
        assert steps_of(now, curve="eval_accuracy") == []


@pytest.mark.parametrize("stride", [1, 2, 7, 2**40])
def test_a_long_run_is_thinned_evenly_and_ends_with_its_newest_step(store, monkeypatch, stride):
    monkeypatch.setattr(live_module, "MAX_STEPS", 40)
    monkeypatch.setattr(live_module, "SENT_POINTS", 40)
    live, counts = Live(store), []
    for step in range(1, 1000 * stride, stride):
        live.log("run", [record(step)], [])
        counts.append(store.db.value("SELECT COUNT(*) FROM logged"))
    assert max(counts) == 40 and min(counts[40:]) > 10
    curve = answer_of(live)["curves"]["reward"]
    assert curve["steps"][0] == 1 and curve["steps"][-1] == step
    assert curve["values"] == [float(f"{s / 100:.4g}") for s in curve["steps"]]
    assert answer_of(Live(store))["curves"]["reward"] == curve
    monkeypatch.setattr(live_module, "SENT_POINTS", 5)
    gaps = [b - a for a, b in itertools.pairwise(steps_of(live))]
    assert len(gaps) == 4 and max(gaps) <= 2 * min(gaps)


def test_no_evaluation_is_lost_where_there_are_few(store, monkeypatch):
    """Every second step may be the one that has none, or the one that has it."""
    monkeypatch.setattr(live_module, "MAX_STEPS", 40)
    live = Live(store)
    live.log("run", [{"step": 0, "eval_accuracy": 0.5}], [])
    for step in range(1, 201):
        live.log("run", [record(step)], [])
        if step % 20 == 0:
            live.log("run", [{"step": step, "eval_accuracy": 0.5}], [])
    monkeypatch.setattr(live_module, "SENT_POINTS", 20)
    assert steps_of(live, curve="eval_accuracy") == list(range(0, 201, 20))


def test_what_is_kept_and_sent_is_bounded(store, monkeypatch):
    live = Live(store)
    for n in range(25):
        live.log(f"run {n}", [record(1)], [sample(step) for step in range(n)])
        live.error(f"error {n}")
    for now in (live, Live(store)):
        assert answer_of(now)["runs"] == [f"run {n}" for n in reversed(range(5, 25))]
    assert [s["step"] for s in answer_of(live)["samples"]] == list(reversed(range(16, 24)))
    assert store.db.value("SELECT COUNT(*) FROM logged") == 20 == len(live.samples)
    assert list(live.errors) == [f"error {n}" for n in range(5, 25)]
    live.error("error 5")  # a repeat: counted, and hides no other
    assert len(live.errors) == 20 and live.errors["error 5"][0] == 2
    live.error("x" * 10**6)
    live.log("long", [], [sample(completion="y" * 10_000, answer="z" * 10_000, question=5)])
    (kept,) = answer_of(live)["samples"]
    assert kept["completion"] == "y" * 4000 + " … (6000 more characters)"
    assert kept["answer"].startswith("z" * 200 + " …") and max(map(len, live.errors)) < 540
    monkeypatch.setattr(live_module, "SENT_POINTS", 3)
    for steps, sent in ((range(3), [0, 1, 2]), (range(101), [0, 50, 100])):
        live.log(f"{len(steps)} steps", [record(step) for step in steps], [])
        assert steps_of(live, f"{len(steps)} steps") == sent


def test_what_is_added_to_a_step_is_bounded(store):
    live = Live(store)
    live.log("run", [{f"{n:5}": n for n in range(190)} | {"step": 1}], [])
    with pytest.raises(ValueError, match="a record must be at most 200 numbers"):
        live.log("run", [{f"more {n}": n for n in range(10)} | {"step": 1}], [])
    with pytest.raises(ValueError, match="at most 10000 characters of JSON"):
        live.log("run", [{"step": 2}, {f"{n:0100}": n for n in range(100)} | {"step": 3}], [])
    assert len(answer_of(live)["last"]) == 191 and answer_of(live)["step"] == 1


def test_rates_are_of_the_last_minute(store, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(live_module.time, "monotonic", lambda: clock[0])
    live = Live(store)
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


def test_many_threads_at_once(store):
    live = Live(store)

    def work(n):
        for step in range(50):
            live.log(f"run {n}", [record(step)], [sample(step)])
            live.uploaded(1)
            live.error(f"error {step % 20}")
            live.rates()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for n in range(4):
        assert steps_of(live, f"run {n}") == steps_of(Live(store), f"run {n}") == list(range(50))
    assert len(live.uploads) == 200
    assert sum(count for count, _ in live.errors.values()) == 200


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
    assert now["runs"] == now["errors"] == now["samples"] == [] and now["workers"] == {}
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
    post(app, "second", [record(step, kl=1 / 3) for step in range(1, 2001)], [sample(2000)])
    now = look(app)
    assert (now["states"]["waiting"], now["states"]["scored"]) == (1, 1)
    assert 0 <= now["oldest"]["waiting"] <= now["oldest"]["scored"] == now["oldest_s"] < 60
    assert 0 < now["rates"]["groups_per_s"] <= 1
    assert now["rates"]["tokens_per_s"] == pytest.approx(6 * now["rates"]["groups_per_s"], abs=0.1)
    assert "safetensors" in now["errors"][0]["text"] and list(now["workers"]) == ["w"]
    assert (now["runs"], now["run"], now["step"]) == (["second", "first"], "second", 2000)
    kl = now["curves"]["kl"]
    assert (len(kl["steps"]), kl["steps"][0], kl["steps"][-1]) == (400, 1, 2000)
    assert kl["values"][0] == 0.3333 and now["last"]["reward"] == 20
    assert now["samples"] == [sample(2000)]
    assert look(app, "first")["step"] == 1 and look(app, "nobody")["run"] == "second"


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
    for path in ("/", "/live"):
        for sent in (None, basic("any:secret"), basic(":"), basic("sécret"), "Basic é", "basic !"):
            answer = call(app, "GET", path, HTTP_AUTHORIZATION=sent)
            assert "GRPO_TOKEN" in refused(answer, 401)
            assert answer[1]["Www-Authenticate"] == 'Basic realm="grpo-split"'
        for user in ("", "any", "sécret"):
            sent = basic(f"{user}:sécret")
            assert call(app, "GET", path, HTTP_AUTHORIZATION=sent)[0] == 200
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
    assert now["curves"]["reward"] == {"steps": [1, 2], "values": [0.01, 0.02]}
    assert now["samples"] == [sample()]


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
    assert look(app)["curves"]["reward"]["steps"] == [1, 2, 3]


def test_what_is_refused_is_said_and_not_sent_again(app, capsys):
    server = InProcess(app)
    server.log("run", [record(1, kl=1e31)], [])
    assert "'kl' of a record must be a finite number" in capsys.readouterr().out
    server.log("run", [record(2)], [])
    assert look(app)["curves"]["reward"]["steps"] == [2]


# --- A real browser -----------------------------------------------------------------
@contextlib.contextmanager
def serving(app):
    """-> (its address, the paths that were asked for)."""
    asked = []

    def noting(environ, start_response):
        asked.append(environ["PATH_INFO"])
        return app(environ, start_response)

    server = waitress.create_server(noting, host="127.0.0.1", port=0, threads=4)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.effective_port}", asked
    finally:
        server.close()
        thread.join(5)
        server.task_dispatcher.shutdown()  # nobody may be in the store when it is closed


HOSTILE = [
    "<script>document.title='hacked'</script>",
    "<img src=/leak onerror=\"document.title='hacked'\">",
    "</script></pre></body><svg onload=document.title='hacked'><iframe src=/leak>",
    "&lt;b&gt; &amp; \u202e right to left \u2066 שלום مرحبا \U0001f600 \x00\x1b[31m",
    "javascript:document.title='hacked'//\"'`${document.title='hacked'}",
    "x" * 10_000,
]


@pytest.mark.skipif(not CHROMIUM, reason="no chromium on PATH: apt-get install chromium")
def test_in_a_real_browser_hostile_text_stays_text(app, store, tmp_path):
    places = ("completion", "question", "answer", "sampler")
    samples = [
        sample(7, **dict.fromkeys(places, text), rewards={text[:100]: -1.0}) for text in HOSTILE
    ]
    records = [record(step, kl=step / 50, completion_tokens=90 + step) for step in range(1, 60)]
    records.append({"step": 59, "eval_accuracy": 0.625, HOSTILE[0]: 1.0})
    assert post(app, HOSTILE[1], records, samples)[0] == 200
    work = {"held": 2, "want": 0, "run": "", "version": -1, "sha256": ""}
    for text in HOSTILE[:4]:
        name = "".join(letter for letter in text if letter.isprintable())[:200]
        assert call(app, "POST", "/work", work | {"worker": name})[0] == 200
        call(app, "POST", "/lease", {"run": "run", "limit": 1, "oldest": 2**62, "wait": text})
    call(app, "POST", "/upload", pack_group(make_group(seed=0)))
    refused(call(app, "POST", f"/policy?{HOSTILE[0]}", b"x"), 404)
    picture = tmp_path / "page.png"
    with serving(app) as (url, asked):
        dom, console = browse(url, "--dump-dom")
        browse(url, f"--screenshot={picture}")
    assert console == []  # no error, and nothing that the policy had to refuse
    assert set(asked) == {"/", "/live"} and asked.count("/live") > 2
    assert "<title>grpo-split</title>" in dom and "hacked</title>" not in dom
    body = dom[dom.index("<body") : dom.index("<script>\n")]
    assert not re.search("<(script|img|iframe|svg onload)", body)
    shown = re.findall("<pre>(.*?)</pre>", body, re.DOTALL)
    assert len(shown) == len(HOSTILE)  # the newest first
    for text, html in zip(reversed(HOSTILE), shown, strict=True):
        for sign, escaped in {"&": "&amp;", "<": "&lt;", ">": "&gt;"}.items():
            text = text.replace(sign, escaped)
        assert html in (text, f"{text[:4000]} … (6000 more characters)")
    curves = re.findall('<path class="mean"[^>]* d="(M[^"]*)"', body)
    assert len(curves) == 4 and all(curve.count("L") == 58 for curve in curves)
    for text in ("evaluation 0.625 ○", ">1.18<", ">149<", "<b>59</b>", ">waiting</span><b>1<"):
        assert text in body, text
    for id in ("workers", "errors", "last", "states", "facts", "runs"):
        assert re.search(f'id="{id}"[^>]*><', body), f"{id} is empty"
    assert body.count("onload=document.title") >= 3  # completion, worker's name
    assert picture.read_bytes()[:4] == b"\x89PNG" and picture.stat().st_size > 20_000


@pytest.mark.skipif(not CHROMIUM, reason="no chromium on PATH: apt-get install chromium")
def test_in_a_real_browser_before_any_run_and_without_the_server(app):
    with serving(app) as (url, _):
        dom, console = browse(url, "--dump-dom", seconds=1)
    body = dom[dom.index("<body") : dom.index("<script>\n")]
    assert console == [] and "No run has logged yet." in body and "undefined" not in body
    assert re.search('id="trouble"[^>]* hidden=""', body) and "NaN" not in body

    def broken(environ, start_response):
        if environ["PATH_INFO"] == "/live":
            environ["PATH_INFO"] = "/nothing"
        return app(environ, start_response)

    with serving(broken) as (url, _):
        dom, _ = browse(url, "--dump-dom", seconds=1)
    assert re.search("The server has not answered as it should since .* ago .status 404", dom)


def test_without_a_browser_the_script_of_the_picture_says_what_to_install(monkeypatch):
    monkeypatch.setattr(page, "CHROMIUM", None)
    with pytest.raises(SystemExit, match="apt-get install chromium"):
        page.main("0")
