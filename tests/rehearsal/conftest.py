"""Sends the tests of this folder to a process that pretends to have a GPU (inside.py), and shows
what they answer as if they had run here."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rehearsal import build

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


class Process:
    """The other process, started by its first test."""

    def __init__(self):
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (open as long as the process)
        paths = os.pathsep.join([str(ROOT), str(HERE.parent)])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rehearsal.inside"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            text=True,
        )

    def run(self, test):
        """Returns the reports of a test, as pytest makes them serial. Raises EOFError with what the
        process has printed last, if it ends."""
        try:
            print(test, file=self.process.stdin, flush=True)
            reports = []
            for line in self.process.stdout:
                if not line.strip():
                    return reports
                reports.append(json.loads(line))
        except BrokenPipeError:
            pass
        self.log.seek(0)
        raise EOFError(f"the rehearsal's process has ended: {self.log.read()[-4000:]}")

    def end(self):
        self.process.kill()  # it has nothing to lose
        self.process.wait()


def process_of(config):
    if not hasattr(config, "rehearsal"):
        config.rehearsal = Process()
        config.add_cleanup(config.rehearsal.end)
    return config.rehearsal


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    if build.loaded or not item.path.is_relative_to(HERE):
        return None
    if reason := build.why_not():
        item.add_marker(pytest.mark.skip(reason=reason))
        return None  # pytest goes on, and skips it
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in reports_of(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def reports_of(item):
    config = item.config
    try:
        return [
            config.hook.pytest_report_from_serializable(config=config, data=data)
            for data in process_of(config).run(item.nodeid)
        ]
    except EOFError as error:
        del config.rehearsal  # the next test starts another
        found = (item.nodeid, item.location, {}, "failed", str(error), "call")
        return [pytest.TestReport(*found)]
