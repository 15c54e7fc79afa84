"""The page for people: its routes, and what it shows of the server beside the runs (runs.py).

page.html asks GET /live every 2 s, and GET /group for the sampled group that is looked at. Errors
and upload rates are bounded, and lost with the process.
"""

import base64
import hashlib
import re
import threading
import time
from collections import deque
from pathlib import Path

import bottle

from grpo.serving.runs import cut
from grpo.serving.store import STATES

MAX_ERRORS, MAX_ERROR = 20, 500  # of so many characters
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


class Live:
    """What happens in the server. Any thread may use it."""

    def __init__(self):
        self.lock, self.started = threading.Lock(), time.monotonic()
        self.errors = {}  # text -> (how often, when last), the latest at the end
        self.uploads = deque(maxlen=MAX_UPLOADS)  # (when, completion tokens) of each group

    def error(self, text):
        """Adds an error; a repeat only counts, so that a producer that retries hides no other."""
        text = cut(text, MAX_ERROR)
        with self.lock:
            count, _ = self.errors.pop(text, (0, 0))
            self.errors[text] = (count + 1, time.monotonic())
            while len(self.errors) > MAX_ERRORS:
                del self.errors[next(iter(self.errors))]

    def uploaded(self, tokens):
        """Counts an uploaded group with so many completion tokens."""
        with self.lock:
            self.uploads.append((time.monotonic(), tokens))

    def rates(self):
        now = time.monotonic()
        with self.lock:
            tokens = [n for when, n in self.uploads if when > now - RATE_SECONDS]
        span = max(1, min(RATE_SECONDS, now - self.started))
        groups, tokens = len(tokens), sum(tokens)
        return {"groups_per_s": round(groups / span, 2), "tokens_per_s": round(tokens / span, 1)}

    def view(self, run, store, policies, pacing, info):
        """Returns what a reference server adds to GET /live's answer; `info` is GET /info's."""
        now, stats, ages = time.monotonic(), store.stats(), store.ages()
        size = {"bytes": stats["bytes"], "max_bytes": stats["max_bytes"]}
        with self.lock:
            errors = [
                {"text": text, "count": count, "age_s": round(now - when, 1)}
                for text, (count, when) in reversed(self.errors.items())
            ]
        return {
            "server": info | size | {"up_s": round(now - self.started, 1)},
            "states": {state: stats[state] for state in STATES},
            "oldest": ages,
            "oldest_s": max(ages.values(), default=None),
            "rates": self.rates(),
            "workers": pacing.stats(),
            "errors": errors,
            "policy_version": (policies.record(run) or {}).get("version"),
        }


# --- Routes -------------------------------------------------------------------------
def add_page(app, runs, view=lambda run: {}):
    """Adds the page's routes to a gate.Gate; where there is a reference server, `view(run)` returns
    Live.view's."""
    html, html_headers = load_page()

    @app.get("/live")
    def get_live():
        bottle.response.headers.update(PLAIN)
        run, _ = app.read_query()
        query = bottle.request.query.decode()
        answer = runs.snapshot(run, query.getall("with"), query.getall("metric"))
        return answer | view(answer["run"])

    @app.get("/group")
    def get_group():
        bottle.response.headers.update(PLAIN)
        _, at = app.read_query("id")
        group = runs.group(at["id"])
        bottle.response.status = 200 if group else 404  # older groups make room for newer ones
        return group or {"error": "no such group"}

    @app.get("/")
    def page():
        bottle.response.headers.update(html_headers)
        return html
