"""The scripts' command line, presets, and main() with constants."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import grpo_ref_split as trainer
import ref_server
import vllm_worker
from grpo import constants
from grpo.proof import NOISE
from grpo.training.checks import TRAINER

ROOT = Path(__file__).parent.parent
SCRIPTS = {"grpo_ref_split.py": trainer, "ref_server.py": ref_server, "vllm_worker.py": vllm_worker}


@pytest.fixture
def given(monkeypatch):
    """Returns a function: the (role, constants) of a script's command line."""

    def ask(script, *words):
        monkeypatch.setattr(sys, "argv", [script, "--local_rank=0", *words])
        roles = ["worker"] if script == "grpo_ref_split.py" else []
        return constants.command_line(script, SCRIPTS[script].__doc__, roles)

    return ask


# --- NAME=value -----------------------------------------------------------------------
def test_values_are_literals_or_texts(given):
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
    own = {"VLLM_SLEEP": True, "STEPS": 3}  # a worker's are the trainer's, too
    assert given("vllm_worker.py", "VLLM_SLEEP=True", "STEPS=3") == (None, own)


def test_where_a_text_is_the_rule_a_number_is_one(given):
    for name in TRAINER["a text"].split():
        assert given("grpo_ref_split.py", f"{name}=1")[1] == {name: "1"}
    for name in ("MODEL", "HOST", "DTYPE"):  # "auto" of DTYPE is no text to begin with
        expected = 1 if name == "DTYPE" else "1"
        assert given("ref_server.py", f"{name}=1")[1] == {name: expected}


@pytest.mark.parametrize(
    ("script", "word", "sentence"),
    [
        ("grpo_ref_split.py", "LERNING_RATE=3", "no constant LERNING_RATE: is LEARNING_RATE meant"),
        ("grpo_ref_split.py", "group_size=3", "no constant group_size: is GROUP_SIZE meant"),
        ("grpo_ref_split.py", "PORT=3", "PORT is a constant of ref_server.py, not of grpo_ref"),
        ("ref_server.py", "PROT=3", "there is no constant PROT: is PORT meant"),
        ("ref_server.py", "PLAIN=3", "there is no constant PLAIN: is "),  # which it imports
        ("ref_server.py", "STEPS=3", "STEPS is a constant of grpo_ref_split.py, not of ref_server"),
        ("vllm_worker.py", "SLEEP=3", "there is no constant SLEEP: is VLLM_SLEEP meant"),
    ],
)
def test_a_name_that_the_script_does_not_have_is_refused(script, word, sentence, given):
    with pytest.raises(SystemExit, match=sentence):
        given(script, word)


# --- All else -------------------------------------------------------------------------
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("words", ["--lr 3", "GROUP_SIZE 16", "worker worker", "=3", "-STEPS=3"])
def test_all_else_is_refused_with_a_usage(script, words, given):
    with pytest.raises(SystemExit) as refused:
        given(script, *words.split())
    told = refused.value.code.splitlines()
    unknown = "worker" if words.startswith("worker") else words.split()[0]
    assert told[-1] == f"unknown argument: {unknown}" and len(told) <= 10
    assert f"python {script}" in refused.value.code and "NAME=value" in refused.value.code


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_is_the_usage(word, given, capsys):
    with pytest.raises(SystemExit, match="0"):
        given("ref_server.py", word)
    told = capsys.readouterr().out
    assert "python ref_server.py" in told and len(told.splitlines()) < 10


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_wrong_command_is_told_before_torch_is_imported(script, tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('imported')")
    command = [sys.executable, ROOT / script, "MODLE=3"]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=env, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "there is no constant MODLE: is MODEL meant?\n"


# --- Presets --------------------------------------------------------------------------
def test_each_script_takes_its_constants_of_a_preset(given, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import math\nhalf = 2\nMODEL = 'm'\nSTEPS = 4 * half\nPORT = 1\nVLLM_SLEEP = True"
    )
    given_to = {script: given(script, str(path), "MODEL=n")[1] for script in SCRIPTS}
    assert given_to == {
        "grpo_ref_split.py": {"MODEL": "n", "STEPS": 8},
        "ref_server.py": {"MODEL": "n", "PORT": 1},
        "vllm_worker.py": {"MODEL": "n", "STEPS": 8, "VLLM_SLEEP": True},
    }
    assert given("ref_server.py", "MODEL=n", str(path))[1]["MODEL"] == "m"  # later ones win


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "can't be read: FileNotFoundError: .*mine.py"),
        ("STEPS = (", r"can't be read: SyntaxError: .* \(mine.py, line 1\)"),
        ("STEPS = 2 * steps", "can't be read: NameError: name 'steps' is not defined"),
        ("LERNING_RATE = 3", "there is no constant LERNING_RATE: is LEARNING_RATE meant"),
        ("model = 'm'", "there is no constant model: is MODEL meant"),
    ],
)
def test_a_preset_with_a_mistake_is_refused(text, sentence, given, tmp_path):
    path = tmp_path / "mine.py"
    if text:
        path.write_text(text)
    with pytest.raises(SystemExit, match=f"the preset {path}.* {sentence}"):
        given("ref_server.py", str(path))


# --- main() ---------------------------------------------------------------------------
@pytest.mark.parametrize("start", [trainer.main, trainer.worker, ref_server.main, vllm_worker.main])
@pytest.mark.parametrize("name", ["MODLE", "main"])
def test_main_refuses_what_is_no_constant(start, name, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))  # vLLM's
    with pytest.raises(SystemExit, match=f"there is no constant {name}: is "):
        start(**{name: 3})


def test_main_sets_constants(monkeypatch):
    """They are refused here, so that nothing starts."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(SystemExit, match="STEPS = 'x' must be a whole number from 1 on"):
        trainer.main(STEPS="x")
    with pytest.raises(SystemExit, match="PORT = 70000 must be 65535 at most"):
        ref_server.main(PORT=70_000)
    with pytest.raises(SystemExit, match="VLLM_SEQUENCES = 4 must be GROUP_SIZE = 8 or more"):
        vllm_worker.main(VLLM_SEQUENCES=4, STEPS=7)
    assert (trainer.STEPS, vllm_worker.VLLM_SEQUENCES) == (7, 4)


def test_a_main_has_nothing_of_an_earlier_one():
    """A preset's values, and those that the start of a run puts in the place of "auto" and None,
    were those of every later main() in the process."""
    shipped = constants.constants_in(vars(trainer))
    c = trainer.constants(STEPS=7, TASK="even", SAMPLE_BATCH=64)
    assert c is trainer and (trainer.STEPS, trainer.TASK) == (7, "even")  # its only home
    resolved = {"OUTCOME": "a", "REWARD_WEIGHTS": {"a": 1.0}, "MICRO_BATCH_TOKENS": 2048}
    constants.set_for_run(vars(trainer), resolved)
    constants.set_for_run(vars(trainer), {"SAMPLE_BATCH": 32})
    assert trainer.OUTCOME == "a" and trainer.SAMPLE_BATCH == 32
    trainer.constants(STEPS=9)
    assert constants.constants_in(vars(trainer)) == shipped | {"STEPS": 9}
    trainer.constants()
    assert constants.constants_in(vars(trainer)) == shipped


def test_what_its_importer_has_set_is_every_mains(monkeypatch):
    """As experiments do: the script's module is where a constant lives."""
    monkeypatch.setattr(trainer, "STEPS", 7)
    trainer.constants(STEPS=9)
    assert trainer.constants(SEED=1).STEPS == 7 and trainer.constants().SEED == 0


def test_a_main_that_is_refused_leaves_nothing_to_the_next():
    shipped = constants.constants_in(vars(trainer))
    with pytest.raises(SystemExit):
        trainer.main(STEPS="x")
    with pytest.raises(SystemExit):  # by its name, before any is set
        trainer.main(MODLE="x", SEED=3)
    trainer.constants()
    assert constants.constants_in(vars(trainer)) == shipped


def test_changed_copies_are_no_second_home():
    c = trainer.constants(STEPS=7)
    other = constants.with_constants(c, GROUP_SIZE=1)
    assert (other.GROUP_SIZE, other.STEPS, trainer.GROUP_SIZE) == (1, 7, 8)
    assert vars(other).keys() == set(filter(str.isupper, vars(trainer)))


def test_the_dtypes_are_those_whose_noise_is_known():
    assert constants.DTYPES == ["auto", *NOISE]
