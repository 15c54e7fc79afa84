"""Serves a live page of runs, read from the files in their folders.

    python plot.py live                   # every run in runs/, at http://127.0.0.1:59877/
    python plot.py live runs/gsm8k 8080   # one run, on another port

live.html calls GET /live every 2 s, and GET /group for the sampled group that it shows. The page
only reads files, so it can start and end at any time and never disturbs a trainer.
"""

import json
import os
import statistics
import sys
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import parse_qs

import bottle
import waitress

from grpo.constants import STOPPED, real
from grpo.gate import is_local

PORT = 59877  # of the page, unless the command names another
SILENT_SECONDS = 600  # a run that wrote nothing for longer counts as stopped
MAX_COMPARED = 8  # runs whose curves are shown together; more make answers larger
POINTS = 400  # points per curve; a chart is about 500 pixels wide, so more would not show
MAX_READ = 16 << 20  # reads only the last bytes of a file; more goes further back and takes longer


# --- A run's files ------------------------------------------------------------------
def read(path):
    """Returns {step: [records]} of a file of JSON lines, ordered by step, and the file's inode,
    which changes when a run resumes."""
    try:
        stat = path.stat()
        now = stat.st_ino, stat.st_size, stat.st_mtime_ns
        kept, records = LAST.get(path, (None, None))
        if kept != now:
            LAST[path] = now, (records := parsed(path, stat.st_size))
        return records, stat.st_ino
    except OSError:
        return {}, None


LAST = {}  # what was read of each file that was shown: {path: (inode, size and time, records)}


def parsed(path, size):
    """Returns {step: [records]} of the end of a file."""
    with open(path, "rb") as file:
        file.seek(max(0, size - MAX_READ))
        lines, found = file.read(MAX_READ).splitlines(), {}
    for line in lines:
        with suppress(ValueError, KeyError, TypeError):  # it is incomplete, or not of a run
            record = json.loads(line)
            found.setdefault(int(record["step"]), []).append(record)
    return dict(sorted(found.items()))


def metrics_of(folder):
    """Returns a dict of numbers per step, in order; includes the evaluation after that step."""
    steps = read(folder / "metrics.jsonl")[0].values()
    merged = [{k: v for part in parts for k, v in part.items()} for parts in steps]
    return [{k: v for k, v in m.items() if real(v)} for m in merged]


def constants_of(folder):
    """Returns the constants of a run; {} before it has written them, None if they are damaged."""
    if not (folder / "run.json").exists():
        return {}
    with suppress(OSError, ValueError, KeyError, TypeError):
        return dict(json.loads((folder / "run.json").read_bytes())["constants"])


def chart(records, name):
    """Returns a metric's steps and values, at most POINTS of them."""
    points = [(record["step"], record[name]) for record in records if name in record]
    points = points[:: -(-(-len(points) // POINTS) or 1)][::-1]  # with the last
    return {"steps": [s for s, _ in points], "values": [float(f"{v:.4g}") for _, v in points]}


def step_seconds(records, updates):
    """Returns the median wall time of the last steps, or None; a single pause has no effect. It is
    a mean over the `updates` of a rollout, of which the first also samples."""
    last = [(r["step"], r["time"]) for r in records[-40 - updates :] if "time" in r]
    pairs = zip(last, last[updates:], strict=False)
    laps = [(t1 - t0) / (s1 - s0) for (s0, t0), (s1, t1) in pairs]
    return statistics.median(laps) if laps else None


# --- All runs -----------------------------------------------------------------------
def find_runs(folder):
    """Returns {name: (folder, time of its last write, status)} of the runs in `folder`, the latest
    first. `folder` may be a run itself, or hold folders of runs. A run has "ended" after all its
    steps; otherwise it is "running", or "stopped" by a signal or an error, or after SILENT_SECONDS
    without a write. It is "damaged" if its constants can't be read."""
    wrote, found = {}, {}
    patterns = [d + name for d in ("", "*/", "*/*/") for name in ("metrics.jsonl", "run.json")]
    for path in (path for pattern in patterns for path in folder.glob(pattern)):
        with suppress(OSError):  # it was deleted just now
            wrote[path.parent] = max(path.stat().st_mtime, wrote.get(path.parent, 0))
    base = folder.parent if folder in wrote else folder
    for run, when in sorted(wrote.items(), key=lambda item: (-item[1], item[0])):
        silent = time.time() - when > SILENT_SECONDS or os.path.lexists(run / STOPPED)
        status = "ended" if os.path.lexists(run / "final") else "stopped" if silent else "running"
        status = "damaged" if constants_of(run) is None else status
        found[str(run.relative_to(base))] = run, when, status
    return found


def snapshot(found, asked="", others=(), metrics=()):
    """Returns the answer to GET /live for the run `asked` (default: the one that wrote last), with
    these metrics' curves, also for the `others`."""
    name = asked if asked in found else next(iter(found), "")
    chosen = [n for n in dict.fromkeys([name, *others]) if n in found][:MAX_COMPARED]
    records = {n: metrics_of(found[n][0]) for n in chosen}
    known = {metric for n in chosen for record in records[n] for metric in record}
    drawn = [metric for metric in dict.fromkeys(metrics) if metric in known]
    folder, wrote, status = found.get(name, (Path("/nowhere"), 0, ""))
    constants, latest = constants_of(folder) or {}, records.get(name, [])
    groups, inode = read(folder / "samples.jsonl")
    return {
        "runs": [{"name": n, "status": state} for n, (_, _, state) in found.items()],
        "run": name,
        "status": status,
        "wrote_s": max(0, round(time.time() - wrote, 1)) if name else None,
        "model": constants.get("MODEL", ""),
        "step": latest[-1]["step"] if latest else None,
        "steps": constants.get("STEPS"),
        "step_seconds": step_seconds(latest, constants.get("UPDATES_PER_ROLLOUT", 1)),
        "last": {name: value for record in latest[-40:] for name, value in record.items()},
        "metrics": sorted(known - {"step", "time"}),
        "curves": [{"run": n, "charts": {m: chart(records[n], m) for m in drawn}} for n in chosen],
        "file": inode,  # a resumed run writes a group again
        "groups": [[step, len(completions)] for step, completions in groups.items()],
    }


# --- HTTP ---------------------------------------------------------------------------
def make_app(folder):
    """Returns the WSGI app for a folder, which holds runs or is a run itself."""
    app, folder = bottle.Bottle(), Path(folder).resolve()

    def query(name):  # bottle's raises if the query is not UTF-8
        return parse_qs(bottle.request.query_string).get(name, [""])

    @app.get("/live")
    def live():
        return snapshot(find_runs(folder), query("run")[0], query("with"), query("metric"))

    @app.get("/group")
    def group():
        run, step = find_runs(folder).get(query("run")[0]), query("step")[0]
        groups = read(run[0] / "samples.jsonl")[0] if run else {}
        lines = next((lines for number, lines in groups.items() if str(number) == step), [])
        bottle.response.status = 200 if lines else 404
        return {"completions": lines}

    @app.hook("before_request")
    def refuse_other_names():  # DNS rebinding: a web page could read the runs
        if not is_local(bottle.request.environ.get("HTTP_HOST", "localhost")):
            bottle.abort(403, "this page is for 127.0.0.1 and localhost")

    html = Path(__file__).with_name("live.html").read_text(encoding="utf-8")
    app.get("/", callback=lambda: html)
    return app


def serve(folder, port=PORT):
    """Serves the page to this machine until Ctrl-C. Raises SystemExit if it can't."""
    if not Path(folder).is_dir():
        sys.exit(f"{folder} is not a folder: name the folder of a run, or a folder of runs")
    if port > 65_535:
        sys.exit(f"port {port} cannot be used (the largest is 65535): name another one")
    try:
        server = waitress.create_server(make_app(folder), host="127.0.0.1", port=port, threads=1)
    except (OSError, ValueError) as error:
        sys.exit(f"port {port} cannot be used ({error}): name another port after the folder")
    url = f"http://127.0.0.1:{server.effective_port}/"
    print(f"the runs in {folder}: {url} (Ctrl-C ends the page)", flush=True)
    server.run()
