"""What the reference server's page shows: errors, upload rates, and the runs' metrics.

page.html asks GET /live (`snapshot`) every 2 s. Trainers POST /log (`log`) records as in
metrics.jsonl and completions as in samples.jsonl. All that is kept is bounded. The metrics are in
the store's database, and survive kill -9; the rest is lost with the process.
"""

import base64
import hashlib
import json
import re
import time
from collections import deque
from pathlib import Path

from grpo.serving.store import STATES
from grpo.wire import is_name

CURVES = ("reward", "accuracy", "eval_accuracy", "kl", "completion_tokens")
MAX_STEPS = 4000  # of a run; beyond it half as many are kept
SENT_POINTS = 400  # of a curve in one answer: a chart is about 500 pixels wide
MAX_RECORD = 10_000  # characters of a step's JSON, so that all runs together have 800 MB at most
MAX_RUNS, MAX_SAMPLES, MAX_ERRORS = 20, 8, 20
MAX_ERROR = 500  # characters
SAMPLE_TEXTS = {"question": 4000, "completion": 4000, "answer": 200, "sampler": 200}  # characters
RATE_SECONDS, MAX_UPLOADS = 60, 100_000  # what upload rates are of
SCHEMA = """
DROP TABLE IF EXISTS curves;  -- an earlier version's
CREATE TABLE IF NOT EXISTS shown (run TEXT PRIMARY KEY, logged REAL);  -- the latest post last
CREATE TABLE IF NOT EXISTS logged (run TEXT, step INTEGER, numbers INTEGER, record TEXT);
CREATE INDEX IF NOT EXISTS by_step ON logged (run, step, numbers);
"""
SHOWN = "SELECT run, logged FROM shown ORDER BY rowid DESC"
# At most :most steps of a run, which is cut into as many stretches of the same length. For each
# stands its first or last step, if it has that, or else one with the most numbers: an evaluation's
EVENLY = """
SELECT step FROM (
    SELECT step, ROW_NUMBER() OVER (
        PARTITION BY CAST((step - first) * (:most - 1.0) / (last - first) AS INTEGER)
        ORDER BY step IN (first, last) DESC, numbers DESC, step) AS place
    FROM logged, (SELECT MIN(step) AS first, MAX(step) AS last FROM logged WHERE run=:run)
    WHERE run=:run)
WHERE place=1
"""
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
    """Returns at most `limit` characters of a text, and how many more it has.

    >>> cut("abcdef", 4)
    'abcd … (2 more characters)'
    """
    more = len(text) - limit
    return text if more <= 0 else f"{text[:limit]} … ({more} more characters)"


def chart(records, name):
    """Returns the metric `name` for the page, of those records that have it."""
    points = [(record["step"], record[name]) for record in records if name in record]
    return {"steps": [s for s, _ in points], "values": [float(f"{v:.4g}") for _, v in points]}


class Live:
    """What the page shows. Any thread may use it: the store's lock guards it."""

    def __init__(self, store):
        self.store, self.db, self.started = store, store.db, time.monotonic()
        self.errors = {}  # text -> (how often, when last), the latest at the end
        self.uploads = deque(maxlen=MAX_UPLOADS)  # (when, completion tokens) of each group
        self.samples = {}  # run -> the latest
        self.db.executescript(SCHEMA)

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

    def log(self, run, records, samples):
        """Adds records and samples to a run: all, or none if one is malformed: ValueError."""
        if not is_name(run):
            raise ValueError("run must have 1 to 200 printable characters")
        if len(records) > MAX_STEPS or len(samples) > 100:
            raise ValueError(f"at most {MAX_STEPS} records and 100 samples in one post, please")
        samples = [clean_sample(sample) for sample in samples]
        with self.db.changed:
            with self.db.transaction():
                for record in records:
                    self._add(run, record)
                self._bound(run)
            latest = self.samples.pop(run, []) + samples  # on a full disk it has raised
            self.samples[run] = latest[-MAX_SAMPLES:]
            if len(self.samples) > MAX_RUNS:
                del self.samples[next(iter(self.samples))]

    def _add(self, run, record):
        """Adds a step's metrics to those that the step has already: an evaluation follows its step.
        An earlier step removes the later ones: the trainer resumed from a checkpoint."""
        check_step("a record", record)
        at = run, record["step"]
        before = self.db.value("SELECT record FROM logged WHERE run=? AND step=?", at)
        record = json.loads(before or "{}") | record
        check_numbers("a record", record, 200)
        text = json.dumps(record)
        if len(text) > MAX_RECORD:
            raise ValueError(f"a record must be at most {MAX_RECORD} characters of JSON")
        self.db.execute("DELETE FROM logged WHERE run=? AND step>=?", at)
        row = (*at, len(record), text)
        self.db.execute("INSERT INTO logged VALUES (?, ?, ?, ?)", row)

    def _bound(self, run):
        """Notes that the run logged last; thins it if it is long, and deletes the oldest runs."""
        count = self.db.value("SELECT COUNT(*) FROM logged WHERE run=?", (run,))
        if count > MAX_STEPS:
            half = {"run": run, "most": MAX_STEPS // 2}
            self.db.execute(f"DELETE FROM logged WHERE run=:run AND step NOT IN ({EVENLY})", half)
        self.db.execute("INSERT OR REPLACE INTO shown VALUES (?, ?)", (run, time.time()))
        for old, _ in self.db.rows(f"{SHOWN} LIMIT -1 OFFSET ?", (MAX_RUNS,)):
            self.db.execute("DELETE FROM shown WHERE run=?", (old,))
            self.db.execute("DELETE FROM logged WHERE run=?", (old,))

    # --- The answer to GET /live --------------------------------------------------
    def snapshot(self, asked, policies, pacing, server):
        """Returns GET /live's answer for the run `asked`, or else for the one that logged last.

        `server` is GET /info's answer. Times are ages in seconds: clocks may differ.
        """
        now, clock = time.monotonic(), time.time()
        with self.db.changed:
            stats, ages = self.store.stats(), self.store.ages()
            shown = dict(self.db.rows(SHOWN))
            name = asked if asked in shown else next(iter(shown), "")
            policy = policies.record(name) or {}  # without a name, of the run that published last
            name = name or policy.get("run", "")
            query = f"SELECT record FROM logged WHERE run=:run AND step IN ({EVENLY}) ORDER BY step"
            rows = self.db.rows(query, {"run": name, "most": SENT_POINTS})
            records = [json.loads(text) for (text,) in rows]
            last = records[-1] if records else {}
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
                "runs": list(shown),
                "run": name,
                "ended": policies.ended(name),
                "step": last.get("step"),
                "policy_version": policy.get("version"),
                "logged_s": round(max(0, clock - shown[name]), 1) if name in shown else None,
                "curves": {curve: chart(records, curve) for curve in CURVES},
                "last": last,
                "samples": list(reversed(self.samples.get(name, []))),
            }
