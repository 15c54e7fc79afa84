"""The scripts' command line, presets, and main() with constants."""

import io
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import python

import grpo_ref_split as trainer
import ref_server
from grpo import constants, loss
from grpo.checks import KINDS, trainer_constants
from grpo.engine import training_threads
from grpo.log import say

SCRIPTS = {"grpo_ref_split.py": trainer, "ref_server.py": ref_server}


@pytest.fixture
def given(monkeypatch):
    """Returns a function: the (role, constants) of a script's command line."""

    def ask(script, *words):
        monkeypatch.setattr(sys, "argv", [script, "--local_rank=0", *words])
        roles = ["worker"] if script == "grpo_ref_split.py" else []
        module = SCRIPTS[script]
        return constants.command_line(module.DEFAULTS, module.__doc__, roles)

    return ask


# --- NAME=value -----------------------------------------------------------------------
def test_values_are_literals_or_texts(given, monkeypatch):
    said = "GROUP_SIZE=16 LEARNING_RATE=1e-5 TASK=countdown FUSED_LOSS=False SAMPLE_BATCH=64"
    said += " GROUP_SIZE=8 MICRO_BATCH_TOKENS=auto STOP_TOKENS=['a','b'] RUN_DIR=1 MODEL=None"
    role, values = given("grpo_ref_split.py", "worker", *said.split())
    assert role == "worker" and values == {
        "GROUP_SIZE": 8,
        "LEARNING_RATE": 1e-5,
        "TASK": "countdown",
        "FUSED_LOSS": False,
        "SAMPLE_BATCH": 64,
        "MICRO_BATCH_TOKENS": "auto",
        "STOP_TOKENS": ["a", "b"],
        "RUN_DIR": "1",
        "MODEL": None,
    }
    assert given("ref_server.py", "MODEL=a=b.py") == (None, {"MODEL": "a=b.py"})
    monkeypatch.setenv("HOME", "/me")
    c = trainer_constants(
        trainer.DEFAULTS, {"RUN_DIR": "~/x", "MODEL": "~/m", "STOP_STRINGS": ["~/y"]}
    )
    assert (c.RUN_DIR, c.MODEL, c.STOP_STRINGS) == ("/me/x", "/me/m", ["~/y"])


def test_where_a_text_is_the_rule_a_number_is_one(given):
    for name in dict(KINDS)[constants.TEXT].split():
        assert given("grpo_ref_split.py", f"{name}=1")[1] == {name: "1"}
    for name in ("MODEL", "HOST", "DTYPE"):  # "auto" of DTYPE is no text to begin with
        expected = 1 if name == "DTYPE" else "1"
        assert given("ref_server.py", f"{name}=1")[1] == {name: expected}


# --- All else -------------------------------------------------------------------------
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("words", ["GROUP_SIZE 16", "worker worker", "=3", "-STEPS=3"])
def test_all_else_is_refused_with_a_usage(script, words, given):
    with pytest.raises(SystemExit) as refused:
        given(script, *words.split())
    told = refused.value.code.splitlines()
    unknown = "worker" if words.startswith("worker") else words.split()[0]
    assert told[-1].startswith(f"unknown argument: {unknown}: ") and len(told) <= 10
    assert f"python {script}" in refused.value.code and "NAME=value" in refused.value.code


def test_help_is_the_usage(given, capsys):
    for word in ("-h", "--help"):
        with pytest.raises(SystemExit, match="0"):
            given("ref_server.py", word)
        told = capsys.readouterr().out
        assert "python ref_server.py" in told and len(told.splitlines()) < 10


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("ref_server.py MODEL=./nowhere", "MODEL = './nowhere'"),
        ("grpo_ref_split.py MODLE=3", "did you mean MODEL?"),
        ("grpo_ref_split.py max_steps=3", "no constant max_steps: here it is STEPS"),
        ("grpo_ref_split.py num_pre_Q=3", "here it is GROUP_SIZE"),
        ("grpo_ref_split.py num_train_epochs=3", "docs/coming_from.md"),
        ("grpo_ref_split.py PORT=3", "ref_server.py has it"),
        ("ref_server.py STEPS=3", "grpo_ref_split.py has it"),
        ("grpo_ref_split.py --max_steps 3", "here it is STEPS"),
        ("grpo_ref_split.py --group-size=3", "did you mean GROUP_SIZE?"),
        ("grpo_ref_split.py STEPS = 3", "write NAME=value, without -- or spaces"),
        ("grpo_ref_split.py --STEPS 3", "write NAME=value, without -- or spaces"),
        ("grpo_ref_split.py MODEL=runs/nowhere/final", "MODEL = 'runs/nowhere/final'"),
        ("grpo_ref_split.py GROUP_SIZE=four", "GROUP_SIZE = 'four'"),
        ("grpo_ref_split.py TASK=my/tusk.py", "my/tusk.py"),
        ("grpo_ref_split.py worker TASK=gsm9k", "did you mean gsm8k"),
    ],
)
def test_a_wrong_command_is_told_before_torch_is_imported(command, named, tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('imported')")
    done = python(*command.split(), PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert named in done.stderr and "imported" not in done.stderr


def test_a_presets_names_are_those_that_the_scripts_have():
    """They are read from a script's text, so that a command is checked before torch is imported."""
    for script, module in SCRIPTS.items():
        assert list(constants.names_of(script)) == list(module.DEFAULTS)


def test_every_row_of_the_page_for_newcomers_names_the_constant_of_its_bracket():
    page = Path(constants.ROOT, "docs/coming_from.md").read_text()
    rows = re.findall(r"^\| `(\w+)`[^|]*\|[^|]*\| `([A-Z_]+)`", page, re.MULTILINE)
    theirs = {
        x: our
        for script in SCRIPTS
        for our, names in constants.names_of(script).items()
        for x in names
    }
    pairs = {name.lower(): our for name, our in rows if name.upper() != our}
    assert len(theirs) > 42 and len(pairs) > 7 and pairs == {n: theirs.get(n) for n in pairs}


@pytest.mark.parametrize("name, values", [
    ("LOSS_TYPE", loss.LOSS_TYPES), ("OBJECTIVE", loss.OBJECTIVES)
])  # fmt: skip
def test_the_variants_are_those_of_the_loss(name, values):
    ((_, holds),) = (kind for kind, names in KINDS if names == name)
    assert all(map(holds, values)) and not holds("another")


# --- Where it runs --------------------------------------------------------------------
@pytest.fixture
def begun(monkeypatch):
    """Undoes what begin() sets."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    return constants.begin


def test_windows_is_refused_with_what_to_install(begun, monkeypatch):
    monkeypatch.setattr(constants, "os", SimpleNamespace(name="nt"))
    with pytest.raises(SystemExit, match="WSL"):
        begun()


def test_a_mac_trains_on_its_cpu_and_is_said_to_be_untried(begun, monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "darwin")
    begun()
    assert "Mac" in capsys.readouterr().out and os.environ["DS_ACCELERATOR"] == "cpu"
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert training_threads() == 6


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_what_an_encoding_lacks_is_escaped(begun, monkeypatch, encoding):
    """A preview of Chinese prompts ended the run, as did half an emoji in UTF-8."""
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", out)
    begun()
    say("九 \ud83d")
    out.seek(0)
    assert out.buffer.getvalue().endswith({
        "ascii": b" \\u4e5d \\ud83d\n", "utf-8": " 九 \\ud83d\n".encode(),
    }[encoding])  # fmt: skip


def test_ctrl_c_while_torch_is_imported_is_one_line(tmp_path):
    source = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    source += "signal.raise_signal(signal.SIGINT)"  # a shell's `&` would ignore it
    (tmp_path / "torch.py").write_text(source)
    for script in ("grpo_ref_split.py", "ref_server.py"):
        done = python(script, PYTHONPATH=str(tmp_path))
        assert done.returncode and done.stderr.split("\n") == ["", "ended by Ctrl-C", ""], script


# --- Presets --------------------------------------------------------------------------
def test_each_script_takes_its_constants_of_a_preset(given, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import math\nhalf = 2\nMODEL = 'm'\nSTEPS = 4 * half\nPORT = 1")
    given_to = {script: given(script, str(path), "MODEL=n")[1] for script in SCRIPTS}
    assert given_to == {
        "grpo_ref_split.py": {"MODEL": "n", "STEPS": 8},
        "ref_server.py": {"MODEL": "n", "PORT": 1},
    }
    assert given("ref_server.py", "MODEL=n", str(path))[1]["MODEL"] == "m"  # later ones win


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "FileNotFoundError"),
        ("STEPS = (", r"SyntaxError: .* \(mine.py, line 1\)"),
        ("STEPS = 2 * steps", "NameError: name 'steps'"),
        ("LERNING_RATE = 3", "LEARNING_RATE"),
        ("model = 'm'", "MODEL"),
    ],
)
def test_a_preset_with_a_mistake_is_refused(text, sentence, given, tmp_path):
    path = tmp_path / "mine.py"
    if text:
        path.write_text(text)
    with pytest.raises(SystemExit, match=f"{path}.*{sentence}"):
        given("ref_server.py", str(path))


# --- main() ---------------------------------------------------------------------------
@pytest.mark.parametrize("start", [trainer.main, trainer.worker, ref_server.main])
@pytest.mark.parametrize("name", ["MODLE", "main"])
def test_main_refuses_what_is_no_constant(start, name):
    with pytest.raises(SystemExit, match=f"constant {name}:"):
        start(**{name: 3})


def test_constants_cant_be_set_and_a_change_is_a_copy():
    given = {"STOP_STRINGS": ["a"]}
    c = trainer_constants(trainer.DEFAULTS, given)
    with pytest.raises(AttributeError, match="STEPS can't be set"):
        c.STEPS = 7
    other = c.but(GROUP_SIZE=1)
    assert (other.GROUP_SIZE, c.GROUP_SIZE, other.STEPS) == (1, 8, c.STEPS)
    given["STOP_STRINGS"].append("b")
    assert (
        c.STOP_STRINGS == ["a"]
        and vars(trainer_constants(trainer.DEFAULTS, {})) == trainer.DEFAULTS
    )
