"""Reads and checks a script's constants, command line and presets. Nothing here imports torch, so
that a mistake in the command is reported at once."""

import ast
import copy
import math
import os
import re
import runpy
import sys
from difflib import get_close_matches
from pathlib import Path

ROOT = Path(__file__).parent.parent
STOPPED = ".stopped"  # a file in RUN_DIR, once the run has ended or was stopped
SCRIPTS = "grpo_ref_split.py", "ref_server.py"  # a preset may set constants of both


class Constants:
    """The constants of a run, as attributes that can't be set."""

    def __init__(self, values):
        vars(self).update({name: copy.copy(value) for name, value in values.items()})

    def __setattr__(self, name, value):
        raise AttributeError(f"{name} can't be set: a run's constants do not change")

    def but(self, **changes):
        """Returns a copy with these changes."""
        return Constants(vars(self) | changes)


def defaults_in(script):
    """Returns {constant: value} of a script's globals. The script calls this below its constants,
    before it imports other modules' upper-case names."""
    return {name: value for name, value in script.items() if name.isupper()}


def before_torch():
    """Sets what torch reads when it is imported, unless the user has set it."""
    # On shared cores, threads that spin while they wait made a step 3 to 7 times as long (db870c7).
    # Segments that can grow leave fewer gaps in GPU memory
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    settings = os.environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", settings)


# --- The command line -----------------------------------------------------------------
def begin():
    """Runs before a script imports torch: refuses Windows, makes Ctrl-C print one line
    instead of an import's traceback, escapes characters that stdout's encoding lacks, and keeps the
    script from being imported in processes that a task starts."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    if os.name == "nt":  # no fcntl, no process groups
        raise SystemExit("Windows is not supported: install WSL (wsl --install) and run this there")
    if sys.platform == "darwin":
        print("running on the Mac's CPU; Macs are untested, so please report what fails")
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would use the GPU, but we do not
    hook, ended = sys.excepthook, lambda *_: print("\nended by Ctrl-C", file=sys.stderr)
    sys.excepthook = lambda kind, *e: (ended if kind is KeyboardInterrupt else hook)(kind, *e)


def command_line(defaults, doc, roles=()):
    """Returns (role, constants) of the command line: one of `roles` or None, and values by name.
    Raises SystemExit with the usage (from the script's __doc__) for any other word, and if MODEL
    looks like a folder but is none."""
    begin()
    constants, words = read_words(defaults)
    role = words.pop(0) if words and words[0] in roles else None
    if words and words[0] in ("-h", "--help"):
        print(usage(doc))
        raise SystemExit(0)
    if words:
        how, name = "write NAME=value, without -- or spaces", words[0].partition("=")[0]
        if name.startswith("--") or words[1:2] == ["="]:
            check_names([name.lstrip("-").replace("-", "_")], defaults, f"{how}; ")
        raise SystemExit(f"{usage(doc)}\nunknown argument: {words[0]}: {how}")
    if TEXT[1](model := constants.get("MODEL")) and (fault := fault_of(model)):
        raise SystemExit(f"MODEL = {model!r} can't be loaded: {fault}")
    return role, constants


def fault_of(name):
    """Returns what is wrong with a model's name that looks like a folder; "" if nothing is."""
    folder = Path(name)
    if Path(folder, "run.json").exists():
        return f"it is the RUN_DIR of a run: name a model in it, such as {folder / 'final'}"
    if folder.is_file():
        return f"it is a file: name the folder of a model ({folder.parent}?), or a model on the hub"
    if folder.is_dir():
        named = any(Path(folder, f"{kind}config.json").exists() for kind in ("", "adapter_"))
        return "" if named else "the folder has no config.json"
    # A hub's name is NAME or OWNER/NAME
    path = name.count("/") > 1 or name[0] in "./~" or name.startswith("runs/")
    return f"there is no folder {folder.absolute()}" if path else ""


def is_same(name, one, other):
    """Returns whether two values of the constant `name` are equal, or spell one folder or file."""
    place = lambda path: os.path.realpath(os.path.expanduser(path))
    spelled = name in ("MODEL", "TASK", "REFERENCE", "RUN_DIR") and one and other
    return one == other or bool(spelled and place(one) == place(other))


def read_words(defaults, presets=True):
    """Returns (constants, other words) of the command line. Constants are NAME=value words
    and, with `presets`, those of preset files; later ones win. SystemExit for a name that is not in
    `defaults`, the script's constants."""
    constants, others = {}, []
    for word in sys.argv[1:]:
        name, equals, text = word.partition("=")
        if equals and name.isidentifier():
            check_names([name], defaults)
            constants[name] = value_of(text, defaults[name])
        elif presets and word.endswith(".py"):
            found = read_preset(word)
            constants |= {name: value for name, value in found.items() if name in defaults}
        elif not word.startswith("--local_rank="):  # DeepSpeed's
            others.append(word)
    return constants, others


def usage(doc):
    """Returns a usage text of nine lines at most, from a script's __doc__."""
    first, commands, *_ = doc.split("\n\n")
    return f"""{first}

{commands}

Arguments: NAME=value sets a constant (TEMPERATURE=0.8); FILE.py is a preset, which sets several
(presets/). Later arguments win."""


def value_of(text, default):
    """Returns the value of NAME=text: a Python literal, or else the text itself. If the script's
    `default` is a text, the value stays a text: RUN_DIR=1 is the folder "1"."""
    words = isinstance(default, str) and default != "auto"
    if words and text not in ("None", "True", "False"):
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


# --- Presets --------------------------------------------------------------------------
def read_preset(path):
    """Returns the constants of a preset, a Python file. Raises SystemExit if the file can't be read
    or sets a name that no script has."""
    try:
        found = runpy.run_path(path)
    except Exception as error:  # noqa: BLE001 (raised again as SystemExit)
        why = f"{type(error).__name__}: {error}"
        raise SystemExit(f"the preset {path} can't be read: {why}") from None
    known = set().union(*map(names_of, SCRIPTS))
    names = [name for name in found if name.isupper() or name.upper() in known]
    check_names(names, known, f"the preset {path}: ")
    return {name: found[name] for name in names}


def names_of(script):
    """Returns {constant: its names elsewhere} of a script, without importing it (and torch):
    those in brackets in its comments."""
    block, *_ = (ROOT / script).read_text().partition("\nDEFAULTS = ")
    found = re.findall(r"^((?:# .*\n)*)([A-Z_]+) = (.*)", block, re.MULTILINE)
    brackets = lambda text: re.findall(r"\((\w+(?:,\s(?:# )?\w+)*)\)", text)
    return {name: re.findall(r"\w+", " ".join(brackets(a + b)).lower()) for a, name, b in found}


def check_names(names, known, where=""):
    """Raises SystemExit for a name that is not in `known`: another script or project has it, or
    it is misspelt."""
    for name in names:
        if name not in known:
            ours = {script: names_of(script) for script in SCRIPTS}
            theirs = {x: f"{a} of {s}" for s in SCRIPTS for a in ours[s] for x in ours[s][a]}
            owners = [f"{script} has it" for script in SCRIPTS if name in ours[script]]
            here = [f"here it is {theirs[name.lower()]}"] if name.lower() in theirs else []
            near = get_close_matches(name.upper(), sorted(known), n=1, cutoff=0.8)
            meant = [f"did you mean {one}?" for one in near]
            why, *_ = [*owners, *here, *meant, "names of other projects: docs/coming_from.md"]
            raise SystemExit(f"{where}there is no constant {name}: {why}")


# --- Rules ----------------------------------------------------------------------------
# A kind of constant is (text: what a value must be, function: whether a value is that)
WHOLE = "a whole number, 1 or more", lambda value: type(value) is int and value >= 1
COUNT = "a whole number, 0 or more", lambda value: type(value) is int and value >= 0
NUMBER = "a number, 0 or more", lambda value: real(value) and value >= 0
POSITIVE = "a number above 0", lambda value: real(value) and value > 0
FLAG = "True or False", lambda value: value in (True, False)
TEXT = "a non-empty string", lambda value: isinstance(value, str) and value != ""


def one_of(*values):
    return f"one of {', '.join(map(repr, values))}", lambda value: value in values


def or_(other, kind):
    return f"{other!r}, or {kind[0]}", lambda value: value == other or kind[1](value)


def list_of(what, holds):
    return f"a list of {what}", lambda v: isinstance(v, list | tuple) and all(map(holds, v))


def dict_of(what, holds):
    fits = lambda v: isinstance(v, dict) and all(TEXT[1](k) and holds(x) for k, x in v.items())
    return f"a dict of {what} by name", fits


DTYPE = one_of("auto", "float32", "bfloat16")  # "auto", and those of grpo.policy.NOISE


def checked(script, defaults, given, kinds, relations):
    """Returns the Constants of a script: its `defaults`, but for those that are `given`, by name.
    Raises SystemExit with a line for each wrong one. `kinds` is [(kind, "NAME ...")]. `relations`,
    checked if all kinds are right, is [(NAME, text: what it must be, function of the constants:
    whether it is that)]."""
    check_names(given, defaults)
    home = lambda value: os.path.expanduser(value) if isinstance(value, str) else value  # ~/x
    c = Constants({name: home(value) for name, value in (defaults | given).items()})
    pairs = [(name, kind) for kind, names in kinds for name in names.split()]
    first = [(name, what, holds(getattr(c, name))) for name, (what, holds) in pairs]
    for rules in (first, ((name, what, holds(c)) for name, what, holds in relations)):
        if wrong := [
            f"{name} = {getattr(c, name)!r} must be {what}" for name, what, ok in rules if not ok
        ]:
            raise SystemExit("\n".join([f"these constants of {script} are wrong:", *wrong]))
    return c


def real(value):
    """Returns whether a value is a finite number; True is no number."""
    return type(value) is not bool and isinstance(value, int | float) and math.isfinite(value)
