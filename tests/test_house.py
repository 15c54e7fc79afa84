"""The import rules, read off the files, also within functions."""

import ast
import doctest
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PARTS = ("grpo.sampling", "grpo.training")  # packages of grpo; the rest of it are single files
FILES = [*ROOT.glob("*.py"), *ROOT.glob("grpo/**/*.py"), *ROOT.glob("tasks/*.py")]


def name_of(path):
    """Example: grpo/sampling/worker.py -> grpo.sampling.worker; grpo/__init__.py -> grpo"""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FILES}


def imports_of(path):
    """Returns the names of all modules that a file imports, ours and others."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are absolute"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in inner}
    return found


IMPORTS = {name: imports_of(path) for name, path in MODULES.items()}


def room(module):
    """Returns where a module lives: one of PARTS, "grpo" (the rest of it), "tasks", or "root"."""
    if module == "tasks.__main__":
        return "root"
    homes = (home for home in (*PARTS, "grpo", "tasks") if f"{module}.".startswith(f"{home}."))
    return next(homes, "root")


MAY = {  # what a room may import of ours, beside itself
    "root": {"root", "grpo", "tasks", *PARTS},
    "grpo": {"grpo"},
    "grpo.sampling": {"grpo"},
    "grpo.training": {"grpo", "grpo.sampling"},
    "tasks": set(),
}


@pytest.mark.parametrize("module", MODULES)
def test_a_room_imports_only_what_it_may(module):
    here = room(module)
    for other in IMPORTS[module] & MODULES.keys():
        allowed = room(other) in MAY[here] | {here}
        fused = other == "grpo_loss_triton" and (here in PARTS or module == "grpo.forward")
        assert allowed or fused, f"{module} must not import {other}"


SERVERS = {"grpo.gate", "grpo.live", "ref_server"}  # those that answer requests
KEPT = {  # who may import a package: modules, or PARTS
    "torch.distributed": {"grpo.training", "root"},
    "deepspeed": {"grpo.training", "root"},
    "bottle": SERVERS,
    "waitress": SERVERS,
    "sqlite3": set(),
}


@pytest.mark.parametrize("module", MODULES)
def test_packages_stay_in_their_process(module):
    """The server needs no DeepSpeed, a worker neither that nor bottle; ranks are training's."""
    for package, homes in KEPT.items():
        used = any(i == package or i.startswith(f"{package}.") for i in IMPORTS[module])
        here = {module, room(module)}
        assert not used or homes & here, f"{module} must not import {package}"


COLLECTIVES = {"all_reduce", "all_gather_object", "broadcast", "broadcast_object_list", "barrier"}
FUNCTIONS = [  # (module, function) of grpo.training, methods too
    (module, node)
    for module, path in MODULES.items()
    for node in ast.walk(ast.parse(path.read_text()))
    if room(module) == "grpo.training" and isinstance(node, ast.FunctionDef)
]


def test_what_all_ranks_must_call_together_says_so():
    """A rank that calls such a function alone waits for ever: "Collective:" opens its docstring."""
    documents = [ast.get_docstring(function) or "" for _, function in FUNCTIONS]
    marked = [text.startswith("Collective:") for text in documents]
    known = {f.name for (_, f), mark in zip(FUNCTIONS, marked, strict=True) if mark}
    assert {"gathered", "add_up", "all_or_none"} < known
    known |= {f"dist.{name}" for name in COLLECTIVES}
    for (module, function), mark in zip(FUNCTIONS, marked, strict=True):
        calls = {ast.unparse(n.func) for n in ast.walk(function) if isinstance(n, ast.Call)}
        unsaid = [] if mark else calls & known
        assert not unsaid, f"{function.name} in {module} calls {unsaid}: it is collective, too"


def test_there_are_no_circles():
    seen = {}

    def visit(module, path):
        assert seen.get(module) != "open", f"a circle: {[*path, module]}"
        if module not in seen:
            seen[module] = "open"
            for other in IMPORTS[module] & MODULES.keys():
                visit(other, [*path, module])
            seen[module] = "done"

    for module in MODULES:
        visit(module, [])


QUIET = """
import importlib, pathlib, sys, threading
before = set(pathlib.Path().iterdir())
for name in sys.argv[1:]:
    importlib.import_module(name)
assert set(pathlib.Path().iterdir()) == before
assert threading.active_count() == 1, threading.enumerate()
"""


def test_importing_does_nothing_but_define(tmp_path):
    """It prints nothing, starts no thread, writes no file and reads no argument."""
    names = [m for m in MODULES if not m.startswith("tasks") and m != "test_qiudao"]
    command = [sys.executable, "-c", QUIET, *names]
    settings = {"cwd": tmp_path, "env": {"PYTHONPATH": str(ROOT)}, "capture_output": True}
    done = subprocess.run(command, check=False, text=True, **settings)
    assert done.returncode == 0 and done.stdout == "", done.stdout + done.stderr


EXAMPLES = {name: path.read_text().count(">>> ") for name, path in MODULES.items()}


@pytest.mark.parametrize("module", filter(EXAMPLES.get, EXAMPLES))
def test_the_examples_in_the_docstrings_hold(module):
    assert doctest.testmod(importlib.import_module(module)) == (0, EXAMPLES[module])


# --- Collective functions ---------------------------------------------------------------
def functions_of(path):
    """Returns [(function's node, whether it is a method)] of a file."""
    tree = ast.parse(path.read_text())
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    methods = {
        id(item) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for item in node.body
    }
    return [(n, id(n) in methods) for n in ast.walk(tree) if isinstance(n, kinds)]


def is_collective(node):
    return (ast.get_docstring(node) or "").startswith("Collective: ")


TRAINER = ROOT / "grpo_ref_split.py"
COLLECTIVE = {
    node.name: is_method
    for path in [TRAINER, *ROOT.glob("grpo/training/*.py")]
    for node, is_method in functions_of(path)
    if is_collective(node)
}


def test_a_collective_call_is_marked_where_the_trainer_makes_it():
    """A rank that does not make it leaves the others waiting: one must see it at the call."""
    text = TRAINER.read_text()
    lines, marked = text.splitlines(), 0
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            attribute = isinstance(node.func, ast.Attribute)
            name = node.func.attr if attribute else getattr(node.func, "id", None)
            of_counter = attribute and name == "update" and not COLLECTIVE.get(name)
            if name in COLLECTIVE and not of_counter:
                assert "# collective" in lines[node.lineno - 1], lines[node.lineno - 1]
                marked += 1
    assert marked > 15
