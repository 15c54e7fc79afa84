"""The live page of a run that has no reference server, served by its trainer."""

import os
import sqlite3
from pathlib import Path

from grpo.log import in_background, say

PORTS = 20  # tried from PAGE_PORT on: a server, or other runs' pages, may have the first


class LocalPage:
    """In place of the server's client, for what is logged. Whatever fails, the run goes on."""

    def __init__(self, runs):
        self.runs = runs

    def copy(self):
        return self

    def log(self, run, records, samples, steps=0):
        """Shows metrics and completions on the page."""
        try:
            self.runs.log(run, records, samples, steps)
        except (ValueError, sqlite3.Error) as error:
            say(f"not on the page: {error}")


def serve_page(c):
    """Returns the LocalPage of the run in RUN_DIR, which it serves to this machine in threads, or
    None, with a sentence, where that fails. `c` has the trainer's constants as attributes."""
    if not c.PAGE_PORT:
        return None
    try:
        runs, server = start_page(c)
    except (SystemExit, ImportError, OSError, sqlite3.Error) as error:
        say(f"there is no live page, and the run goes on without: {error}")
        return None
    in_background(server.run)
    port = int(server.effective_port)
    taken = f" (PAGE_PORT = {c.PAGE_PORT} is taken)" if port != c.PAGE_PORT else ""
    say(f"the live page, for this machine alone: http://127.0.0.1:{port}/{taken}")
    return LocalPage(runs)


def start_page(c):
    """Returns (Runs, HTTP server), on the first port that is free."""
    # Only here: a trainer with a server needs neither bottle nor waitress
    from grpo.serving.dashboard import add_page
    from grpo.serving.database import Database
    from grpo.serving.gate import Gate, listen
    from grpo.serving.runs import Runs

    path = Path(c.RUN_DIR, "page.sqlite")
    runs = Runs(Database(path))
    app = Gate(say, path, token=os.environ.get("GRPO_TOKEN"), max_body_bytes=0)
    add_page(app, runs)
    for port in range(c.PAGE_PORT, min(c.PAGE_PORT + PORTS, 65536)):
        try:
            return runs, listen(app, "127.0.0.1", port, threads=4, max_body_bytes=1)
        except SystemExit:  # it is taken
            continue
    raise OSError(f"PAGE_PORT = {c.PAGE_PORT} and the {PORTS - 1} ports after it can't be had")
