"""Two thousand requests of the fuzzer; `python tests/fuzz.py 100000` is its long form."""

import pytest
from fuzz import SERVERS, check

COUNT = 1000  # requests to each server


@pytest.mark.parametrize("server", SERVERS)
def test_a_server_refuses_what_is_malformed_and_still_serves(server, tiny, tmp_path):
    with SERVERS[server](tmp_path, tiny) as target:
        target.fuzz(COUNT, 1)
    assert target.statuses[400] > COUNT / 2
    assert {"closed", 200, 404, 405, 413} < target.statuses.keys()


def test_the_fuzzer_sees_what_should_not_have_been_answered():
    for status, text in [(500, b"{}"), (302, b""), (400, b'{"error": ""}'), (400, b"no JSON")]:
        with pytest.raises((AssertionError, ValueError)):
            check(status, text, "")
    check(400, b'{"error": "a sentence"}', "")
    check(404, b"", "")  # of a HEAD request
