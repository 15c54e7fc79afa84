"""The runs that the page shows: their metrics, sampled groups, and whether their trainers live.

    runs = Runs(Database(path))
    runs.log("gsm8k-1", [{"step": 1, "reward": 0.5}], [], steps=500)      # POST /log
    runs.snapshot("gsm8k-1", metrics=["reward"])                          # GET /live

A trainer posts records as in metrics.jsonl and completions as in samples.jsonl, and an empty post
every 10 s, by which one sees that it lives. All that is kept is bounded, and survives kill -9.
"""

import itertools
import json
import statistics
import time

from grpo.wire import is_name

GONE_SECONDS = 60  # without a post of its trainer a run that has not ended is gone
MAX_STEPS = 4000  # of a run; beyond it half as many are kept
SENT_POINTS = 400  # of a curve in one answer: a chart is about 500 pixels wide
MAX_RECORD = 10_000  # characters of a step's JSON, so that all runs together have 800 MB at most
MAX_RUNS = 20
MAX_COMPARED, MAX_CURVES = 8, 100  # runs and metrics in one answer
MAX_GROUPS, MAX_GROUP_BYTES = 400, 16 << 20  # of a run; beyond them half as many steps have groups
MAX_COMPLETIONS = 64  # of a group
GROUP_TEXTS = {"prompt": 8000, "question": 4000, "answer": 200, "sampler": 200}  # characters
COMPLETION, MAX_FIELDS, FIELD = 4000, 50, 500  # characters, fields of an item, characters of one
SCHEMA = """
DROP TABLE IF EXISTS curves;  -- an earlier version's
CREATE TABLE IF NOT EXISTS shown (run TEXT PRIMARY KEY, logged REAL);  -- the latest post last
CREATE TABLE IF NOT EXISTS logged (run TEXT, step INTEGER, numbers INTEGER, record TEXT);
CREATE INDEX IF NOT EXISTS by_step ON logged (run, step, numbers);
CREATE TABLE IF NOT EXISTS plan (run TEXT PRIMARY KEY, steps INTEGER, ended INTEGER);
CREATE TABLE IF NOT EXISTS sampled (id INTEGER PRIMARY KEY AUTOINCREMENT, run TEXT, step INTEGER,
    name TEXT, numbers INTEGER, size INTEGER, record TEXT, UNIQUE (run, step, name));
"""
SHOWN = "SELECT run, logged FROM shown ORDER BY rowid DESC"
# At most :most steps of a run, which is cut into as many stretches of the same length. For each
# stands its first or last step, if it has that, or else one with the most numbers: an evaluation's.
# `sampled` has the number of completions there
EVENLY = """
SELECT step FROM (
    SELECT step, ROW_NUMBER() OVER (
        PARTITION BY CAST((step - first) * (:most - 1.0) / (last - first) AS INTEGER)
        ORDER BY step IN (first, last) DESC, numbers DESC, step) AS place
    FROM {table}, (SELECT MIN(step) AS first, MAX(step) AS last FROM {table} WHERE run=:run)
    WHERE run=:run)
WHERE place=1
"""


# --- What a trainer may post --------------------------------------------------------
def check_numbers(what, numbers, limit):
    """Raises ValueError unless `numbers` are at most `limit` finite numbers, or None, by name."""
    if type(numbers) is not dict or len(numbers) > limit:
        raise ValueError(f"{what} must be at most {limit} numbers by name")
    for name, value in numbers.items():
        # the bound also keeps out NaN, and integers that no float can hold
        fits = value is None or type(value) in (int, float) and abs(value) < 1e30
        if len(name) > 100 or not fits:
            raise ValueError(f"{name[:100]!r} of {what} must be a finite number")


def check_step(what, value):
    step = value.get("step") if type(value) is dict else None
    if type(step) is not int or not 0 <= step < 2**53:
        raise ValueError(f"{what} must be a dict with a step of 0 or more")


def clean_sample(sample):
    """Returns what the page shows of a sample: (facts of its group, the completion's own), with
    texts and the item's fields cut. Raises ValueError."""
    check_step("a sample", sample)
    if type(sample.get("completion")) is not str:
        raise ValueError("a sample's completion must be a text")
    rewards, item = sample.get("rewards", {}), sample.get("item") or {}
    check_numbers("a sample's rewards", rewards, 50)
    if type(item) is not dict:
        raise ValueError("a sample's item must be a dict")
    given = {name: value for name, value in sample.items() if value is not None}
    numbers = {n: given[n] for n in ("advantage", "policy_version", "number") if n in given}
    check_numbers("a sample", numbers, 3)
    texts = {n: cut(str(given[n]), GROUP_TEXTS[n]) for n in GROUP_TEXTS if n in given}
    kept, more = list(item.items())[:MAX_FIELDS], len(item) - MAX_FIELDS
    fields = {cut(name, 100): cut(str(value), FIELD) for name, value in kept}
    fields |= {"…": f"({more} more fields)"} if more > 0 else {}
    # An earlier version's sample names no group: one of its steps has those of one question
    name = cut(str(given.get("group", texts.get("question", ""))), 200)
    facts = {"step": sample["step"], "group": name, "flat": bool(sample.get("flat"))}
    own = {"completion": cut(sample["completion"], COMPLETION), "rewards": rewards}
    own["truncated"] = bool(sample.get("truncated"))
    version = {"policy_version": numbers.pop("policy_version", None)}
    return facts | version | texts | {"item": fields}, own | numbers


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


def step_seconds(records):
    """Returns the median of the last steps' wall time, by the trainer's clock: evaluations and a
    pause before a run resumed do not count. None if there is no such step.

    >>> step_seconds([{"step": s, "time": 10 * s + 1000 * (s > 2)} for s in range(5)])
    10.0
    """
    last = [(record["step"], record["time"]) for record in records[-40:] if "time" in record]
    laps = [(t1 - t0) / (s1 - s0) for (s0, t0), (s1, t1) in itertools.pairwise(last)]
    return statistics.median(laps) if laps else None


class Runs:
    """Any thread may use it: the database's lock guards it."""

    def __init__(self, db):
        self.db = db
        self.heard = {}  # run -> when its trainer last posted anything
        self.thinned = {}  # run -> its records(), until it logs another
        self.db.executescript(SCHEMA)

    # --- What trainers post ---------------------------------------------------------
    def log(self, run, records, samples, steps=0):
        """Adds records and samples to a run of so many steps in all (0: not known): all, or none if
        one is malformed: ValueError."""
        if not is_name(run):
            raise ValueError("run must have 1 to 200 printable characters")
        if len(records) > MAX_STEPS or len(samples) > 100:
            raise ValueError(f"at most {MAX_STEPS} records and 100 samples in one post, please")
        if not 0 <= steps < 2**53:
            raise ValueError("steps must be 0 or more")
        groups = {}  # {step and name: (facts, completions)}
        for facts, completion in map(clean_sample, samples):
            at = facts["step"], facts["group"]
            groups.setdefault(at, (facts, []))[1].append(completion)
        with self.db.changed:
            with self.db.transaction():
                for record in records:
                    self._add(run, record)
                for facts, completions in groups.values():
                    self._add_group(run, facts, completions)
                self._note(run, steps, is_beat=not (records or samples))
                self._bound(run)
            self.heard[run] = time.monotonic()  # on a full disk it has raised
            if records:
                self.thinned.pop(run, None)

    def _add(self, run, record):
        """Adds a step's metrics to those that the step has already: an evaluation follows its step.
        An earlier step removes the later ones: the trainer resumed from a checkpoint."""
        check_step("a record", record)
        at = run, record["step"]
        before = self.db.value("SELECT record FROM logged WHERE run=? AND step=?", at)
        record = json.loads(before or "{}") | record
        check_numbers("a record", record, 200)
        record = {name: value for name, value in record.items() if value is not None}
        text = json.dumps(record)
        if len(text) > MAX_RECORD:
            raise ValueError(f"a record must be at most {MAX_RECORD} characters of JSON")
        self.db.execute("DELETE FROM logged WHERE run=? AND step>=?", at)
        # The groups of a step are posted before its record
        self.db.execute("DELETE FROM sampled WHERE run=? AND step>?", at)
        row = (*at, len(record), text)
        self.db.execute("INSERT INTO logged VALUES (?, ?, ?, ?)", row)

    def _add_group(self, run, facts, completions):
        """Adds completions to those that the group has already; the same number replaces."""
        at = run, facts["step"], facts["group"]
        query = "SELECT record FROM sampled WHERE run=? AND step=? AND name=?"
        known = json.loads(self.db.value(query, at) or '{"completions": []}')["completions"]
        known = {completion["number"]: completion for completion in known}
        for completion in completions:
            number = completion.setdefault("number", len(known))
            if number in known or len(known) < MAX_COMPLETIONS:
                known[number] = completion
        record = json.dumps(facts | {"completions": list(known.values())})
        self.db.execute(
            "INSERT INTO sampled (run, step, name, numbers, size, record) VALUES (?, ?, ?, ?, ?, ?)"
            " ON CONFLICT DO UPDATE"
            " SET numbers=excluded.numbers, size=excluded.size, record=excluded.record",
            (*at, len(known), len(record), record),
        )

    def _note(self, run, steps, is_beat):
        """Notes that the run logged last, and how many steps it is to make."""
        verb = "IGNORE" if is_beat else "REPLACE"
        self.db.execute(f"INSERT OR {verb} INTO shown VALUES (?, ?)", (run, time.time()))
        self.db.execute(
            "INSERT INTO plan VALUES (:run, :steps, 0)"
            " ON CONFLICT DO UPDATE SET steps=:steps WHERE steps!=:steps",
            {"run": run, "steps": steps},
        )

    def _bound(self, run):
        """Thins the run's records and groups if they are many, and deletes the oldest runs."""
        count = self.db.value("SELECT COUNT(*) FROM logged WHERE run=?", (run,))
        if count > MAX_STEPS:
            self._thin("logged", run, MAX_STEPS // 2)
        query = "SELECT COUNT(*), TOTAL(size), COUNT(DISTINCT step) FROM sampled"
        while True:
            ((count, size, steps),) = self.db.rows(f"{query} WHERE run=?", (run,))
            if count <= MAX_GROUPS and size <= MAX_GROUP_BYTES:
                break
            self._thin("sampled", run, steps // 2)
        for old, _ in self.db.rows(f"{SHOWN} LIMIT -1 OFFSET ?", (MAX_RUNS,)):
            for table in ("shown", "plan", "logged", "sampled"):
                self.db.execute(f"DELETE FROM {table} WHERE run=?", (old,))
            self.heard.pop(old, None)
            self.thinned.pop(old, None)

    def _thin(self, table, run, most):
        kept = EVENLY.format(table=table) if most > 1 else "-1"  # many groups of one step: all go
        self.db.execute(
            f"DELETE FROM {table} WHERE run=:run AND step NOT IN ({kept})",
            {"run": run, "most": most},
        )

    def end(self, run, ended=True):
        """Notes that the run has made its steps, or resumes with more of them."""
        with self.db.transaction():
            self.db.execute("UPDATE plan SET ended=? WHERE run=?", (int(ended), run))

    # --- What the page asks for -----------------------------------------------------
    def records(self, run):
        """Returns at most SENT_POINTS of the run's records, evenly over its steps."""
        if run not in self.thinned:
            steps = EVENLY.format(table="logged")
            query = f"SELECT record FROM logged WHERE run=:run AND step IN ({steps}) ORDER BY step"
            rows = self.db.rows(query, {"run": run, "most": SENT_POINTS})
            self.thinned[run] = [json.loads(text) for (text,) in rows]
        return self.thinned[run]

    def status(self, run, logged):
        """Returns (status, seconds since the trainer's last post) of a run that logged then."""
        since = time.time() - logged  # before this process started
        if run in self.heard:
            since = time.monotonic() - self.heard[run]
        ended = self.db.value("SELECT ended FROM plan WHERE run=?", (run,))
        status = "ended" if ended else "gone" if since > GONE_SECONDS else "running"
        return status, round(max(0, since), 1)

    def snapshot(self, asked="", others=(), metrics=()):
        """Returns GET /live's answer for the run `asked`, or else for the one that logged last,
        with the curves of these metrics, also of the `others`.

        Times are ages in seconds: clocks may differ.
        """
        with self.db.changed:
            shown = dict(self.db.rows(SHOWN))
            status = {run: self.status(run, logged) for run, logged in shown.items()}
            name = asked if asked in shown else next(iter(shown), "")
            chosen = [run for run in dict.fromkeys([name, *others]) if run in shown][:MAX_COMPARED]
            records = {run: self.records(run) for run in chosen}
            known = {metric for run in chosen for record in records[run] for metric in record}
            drawn = [m for m in dict.fromkeys(metrics) if m in known][:MAX_CURVES]
            last = records[name][-1] if records.get(name) else {}
            query = "SELECT id, step, numbers FROM sampled WHERE run=? ORDER BY step, id"
            return {
                "runs": [{"name": run, "status": status[run][0]} for run in shown],
                "run": name,
                "status": status[name][0] if name else "",
                "heard_s": status[name][1] if name else None,
                "logged_s": round(max(0, time.time() - shown[name]), 1) if name else None,
                "step": last.get("step"),
                "steps": self.db.value("SELECT steps FROM plan WHERE run=?", (name,)) or None,
                "step_seconds": step_seconds(records.get(name, [])),
                "last": last,
                "metrics": sorted(known - {"step", "time"}),
                "curves": {run: {m: chart(records[run], m) for m in drawn} for run in chosen},
                "groups": self.db.rows(query, (name,)),
            }

    def group(self, number):
        """Returns the sampled group with that id in `snapshot`, or None if it is gone."""
        text = self.db.value("SELECT record FROM sampled WHERE id=?", (number,))
        return json.loads(text) if text else None
