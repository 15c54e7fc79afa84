"""Every part of the GPU's report runs, at its smallest; and the report is there however it ends."""

import sys
import tarfile

import processes
import psutil
import pytest

import demo
from benchmarks import gpu_kit, gpu_parts, gpu_report, loss

# --- The report -----------------------------------------------------------------------
TABLE = "print('| a | b |\\n|---|---|\\n| 1 | 2 |')"
HANGS = ["sh", "-c", "echo begun; sleep 99 & wait"]  # starts within its 2 s on a busy machine


def python(code):
    return [sys.executable, "-c", code]


def packed(folder):
    with tarfile.open(folder / "gpu_report.tar.gz") as archive:
        return set(archive.getnames())


def test_a_part_that_fails_or_hangs_is_a_section_and_not_the_end(tmp_path):
    parts = {
        "a table": (python(TABLE), 120),
        "one that fails": (python("raise ValueError('no such kernel')"), 120),
        "one that hangs": (HANGS, 2),
        "the last": (python("print('fine')"), 120),
    }
    before = set(psutil.Process().children(recursive=True))
    gpu_report.report(parts, tmp_path, gpu_report.MINUTES)
    text = (tmp_path / "gpu_report.md").read_text()
    assert "| a table | took" in text and "\n| 1 | 2 |\n" in text
    assert "| one that fails | FAILED (1)" in text and "no such kernel" in text
    assert "| one that hangs | NOT FINISHED in 2 s" in text and "begun" in text
    assert "| the last | took" in text and "fine" in text
    assert set(psutil.Process().children(recursive=True)) <= before
    assert packed(tmp_path) == {"gpu_report.md", *(f"{name}.log" for name in parts)}
    gpu_report.report(parts, tmp_path, 0)
    assert (tmp_path / "gpu_report.md").read_text().count("NOT RUN") == len(parts)


# --- Its parts ------------------------------------------------------------------------
FEW = {"EVAL_QUESTIONS": 2, "PROMPTS_PER_STEP": 1, "GROUP_SIZE": 2, "SKIP_FLAT_GROUPS": False}
RUN = {"WARM_STEPS": 2, **FEW}
SMALLEST = {
    "demo": {"STEPS": 1, **RUN},
    "resumed": {"STEPS": 60, **RUN},  # the signal comes while it trains
    "sums_float32": {"STEPS": 1, "MAX_PROMPT_TOKENS": 200, **FEW},
    **{name: {"STEPS": 1} for name in gpu_parts.STEPS},
}
LONG = {"demo", "resumed", "sums_float32", "ranks"}
# they differ from sums_float32, lora and, on a CPU, sampling in a constant
SAME = {"sums_bfloat16", "offload", "full", "sampling_large"}
PARTS = [
    pytest.param(name, marks=[pytest.mark.long] * (name in LONG))
    for name in gpu_report.PARTS
    if name not in SAME | {"tests"}
]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("work")


@pytest.fixture
def quick(work, monkeypatch):
    """Parts work in a temporary folder, and scripts are forked."""

    started = demo.start

    def start(command, log=None, threads=demo.ONE_THREAD, **options):
        if "-m" in command:  # the launcher
            return started(command, log, threads, **options)
        return processes.start(command, log.name if log else work / "printed.log", **threads)

    monkeypatch.setattr(gpu_parts, "WORK", work)
    monkeypatch.setitem(loss.SHAPES, "small", (64, 1000))
    monkeypatch.setattr(demo, "start", start)


@pytest.mark.parametrize("name", PARTS)
def test_every_part_runs(name, quick, tiny, work, capsys):
    words = SMALLEST.get(name, {}) | ({"MODEL": tiny} if name.startswith("sums") else {})
    assert gpu_parts.run(name, **words) is not False, capsys.readouterr().out
    printed = capsys.readouterr().out
    assert "|" in printed or name == "facts"
    if name in gpu_parts.STEPS:
        assert "| peak GB | computed |" in printed and "seconds_backward" in printed


# --- The kit --------------------------------------------------------------------------
def test_the_kit_has_every_requirement_that_a_machine_may_lack():
    lines = (gpu_report.ROOT / "requirements.txt").read_text().splitlines()
    required = {line.split(">")[0].strip() for line in lines if ">=" in line}
    needed_by_others = {"safetensors", "tqdm", "jinja2", "triton"}
    not_used = {"datasets", "math-verify", "matplotlib"}
    known = {*gpu_kit.EXPECTED, *gpu_kit.BROUGHT, gpu_kit.SOURCE, *needed_by_others, *not_used}
    assert required <= known
