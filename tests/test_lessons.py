"""The lessons of test_qiudao.py: printed in both languages."""

import inspect
import re
import runpy

import pytest
from documents import ROOT

import test_qiudao

LESSONS = [thing for name, thing in vars(test_qiudao).items() if name.startswith("test_")]


def test_the_story_is_told_in_the_language_of_lang(monkeypatch, capsys):
    numbers = []
    for language, locale in enumerate(("en_US.UTF-8", "zh_CN.UTF-8")):
        monkeypatch.setenv("LANG", locale)
        runpy.run_path(str(ROOT / "test_qiudao.py"), run_name="__main__")
        story = capsys.readouterr().out
        for thing in [test_qiudao, *LESSONS]:
            texts = [text.split("\n") for text in inspect.getdoc(thing).split("\n---\n")]
            assert set(texts[language]) <= set(story.split("\n"))
            assert not set(filter(None, texts[1 - language])) & set(story.split("\n"))
            assert not [line for line in texts[1] if re.search("^[^-].*[一-鿿]$", line)]
        numbers.append(re.findall(r"^  \S.*$", story, re.MULTILINE))
        assert len(re.findall("\n\n(?:In a run: |训练时：).*\n\n", story)) == len(LESSONS)
    assert numbers[0] == numbers[1]  # what is computed has no language
    assert len(numbers[0]) >= 4 * len(LESSONS)


def test_a_number_that_is_wrong_is_refused():
    got = test_qiudao.R
    for by_hand in ("[1, 2, 0.001]", "[-1, 2, 0]", "1", "[[1, 2, 0]]"):
        with pytest.raises(AssertionError):
            test_qiudao.check("R", got, by_hand)
