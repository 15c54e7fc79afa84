"""Docs and code have the same constants, files, links and commands."""

import re
from pathlib import Path

import pytest
from documents import TEXT, code_words

from grpo.constants import names_of

ROOT = Path(__file__).parent.parent
SCRIPTS = ("grpo_ref_split.py", "ref_server.py")
pages = pytest.mark.parametrize("page", TEXT)


def anchors(page):
    """Returns the names that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pages
def test_every_relative_link_leads_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", TEXT[page]):
        if not link.startswith("http"):
            name, _, anchor = link.partition("#")
            target = (ROOT / page).parent / name if name else ROOT / page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_the_readme_leads_to_every_page_in_two_clicks():
    def linked(page):
        targets = {link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", TEXT[page])}
        paths = {((ROOT / page).parent / target).resolve() for target in targets}
        return {name for name in TEXT if (ROOT / name).resolve() in paths}

    first = linked("README.md")
    assert first.union(*map(linked, first)) | {"README.md"} == TEXT.keys()


def prose(text):
    """Returns a page without its tables and code."""
    without = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^(\||    ).*$", "", without, flags=re.MULTILINE)


def test_the_readme_is_short_and_so_are_the_pages():
    assert len(TEXT["README.md"].splitlines()) <= 110
    words = {page: len(text.split()) for page, text in TEXT.items()}
    assert len(prose(TEXT["README.md"]).split()) <= 800
    assert sum(n for page, n in words.items() if re.match(r"docs/\w+\.md", page)) <= 12_000


WRITTEN = {"metrics.jsonl", "bad_step_*.json", "my/task.py"}  # by runs, and by you
WRITTEN |= {"runs/gsm8k/bad_step_000138.json"}
HISTORY = r"git show (\w+:[\w./]+)"
FILE = re.compile(r"[\w*./-]+\.(?:py|md|txt|html|yml|toml|png|jsonl?)\b", re.ASCII)


@pages
def test_every_file_that_is_named_exists(page):
    folders = ("", "grpo/**/", "tests/", "tasks/", "presets/", "docs/", "benchmarks/")
    text = re.sub(rf"https?://\S+|\]\([^)]*\)|{HISTORY}", "", TEXT[page])
    for word in FILE.findall(text):
        found = any(any(ROOT.glob(folder + word.lstrip("./"))) for folder in folders)
        assert found or word in WRITTEN or word.startswith("../"), word


OTHERS = {"GRPO_TOKEN", "OMP_NUM_THREADS"}
OTHERS |= {"REWARDS"}  # of experiments/learn.py
OTHERS |= {"VARIANTS", "KINDS", "SHARED"}  # of CONTRIBUTING.md
OTHERS |= {"TOOLS", "MAX_CALLS", "MAX_RESULT_CHARS"}  # of tasks
OTHERS |= {"NAME", "POST"}


@pages
def test_every_constant_that_is_named_exists(page):
    known = OTHERS.union(*map(names_of, SCRIPTS))
    for word in code_words(TEXT[page]):
        for name in re.findall(r"(?<![\w`.])[A-Z][A-Z_]{3,}(?![\w./])", word):
            assert name in known, name


def commands(text):
    """Returns the lines of indented and fenced blocks that begin as a command does."""
    lines = re.findall(r"^ {4}(\S.*)$", text, re.MULTILINE)
    start = r"(?:\w+=\S+ )*(?:make|\.?[\w./]*python|deepspeed|torchrun|sbatch|caddy|ssh|\.ci/run)\b"
    return [line for line in lines if re.match(start, line)]


@pages
def test_every_make_command_has_its_target(page):
    for target in re.findall(r"\bmake ([\w-]+)", " ".join(commands(TEXT[page]))):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
