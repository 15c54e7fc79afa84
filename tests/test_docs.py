"""Docs and code have the same constants, metrics, routes, files, links and commands."""

import ast
import itertools
import re
import subprocess
from pathlib import Path

import pytest
from documents import TEXT, code_words

from grpo.constants import names_of
from grpo.wire import IDS, TENSORS

ROOT = Path(__file__).parent.parent
SCRIPTS = ("grpo_ref_split.py", "ref_server.py")
CODE = [*ROOT.glob("*.py"), *ROOT.glob("grpo/**/*.py"), *ROOT.glob("tasks/*.py")]
TREES = {path: ast.parse(path.read_text()) for path in CODE}
pages = pytest.mark.parametrize("page", TEXT)


def rows(text, heading):
    """Returns the cells of the tables below a heading, up to the next heading."""
    section = re.split(r"\n##+ ", text.split(f"\n{heading}\n")[1])[0]
    table = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]


# --- The README, links, files ---------------------------------------------------------
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


def test_the_readme_is_short_and_so_are_the_pages():
    assert len(TEXT["README.md"].splitlines()) <= 110
    words = {page: len(text.split()) for page, text in TEXT.items()}
    assert words["README.md"] <= 800
    assert sum(n for page, n in words.items() if re.match(r"docs/\w+\.md", page)) <= 19_000


WRITTEN = {
    "metrics.jsonl",
    "metrics.*.jsonl",
    "samples.jsonl",
    "bad_step_*.json",
    "generation_config.json",
    "config.json",
    "out.md",
}  # by runs
WRITTEN |= {"adapter_config.json", "example_model_solutions.jsonl", "runs/gpu_report.md"}
WRITTEN |= {".gpu/kit/run.py", ".gpu/results/gpu_report.md"}
WRITTEN |= {"curves.png", "my/task.py"}
HISTORY = r"git show (\w+:[\w./]+)"
FILE = re.compile(r"[\w*./-]+\.(?:py|md|txt|html|yml|toml|png|jsonl?)\b", re.ASCII)


@pages
def test_every_file_that_is_named_exists(page):
    folders = ("", "grpo/**/", "tests/", "tasks/", "presets/", "docs/", "benchmarks/")
    text = re.sub(rf"https?://\S+|\]\([^)]*\)|{HISTORY}", "", TEXT[page])
    for word in FILE.findall(text):
        found = any(any(ROOT.glob(folder + word.lstrip("./"))) for folder in folders)
        assert found or word in WRITTEN or word.startswith("../"), word


def test_programs_that_are_said_to_be_in_the_history_are_there():
    def git(*words):
        return subprocess.check_output(["git", "-C", str(ROOT), *words], text=True).strip()

    if not (ROOT / ".git").exists() or git("rev-parse", "--is-shallow-repository") == "true":
        pytest.skip("needs the whole history")
    tables = [path.read_text() for path in ROOT.glob("benchmarks/results/**/*.md")]
    found = set(re.findall(HISTORY, "\n".join([*tables, *TEXT.values()])))
    assert found
    for program in found:
        assert git("cat-file", "-t", program) == "blob"


def test_architecture_names_every_file_of_the_package():
    text = TEXT["docs/architecture.md"]
    for path in ROOT.glob("grpo/**/*.py"):
        inner = path.parent.name == "decoders" or path.name == "__init__.py"
        assert inner or path.name in text, path


# --- Constants ------------------------------------------------------------------------
def constants_of(script):
    """Returns {constant: whether a comment in the script explains it}."""
    lines, found = (ROOT / script).read_text().splitlines(), {}
    for node in TREES[ROOT / script].body:
        if isinstance(node, ast.Assign) and node.targets[0].id in names_of(script):
            own = lines[node.lineno - 1 : node.end_lineno]
            above = lines[node.lineno - 2]
            commented = any("  # " in line for line in own)
            found[node.targets[0].id] = commented or above.startswith("# ") and "---" not in above
    return found


CONSTANTS = {script: constants_of(script) for script in SCRIPTS}
OTHERS = {"GRPO_TOKEN", "CUDA_VISIBLE_DEVICES", "PIP_EXTRA_INDEX_URL", "PYTORCH_CUDA_ALLOC_CONF"}
OTHERS |= {"PYTORCH_ALLOC_CONF", "GOMP_SPINCOUNT", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}
OTHERS |= {"OMP_NUM_THREADS", "MINUTES", "GPU_PYTHON", "FOLDER"}  # of make
OTHERS |= {"REWARDS", "UPDATES"}  # of docs/learn.py
OTHERS |= {"VARIANTS", "KINDS", "SHARED", "CHOOSE"}  # of CONTRIBUTING.md
OTHERS |= {"TOOLS", "MAX_CALLS", "MAX_RESULT_CHARS", "SANDBOX"}  # of tasks
OTHERS |= {"NCCL_DEBUG", "NCCL_", "INFO", "NAME", "PYTHON", "WANDB_MODE", "POST", "JSON"}


@pages
def test_every_constant_that_is_named_exists(page):
    known = OTHERS.union(*CONSTANTS.values())
    for word in code_words(TEXT[page]):
        for name in re.findall(r"(?<![\w`.])[A-Z][A-Z_]{3,}(?![\w./])", word):
            assert name in known, name


def test_every_constant_is_explained():
    named = set(re.findall(r"\w+", " ".join(word for t in TEXT.values() for word in code_words(t))))
    for script, constants in CONSTANTS.items():
        for name, commented in constants.items():
            assert commented or name in named, f"{name} of {script}: a comment, or a word in docs"


# --- The paper's algorithm 1 ----------------------------------------------------------
def test_what_is_said_to_be_a_line_of_algorithm_1_is_defined():
    table = rows(TEXT["docs/loss.md"], "## Algorithm 1, line by line")[1:]
    assert [int(number) for number, *_ in table] == list(range(1, 13))
    kinds = ast.FunctionDef | ast.ClassDef
    defined = {n.name for tree in TREES.values() for n in ast.walk(tree) if isinstance(n, kinds)}
    for number, _, _, here in table:
        names = {word for word in code_words(here) if not word.isupper() and "." not in word}
        assert names <= defined, number


# --- Routes ---------------------------------------------------------------------------
SERVING = "grpo/options/gate.py", "ref_server.py", "grpo/options/workers.py"


def routes():
    """Returns [(method, path)] of calls such as app.get("/info") in the files that serve."""
    found = []
    for node in itertools.chain.from_iterable(ast.walk(TREES[ROOT / file]) for file in SERVING):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            method, path = node.func.attr.upper(), getattr(node.args[0], "value", None)
            if method in ("GET", "POST", "PUT") and str(path).startswith("/"):
                found.append((method, path))
    return found


def test_the_routes_in_the_docs_are_those_in_the_code():
    cells = [row[0] for row in rows(TEXT["docs/architecture.md"], "## Routes")]
    documented = [tuple(code_words(cell)[0].split("?")[0].split()) for cell in cells if "`" in cell]
    assert len(routes()) >= 6
    assert sorted(documented) == sorted(routes())


@pytest.mark.parametrize("heading, names", [("### Ids", IDS), ("### A group", TENSORS)])
def test_the_tensors_in_the_docs_are_those_of_the_wire(heading, names):
    named = [row[0] for row in rows(TEXT["docs/architecture.md"], heading) if "`" in row[0]]
    assert sorted(word for cell in named for word in code_words(cell)) == sorted(names)


# --- Commands -------------------------------------------------------------------------
IN_TASKS = "tests/test_tasks.py", "module.main(made[2])"
RUN = {  # the file that runs a command, or the same with other constants; the words that do it
    "make demo": ("tests/test_demo.py", '"demo.py", "1"'),
    "make demo-real": ("tests/options/test_smollm2.py", '"demo_real.py", *words'),
    "make demo-tools": ("tests/test_demo.py", "sys.executable, *trained"),
    "make test": (".ci/run", "\nmake test\n"),
    "make test-oldest": (".ci/run", "\nmake test-oldest\n"),
    "make test-long": (".ci/run", "\nmake test-long\n"),
    "make lint": (".ci/run", "\nmake lint\n"),
    ".ci/run": (".github/workflows/ci.yml", "run: .ci/run\n"),
    ".venv/bin/python -m pytest tests/test_loss.py": ("Makefile", ".venv/bin/python -m pytest"),
    ".venv/bin/python -m docs.learn": ("tests/test_learn.py", "learn.main()"),
    '.venv/bin/python -m docs.learn REWARDS="1 1 0 0" UPDATES=6': (
        "tests/test_learn.py",
        'learn.main(REWARDS="1 1 0 0", UPDATES=6',
    ),
    "python -m tasks my/task.py OUT=runs/my_model": IN_TASKS,
    """python -m tasks my/task.py OUT=runs/my_model 'STOP_STRINGS=["</tool>"]'""": IN_TASKS,
    ".venv/bin/python -m docs.learn_pictures": ("tests/test_learn.py", "learn_pictures.main()"),
}


def commands(text):
    """Returns the lines of indented and fenced blocks that begin as a command does."""
    lines = re.findall(r"^ {4}(\S.*)$", text, re.MULTILINE)
    start = r"(?:\w+=\S+ )*(?:make|\.?[\w./]*python|deepspeed|torchrun|sbatch|caddy|ssh|\.ci/run)\b"
    return [line for line in lines if re.match(start, line)]


@pages
def test_every_command_names_what_runs_it_or_what_it_needs(page):
    for line in commands(TEXT[page]):
        command, _, comment = (part.strip() for part in line.partition("  # "))
        if not comment.startswith(("needs ", "需要")):
            assert command in RUN, f"{line}: add `# needs ...`, or what runs it"
            file, words = RUN[command]
            assert words in (ROOT / file).read_text(), f"{file} does not run {command}"
        for target in re.findall(r"\bmake ([\w-]+)", command):
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
