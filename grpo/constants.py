"""A script's constants, command line and presets, with a sentence for each mistake. Nothing here
imports torch, so that a wrong command is told at once."""

import ast
import difflib
import math
import numbers
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parent.parent
SCRIPTS = {  # each with those whose constants it takes
    "grpo_ref_split.py": ["grpo_ref_split.py"],
    "ref_server.py": ["ref_server.py"],
    "vllm_worker.py": ["vllm_worker.py", "grpo_ref_split.py"],
}

RULES = {  # what a constant must be: whether a value is
    "a whole number from 1 on": lambda value: type(value) is int and value >= 1,
    "a whole number from 0 on": lambda value: type(value) is int and value >= 0,
    "a number from 0 on": lambda value: real(value) and value >= 0,
    "True or False": lambda value: value in (True, False),
    '"auto" or a whole number from 1 on': lambda value: (
        value == "auto" or type(value) is int and value >= 1
    ),
    '"auto", True or False': lambda value: value in ("auto", True, False),
    "a text": lambda value: isinstance(value, str) and value != "",
}
UNDO = "_set_for_run"  # in a script's globals: what set_for_run has replaced
DTYPES = ["auto", "float32", "bfloat16"]  # "auto", and those of grpo.proof.NOISE


# --- The command line -----------------------------------------------------------------
def arguments():
    """Returns the command line's words without deepspeed's --local_rank=N."""
    return [word for word in sys.argv[1:] if not word.startswith("--local_rank=")]


def command_line(script, doc, roles=()):
    """Returns (role, constants): the one of `roles` that the script's command line names, or None;
    values by name, of its presets and NAME=value arguments, the later of two. SystemExit with a
    sentence for a name that no script has, or a preset that can't be read; with a usage, from the
    script's __doc__, for all else."""
    defaults, constants, role = defaults_of(*SCRIPTS[script]), {}, None
    for word in arguments():
        name, equals, text = word.partition("=")
        if equals and name.isidentifier():
            check_own(script, name, defaults)
            constants[name] = value_of(text, defaults[name])
        elif word.endswith(".py"):
            found = read_preset(word)
            constants |= {name: value for name, value in found.items() if name in defaults}
        elif word in roles and role is None:
            role = word
        elif word in ("-h", "--help"):
            print(usage(doc))
            raise SystemExit(0)
        else:
            raise SystemExit(f"{usage(doc)}\nunknown argument: {word}")
    return role, constants


def usage(doc):
    """Returns nine lines at most, from a script's __doc__."""
    first, commands, *_ = doc.split("\n\n")
    return f"""{first}

{commands}

Arguments, of which later ones win: NAME=value for a constant of the file (GROUP_SIZE=16); FILE.py
for a file of constants (presets/)."""


def constants_among(words, script):
    """Returns (constants, other words): of a command's words those that say NAME=value, by name.
    SystemExit for a name that `script` does not have."""
    defaults, given, others = defaults_of(script), {}, []
    for word in words:
        name, equals, text = word.partition("=")
        if equals and name.isidentifier():
            check_own(script, name, defaults)
            given[name] = value_of(text, defaults[name])
        else:
            others.append(word)
    return given, others


def defaults_of(*scripts):
    """Returns {constant: value} of scripts, read from their source; a value that is not a plain
    number or text is not evaluated."""
    bodies = [ast.parse((ROOT / script).read_text()).body for script in scripts]
    pairs = [(n.targets[0], n.value) for b in bodies for n in b if isinstance(n, ast.Assign)]
    return {
        target.id: getattr(value, "value", None)
        for target, value in pairs
        if isinstance(target, ast.Name) and target.id.isupper()
    }


def check_own(script, name, own):
    """Raises SystemExit if the name is not among a script's `own`, perhaps another script's."""
    for other in SCRIPTS:
        if name not in own and name in defaults_of(other):
            raise SystemExit(f"{name} is a constant of {other}, not of {script}")
    check_names([name], own)


def value_of(text, default):
    """Returns what NAME=text says, where the script has `default`: a literal of Python's, or the
    text. Where a text is the rule, a number is one: RUN_DIR=1 is the folder "1"."""
    words = isinstance(default, str) and default != "auto"
    if words and text not in ("None", "True", "False"):
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


# --- Presets --------------------------------------------------------------------------
def read_preset(path):
    """Returns the constants of a preset, a Python file. SystemExit with a sentence if it can't be
    read, or sets a name that no script has."""
    try:
        found = runpy.run_path(path)
    except Exception as error:  # noqa: BLE001 (raised again, as a sentence)
        why = f"{type(error).__name__}: {error}"
        raise SystemExit(f"the preset {path} can't be read: {why}") from None
    known = defaults_of(*SCRIPTS)
    names = [name for name in found if name.isupper() or name.upper() in known]
    check_names(names, known, f"the preset {path}: ")
    return {name: found[name] for name in names}


def check_names(names, known, where=""):
    """Raises SystemExit with the nearest for a name that is not in `known`."""
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name.upper(), sorted(known), n=1, cutoff=0)[0]
            raise SystemExit(f"{where}there is no constant {name}: is {near} meant?")


# --- Their home: a script's module ------------------------------------------------------
def settle(module, known, preset):
    """Sets the constants of `preset`, by name, in a script's globals, `module`, once all that an
    earlier main() has set there is undone; returns all constants. Raises SystemExit for a name, of
    `preset` or set before, that is not in `known`, the script's own."""
    check_names(preset, known)
    module.update(module.pop(UNDO, {}))
    set_for_run(module, preset)
    now = constants_in(module)
    check_names(now, known)
    return now


def set_for_run(module, values):
    """Sets constants in a script's globals, `module`, until the next settle()."""
    before = module.setdefault(UNDO, {})
    before |= {name: module[name] for name in values if name not in before}
    module.update(values)


def constants_in(module):
    return {name: value for name, value in module.items() if name.isupper()}


def with_constants(c, **changes):
    """Returns the constants that are attributes of `c`, with changes, as attributes."""
    return SimpleNamespace(**constants_in(vars(c)) | changes)


# --- Rules ----------------------------------------------------------------------------
def rules_of(table, now):
    """Returns [(constant, what it must be, whether it is)] of a table {what: "NAME ..."}."""
    return [(n, what, RULES[what](now[n])) for what in table for n in table[what].split()]


def refuse_broken(script, now, rules):
    broken = [f"{name} = {now[name]!r} must be {what}" for name, what, holds in rules if not holds]
    if broken:
        raise SystemExit(f"{script} can't run with these constants:\n" + "\n".join(broken))


def real(value):
    """Whether this is a finite number, NumPy's too; True is not."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return number and math.isfinite(value)
