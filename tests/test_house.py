"""The import rules, read off the files, also within functions."""

import ast
import doctest
import graphlib
import importlib
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = [*ROOT.glob("*.py"), *ROOT.glob("grpo/**/*.py"), *ROOT.glob("tasks/*.py")]


def name_of(path):
    """Example: grpo/options/turns/tools.py -> grpo.options.turns.tools; grpo/__init__.py -> grpo"""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FILES}


def imports_of(path, top=False):
    """Returns the modules that a file imports, ours and others; with `top` not in functions."""
    found, tree = set(), ast.parse(path.read_text())
    for node in tree.body if top else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are absolute"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in inner}
    return found


IMPORTS = {name: imports_of(path) for name, path in MODULES.items()}


def package(module):
    """Returns where a module lives: the core, an option, a command, a task, or the root."""
    if module == "tasks.__main__":
        return "root"
    homes = {
        "grpo.options.": "option",
        "grpo.commands.": "command",
        "grpo.": "core",
        "tasks.": "task",
    }
    return next((home for begin, home in homes.items() if module.startswith(begin)), "root")


MAY = {  # what a module may import of ours
    "root": {"root", "core", "command", "task"},
    "core": {"core"},
    "option": {"core"},
    "command": {"root", "core", "option", "command"},
    "task": {"task"},
}
# One place composes: these choose options, and hand on what they chose
COMPOSE = {"grpo.start", "grpo.prepare", "grpo.options.workers.worker", "grpo_ref_split"}


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_it_may(module):
    here = package(module)
    folder = module.rpartition(".")[0]
    for other in IMPORTS[module] & MODULES.keys():
        beside = here == "option" and other.rpartition(".")[0] in (folder, "grpo.options")
        chosen = module in COMPOSE and package(other) == "option"
        allowed = package(other) in MAY[here] or beside or chosen
        assert allowed, f"{module} must not import {other}"


def test_options_are_imported_within_the_function_that_chooses_them():
    for module in COMPOSE:
        top = imports_of(MODULES[module], top=True) & MODULES.keys()
        chosen = {other for other in top if package(other) == "option"}
        assert {other.rpartition(".")[0] for other in chosen} <= {module.rpartition(".")[0]}


def reached_from(*modules):
    """Returns the modules of ours that these import, and those that these import, and so on."""
    found, new = set(), set(modules)
    while new:
        found |= new
        new = {m for module in new for m in IMPORTS[module]} & MODULES.keys() - found
    return found


def imports(module, library):
    return any(i == library or i.startswith(f"{library}.") for i in IMPORTS[module])


RANKS = {"deepspeed", "torch.distributed"}
# docs/several_machines.md installs torch, transformers and requests on a worker's machine
ABSENT = {"accelerate", "bottle", "datasets", "deepspeed", "math_verify", "matplotlib"}
ABSENT |= {"psutil", "waitress"}


@pytest.mark.parametrize("process, absent", [
    ("grpo.options.workers.worker", RANKS | ABSENT), ("ref_server", RANKS)
])  # fmt: skip
def test_a_worker_and_the_server_need_what_is_installed_for_them(process, absent):
    """The files that a rank alone imports may use more, but not when they are imported."""
    for module in reached_from(process, "grpo.policy", "grpo.prepare"):
        assert not [library for library in absent if imports(module, library)], module
    for module, path in MODULES.items():
        if package(module) == "core" and module != "grpo.gate" or module == "grpo_ref_split":
            at_the_top = imports_of(path, top=True)
            assert not {name.split(".")[0] for name in at_the_top} & (ABSENT | {"peft"}), module


CEILINGS = {  # lines of the files that match; they only go down
    "*.py grpo/**/*.py tasks/*.py presets/*.py": 10_845,
    "tests/**/*.py": 13_408,
    "grpo_ref_split.py": 417,
    "ref_server.py": 165,
    "benchmarks/*.py": 2_097,
    "experiments/*.py": 1_168,
}


@pytest.mark.parametrize("files", CEILINGS)
def test_lines_stay_below_their_ceiling(files):
    """A line in, a line out. If you can remove some, lower the number."""
    found = [path for pattern in files.split() for path in ROOT.glob(pattern)]
    lines = sum(len(path.read_text().splitlines()) for path in found)
    assert lines <= CEILINGS[files], f"{files}: {lines} lines"


LONG = {"grpo_ref_split": 46}  # what CONTRIBUTING's limits except: tens of lines


@pytest.mark.parametrize("module", MODULES)
def test_functions_have_40_lines_and_files_400_at_most(module):
    """Without docstrings, as a function that explains its formula is not long."""
    text = MODULES[module].read_text()
    sizes = {module: len(text.splitlines()) / 10}
    for parent in ast.walk(ast.parse(text)):
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.FunctionDef):
                of_class = f"{parent.name}." if isinstance(parent, ast.ClassDef) else ""
                words = node.body[0] if ast.get_docstring(node) else None
                own = words.end_lineno - words.lineno + 1 if words else 0
                sizes[of_class + node.name] = node.end_lineno - node.lineno + 1 - own
    assert not {name for name, size in sizes.items() if size > LONG.get(name, 40)}


def test_there_are_no_circles():
    graphlib.TopologicalSorter({m: IMPORTS[m] & MODULES.keys() for m in MODULES}).prepare()


def test_importing_does_nothing_but_define():
    """It prints nothing, starts no thread, writes no file and reads no argument."""
    top = [node for path in FILES for node in ast.parse(path.read_text()).body]
    assert not [ast.unparse(n) for n in top if isinstance(n, ast.For | ast.While | ast.With)]
    calls = [n.value for n in top if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call)]
    registers = "AttentionInterface.register"  # of transformers: a name for a function of ours
    known = {"before_torch", "constants.before_torch", registers}
    assert {ast.unparse(call.func) for call in calls} == known


EXAMPLES = {name: path.read_text().count(">>> ") for name, path in MODULES.items()}


@pytest.mark.parametrize("module", filter(EXAMPLES.get, EXAMPLES))
def test_the_examples_in_the_docstrings_hold(module):
    assert doctest.testmod(importlib.import_module(module)) == (0, EXAMPLES[module])


def test_pip_and_uv_have_the_same_tested_versions():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pins = project["tool"]["uv"]["constraint-dependencies"]
    assert pins == [line for line in lines if not line.startswith("#")]
