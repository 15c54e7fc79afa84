"""What the reference server's page shows: errors, upload rates, and the runs' metrics.

page.html asks GET /live (`snapshot`) every 2 s. Trainers POST /log (`log`) records as in
metrics.jsonl and completions as in samples.jsonl. All that is kept is bounded. The curves are in
the store's database too, and survive kill -9; the rest is lost with the process.
"""

import base64
import hashlib
import re
import time
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path

from grpo.serving.store import STATES
from grpo.wire import is_name

CURVES = ("reward", "accuracy", "eval_accuracy", "kl", "completion_tokens")
MAX_POINTS = 4000  # of a curve; beyond it every second one goes
SENT_POINTS = 400  # of a curve in one answer: a chart is about 500 pixels wide
MAX_RUNS, MAX_SAMPLES, MAX_ERRORS = 20, 8, 20
MAX_ERROR = 500  # characters
SAMPLE_TEXTS = {"question": 4000, "completion": 4000, "answer": 200, "sampler": 200}  # characters
RATE_SECONDS, MAX_UPLOADS = 60, 100_000  # what upload rates are of
PLAIN = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}


def load_page():
    """Returns page.html and its headers, which allow its script by hash: if a model's text ever
    became HTML, no script in it would run."""
    html = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    script = re.search("<script>(.*?)</script>", html, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}';"
        " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none';"
        " frame-ancestors 'none'"
    )
    kind = {"Content-Type": "text/html; charset=utf-8", "Content-Security-Policy": policy}
    return html, PLAIN | kind


# --- What a trainer may post --------------------------------------------------------
def check_numbers(what, numbers, limit):
    """Raises ValueError unless `numbers` are at most `limit` finite numbers by name."""
    if type(numbers) is not dict or len(numbers) > limit:
        raise ValueError(f"{what} must be at most {limit} numbers by name")
    for name, value in numbers.items():
        # the bound also keeps out NaN, and integers that no float can hold
        if len(name) > 100 or type(value) not in (int, float) or not abs(value) < 1e30:
            raise ValueError(f"{name[:100]!r} of {what} must be a finite number")


def check_step(what, value):
    step = value.get("step") if type(value) is dict else None
    if type(step) is not int or not 0 <= step < 2**53:
        raise ValueError(f"{what} must be a dict with a step of 0 or more")


def clean_sample(sample):
    """Returns what the page shows of a completion, with texts cut. Raises ValueError."""
    check_step("a sample", sample)
    if type(sample.get("completion")) is not str:
        raise ValueError("a sample's completion must be a text")
    rewards = sample.get("rewards", {})
    check_numbers("a sample's rewards", rewards, 50)
    given = {name: value for name, value in sample.items() if value is not None}
    numbers = {n: given[n] for n in ("advantage", "policy_version") if n in given}
    check_numbers("a sample", numbers, 2)
    texts = {n: cut(str(given[n]), SAMPLE_TEXTS[n]) for n in SAMPLE_TEXTS if n in given}
    facts = {"step": sample["step"], "truncated": bool(sample.get("truncated"))}
    return facts | texts | numbers | {"rewards": rewards}


def cut(text, limit):
    """Example: "abcdef", 4 -> "abcd … (2 more characters)" """
    more = len(text) - limit
    return text if more <= 0 else f"{text[:limit]} … ({more} more characters)"


# --- Curves -------------------------------------------------------------------------
@dataclass
class Run:
    logged: float = 0  # time of the last post
    step: int = -1
    curves: dict = field(default_factory=lambda: {name: [] for name in CURVES})  # (step, value)
    last: dict = field(default_factory=dict)  # all metrics of the last step
    samples: deque = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))

    def copy(self, logged):
        curves = {curve: list(points) for curve, points in self.curves.items()}
        samples = deque(self.samples, maxlen=MAX_SAMPLES)
        return replace(self, logged=logged, curves=curves, samples=samples)

    def add(self, record):
        """Adds a step's metrics to those that the step has already: an evaluation follows its step.
        An earlier step removes the later ones: the trainer resumed from a checkpoint."""
        step = record["step"]
        if step < self.step:
            self.curves = {c: [p for p in old if p[0] <= step] for c, old in self.curves.items()}
        self.last = (self.last if step == self.step else {}) | record
        self.step = step
        for curve in CURVES:
            if curve in record:
                add_point(self.curves[curve], step, float(record[curve]))


def add_point(points, step, value):
    """Appends a point, or replaces that of the same step; thins the curve if it is full."""
    half = MAX_POINTS // 2
    if len(points) > half:  # thinned, perhaps: then the last stays only if it is as far apart
        apart = (points[half - 1][0] - points[0][0]) / (half - 1)
        if points[-1][0] - points[-2][0] < apart:
            points.pop()
    if points and points[-1][0] == step:
        points.pop()
    points.append((step, value))
    if len(points) > MAX_POINTS:
        points[:] = points[:-1:2] + points[-1:]


def chart(points):
    """Returns a curve for the page: SENT_POINTS at most, evenly, with the first and the last."""
    last = len(points) - 1
    if last >= SENT_POINTS:
        points = [points[i * last // (SENT_POINTS - 1)] for i in range(SENT_POINTS)]
    return {"steps": [s for s, _ in points], "values": [float(f"{v:.4g}") for _, v in points]}


class Live:
    """What the page shows. Any thread may use it: the store's lock guards it."""

    def __init__(self, store):
        self.store, self.db, self.started = store, store.db, time.monotonic()
        self.errors = {}  # text -> (how often, when last), the latest at the end
        self.uploads = deque(maxlen=MAX_UPLOADS)  # (when, completion tokens) of each group
        self.runs = {}  # name -> Run, the one that logged last at the end
        with self.db.transaction():
            self.db.execute(
                "CREATE TABLE IF NOT EXISTS curves (run TEXT, curve TEXT, step INTEGER, value REAL,"
                " logged REAL, PRIMARY KEY (run, curve, step)) WITHOUT ROWID"
            )
            for name, curve, *point, logged in self.db.execute(
                "SELECT run, curve, step, value, logged FROM curves ORDER BY run, curve, step"
            ):
                run = self.runs.setdefault(name, Run())
                run.curves.setdefault(curve, []).append(tuple(point))
                run.step, run.logged = max(run.step, point[0]), max(run.logged, logged)
        self.runs = dict(sorted(self.runs.items(), key=lambda item: item[1].logged))

    def error(self, text):
        """Adds an error; a repeat only counts, so that a producer that retries hides no other."""
        text = cut(text, MAX_ERROR)
        with self.db.changed:
            count, _ = self.errors.pop(text, (0, 0))
            self.errors[text] = (count + 1, time.monotonic())
            while len(self.errors) > MAX_ERRORS:
                del self.errors[next(iter(self.errors))]

    def uploaded(self, tokens):
        """Counts an uploaded group with so many completion tokens."""
        with self.db.changed:
            self.uploads.append((time.monotonic(), tokens))

    def rates(self):
        now = time.monotonic()
        with self.db.changed:
            tokens = [n for when, n in self.uploads if when > now - RATE_SECONDS]
        span = max(1, min(RATE_SECONDS, now - self.started))
        groups, tokens = len(tokens), sum(tokens)
        return {"groups_per_s": round(groups / span, 2), "tokens_per_s": round(tokens / span, 1)}

    def log(self, name, records, samples):
        """Adds records and samples to a run: all, or none if one is malformed: ValueError."""
        if not is_name(name):
            raise ValueError("run must have 1 to 200 printable characters")
        if len(records) > MAX_POINTS or len(samples) > 100:
            raise ValueError(f"at most {MAX_POINTS} records and 100 samples in one post, please")
        for record in records:
            check_step("a record", record)
            check_numbers("a record", record, 200)
        samples = [clean_sample(sample) for sample in samples]
        with self.db.changed:
            before = self.runs.get(name) or Run()
            run = before.copy(time.time())
            run.samples.extend(samples)
            for record in records:
                run.add(record)
            others = [other for other in self.runs if other != name]
            kept = others[max(0, len(others) + 1 - MAX_RUNS) :]
            with self.db.transaction():
                for curve, points in run.curves.items():  # what differs: 1 ms where all are full
                    old, new = set(before.curves[curve]), set(points)
                    gone = [(name, curve, step) for step, _ in old - new]
                    query = "DELETE FROM curves WHERE run=? AND curve=? AND step=?"
                    self.db.executemany(query, gone)
                    rows = [(name, curve, *point, run.logged) for point in new - old]
                    self.db.executemany("INSERT INTO curves VALUES (?, ?, ?, ?, ?)", rows)
                for other in set(others) - set(kept):
                    self.db.execute("DELETE FROM curves WHERE run=?", (other,))
            # on a full disk it raised: memory then has what the disk has, and the post is repeated
            self.runs = {other: self.runs[other] for other in kept} | {name: run}

    # --- The answer to GET /live --------------------------------------------------
    def snapshot(self, asked, policies, pacing, server):
        """Returns GET /live's answer for the run `asked`, or else for the one that logged last.

        `server` is GET /info's answer. Times are ages in seconds: clocks may differ.
        """
        now, clock = time.monotonic(), time.time()
        with self.db.changed:
            stats, ages = self.store.stats(), self.store.ages()
            name = asked if asked in self.runs else next(reversed(self.runs), "")
            policy = policies.record(name) or {}  # without a name, of the run that published last
            name = name or policy.get("run", "")
            run = self.runs.get(name, Run())
            size = {"bytes": stats["bytes"], "max_bytes": stats["max_bytes"]}
            return {
                "server": server | size | {"up_s": round(now - self.started, 1)},
                "states": {state: stats[state] for state in STATES},
                "oldest": ages,
                "oldest_s": max(ages.values(), default=None),
                "rates": self.rates(),
                "workers": pacing.stats(),
                "errors": [
                    {"text": text, "count": count, "age_s": round(now - when, 1)}
                    for text, (count, when) in reversed(self.errors.items())
                ],
                "runs": list(reversed(self.runs)),
                "run": name,
                "ended": policies.ended(name),
                "step": run.step if run.step >= 0 else None,
                "policy_version": policy.get("version"),
                "logged_s": round(max(0, clock - run.logged), 1) if run.logged else None,
                "curves": {curve: chart(points) for curve, points in run.curves.items()},
                "last": dict(run.last),
                "samples": list(reversed(run.samples)),
            }
