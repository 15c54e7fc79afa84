"""Each Chinese page has what its English page has: headings, commands, names, links, numbers."""

import itertools
import re
from pathlib import PurePath

import pytest
from documents import TEXT, code_words

CHINESE = sorted({"README.zh.md"} | {page for page in TEXT if page.endswith(".zh.md")})
chinese = pytest.mark.parametrize("page", CHINESE)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?<=\n\n)(?: {4}.*\n)+")


def sections(text):
    """Returns [(level, text)] of a page, from each heading to the next; without its code blocks."""
    parts = re.split(r"^(?=#+ )", FENCED.sub("", INDENTED.sub("", text)), flags=re.MULTILINE)
    return [(len(part) - len(part.lstrip("#")), part) for part in parts if part]


def code_lines(text):
    """Returns the lines of the code blocks, up to a comment: that may be translated."""
    blocks = INDENTED.findall(text) + FENCED.findall(text)
    return [re.sub(r"(^|\s+)# .*", "", line) for line in "".join(blocks).split("\n")]


def pairs(page, parts):
    """Returns [(English, Chinese)] of what `parts` finds in either; asserts as many in both."""
    english, translated = parts(TEXT[page.replace(".zh.", ".")]), parts(TEXT[page])
    assert len(english) == len(translated)
    return list(zip(english, translated, strict=True))


def numbers(text):
    """Example: "Qwen2.5-3B takes 22 GB, at 1e-6" -> ["3", "22", "1e-6"]; none in code or links."""
    text = re.sub(r"`[^`\n]+`|\]\([^)]*\)", " ", text)
    return re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?:e-?\d+)?", text, re.ASCII)


def links(text, page):
    """Returns the targets, Chinese pages as English ones; to the page itself, without #heading."""
    found = [link.replace(".zh.md", ".md") for link in re.findall(r"\]\(([^)\s]+)\)", text)]
    own = PurePath(page).name.replace(".zh.", ".")
    return {own if link.startswith(f"{own}#") else link for link in found}


@chinese
def test_headings_and_what_stands_below_each_are_the_same(page):
    for (level, english), (level_too, translated) in pairs(page, sections):
        heading = english.splitlines()[0]
        assert level == level_too, heading
        assert set(code_words(english)) == set(code_words(translated)), heading
        assert links(english, page) == links(translated, page), heading
        missing, extra = (set(numbers(text)) for text in (english, translated))
        missing, extra = missing - extra, extra - missing
        # "five seeds" may be 5 个 seed
        assert not missing and all(len(number) < 3 for number in extra), (heading, missing, extra)


@chinese
def test_code_is_the_same_up_to_comments(page):
    for english, translated in pairs(page, code_lines):
        assert english == translated


@chinese
def test_tables_have_the_same_cells_with_the_same_numbers_and_names(page):
    def cells(text):
        return [line.split(" | ") for line in text.splitlines() if line.startswith("|")]

    rows = [zip(*row, strict=True) for row in pairs(page, cells)]
    for english, translated in itertools.chain(*rows):
        for what in (numbers, code_words):
            assert sorted(what(english)) == sorted(what(translated)), english
