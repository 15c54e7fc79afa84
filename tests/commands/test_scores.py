"""What answers amount to, by hand."""

import pytest

from grpo.commands import scores


def answers(*groups):
    """-> answers to questions 0, 1, ..., of pairs (correctness, format) for each sample."""
    return {
        question: [
            {
                "tokens": 10 * question,
                "truncated": not r,
                "rewards": {"correctness": r, "format": f},
            }
            for r, f in group
        ]
        for question, group in enumerate(groups)
    }


def test_a_gain_in_format_is_no_gain_in_what_is_right():
    found = scores.summary(answers([(1, -1)], [(1, 1.25)], [(-1, 1)], [(1, None)]), "correctness")
    assert found["questions"] == 4 and found["right"][0] == 3 / 4
    assert found["right_in_format"][0] == 2 / 4  # a reward that does not apply is not missed
    both = [answers([(1, -1)], [(-1, 1)])] * 2
    metric, again = scores.columns(both, "correctness", ["format"])  # the task weights it 0
    assert metric["right_in_format"] == metric["right"] and metric["positive_format"] == 1 / 2
    assert again["right_in_format - first"] == again["right - first"]
    assert found["positive_format"] == pytest.approx(2 / 3)  # of those where it applies
    assert found["truncated"] == 0 and found["completion_tokens"] == 15
    assert found["right"] == scores.interval([1, 1, 0, 1], scores.SHARES) and "pass@1" not in found
    assert "positive_correctness" not in found  # that is "right"


def test_an_answer_to_which_the_outcome_does_not_apply_is_neither_right_nor_wrong():
    found = scores.summary(answers([(None, -1)], [(0.0, 1)], [(1, 1)]), "correctness")
    assert found["right"] == scores.interval([0, 1], scores.SHARES) == found["right_in_format"]
    assert found["questions"] == 3 and found["positive_format"] == 2 / 3
    never = scores.summary(answers([(None, 1)] * 2), "correctness")
    assert never["right"] is never["pass@1"] is None
    assert scores.table("x", ["a"], [never])[2].split() == ["right", "-"]
    some = [(1, 1), (-1, 1), (None, 1)], [(1, 1)] * 3, [(None, 1)] * 3
    found = scores.summary(answers(*some), "correctness")
    assert found["pass@1"] == found["right"][0] == 3 / 4 and found["pass@2"] == found["pass@3"] == 1
    both = answers([(1, 1)], [(None, 1)], [(1, 1)]), answers([(-1, 1)], [(1, 1)], [(1, 1)])
    assert scores.columns(both, "correctness")[1]["right - first"][0] == -1 / 2


def test_several_samples_give_pass_at_k_and_an_interval_over_questions():
    half, none, whole = [(1, 1), (-1, 1)] * 2, [(-1, 1)] * 4, [(1, -1)] * 4
    found = scores.summary(answers(half, none, whole), "correctness")
    assert found["right"][0] == found["pass@1"] == pytest.approx(1 / 2)
    assert found["right_in_format"][0] == pytest.approx(1 / 6)
    # C(2, 2) / C(4, 2) = 1 / 6 of the pairs of the first question have none right
    assert found["pass@2"] == pytest.approx((5 / 6 + 0 + 1) / 3)
    assert found["pass@4"] == pytest.approx(2 / 3)
    assert list(found) == [
        *("questions", "right", "right_in_format", "positive_format", "truncated"),
        *("completion_tokens", "pass@1", "pass@2", "pass@4"),
    ]
    assert found["right"][1:] == pytest.approx((0.1571, 0.8429), abs=1e-4)  # sd sqrt(1.5 / 7)
    # Of many questions it is the usual one: 0.5 +- 1.96 * 0.1 / sqrt(5000)
    many = scores.interval([0.4, 0.6] * 2500, scores.SHARES)
    assert many == pytest.approx([0.5, 0.4972, 0.5028], abs=2e-4)
    mean, low, high = scores.interval([1.0] * 20, scores.SHARES)
    assert mean == high == 1 and 0.8 < low < 0.9  # not of no width


def test_models_are_compared_question_by_question_on_what_both_have():
    first = answers([(-1, 1)], [(1, 1)], [(-1, 1)])
    other = {k: v for k, v in answers([(1, -1)], [(1, 1)], [(1, -1)], [(1, 1)]).items() if k != 0}
    columns = scores.columns([first, other], "correctness")
    assert "right - first" not in columns[0]
    mean, low, high = columns[1]["right - first"]
    assert mean == 1 / 2 and low < 0 < high  # two questions show little
    assert columns[1]["right_in_format - first"][0] == 0
    lines = scores.table("greedy", ["a", "b"], columns)
    (row,) = [line for line in lines if line.strip().startswith("right - first")]
    assert "  0.500 [" in row and "  -  " in row
