"""A thousand bodies of the fuzzer; `python tests/fuzz.py 100000` is its long form."""

import pytest
from fuzz import LEVELS, Case, Function, build, check_answer, decode, fuzz, make_case, valid_group
from helpers import raw

SEED = 1


def test_whatever_a_body_holds_it_is_taken_whole_or_refused_with_a_reason(tmp_path):
    server = Function(tmp_path)
    result = fuzz(server, 1200, seed=SEED)
    server.store.db.close()
    kinds = result["kinds"]
    assert {way.__name__ for level in LEVELS for way in level} <= kinds.keys()
    assert kinds["valid"] > 80 and result["stored"]["waiting"] > 80 < result["statuses"][400]


def test_a_case_is_the_same_for_the_same_seed():
    assert make_case(3, 70) == make_case(3, 70) != make_case(4, 70)


def test_the_fuzzer_sees_what_should_not_have_been_taken():
    """Each answer and body that it must complain of."""
    import random

    draw, refusal = random.Random(0), b'{"error": "a reason"}'
    case, headers = Case("x", b""), {"Content-Type": "application/json"}
    check_answer(case, 400, headers, refusal, 0.1, app=True)
    good = build(draw, valid_group(draw, 0), [])
    decode(good)
    for status, data, seconds in [(500, refusal, 0), (400, b'{"error": ""}', 0), (400, refusal, 2)]:
        with pytest.raises(AssertionError):
            check_answer(case, status, headers, data, seconds, app=True)
    with pytest.raises(AssertionError):
        check_answer(Case("x", b"", good=True), 400, headers, refusal, 0, app=True)
    with pytest.raises(Exception, match="bytes that no tensor has"):
        decode(good + b"\0")
    with pytest.raises(KeyError):
        decode(raw({"__metadata__": {}}))
