"""The ten lessons of test_qiudao.py, told: whole in both languages, with every asserted number."""

import inspect
import math
import re
import runpy

import pytest
import torch
from documents import ROOT, code_words

import test_qiudao

LESSONS = [thing for name, thing in vars(test_qiudao).items() if name.startswith("test_")]
CHINESE = re.compile(r"[\u4e00-\u9fff]")


def told(language, monkeypatch, capsys):
    monkeypatch.setenv("LANG", language)
    runpy.run_path(str(ROOT / "test_qiudao.py"), run_name="__main__")
    return capsys.readouterr().out


def texts(thing):
    english, chinese = inspect.getdoc(thing).split("\n---\n")
    return english, chinese


def is_chinese(text):
    return len(CHINESE.findall(text)) > 50


@pytest.mark.parametrize("number, lesson", enumerate(LESSONS, 1))
def test_a_lesson_has_both_texts_and_both_name_the_same_things(number, lesson):
    english, chinese = texts(lesson)
    assert is_chinese(chinese) and not CHINESE.search(english)
    for of in (code_words, constants, formulas):
        assert set(of(english)) == set(of(chinese)), of.__name__
    for text in (english, chinese):
        assert text.startswith(f"{number}. ") and text.count("\n") >= 3


def constants(text):
    return re.findall(r"\b[A-Z]+_[A-Z_]+\b|\b[a-z]+_[a-z]+\b", text)


def formulas(text):
    """Returns fractions and decimals."""
    return re.findall(r"\d+(?:\.\d+|(?:/\d+)+)", text)


def test_the_story_is_told_in_the_language_of_lang(monkeypatch, capsys):
    stories = [told(language, monkeypatch, capsys) for language in ("en_US.UTF-8", "zh_CN.UTF-8")]
    for language, story in enumerate(stories):
        for thing in [test_qiudao, *LESSONS]:
            assert texts(thing)[language] in story
            assert texts(thing)[1 - language] not in story
    numbers = [re.findall(r"^  \S.*$", story, re.MULTILINE) for story in stories]
    assert numbers[0] == numbers[1]  # what is computed has no language


def test_every_number_that_is_asserted_is_printed(monkeypatch, capsys):
    """check() alone asserts, and prints a line for each call."""
    source = (ROOT / "test_qiudao.py").read_text()
    assert len(re.findall(r"\bassert\b", source)) == 1
    check, asserted = test_qiudao.check, []

    def recorded(name, got, by_hand, **options):
        check(name, got, by_hand, **options)
        asserted.append(f"{by_hand} {{}} {test_qiudao.text_of(got.tolist())}")

    monkeypatch.setattr(test_qiudao, "check", recorded)
    for lesson in LESSONS:
        before = len(asserted)
        lesson()
        assert len(asserted) >= before + 4, lesson.__name__
    capsys.readouterr()
    story = told("C", monkeypatch, capsys)
    for line in asserted:
        assert line.format("=") in story or line.format("≈") in story, line


def lines_of(lesson, monkeypatch):
    """Returns [(name, by_hand, what was computed, a tensor)] of a lesson."""
    lines = []
    monkeypatch.setattr(
        test_qiudao,
        "check",
        lambda name, got, by_hand, **_: lines.append((name, by_hand, got.detach())),
    )
    lesson()
    return lines


def value(text):
    """Example: "1/2/2" -> 0.25"""
    first, *others = map(float, text.split("/"))
    return first / math.prod(others)


@pytest.mark.parametrize("lesson", LESSONS)
def test_the_fractions_of_a_lesson_are_in_its_lines(lesson, monkeypatch):
    """Decimals may be rounded; sections of books are none."""
    _, by_hand, computed = zip(*lines_of(lesson, monkeypatch), strict=True)
    derived = re.findall(r"\d+(?:\.\d+)?(?:/\d+)*", " ".join(by_hand))
    results = torch.cat([got.flatten() for got in computed]).tolist()
    for text in texts(lesson):
        for number in formulas(re.sub(r"section\s[\d.]+|[\d.]+\s节", "", text)):
            digits = len(number.partition(".")[2])
            known = [round(x, digits) if digits else x for x in results]
            known += map(value, derived)
            assert any(abs(value(number) - x) < 1e-6 for x in known), number


def test_what_lessons_say_in_words(monkeypatch):
    def told(number, *phrases):
        """Asserts that English and Chinese say so; returns {name: values}, its lines."""
        for text, phrase in zip(texts(LESSONS[number - 1]), phrases, strict=True):
            assert "".join(phrase.split()) in "".join(text.split()), phrase
        lines, of = {}, ""
        for name, _, got in lines_of(LESSONS[number - 1], monkeypatch):
            of = name if not name.startswith(" ") else of
            lines[name if of == name else of + name] = got.tolist()
        return lines

    said = told(2, "only grad_norm, 0, shows", "只有 grad_norm 为 0")
    assert not any(said["d ratio without detach"])

    said = told(4, "cuts it to a third", "降到三分之一")
    noise = {name.split(", E")[0]: v for name, v in said.items() if "noise" in name}
    assert noise["b = E[R]"] * 3 == pytest.approx(noise["no b"])
    told(4, "the noise is RLOO's (mean of the others)", "噪声则与 RLOO（用其余样本的均值）相同")
    assert noise["mean of the others"] == pytest.approx(noise["group's mean"])
    assert noise["group's mean"] > noise["b = E[R]"]

    said = told(5, "larger, without bound, for a bad one", "坏 token 概率变大了，斜率也大")
    slope = {name[2:].split(", [")[0]: v[1] for name, v in said.items()}
    assert slope["-1, r 1.5"] < -1 and 0 < slope["+1, r 0.5"] < 1
    assert slope["+1, r 1.5"] == slope["-1, r 0.5"] == 0

    said = told(6, "the gradient of KL(reference || policy)", "是 KL(reference || policy) 的梯度")
    assert said["E d k3"] == pytest.approx(said["d KL(reference || policy)"])
    told(6, "(UNBIASED_KL): -d s, the KL's gradient", "（UNBIASED_KL）：-d s，就是 KL 的梯度")
    for name in ("E d k2", "E d(k3 r)"):
        assert said[name] == pytest.approx(said["d KL"])

    said = told(7, "a quarter as hard as of a short one", "每个 token 受的惩罚只有短的四分之一")
    one_vote = said['"grpo", T = 2 8 2 8, w A']
    assert one_vote[3] * 4 == pytest.approx(one_vote[2])
    told(7, "grow to 28, and each push is halved", "一条变成 28 个 token，所有推力都减半")
    short, long = (said[f'"dapo", T = 2 8 2 {last}, w A'] for last in (8, 28))
    assert short == pytest.approx([2 * push for push in long])

    said = told(9, "with b = 3/4 a quarter of the push is left", "b = 3/4 时推力只剩四分之一")
    slope = {name[4:].split(", slope")[0]: v for name, v in said.items() if "slope" in name}
    assert slope['no "w w", b = 3/4'] * 4 == slope["all, b = 3/4"] == slope["all, b = 0"]
    told(9, "with b = 0 it is unlearned", "b = 0 时越学越停不下来")
    assert slope["no EOS, b = 0"] < 0 < slope["no EOS, b = 3/4"]
    told(9, "with b = 0 equal rewards push by q - p", "b = 0 时，reward 全都相同也有推力 q - p")
    push = said["(b) R = 1, b = 0, trained at tau = 1"]
    p = torch.tensor([1 / 2, 1 / 4, 1 / 4])
    assert torch.allclose(torch.tensor(said["(b) q, drawn at tau = 1/2"]) - p, torch.tensor(push))


def test_the_group_s_mean_cancels_a_wrong_temperature_at_the_first_token():
    """Over all 81 groups drawn at tau = 1/2, the log-probs of tau = 1 give the same direction;
    equal rewards that are above the group's push towards q."""
    p, q = torch.tensor([1 / 2, 1 / 4, 1 / 4]), torch.tensor([4 / 6, 1 / 6, 1 / 6])
    groups = torch.cartesian_prod(*[torch.arange(3)] * 4)
    A = torch.stack(
        [test_qiudao.group_advantages(r, scale_by_std=False) for r in test_qiudao.R[groups]]
    )

    def mean(scores):
        return q[groups].prod(1) @ (A[..., None] * scores[groups]).mean(1)

    torch.testing.assert_close(mean(torch.eye(3) - p), mean(torch.eye(3) - q))
    assert (q @ (torch.eye(3) - p))[0] > 0


def test_a_number_that_is_wrong_is_refused():
    got = test_qiudao.R
    for by_hand in ("[1, 2, 0.001]", "[-1, 2, 0]", "1", "[[1, 2, 0]]"):
        with pytest.raises(AssertionError):
            test_qiudao.check("R", got, by_hand)
