"""Two thousand requests of the fuzzer; `python tests/fuzz.py 100000` is its long form."""

import os

import pytest
from fakes import tiny_policy
from fuzz import MOST_GROWTH, Target, check_scores, check_workers, fuzz, rank_0
from processes import server_process

COUNT = 1000  # requests to each server


def fuzzed(target):
    fuzz(target, 100, "warm")
    before = target.memory()
    fuzz(target, COUNT, 1)
    assert target.memory() - before < MOST_GROWTH
    assert target.kinds.keys() == {"tensors", "header", "bytes", "route", "headers", "raw"}
    assert target.statuses[400] > COUNT / 2 and {200, 404, 405, 413} < target.statuses.keys()


def test_the_reference_server_refuses_what_is_malformed_and_still_scores(tiny, tmp_path):
    with server_process(tmp_path, tiny, DTYPE="float32") as (process, url):
        check_scores(url, tiny_policy(tiny))
        fuzzed(Target(url, process.pid, ["/score"]))
        check_scores(url, tiny_policy(tiny))
    assert not {"Traceback", "uncaptured"} & set((tmp_path / "server.log").read_text().split())


def test_rank_0_refuses_what_is_malformed_and_still_serves_workers(tiny, tmp_path, capfd):
    workers, url = rank_0(tiny)
    try:
        target = Target(url, os.getpid(), ["/group"])
        fuzzed(target)
        workers.take(0)
        check_workers(url, tmp_path)
        (group,) = workers.take(0)
        assert group.id.startswith("fuzz-")
    finally:
        workers.close()
    assert "Traceback" not in capfd.readouterr().err


def test_the_fuzzer_sees_what_should_not_have_been_answered():
    target = Target("http://127.0.0.1:9", os.getpid(), ["/score"])
    for status, text in [(500, b"{}"), (501, b""), (302, b""), (400, b'{"error": ""}'), (404, b"")]:
        wrong = status != 404  # of a HEAD request
        if wrong:
            with pytest.raises(AssertionError):
                target.check("x", status, text, "")
        else:
            target.check("x", status, text, "")
    with pytest.raises(ValueError):
        target.check("x", 400, b"a sentence, but not in JSON", "")
