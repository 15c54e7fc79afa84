"""The ten lessons of test_qiudao.py: printed in both languages."""

import inspect
import re
import runpy

import pytest
from documents import ROOT

import test_qiudao

LESSONS = [thing for name, thing in vars(test_qiudao).items() if name.startswith("test_")]


def told(language, monkeypatch, capsys):
    monkeypatch.setenv("LANG", language)
    runpy.run_path(str(ROOT / "test_qiudao.py"), run_name="__main__")
    return capsys.readouterr().out


def texts(thing):
    english, chinese = inspect.getdoc(thing).split("\n---\n")
    return english, chinese


def test_the_story_is_told_in_the_language_of_lang(monkeypatch, capsys):
    stories = [told(language, monkeypatch, capsys) for language in ("en_US.UTF-8", "zh_CN.UTF-8")]
    for language, story in enumerate(stories):
        for thing in [test_qiudao, *LESSONS]:
            assert texts(thing)[language] in story
            assert texts(thing)[1 - language] not in story
    numbers = [re.findall(r"^  \S.*$", story, re.MULTILINE) for story in stories]
    assert numbers[0] == numbers[1]  # what is computed has no language
    assert len(numbers[0]) >= 4 * len(LESSONS)


def test_a_number_that_is_wrong_is_refused():
    got = test_qiudao.R
    for by_hand in ("[1, 2, 0.001]", "[-1, 2, 0]", "1", "[[1, 2, 0]]"):
        with pytest.raises(AssertionError):
            test_qiudao.check("R", got, by_hand)
