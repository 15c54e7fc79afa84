"""The process of the rehearsal: pytest, on the pretended GPU, given the tests one by one.

It reads a test's id from each line of its input, runs the test, and answers with a line for each of
pytest's reports, as JSON, and an empty one; until the input ends. conftest.py is at the other end.
"""

import json
import os
import sys

from rehearsal import build


class Inside:
    """A plugin of pytest that runs what the input names, not what was collected."""

    def __init__(self, questions, answers):
        self.questions, self.answers, self.reports = questions, answers, []

    def pytest_runtestloop(self, session):
        tests = {item.nodeid: item for item in session.items}
        for line in self.questions:
            item = tests[line.strip()]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            for report in [*self.reports, None]:
                serial = report and session.config.hook.pytest_report_to_serializable(
                    config=session.config, report=report
                )
                print(json.dumps(serial) if serial else "", file=self.answers, flush=True)
            self.reports.clear()
        return True

    def pytest_runtest_logreport(self, report):
        self.reports.append(report)


def main(folder):
    questions, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what tests and pytest print is no answer
    build.load()
    import pytest

    from rehearsal import cuda

    cuda.pretend()
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    return pytest.main([*options, folder], plugins=[Inside(questions, answers)])


if __name__ == "__main__":
    sys.exit(main(os.path.dirname(os.path.abspath(__file__))))
