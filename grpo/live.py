"""The live page of runs, read from the files in their folders.

    python plot.py live                   # every run in runs/, at http://127.0.0.1:59877/
    python plot.py live runs/gsm8k 8080   # one run, on another port

live.html asks GET /live every 2 s, and GET /group for the sampled group that it shows. The page
only reads: it takes no lock, so it can start and end at any time and never disturbs a trainer.
"""

import base64
import functools
import hashlib
import itertools
import json
import math
import os
import re
import statistics
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import parse_qs

import bottle
import waitress

from grpo.gate import is_local

METRICS, SAMPLES, CONSTANTS = "metrics.jsonl", "samples.jsonl", "run.json"
LOCKS = Path("/proc/locks")  # Linux lists here who has locked which file
PORT = 59877
SILENT_SECONDS = 600  # if locks cannot be seen: a run that writes nothing for longer has stopped
MAX_RUNS, MAX_COMPARED = 20, 8  # runs in memory; runs in one answer
MAX_GROUPS = 400  # of a run in memory: the newest
POINTS = 400  # of a curve, as a chart is about 500 pixels wide
MAX_READ, MAX_LINE = 16 << 20, 1 << 20  # bytes of a file per request; a longer line is skipped


# --- Files that grow ----------------------------------------------------------------
def parse(line):
    """Returns a line's record, or None if it is not a JSON object with a step."""
    try:
        record = json.loads(line, parse_constant=lambda name: None)  # NaN becomes null
    except (ValueError, RecursionError):
        return None
    step = record.get("step") if type(record) is dict else None
    return record if type(step) is int and 0 <= step < 2**53 else None


def in_query(name):
    """Returns a name as a browser can send it back: surrogates have no place in UTF-8."""
    return str(name).encode(errors="backslashreplace").decode()


def key_of(record):
    """Returns (step, name of the group); metrics belong to no group."""
    return record["step"], in_query(record.get("group", ""))


def numbers_of(record):
    """Returns the numbers in a record, by name."""
    return {k: v for k, v in record.items() if type(v) in (int, float) and abs(v) < 1e300}


class Tail:
    """The records of a growing file: {key_of: [records]}, the newest `most` keys."""

    def __init__(self, path, most, part=lambda record: record):
        self.path, self.most, self.part = path, most, part
        self.start_over()

    def start_over(self):
        self.inode, self.offset, self.records = None, 0, {}

    def read(self):
        """Returns the records, with what the file has gained, of at most MAX_READ bytes."""
        try:
            with open(self.path, "rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != self.inode or stat.st_size < self.offset:
                    self.start_over()  # a run that resumed has put another file there
                    self.inode = stat.st_ino
                file.seek(self.offset)
                self.read_lines(file, limit=self.offset + MAX_READ)
        except OSError:
            self.start_over()
        return self.records

    def read_lines(self, file, limit):
        while self.offset < limit and (line := file.readline(MAX_LINE)):
            if not line.endswith(b"\n") and len(line) < MAX_LINE:
                break  # it is being written
            self.offset += len(line)
            if record := parse(line):
                self.records.setdefault(key_of(record), []).append(self.part(record))
            while len(self.records) > self.most:
                del self.records[next(iter(self.records))]


# --- A run --------------------------------------------------------------------------
class Run:
    def __init__(self, folder):
        self.folder = folder
        self.metrics = Tail(folder / METRICS, math.inf, numbers_of)
        self.samples = Tail(folder / SAMPLES, MAX_GROUPS)

    def steps(self):
        """Returns a record for each step, in order: an evaluation joins its step."""
        found = sorted(self.metrics.read().items())
        return [{k: v for part in parts for k, v in part.items()} for _, parts in found]

    def groups(self):
        """Returns {id: records} of the sampled groups, in order."""
        found = sorted(self.samples.read().items())
        return {f"{step}/{name}": records for (step, name), records in found}

    def constants(self):
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            return dict(json.loads((self.folder / CONSTANTS).read_bytes())["constants"])
        return {}


def chart(records, name):
    """Returns a metric's steps and values, of at most POINTS of the records that have it."""
    points = [(record["step"], record[name]) for record in records if name in record]
    points = points[:: -(-(-len(points) // POINTS) or 1)][::-1]  # with the last
    return {"steps": [s for s, _ in points], "values": [float(f"{v:.4g}") for _, v in points]}


def step_seconds(records):
    """Returns the median wall time of the last steps, or None: a pause does not count."""
    last = [(record["step"], record["time"]) for record in records[-40:] if "time" in record]
    laps = [(t1 - t0) / (s1 - s0) for (s0, t0), (s1, t1) in itertools.pairwise(last)]
    return statistics.median(laps) if laps else None


# --- All runs -----------------------------------------------------------------------
def status(folder, wrote):
    """Returns "running", "ended" (it made all its steps) or "stopped"; it wrote a file at `wrote`.

    A trainer holds its folder's lock. To try that lock could refuse a trainer that starts just
    then, so the list of locks is read. That list lacks the locks of other machines; a disk without
    a device number may be a network's, and there a run that wrote lately is running.
    """
    lock, disk = folder / ".lock", folder.stat().st_dev
    with suppress(OSError):
        locked = f" {os.major(disk):02x}:{os.minor(disk):02x}:{lock.stat().st_ino} "
        if any(" WRITE " in line and locked in line for line in LOCKS.read_text().splitlines()):
            return "running"
    if os.path.lexists(folder / "final"):
        return "ended"
    is_listed = LOCKS.exists() and os.major(disk)
    is_recent = lock.exists() and time.time() - wrote < SILENT_SECONDS
    return "running" if is_recent and not is_listed else "stopped"


def find_runs(folder):
    """Returns {name: (folder, when it wrote, status)} of the runs in `folder`, which may itself be
    a run and may hold folders of runs; the one that wrote last comes first."""
    wrote, found = {}, {}
    patterns = [d + name for d in ("", "*/", "*/*/") for name in (METRICS, CONSTANTS)]
    for path in (path for pattern in patterns for path in folder.glob(pattern)):
        with suppress(FileNotFoundError):  # it was deleted just now
            wrote[path.parent] = max(path.stat().st_mtime, wrote.get(path.parent, 0))
    base = folder.parent if folder in wrote else folder
    for run, when in sorted(wrote.items(), key=lambda item: (-item[1], item[0])):
        with suppress(FileNotFoundError):
            found[in_query(run.relative_to(base))] = run, when, status(run, when)
    return found


def snapshot(found, load, asked="", others=(), metrics=()):
    """Returns GET /live's answer for the run `asked`, or else for the one that wrote last, with the
    curves of these metrics, also of the `others`. `load` returns the Run in a folder."""
    name = asked if asked in found else next(iter(found), "")
    chosen = [n for n in dict.fromkeys([name, *others]) if n in found][:MAX_COMPARED]
    runs = {n: load(found[n][0]) for n in chosen}
    records = {n: run.steps() for n, run in runs.items()}
    known = {metric for n in chosen for record in records[n] for metric in record}
    drawn = [metric for metric in dict.fromkeys(metrics) if metric in known]
    own, constants = records.get(name, []), runs[name].constants() if name else {}
    steps = constants.get("STEPS")
    groups = runs[name].groups() if name else {}
    return {
        "runs": [{"name": n, "status": state} for n, (_, _, state) in found.items()],
        "run": name,
        "status": found[name][2] if name else "",
        "wrote_s": max(0, round(time.time() - found[name][1], 1)) if name else None,
        "model": str(constants.get("MODEL", "")),
        "step": own[-1]["step"] if own else None,
        "steps": steps if type(steps) is int else None,
        "step_seconds": step_seconds(own),
        "last": own[-1] if own else {},
        "metrics": sorted(known - {"step", "time"}),
        "curves": [{"run": n, "charts": {m: chart(records[n], m) for m in drawn}} for n in chosen],
        "file": runs[name].samples.inode if name else None,  # a resumed run writes a group again
        "groups": [[id, found[0]["step"], len(found)] for id, found in groups.items()],
    }


# --- HTTP ---------------------------------------------------------------------------
def load_page():
    """Returns live.html and headers that allow its script by hash: if a model's text ever became
    HTML, no script in it would run."""
    html = Path(__file__).with_name("live.html").read_text(encoding="utf-8")
    script = re.search("<script>(.*?)</script>", html, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}';"
    policy += " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none';"
    headers = {"Content-Security-Policy": f"{policy} frame-ancestors 'none'"}
    return html, headers | {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}


def make_app(folder):
    """Returns the WSGI app for the runs in a folder, or for the run that the folder is."""
    app, folder, one_at_a_time = bottle.Bottle(), Path(folder).resolve(), threading.Lock()
    load, (html, headers) = functools.lru_cache(MAX_RUNS)(Run), load_page()
    app.add_hook("after_request", lambda: bottle.response.headers.update(headers))

    def query(name):  # not bottle's, which raises if it is not UTF-8
        return parse_qs(bottle.request.query_string).get(name, [""])

    @app.get("/live")
    def live():
        with one_at_a_time:
            found = find_runs(folder)
            return snapshot(found, load, query("run")[0], query("with"), query("metric"))

    @app.get("/group")
    def group():
        with one_at_a_time:
            found = find_runs(folder).get(query("run")[0])
            lines = load(found[0]).groups().get(query("id")[0]) if found else []
        bottle.response.status = 200 if lines else 404
        return {"completions": lines or []}

    @app.hook("before_request")
    def refuse_other_names():  # DNS rebinding: a web page could read the runs
        if not is_local(bottle.request.environ.get("HTTP_HOST", "localhost")):
            bottle.abort(403, "this page is for 127.0.0.1 and localhost")

    app.get("/", callback=lambda: html)
    return app


def serve(folder, port=PORT):
    """Serves the page to this machine until Ctrl-C. SystemExit if it cannot."""
    if not Path(folder).is_dir():
        sys.exit(f"{folder} is not a folder: name a run's folder, or one that holds runs")
    try:
        server = waitress.create_server(make_app(folder), host="127.0.0.1", port=port, threads=4)
    except (OSError, OverflowError, ValueError) as error:
        sys.exit(f"port {port} cannot be used ({error}): name another port after the folder")
    url = f"http://127.0.0.1:{server.effective_port}/"
    print(f"the runs in {folder}: {url} (Ctrl-C ends the page)", flush=True)
    server.run()
