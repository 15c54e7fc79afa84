"""The rewards of tasks/gsm8k.py on honest and adversarial answers."""

import re
import time

import pytest

from tasks.gsm8k import CORRECT, messages, rewards


def correct(gold, completion):
    return rewards({"answer": gold}, completion)["correctness"] == CORRECT


def pairs(table):
    return [(gold, answer) for gold, answers in table.items() for answer in answers]


RIGHT = {  # gold: what stands between the answer tags
    "18": [
        "18", " 18.\n", "**18**", r"\boxed{18}", r"\(18\)", r"\left(18\right)", r"\[ 18 \]",
        r"18 \text{ dollars}", "16-3-4=9\n9*2=18", "9*2=<<9*2=18>>18", "18 cm^2",
        "She makes $18 per day.", "The answer is 18.", "#### 18", "18 (20 minus 2)",
        "(18 dollars)", r"\boxed{\left(18\text{ cm}\right)}",
    ],
    "70000": ["70,000", "70{,}000", r"70\,000", r"70,\!000"],
    "70,000": ["70000"],
    "1234567": ["$1,234,567"],
    "-7": ["-7", "\u22127", "- 7", "(-7)", "minus 7", "Negative $7", "–7", "—7", "-Rs.7", "–¥7"],
    "5": ["$5", r"\$5", "5€", "US$5", "5.00", "x = 5"],
    "-5": ["-$5", "-USD 5", "-US$5", "$-5", "\u2212$5"],
    "5.00": ["5"],
    "50": ["50%", r"50\%"],
    "1/2": ["0.5"],
    "0.5": ["1/2", ".5", r"\frac{1}{2}", r"$\frac12$"],
    "-0.5": [r"-\frac{1}{2}"],
    "2.5": ["2 1/2", r"2\frac{1}{2}", "2 and 1/2", "2 and one half"],
    "2.25": ["2 and a quarter", "2 and one quarter miles"],
    "2.75": ["2 and three quarters", "2 and three-quarters"],
    "-2.5": ["-2 1/2"],
    "18000": ["1.8e4"],
    "7": ["3 + 4 = 7", "7 dollars", "7 dozen", "7千米", "7千克"],
    "3": ["#3"],
    "12": [
        "12 apples (from 3 boxes)", "12 apples from 3 boxes", "12 apples (3 or 4 in each box)",
        "12 (3 in each box)", "She has 12 apples (from 3 boxes).",
    ],
    "60": ["60 miles/hour"],
    "5000000": ["5 million", "$5-million", r"5 \text{ Millions}", "5M", "50 lakh"],
    "5 million": ["5,000,000", "½ crore"],
    "30000": ["3万", "3萬", "30 thousand", "30K", "300百"],
    "2½": ["2.5", "2½ cups", "2 ½"],
    "-1/4": ["-¼"],
    "9": ["9 cm²", "9 m⁻¹", "9 平方米"],
}  # fmt: skip
NOT_RIGHT = {  # gold: none of these has its value
    "18": ["", "\n", "十八"],
    "0": [""],
    "2": ["2 and a quarter", "2 and three quarters", "2 and 1/2"],
    "3": ["three", "12 apples (from 3 boxes)", "12 apples from 3 boxes"],
    "70000": ["000", "70"],
    "7": ["-7", "- 7", "7.0000001", "x7", "7/0", "7^", r"\frac{7}{0}", "x7个", "第A7页"],
    "-7": ["7"],
    "0.333333": ["1/3"],
    "0.3333333333": ["1/3"],
    "4": ["A4"],
    "12": [r"\frac{12"],
    "49": [r"\sqrt{49}", "49^2"],
    "5": ["5 million", "5k", "5bn", "5万", "5½", "5²", "5₂", "5 thousandths", "5千2百"],
}  # fmt: skip
LISTS = [  # none of their numbers may count
    "5 or 6", "5 (or 6)", "5, 6", "5; 6", "5/6/7", "5-6", "5–6", "5 to 6", "5\n6", "5 and 6",
    "either 5 or 6", "5, maybe 6", "5 possibly 6", "5 apples or 6 apples", "between 5 and 6",
    "the answer is 5 or 6", r"\boxed{5 \text{ or } 6}", r"\{5, 6\}", r"5 \text{ or } 6",
    "x = 5 or x = 6", r"x=5 \vee x=6", "1 2 3 4 5 6 7", "5 | 6", "5、6、7", "5，6", "5～6", "5或6",
    "5个或者6个", "5（或6）", "5または6", "5 또는 6", r"\boxed{5\text{或}6}",
]  # fmt: skip
UNDONE = ["3 * 4", "3 x 4", "3 × 4", "16 - 4", "8 + 4", "24/2", r"\frac{24}{2}", r"3 \times 4"]
UNDONE += [r"3 \cdot 4", "15-3^1", "(3)(4)", "12 = 3 * 4", "12+John's age", "John's age + 12"]
HEADINGS = ["#### 2. **Find", "#### **2. Find", "#### **2.** Find", "##### 2. Find", "#### 1: Find"]
HEADINGS += ["#### 2. 9 * 2 is", "#### 2、计算", "#### （2）计算"]
UNTAGGED = {  # gold: a whole completion without (complete) tags
    "18": [
        "She sells 9 eggs.\nSo she makes 9 * 2 = $18 per day.", "So 9 * 2 is $18.",
        "9 * 2 = <<9*2=18>>18\n#### 18", "#### Step 2: 3 * 4 = 12\nThe answer is 18.",
        "#### 2. Add\nHence the total is 18", "#### (2) Add\nHence the total is 18",
        *(f"{heading} the rest\n9 * 2 = 18\n\nThe answer is 18." for heading in HEADINGS),
        "#### 18.\n\nThe 9 eggs cost 2 each.", "#### $18. The 9 eggs cost 2 each.",
        r"First \boxed{5}, then \boxed{18}. Check: 18 - 5 = 13.",
        "The answer is 18% of the total.", "#### 18 percent of students", "It adds up to $18.",
        "So we round 17.5 up to 18.", "The answer is 18 to the nearest dollar.",
        "She gave 18 to the school.", "He sold 18 model cars.", "18 is not prime",
        "18 cookies is too many to eat.", "In the second half 18 points were scored.",
        "She sold 18 and so made a profit.", "There is no doubt it is 18.",
        "18 dollars over 3 days is the total: 18", "double that is 18", "The amount is 18!",
    "=> 18",
        "He wants 18 more than her", "Since it does not rain, it is 18", "not 17 but 18",
    "12+6 => 18",
        "The answer is 18. Check: 9 + 9. I hope this answer is helpful.", "**Answer:** 18",
        "Final answer: $18<|im_end|>", "the answer is\n\n18", "A: 18", "- eggs: 9\n- 18 dollars",
        "<think>9 * 2</think><answer>18",
        "Answer: She sells 16 - 3 - 4 = 9 eggs.\nShe makes 9 * 2 = $18 every day.",
        "A: 16 - 3 - 4 = 9 eggs are sold.\nShe makes 9 * 2 = $18 every day.",
        "To find the answer, we need her eggs:\nShe has 9 eggs.\nThey cost $18.",
        "Answer: x = 18. Check: 9 + 9 = 2 * 9", r"**Answer:** \(\frac{36}{2} = 18\)",
        "The final answer is:\n\n- $18 per day", "**Answer:**\n  - 18\n\n(9 eggs)",
        "The answer is that she makes $18. Check: 18 / 9 = 2", "Answer: 18 eggs\nThat is 9 twice",
        "A: She makes 18 dollars.\n\nQ: Tom has 5 apples.",
        "If x = 9, then she has 18 eggs", "Because x = 9 and y = 2 the total is 18",
        "If $x$ = 9, then she has 18 eggs",
        "Answer:\n– 18 eggs", "Answer: — 18 dollars", "The total is 18\n– 18 dollars",
        "<answer>– 18</answer>",
    ],
    "15": ["So 3 x 5 = 15 limbs after 20 days.", r"So 3 \times 5 = 15 after 20 days."],
    "13": ["So 16 \u2212 3 = 13 eggs after 2 days.", "In total = 13 eggs in 3 boxes"],
    "80": ["So 30 g + 50 g = 80 g in 2 days.", "So x = 80 eggs in 3 boxes."],
    "8": ["It would grow 5 + 3 = <<5+3=8>>8 new limbs after 15 days."],
    "4": ["12 apples were in 3 boxes. So 4 each."],
    "70000": ["#### 70,000"],
    "12": [
        "#### 12 apples from 3 boxes\nNext question: 5 pears",
        "The answer is: 12 apples from 3 boxes.",
    ],
    "0.5": [r"Thus \boxed{\frac{1}{2}} of 10."],
    "1/2": ["I paid 3 dollars. The answer is ½."],
    "6": ["The answer is 5. No, the answer is 6."],
    "-7": ["It falls to -7", "The answer is - 7"],
}  # fmt: skip


@pytest.mark.parametrize(("gold", "answer"), pairs(RIGHT))
def test_right_answers_count_tagged_and_untagged(gold, answer):
    assert correct(gold, f"<think>1 + 1 = 2</think>\n<answer>{answer}</answer>")
    assert correct(f"some reasoning, 2 * 3 = 6\n#### {gold}", f"<answer>{answer}</answer> 999")


@pytest.mark.parametrize(("gold", "answer"), pairs(NOT_RIGHT))
def test_wrong_answers_do_not_count(gold, answer):
    assert not correct(gold, f"<think>It is {gold}.</think>\n<answer>{answer}</answer>")


@pytest.mark.parametrize("answer", LISTS)
def test_listing_candidates_never_pays(answer):
    for gold in set(re.findall(r"\d+", answer)):
        assert not correct(gold, f"<think></think><answer>{answer}</answer>")


@pytest.mark.parametrize("answer", UNDONE)
def test_a_sum_left_undone_is_no_answer(answer):
    """Or else to copy the question of an arithmetic task would be the best policy."""
    assert not correct("12", f"<answer>{answer}</answer>")


@pytest.mark.parametrize(("gold", "completion"), pairs(UNTAGGED))
def test_accuracy_does_not_need_the_tags(gold, completion):
    assert correct(gold, completion)


@pytest.mark.parametrize(
    "completion",
    ["1 2 3 18", "10 or 18", "10 eggs or 18", "", "none", "It falls to -18", "180", "minus 18"],
)
def test_untagged_lists_and_other_numbers_do_not_count(completion):
    assert not correct("18", completion)


DENIED = [  # or bounded, or an operand
    "It isn't 18", "at least 18", "half of 18", "18 choose 2", "It is not 18",
    "I don't think it is 18",
    "more than 18", "18 eggs at most", "18 or more", "no fewer than 18", "twice 18", "18 squared",
    "the square root of 18", "two thirds of 18", "20% of 18", "18% of 50", "18 divided by 2",
    "18 mod 7", "18, no wait, 20", "18x", "18 pi", "18 or greater",
    "18 minimum", "18 is too high",
    "3 times 18", "20 minus 18", "x > 18", "x >= 18", "x != 18", "18 is wrong", "18 isn't right",
    "above $18", "up to 18", "5 of 18", "other than 18", "sqrt(18)", "18 to the power of 2",
    "18 or so",
]  # fmt: skip


@pytest.mark.parametrize("answer", DENIED)
def test_a_number_that_is_denied_bounded_or_computed_with_is_no_answer(answer):
    for text in (
        answer,
        f"<answer>{answer}</answer>",
        f"#### {answer}",
        f"The answer is {answer}.",
    ):
        assert not correct("18", text), text


TWO_UNITS = [  # gold, answers with its number that are another quantity
    "2 h 45 min", "2h45m", "2h45", "2 hours and 45 minutes", "2 Hours, 45 Minutes",
    "2 hrs. 45 min.", "6 yards 2 ft", "2 tons 300 kg", "5 rupees 50 paise",
    "5-foot-3", "2 h + 45 min", "5 feet and 3 inches",
    "5 ft 3 in", "5 feet, 3 inches", "5 ft 3", "6'2\"", "1 lb 4 oz", "3 days 4 hours", "2 m 30 cm",
    "1 day, 2 hours and 30 minutes", "3 dollars and 50 cents", "2 kg 500 g", "2 years, 6 months",
    r"2\text{ h }45\text{ min}", "2-hour 45-minute", "1 gallon 2 quarts", "3 liters 5 ml",
    "1d 2h", "2 m 30", "3:30", "2 weeks & 3 days",
    "2 hours; 45 minutes", "2 hours plus 45 minutes", "1 decade 2 years", "2 tbsp 1 tsp",
    "2 hours (and 45 minutes)", "2 hours and a quarter", "two hours and 45 minutes",
    "1 hour and thirty minutes", "4 feet six inches", "30 degrees 15 minutes",
    "2 dozen and 3", "3 quarters, 2 dimes", "2 hours – 45 minutes",
]  # fmt: skip


@pytest.mark.parametrize("answer", TWO_UNITS)
def test_a_quantity_of_two_units_is_no_number_neither_as_gold_nor_as_an_answer(answer):
    for text in (f"<answer>{answer}</answer>", f"The answer is {answer}", f"#### {answer}"):
        for gold in re.findall(r"\d+", answer):
            assert not correct(gold, text)
    unmarked = f"So it is about {answer}"
    assert not any(correct(gold, unmarked) for gold in re.findall(r"\d+", answer))
    with pytest.raises(ValueError, match="is not a number with at most one unit"):
        correct(answer, "<answer>2</answer>")


@pytest.mark.parametrize("gold, answer", [
    ("165", "2 h 45 min = 165 min"), ("18", "18 in 5 days"), ("12", "12 feet of 3 boxes"),
    ("18", "18 dollars for 5 hours"), ("12", "12 m per 3 s"), ("2.5", "2 1/2 hours"),
    ("18", "18 days, 5 of them dry"), ("9", "9 m^2"), ("9", "9 m² for 2 h"),
    ("3", "3 days 4 boxes"),
    ("18", "in 3 hours, 18"), ("18", "In 3 hours, 18 miles"), ("18", "After 2 days, 18 dollars"),
    ("18", "18 miles (in 2 h 45 min)"), ("5", "5 h"), ("2", "2 days"),
    ("10", "10 pounds, 2 pounds each"), ("10", "10 pounds, 1 pound each"), ("8", "8 hours a day"),
    ("2.5", "2 and a half hours"), ("2", "2 dozen"), ("8", "8 hours, one of them dark"),
])  # fmt: skip
def test_a_second_number_that_is_not_of_the_quantity_stays_unread(gold, answer):
    assert correct(gold, f"<answer>{answer}</answer>")
    assert correct("18", "She worked 2 h 45 min, so she earned $18")


def test_units_of_two_sentences_or_lines_are_of_two_quantities():
    assert correct("18", "The answer is 18 dollars. 2 cups cost 4 dollars.")
    assert correct("18", "#### 18 hours\n30 min are left")
    assert not correct("2", "<answer>2 hours\n45 minutes</answer>")  # of one answer
    assert correct("18", "<answer>18 feet. 3 inches were cut off</answer>")


def test_the_last_complete_block_is_the_answer_even_if_empty():
    assert correct("6", "<answer>5</answer> no: <answer>6</answer> 5 <answer>4")
    assert not correct("5", "<answer>5</answer> no: <answer>6</answer>")
    assert not correct("5", "5 <answer>5</answer><answer></answer>")


NO_GOLD = [
    "blue", "5 or 6", r"2\sqrt{3}", "", "10²", "3万5千", "x > 5", "3i", "1e400", "p = 5, q = 2",
    "x = 5",
    "half of 18", "0,111", "10-12", "at least 18", "5 choose 2", "2^3", "5!", "5 + 3", "5x",
    "5 n", "3π",
    "17 not 18", "3:45", "1.2.3", "1/0", "12th", "±5", "5 (mod 7)", "101 (base 2)", "0x1F",
    "1 000 000",
    "7 p.m.", "--5", "1,23", "18 or more", "5 below zero", "3 pi", "[5, 6]", "5 less than x", "nan",
    "5以上", "5左右", "5的一半", "5 minimum", "~5", "5 (about)", "5 tenths", "5 halved", "5 maybe",
]  # fmt: skip
GOLD = [
    "5 dollars", "$5 per day", r"\$5", "5€", "USD 5", "5%", r"5\%", "5 percent", "5 cm^2", "5 m²",
    "5kg",
    "5 miles/hour", r"5\text{ cm}", "5.0", "5 °C", r"\boxed{5}", "5 (dollars)", "5 years old",
    "$5 a week", "5 cups of flour", "5 students in the class", "5 more apples", "5 left over",
    "5 models", "₹5", "5¢", "US$5", "5 W", "5 degrees C", "5 N·m", "5 T-shirts",
    "5 children's books",
    "5 мин", "5％", '"5"', "5,", "+5", "5个", "0.5e1", "5 people each",
]  # fmt: skip


def test_a_gold_answer_may_be_a_bare_number_and_must_be_a_number():
    assert correct(12, "<answer>12</answer>")
    for gold in NO_GOLD:
        with pytest.raises(ValueError, match="is not a number .*: correct the data"):
            correct(f"#### {gold}", f"<answer>{gold}</answer>")
        with pytest.raises(ValueError, match="is not a number"):  # of all items, at the start
            messages({"question": "?", "answer": gold})
    for gold in GOLD:
        assert correct(gold, "5"), gold


HEAVY = [
    "9^9^9^9", "9^{9^{9^9}}", "9**9**9**9", "((9^9)^9)^9", "9" * 10_000, r"\sqrt{" * 500,
    "999999999!", r"10^{10^{10}}", r"\sum_{i=1}^{10^9} i", "(" * 10_000, "a" * 10_000,
    "<answer>" * 1000, "<<" * 2000, "1 or " * 2000, "#### " * 1000, "answer: " * 1000, "\n" * 30000,
    "one " * 2500, "Answer:\n- a " * 999 + "1", "5 hours (and " * 999,
    r"\boxed{" * 1000, "<|im_end|> " * 1000 + "x", "1 " * 5000, "=" * 9000, "answer is " * 1000,
    "-1" * 4000, "=" + "-1" * 4000, "if " * 3000 + "=",
]  # fmt: skip


@pytest.mark.parametrize("text", HEAVY, ids=range(len(HEAVY)))
def test_pathological_text_is_wrong_and_quick(text):
    start = time.thread_time()  # of this thread alone, however busy the machine is
    assert not correct("7", f"<think>7</think><answer>{text}</answer>")
    assert not correct("7", text)
    assert time.thread_time() - start < 2  # the slowest takes 0.1 s
