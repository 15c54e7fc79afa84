"""The presets: constants that both scripts take, commands that work, memory that is as computed."""

import ast
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from documents import TEXT

import grpo_ref_split as trainer
import ref_server
from grpo.constants import command_line
from grpo.sampling.memory import CONTEXT, USUAL, need
from grpo.training.checks import check_constants
from grpo.training.memory import sizes_that_fit

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import memory

GB = 2**30
# preset: GB of a trainer's card, trainer's cards, GB of the server's; 0: it shares one; None: none
LAYOUTS = {
    "0.5b_1x24gb": (24, 1, None),
    "1.5b_1x24gb": (24, 1, None),
    "3b_1x24gb": (24, 1, None),
    "3b_2x24gb": (24, 2, 0),
    "3b_2x80gb": (80, 1, 80),
    "3b_8x80gb": (80, 7, 80),
    "7b_2x80gb": (80, 1, 80),
    "7b_8x80gb": (80, 7, 80),
    "7b_lora_1x24gb": (24, 1, None),
    "two_machines": (80, 8, 24),
}
presets = pytest.mark.parametrize("name", LAYOUTS)


def doc_of(name):
    """Returns a preset's docstring."""
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
    """Returns the constants with which the docstring's command runs a script."""
    (arguments,) = [arguments for _, _, other, arguments in commands_of(name) if other == script]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [script, *arguments.split()])
    own = {name: value for name, value in vars(module).items() if name.isupper()}
    return own | command_line(script, module.__doc__)[1]


def test_every_preset_is_tested_and_in_the_docs():
    here = {path.stem for path in (ROOT / "presets").glob("*.py")}
    assert here - {"demo"} == set(LAYOUTS)  # the demo's own fits any machine
    for name in LAYOUTS:
        assert f"`presets/{name}.py`" in TEXT["docs/memory.md"]
        assert len((ROOT / f"presets/{name}.py").read_text().splitlines()) <= 16


@presets
def test_a_presets_commands_start_the_scripts_with_it(name, monkeypatch):
    for _, _, _, argument in commands_of(name):
        assert argument == f"presets/{name}.py"
    trained = constants_of("grpo_ref_split.py", trainer, name, monkeypatch)
    check_constants(trained)
    assert trained["RUN_DIR"] == f"runs/{name}"
    if LAYOUTS[name][2] is None:
        assert trained["REF_SERVER"] is None
        return
    served = constants_of("ref_server.py", ref_server, name, monkeypatch)
    ref_server.check_constants(served)
    for shared in ("MODEL", "TEMPERATURE", "DTYPE"):
        assert trained[shared] == served[shared]
    assert trained["REF_SERVER"].endswith(f":{served['PORT']}")


@presets
def test_a_presets_cards_are_those_of_its_commands(name):
    _, world, servers = LAYOUTS[name]
    (serving, *_), *_, (training, launcher, *_) = 2 * commands_of(name)
    assert (launcher == "deepspeed") == (world > 1)
    if "CUDA_VISIBLE_DEVICES" in training:
        server, ranks = (set(re.findall(r"\d", text)) for text in (serving, training))
        assert len(ranks) == world and len(server) == 1
        assert bool(server & ranks) == (not servers)
    else:  # all that there are
        assert world == 1 or name == "two_machines" and "eight" in doc_of(name)


@presets
def test_a_preset_fits_its_cards_as_computed(name, monkeypatch):
    """By the trainer's own arithmetic of "auto", on the meta device."""
    card, world, servers = LAYOUTS[name]
    c = SimpleNamespace(**constants_of("grpo_ref_split.py", trainer, name, monkeypatch))
    assert all(getattr(c, name) == "auto" for name in USUAL)
    model = c.MODEL.removeprefix("Qwen/")
    m, frozen = memory.sizes_of(model, c.LORA_RANK), memory.sizes_of(model, 0)
    tokens = c.MAX_PROMPT_TOKENS, c.MAX_COMPLETION_TOKENS
    shared = servers == 0
    server = 0 if servers is None else need(memory.server_phases(frozen, *tokens))[0]
    room = memory.CARDS[card] * GB
    _, size = sizes_that_fit(c, m, room - shared * server, world)
    if servers:
        assert server < 0.95 * memory.CARDS[servers] * GB
    elif (
        shared
    ):  # a server that has scored nothing yet holds less, and leaves the trainer more to take
        _, most = sizes_that_fit(c, m, room - memory.BF16 * frozen.total - CONTEXT, world)
        assert most + server <= room
    told = re.sub(r"\s+", " ", doc_of(name))
    assert f"{memory.CARDS[card]:.1f} GB the trainer needs {memory.gb(size)} GB" in told
    assert servers is None or re.search(rf"server (needs )?{memory.gb(server)} GB", told)
    if c.OFFLOAD_OPTIMIZER:  # master weights, Adam, gradients and a copy, as print_states has it
        assert f"in RAM, {memory.gb((4 * memory.FP32 + memory.BF16) * m.trained)} GB of it" in told


@presets
def test_what_a_preset_saves_it_has_to(name, monkeypatch):
    """LoRA where full training does not fit, with the optimiser in RAM neither."""
    card, world, servers = LAYOUTS[name]
    c = SimpleNamespace(**constants_of("grpo_ref_split.py", trainer, name, monkeypatch))
    m = memory.sizes_of(c.MODEL.removeprefix("Qwen/"), 0)
    server = need(memory.server_phases(m, 512, 512))[0] if servers == 0 else 0
    for offload in [False, True] if c.LORA_RANK else [False] if c.OFFLOAD_OPTIMIZER else []:
        full = SimpleNamespace(**vars(c) | {"LORA_RANK": 0, "OFFLOAD_OPTIMIZER": offload})
        with pytest.raises(SystemExit, match="would need"):
            sizes_that_fit(full, m, memory.CARDS[card] * GB - server, world)
