"""What answers amount to, by hand."""

import pytest

from grpo import scores


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
    assert found["positive_format"] == pytest.approx(2 / 3)  # of those where it applies
    assert found["truncated"] == 0 and found["completion_tokens"] == 15
    assert found["right"][1:] == list(scores.wilson(3, 4)) and "pass@1" not in found
    assert "positive_correctness" not in found  # that is "right"


def test_an_answer_to_which_the_outcome_does_not_apply_is_neither_right_nor_wrong():
    found = scores.summary(answers([(None, -1)], [(0.0, 1)], [(1, 1)]), "correctness")
    assert found["right"] == [1 / 2, *scores.wilson(1, 2)] == found["right_in_format"]
    assert found["questions"] == 3 and found["positive_format"] == 2 / 3
    never = scores.summary(answers([(None, 1)] * 2), "correctness")
    assert never["right"] is never["pass@1"] is None and scores.table("x", ["a"], [never])
    some = [(1, 1), (-1, 1), (None, 1)], [(1, 1)] * 3, [(None, 1)] * 3
    found = scores.summary(answers(*some), "correctness")
    assert found["pass@1"] == found["right"][0] == 3 / 4 and found["pass@2"] == found["pass@3"] == 1
    first, other = answers([(1, 1)], [(None, 1)], [(1, 1)]), answers([(-1, 1)], [(1, 1)], [(1, 1)])
    assert scores.compare(first, other, "correctness")["right"][0] == -1 / 2


def test_several_samples_give_pass_at_k_and_an_interval_over_questions():
    half, none, whole = [(1, 1), (-1, 1)] * 2, [(-1, 1)] * 4, [(1, -1)] * 4
    found = scores.summary(answers(half, none, whole), "correctness")
    assert found["right"][0] == found["pass@1"] == pytest.approx(1 / 2)
    assert found["right_in_format"][0] == pytest.approx(1 / 6)
    # C(2, 2) / C(4, 2) = 1 / 6 of the pairs of the first question have none right
    assert found["pass@2"] == pytest.approx((5 / 6 + 0 + 1) / 3)
    assert found["pass@4"] == pytest.approx(2 / 3)
    low, high = found["right"][1:]  # mean 0.5, sd 0.5 of 3 questions: +- 0.566, cut
    assert (low, high) == (0, 1)
    assert scores.mean_interval([1.0] * 20) == scores.wilson(20, 20)  # and no width of 0
    assert scores.mean_interval([0.4, 0.6] * 50) == pytest.approx((0.4803, 0.5197), abs=1e-4)


def test_models_are_compared_question_by_question_on_what_both_have():
    first = answers([(-1, 1)], [(1, 1)], [(-1, 1)])
    other = {k: v for k, v in answers([(1, -1)], [(1, 1)], [(1, -1)], [(1, 1)]).items() if k != 0}
    found = scores.compare(first, other, "correctness")
    assert found["right"][0] == 1 / 2 and found["right_in_format"][0] == 0
    assert found["right"][1] < 0 < found["right"][2]  # two questions say little
    assert scores.compare(first, {}, "correctness")["right"][0] == 0


def test_the_table_shows_few_of_many_passes():
    result = {"right": [0.5, 0.25, 0.75]} | {f"pass@{k}": 0.5 for k in range(1, 13)}
    lines = scores.table("samples", ["a", "b"], [result, {"right": None}])
    assert [line.split()[0] for line in lines] == [
        *("samples", "right", "pass@1", "pass@2", "pass@4", "pass@8", "pass@12")
    ]
    assert lines[1].split("  ")[-2:] == ["0.500 [0.250, 0.750]", "-"]
