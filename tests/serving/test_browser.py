"""What a real browser makes of the page: hostile text, a telephone, no server."""

import contextlib
import html
import json
import re
import threading

import pytest
import waitress
from helpers import app_of, call, make_group, member, post, record, refused

from docs.page import CHROMIUM, browse
from grpo.serving.dashboard import add_page
from grpo.serving.gate import Gate
from grpo.serving.runs import Runs
from grpo.wire import pack_group

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium: apt-get install chromium")


@pytest.fixture
def app(store, tmp_path):
    return app_of(store, tmp_path)[0]


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


DRIVER = """
const until = async holds => { while (!holds()) await new Promise(go => setTimeout(go, 50)); };
const texts = (id, tag) => [...$(id).querySelectorAll(tag)].map(node => node.textContent);
(async () => { parent.document.body.append(el("output", JSON.stringify(await drive()))); })();
"""


def driving(app, script, width):
    """-> what the script, the body of drive(), returns in a page that is so wide. It is in a frame,
    as Chromium's windows have 500 pixels or more, and without the policy that would refuse both."""

    def answer(environ, start_response):
        if environ["PATH_INFO"] not in ("/", "/framed"):
            return app(environ, start_response)
        body = f'<iframe src="/framed" width={width} height=844 style="border: 0"></iframe>'
        if environ["PATH_INFO"] == "/framed":
            page = b"".join(app(environ | {"PATH_INFO": "/"}, lambda *_: None)).decode()
            driver = f"<script>const drive = async () => {{{script}}};{DRIVER}</script>"
            body = page.replace("</html>", f"{driver}</html>")
        start_response("200 OK", [("Content-Type", "text/html; charset=utf-8")])
        return [body.encode()]

    with serving(answer) as (url, _):
        dom, console = browse(url, "--dump-dom", seconds=5)
    assert console == []
    return json.loads(html.unescape(re.search("<output>(.*?)</output>", dom, re.DOTALL)[1]))


HOSTILE = [
    "<script>document.title='hacked'</script>",
    "<img src=/leak onerror=\"document.title='hacked'\">",
    "</script></pre></body><svg onload=document.title='hacked'><iframe src=/leak>",
    "&lt;b&gt; &amp; \u202e right to left \u2066 שלום مرحبا \U0001f600 \x00\x1b[31m",
    "javascript:document.title='hacked'//\"'`${document.title='hacked'}",
    "x" * 10_000,
]


def test_hostile_text_stays_text(app, store, tmp_path):
    everywhere = dict.fromkeys(("prompt", "answer", "sampler", "group"), "".join(HOSTILE[:5]))
    everywhere["item"] = {text[:100]: text for text in HOSTILE}
    samples = [
        member(7, number, **everywhere, completion=text, rewards={text[:100]: -1.0})
        for number, text in enumerate(HOSTILE)
    ]
    length = "completions/mean_length"
    records = [record(step, kl=step / 50, **{length: 90 + step}) for step in range(1, 60)]
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
        dom, console = browse(url, "--dump-dom", f"--screenshot={picture}")
    assert console == []  # no error, and nothing that the policy had to refuse
    assert set(asked) == {"/", "/live", "/group"} and asked.count("/live") > 1
    assert "<title>grpo-split</title>" in dom and "hacked</title>" not in dom
    body = dom[dom.index("<body") : dom.index("<script>\n")]
    assert not re.search("<(script|img|iframe|svg onload)", body)
    shown = re.findall("<pre>(.*?)</pre>", body, re.DOTALL)
    assert len(shown) == len(HOSTILE)
    for text, written in zip(HOSTILE, shown, strict=True):
        for sign, escaped in {"&": "&amp;", "<": "&lt;", ">": "&gt;"}.items():
            text = text.replace(sign, escaped)
        assert written in (text, f"{text[:4000]} … (6000 more characters)")
    curves = re.findall('<path class="mean"[^>]* d="(M[^"]*)"', body)
    assert len(curves) == 4 and all(curve.count("L") == 58 for curve in curves)
    for text in (
        "evaluation 0.625 ○",
        ">1.18<",
        ">149<",
        "<b>59</b>",
        ">waiting</span><b>1<",
        "trainer heard of",
    ):
        assert text in body, text
    for id in ("workers", "errors", "last", "states", "facts", "runs", "metrics"):
        assert re.search(f'id="{id}"[^>]*><', body), f"{id} is empty"
    assert body.count("onload=document.title") >= 6  # completion, prompt, item, worker's name
    assert picture.read_bytes()[:4] == b"\x89PNG" and picture.stat().st_size > 20_000


def test_before_any_run_and_without_the_server(app):
    seen = "await until(() => state); return document.body.innerText"
    text = driving(app, seen, width=1200)
    assert "No step has been logged yet." in text and "no run yet" in text and "server up" in text
    for word in (
        "undefined",
        "NaN",
        "Workers",
        "errors",
        "by state",
        "metrics",
        "groups",
        "answered",
    ):
        assert word not in text, word

    def broken(environ, start_response):
        if environ["PATH_INFO"] == "/live":
            environ["PATH_INFO"] = "/nothing"
        return app(environ, start_response)

    with serving(broken) as (url, _):
        dom, _ = browse(url, "--dump-dom", seconds=1)
    assert re.search("The server has not answered as it should since .* ago .status 404", dom)


USE = """
  await until(() => charts.length && $("group").childElementCount);
  const found = { inner: innerWidth, widths: [document.documentElement.scrollWidth] };
  found.chart = charts[0].svg.clientWidth;
  found.newest = texts("group", "pre");
  $("older").click();
  await until(() => texts("group", "b")[0] === "step 2");
  found.older = $("group").innerText;
  $("newer").click();
  await until(() => texts("group", "b")[0] === "step 3");
  document.querySelectorAll("details").forEach(node => { node.open = true; });
  found.low = [...document.querySelectorAll("select, button, .choices label, summary")]
    .filter(node => node.checkVisibility() && node.getBoundingClientRect().height < 36).length;
  found.widths.push(document.documentElement.scrollWidth);
  $("others").querySelector("input").click();
  await until(() => !$("legend").hidden);
  found.legend = texts("legend", "span");
  const curves = [...charts[0].svg.querySelectorAll(".mean")];
  found.strokes = curves.map(path => path.getAttribute("stroke"));
  const labels = [...$("metrics").querySelectorAll("label")];
  labels.find(label => label.textContent === "rewards/format/mean").querySelector("input").click();
  await until(() => charts.length === 3);
  found.titles = texts("charts", "h2 > span");
  found.latest = texts("charts", "h2 > div");
  found.hash = location.hash;
  for (const run of ["well", "dead"]) {
    $("runs").value = run;
    $("runs").onchange();
    await until(() => state.run === run);
    found[run] = [$("pulse").textContent, $("pulse").className];
  }
  found.widths.push(document.documentElement.scrollWidth);
  return found;
"""


def test_on_a_telephone(app, store, tmp_path):
    name, wide = "a-long-name/" * 16, "x" * 300
    for run in ("well", "dead", name):
        records = [record(step, **{"rewards/format/mean": step}) for step in range(1, 21)]
        post(app, run, [*records, {"step": 20, "eval_accuracy": 0.5, wide[:100]: 1}])
    for step in (1, 2, 3):
        facts = {"prompt": f"<|user|>{step} {wide}", "item": {wide: wide}, "flat": step == 2}
        facts |= {"rewards": {"correctness": step - 2, "format": None}, "answer": None}
        members = [member(step, n, **facts, completion=f"{step} {n}") for n in range(3)]
        post(app, name, [], [sample | {"advantage": sample["number"] - 1} for sample in members])
    call(app, "POST", "/end", {"run": "well"})
    store.db.execute("UPDATE shown SET logged=logged-120 WHERE run!=?", (name,))
    app, _ = app_of(store, tmp_path)  # restarted: it has heard of none
    work = {"held": 2, "want": 0, "run": "", "version": -1, "sha256": ""}
    call(app, "POST", "/work", work | {"worker": wide[:200]})
    refused(call(app, "POST", f"/policy?{wide}", b"x"), 404)
    found = driving(app, USE, width=390)
    assert found["inner"] == 390 and found["widths"] == [390] * 3 and found["chart"] > 330
    assert found["low"] == 0, "controls that a finger misses"
    assert found["newest"] == [f"<|user|>3 {wide}", "3 2", "3 1", "3 0"]  # the best first
    for text in ("flat", "correctness +0.00", "format –", "advantage −1.00", "by trainer"):
        assert text in found["older"], text
    assert found["legend"] == [f"━ {name}", "━ dead"]
    assert found["strokes"] == ["var(--run0)", "var(--run1)"]
    assert found["titles"] == ["Reward", "Accuracy", "rewards/format/mean"]
    assert found["latest"][1] == "0.5 · 0.5 ○0.5 · 0.5 ○"
    assert found["hash"] == (
        "#with=dead&metric=reward&metric=accuracy&metric=rewards%2Fformat%2Fmean"
    )
    assert found["well"] == ["the run ended 2 min ago", "soft"]
    assert found["dead"] == ["trainer gone: not heard of for 2 min", "bad"]


def test_of_a_trainer_without_a_server(store):
    """What the page would show of a server has nothing to say."""
    app, kept = Gate(print, "", token=None, max_body_bytes=1), Runs(store.db)
    add_page(app, kept)
    records = [record(step, time=60 * step) for step in (1, 2)]
    kept.log("run", records, [member(2)], steps=12)
    seen = "await until(() => $('group').childElementCount); return document.body.innerText"
    text = driving(app, seen, width=1200)
    for word in ("2 of 12", "about 10 min to go", "Reward", "groups", "trainer heard of"):
        assert word in text, word
    for word in ("reference", "store", "by state", "uploaded", "Workers", "server", "errors"):
        assert word not in text, word
