"""The presets: constants that both scripts take, commands that work, memory that is as computed; so
is that of the docs."""

import ast
import re
import sys
from pathlib import Path

import pytest

import grpo_ref_split as trainer
import ref_server
from grpo.checks import trainer_constants
from grpo.constants import command_line

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import memory

TEACHERS = memory.TEACHERS
LAYOUTS = memory.PRESETS  # GB of a trainer's GPU, how many, GB of the server's, or None
presets = pytest.mark.parametrize("name", LAYOUTS)


def doc_of(name):
    return ast.get_docstring(ast.parse((ROOT / f"presets/{name}.py").read_text()), clean=False)


def commands_of(name):
    """Returns [(environment, launcher, script, arguments)] of the docstring's commands: the
    server's, where there is one, and the trainer's."""
    lines = re.findall(r"^ {4}(\S.*?)(?:  +# (?:first|then).*)?$", doc_of(name), re.MULTILINE)
    words = [re.fullmatch(r"((?:\w+=\S+ )*)(\w+) (\S+) (.*)", line).groups() for line in lines]
    *servers, (_, launcher, script, _) = words
    assert launcher in ("python", "deepspeed") and script == "grpo_ref_split.py"
    expected = 0 if LAYOUTS[name][2] is None else 1
    assert [server[1:3] for server in servers] == expected * [("python", "ref_server.py")]
    return words


def constants_of(script, module, name, monkeypatch):
    """Returns the constants that the docstring's command gives a script."""
    (arguments,) = [arguments for _, _, other, arguments in commands_of(name) if other == script]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [script, *arguments.split()])
    return command_line(module.DEFAULTS, module.__doc__)[1]


@presets
def test_a_presets_commands_start_the_scripts_with_it(name, monkeypatch):
    for _, _, script, argument in commands_of(name):
        teacher = f" MODEL=Qwen/{TEACHERS[name]}" if name in TEACHERS else ""
        assert argument == f"presets/{name}.py" + teacher * (script == "ref_server.py")
    given = constants_of("grpo_ref_split.py", trainer, name, monkeypatch)
    trained = vars(trainer_constants(trainer.DEFAULTS, given))
    assert trained["RUN_DIR"] == f"runs/{name}"
    if LAYOUTS[name][2] is None:
        assert trained["REF_SERVER"] is None
        return
    given = constants_of("ref_server.py", ref_server, name, monkeypatch)
    served = vars(ref_server.server_constants(given))
    assert trained["DTYPE"] == served["DTYPE"]
    assert (trained["MODEL"] != served["MODEL"]) == (name in TEACHERS)
    assert trained["REF_SERVER"].endswith(f":{served['PORT']}")


def fits(size, gpu):
    return size <= (1 - memory.SPARE) * memory.CARDS[gpu] * 1e9


@presets
def test_a_preset_fits_its_gpus_and_what_saves_memory_is_needed(name):
    """As computed: LoRA where full training does not fit, with the optimiser in RAM neither."""
    gpu, _, servers = LAYOUTS[name]
    c, m, size, server = memory.of_preset(name)
    assert fits(size, gpu) and (not servers or fits(server, servers))
    for offload in [False, True] if c.LORA_RANK else [False] if c.OFFLOAD_OPTIMIZER else []:
        more = {"LORA_RANK": 0, "BASE_BITS": 16, "OFFLOAD_OPTIMIZER": offload}
        *_, full, _ = memory.of_preset(name, **more)
        assert not fits(full, gpu)
    if c.BASE_BITS == 4:
        *_, whole, _ = memory.of_preset(name, BASE_BITS=16)
        assert not fits(whole, gpu)
    told = re.sub(r"\s+", " ", doc_of(name))
    expected = [memory.CARDS[gpu], size / 1e9] + [server / 1e9] * (server > 0)
    expected += [memory.in_ram(m) / 1e9] * c.OFFLOAD_OPTIMIZER
    assert [f"{number:.1f}" for number in expected] == re.findall(r"(\d+\.\d) GB", told)
