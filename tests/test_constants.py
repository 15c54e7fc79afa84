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
from grpo.serving.checks import SERVER
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
    assert given("ref_server.py", "STORE=a=b.py") == (None, {"STORE": "a=b.py"})
    own = {"VLLM_SLEEP": True, "STEPS": 3}  # a worker's are the trainer's, too
    assert given("vllm_worker.py", "VLLM_SLEEP=True", "STEPS=3") == (None, own)


def test_where_a_text_is_the_rule_a_number_is_one(given):
    for script, rules in {"grpo_ref_split.py": TRAINER, "ref_server.py": SERVER}.items():
        for name in rules["a text"].split():
            assert given(script, f"{name}=1")[1] == {name: "1"}


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
    for script, name in [(trainer, "STEPS"), (ref_server, "PORT"), (trainer, "SEED")]:
        monkeypatch.setattr(script, name, getattr(script, name))
    monkeypatch.setattr(vllm_worker, "VLLM_SEQUENCES", 256)
    with pytest.raises(SystemExit, match="STEPS = 'x' must be a whole number from 1 on"):
        trainer.main(STEPS="x")
    with pytest.raises(SystemExit, match="PORT = 70000 must be 65535 at most"):
        ref_server.main(PORT=70_000)
    with pytest.raises(SystemExit, match="VLLM_SEQUENCES = 4 must be GROUP_SIZE = 8 or more"):
        vllm_worker.main(VLLM_SEQUENCES=4, STEPS=7)
    assert (trainer.STEPS, vllm_worker.VLLM_SEQUENCES) == (7, 4)


def test_the_dtypes_are_those_whose_noise_is_known():
    assert constants.DTYPES == ["auto", *NOISE]
