"""What a real browser makes of the live page: hostile text, a narrow window, hover, no server."""

import contextlib
import html
import json
import re
import shutil
import subprocess
import tempfile

import pytest
import waitress
from test_live import age, lines, record, replace, sample, write

from grpo.commands.live import make_app
from grpo.log import in_background

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium: apt-get install chromium")
DRIVER = """
const until = async holds => { while (!holds()) await new Promise(go => setTimeout(go, 50)); };
const texts = (id, tag) => [...$(id).querySelectorAll(tag)].map(node => node.textContent);
(async () => { parent.document.body.append(el("output", JSON.stringify(await drive()))); })();
"""


def browse(url, *options, seconds=3):
    """Returns what Chromium prints, and its console, after `seconds` of the page's clock."""
    with tempfile.TemporaryDirectory() as profile:
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
        command += ["--disable-dev-shm-usage", "--enable-logging=stderr", "--window-size=1200,900"]
        command += [f"--user-data-dir={profile}", f"--virtual-time-budget={1000 * seconds}"]
        command += [*options, url]
        done = subprocess.run(command, capture_output=True, timeout=900, check=True)
    lines = done.stderr.decode().splitlines()
    return done.stdout.decode(), [line for line in lines if "CONSOLE" in line]


@contextlib.contextmanager
def serving(app):
    """Serves a WSGI app in a thread, and gives its address."""
    server = waitress.create_server(app, host="127.0.0.1", port=0, threads=4)
    thread = in_background(server.run)
    try:
        yield f"http://127.0.0.1:{server.effective_port}"
    finally:
        server.close()
        thread.join(5)
        server.task_dispatcher.shutdown()


def driving(app, script, width):
    """Returns what the script, the body of drive(), returns in a page of that width. It is in a
    frame, as Chromium's windows have 500 pixels or more."""

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

    with serving(answer) as url:
        dom, console = browse(url, "--dump-dom", seconds=6)
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


def test_hostile_text_stays_text(tmp_path):
    everywhere = dict.fromkeys(("prompt", "answer", "sampler", "group"), "".join(HOSTILE[:5]))
    everywhere["item"] = {text[:100]: text for text in HOSTILE}
    samples = [
        sample(7, n, **everywhere, completion=text, rewards={text[:100]: -1.0, "__proto__": 1})
        for n, text in enumerate(HOSTILE)
    ]
    samples += [sample(7, x, group=everywhere["group"], completion=[x], rewards=x) for x in HOSTILE]
    records = [record(step, kl=step / 50, __proto__=1) for step in range(1, 60)]
    records.append({"step": 59, "eval_reward": 0.625, HOSTILE[0]: 1.0})
    folder = write(tmp_path / HOSTILE[1].replace("/", ":"), records, samples)
    constants = {"STEPS": 60, "MODEL": HOSTILE[2]}
    (folder / "run.json").write_text(json.dumps({"constants": constants}))
    asked, app = [], make_app(tmp_path)

    def noting(environ, start_response):
        asked.append(environ["PATH_INFO"])
        return app(environ, start_response)

    with serving(noting) as url:
        dom, console = browse(url, "--dump-dom")
    assert console == []  # no error
    assert set(asked) == {"/", "/live", "/group"} and asked.count("/live") > 1
    assert "<title>grpo-split</title>" in dom and "hacked</title>" not in dom
    body = dom[dom.index("<body") : dom.index("<script>\n")]
    assert not re.search("<(script|img|iframe|svg onload)", body)
    shown = re.findall("<pre>(.*?)</pre>", body, re.DOTALL)
    assert len(shown) == 2 * len(HOSTILE)
    for text in HOSTILE:
        for sign, escaped in {"&": "&amp;", "<": "&lt;", ">": "&gt;"}.items():
            text = text.replace(sign, escaped)
        assert f"<span>{text}</span>" in shown  # the span of a turn, and no other element
    assert len(re.findall('<path class="mean"[^>]* d="M[^"]*"', body)) == 2
    for id in ("facts", "runs", "metrics", "model"):
        assert re.search(f'id="{id}"[^>]*>[^<]*<', body), f"{id} is empty"
    assert body.count("onload=document.title") >= 5  # completion, prompt, answer, item, model


def test_before_any_run_and_without_the_server(tmp_path):
    app = make_app(tmp_path)
    seen = "await until(() => state); return [document.body.innerText, $('empty').hidden];"
    text, hidden = driving(app, seen, width=1200)
    assert not hidden and "undefined" not in text and "NaN" not in text

    def broken(environ, start_response):
        found = "/nothing" if environ["PATH_INFO"] == "/live" else environ["PATH_INFO"]
        return app(environ | {"PATH_INFO": found}, start_response)

    with serving(broken) as url:
        dom, _ = browse(url, "--dump-dom", seconds=1)
    assert re.search('<body class="stale"', dom) and "status 404" in dom


USE = """
  await until(() => charts.length && $("group").childElementCount);
  const found = { newest: texts("group", "pre") };
  $("older").click();
  await until(() => texts("group", "b")[0] === "step 2");
  found.older = $("group").innerText;
  const box = charts[0].svg.getBoundingClientRect(), x = box.left + charts[0].x(7);
  charts[0].svg.dispatchEvent(new PointerEvent("pointermove", { clientX: x, clientY: box.top }));
  found.hover = texts("charts", "h2 > div");
  const labels = [...$("metrics").querySelectorAll("label")];
  labels.find(label => label.textContent === "rewards/format/mean").querySelector("input").click();
  await until(() => charts.length === 3);
  $("runs").value = "dead";
  $("runs").onchange();
  await until(() => state.run === "dead");
  found.dead = $("pulse").className;
  found.width = document.documentElement.scrollWidth;
  return found;
"""


def test_groups_metrics_and_runs_are_chosen_also_in_a_narrow_window(tmp_path):
    for run in ("dead", "a-long-name-" * 16):
        records = [record(step, **{"rewards/format/mean": step}) for step in range(1, 21)]
        folder = write(tmp_path / run, [*records, {"step": 20, "eval_accuracy": 0.5}])
        if run == "dead":
            age(folder)
    facts = {"prompt": "x" * 300, "rewards": {"correctness": 0, "format": None}}
    samples = [sample(step, n, **facts | {"advantage": n - 1}) for step in (2, 3) for n in range(3)]
    replace(folder, lines(*samples), "samples.jsonl")
    found = driving(make_app(tmp_path), USE, width=390)
    assert found["width"] == 390
    assert found["newest"] == ["x" * 300, "3 2", "3 1", "3 0"]  # the best first
    for text in ("correctness +0.00", "format –", "advantage −1.00"):
        assert text in found["older"], text
    assert re.findall("[0-9.]+", " ".join(found["hover"])) == ["7", "0.07", "20", "0.5"]
    assert found["dead"] == "bad"
