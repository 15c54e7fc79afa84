"""What a plain run loads of our files: the core. Options are imported only where a constant, the
task or the machine switches them on."""

import json
import subprocess
import sys

from documents import ROOT

LINES = 6_600  # of our files that a plain run loads; to become 4 500
OPTIONS = {  # imported only with ...
    "grpo/client.py",  # REF_SERVER, or the role worker
    "grpo/options/gate.py",  # PUBLISH_STEPS, or ref_server.py
    "grpo/options/live.py",  # plot.py live
    "grpo/options/workers.py",  # PUBLISH_STEPS
    "grpo/options/worker.py",  # the role worker
    "grpo/options/turns.py",  # a task with reply()
    "grpo/options/reward_processes.py",  # REWARD_PROCESSES
    "grpo/options/chat_template.py",  # CHAT_TEMPLATE
    "grpo/options/stop_strings.py",  # STOP_STRINGS
    "grpo/options/vllm_policy.py",  # SAMPLER
    "grpo/options/reporters.py",  # REPORT_TO
    "grpo/options/sizes.py",  # a GPU, and "auto"
    "grpo/options/sample_sizes.py",
    "grpo/options/cuda_graph.py",  # NVIDIA's GPU
}
RUN = """
import json, sys
import grpo_ref_split as trainer
from grpo.constants import read_preset
given = {k: v for k, v in read_preset("presets/demo.py").items() if k in trainer.DEFAULTS}
given |= {"MODEL": sys.argv[1], "RUN_DIR": sys.argv[2], "REF_SERVER": None, "EVAL_STEPS": 1}
given |= {"PROMPTS_PER_STEP": 2, "SAVE_STEPS": 1, "EVAL_QUESTIONS": 2, "SKIP_FLAT_GROUPS": False}
trainer.main(**given | {"STEPS": 1})
trainer.main(**given | {"STEPS": 2})  # resumes
files = [getattr(module, "__file__", None) for module in sys.modules.values()]
print(json.dumps(files))
"""


def lines_of(path):
    return len((ROOT / path).read_text().splitlines())


def test_a_plain_run_loads_the_core_alone(tiny, tmp_path):
    """It samples, trains, evaluates, saves and resumes, without a server, on a CPU."""
    command = [sys.executable, "-c", RUN, str(tiny), str(tmp_path / "run")]
    printed = subprocess.check_output(command, cwd=ROOT, text=True, timeout=120)
    files = filter(None, json.loads(printed.splitlines()[-1]))
    ours = {path.removeprefix(f"{ROOT}/") for path in files if path.startswith(f"{ROOT}/")}
    core = {path: lines_of(path) for path in ours if not path.startswith((".venv", "tests"))}
    for path, number in sorted(core.items(), key=lambda pair: -pair[1]):
        print(f"{number:4} {path}")
    with_server = sum(core.values()) + lines_of("grpo/client.py")
    on_gpu = sum(lines_of(path) for path in OPTIONS if "memory" in path or "cuda" in path)
    print(sum(core.values()), "lines;", with_server, "with REF_SERVER;", on_gpu, "more on a GPU")
    assert not core.keys() & OPTIONS and all((ROOT / path).exists() for path in OPTIONS)
    assert 4_000 < sum(core.values()) <= LINES
