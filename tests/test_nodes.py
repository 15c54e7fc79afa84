"""Two nodes on this machine, started by the commands of docs/several_machines.md: as the page has
them, but for the names of machines and files, one rank a node, and another port."""

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from documents import TEXT
from processes import PATIENCE, QUICK, kill, ranks_of, records, start, wait_for_step

from demo import free_port

PAGE = TEXT["docs/several_machines.md"]
ROOT = Path(__file__).parent.parent
LIMIT = 15  # WAIT_LIMIT_SECONDS
PRESET = """
import sys
sys.path[:0] = {folders!r}
import grpo_ref_split as trainer
if __name__ == "__main__":
    trainer.main(**{constants!r})
"""
COMMANDS = {  # what the batch file calls; `python` only writes with what environment it was called
    "scontrol": "echo 127.0.0.1; echo gpu02",
    "srun": """while [[ $1 == -* ]]; do shift; done
        export SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=0
        NODE=0 SLURM_PROCID=0 "$@" && NODE=1 SLURM_PROCID=1 "$@" """,
    "python": "env --null > task$SLURM_PROCID; echo $1 >> scripts",
}


@pytest.fixture
def preset(tiny, tmp_path):
    """Returns the path of a preset of 6 steps, which saves every second, and needs no server."""
    constants = QUICK | {"MODEL": str(tiny), "RUN_DIR": "run", "TASK": "even", "KL_BETA": 0}
    constants |= {"DTYPE": "bfloat16"}  # whose float32 weights the optimizer has
    constants |= {"STEPS": 6, "SAVE_STEPS": 2, "EVAL_STEPS": 99}
    constants |= {"WAIT_LIMIT_SECONDS": LIMIT, "MAX_PROMPT_TOKENS": 128}
    path = tmp_path / "preset.py"
    folders = [str(ROOT), str(ROOT / "tests")]  # the latter for tasks/even.py
    path.write_text(PRESET.format(folders=folders, constants=constants))
    return path


def start_node(folder, node, command, preset, port, log):
    """Starts one of the page's commands, in `folder`, as node 0 or 1; returns its process."""
    (line,) = re.findall(rf"^ {{4}}({command} .*?grpo_ref_split\.py)", PAGE, re.MULTILINE)
    line = line.replace("--master_port 29500 ", "").replace("gpu01", "127.0.0.1")
    line = line.replace("--node_rank 0", f"--node_rank {node} --master_port {port}")
    line = line.replace("--nproc_per_node 8", "--nproc_per_node 1")
    line = line.replace("grpo_ref_split.py", str(preset))
    folder.mkdir(exist_ok=True)
    hosts = re.search(r"^    gpu01 slots.*\n    gpu02 slots.*\n", PAGE, re.MULTILINE)[0]
    (folder / "hosts").write_text(hosts.replace("    ", "").replace("slots=8", "slots=1"))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return start(["bash", "-c", f"cd {folder} && exec {line}"], log, NODE=str(node), PATH=path)


def losses(folder):
    return [(r["step"], r["loss"], r["grad_norm"]) for r in records(folder) if "loss" in r]


def start_slurm(folder, preset, log):
    """Runs the page's batch file with a fake `srun`; returns the processes of its tasks."""
    (script,) = re.findall(r"```bash\n(#!/bin/bash\n.*?)```", PAGE, re.DOTALL)
    folder.mkdir()
    for name, text in COMMANDS.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(stat.S_IRWXU)
    job = {"SLURM_CPUS_PER_TASK": "1", "SLURM_JOB_NODELIST": "gpu[01-02]"}
    job["PATH"] = f"{folder}:{os.environ['PATH']}"
    script = script.replace("29500", free_port())
    subprocess.run(["bash", "-c", script], cwd=folder, env=os.environ | job, check=True)
    assert (folder / "scripts").read_text() == "grpo_ref_split.py\n" * 2
    tasks = [(folder / f"task{task}").read_text().split("\0")[:-1] for task in (0, 1)]
    own = {"WORKING_FOLDER": str(folder)}
    command = [sys.executable, preset]  # forked from a process that has the imports
    return [start(command, log, **dict(line.split("=", 1) for line in t) | own) for t in tasks]


@pytest.mark.long
def test_a_node_is_killed_and_the_run_resumes_under_another_launcher(preset, tmp_path):
    """kill -9 of all that runs on node 1 after step 3, under deepspeed: node 0 ends, and logs why.
    Both go on under torchrun, to what two tasks of SLURM, never stopped, make."""
    disks, logs = [tmp_path / "0", tmp_path / "1"], [tmp_path / "log0", tmp_path / "log1"]
    (disks[0] / "run").mkdir(parents=True)
    disks[1].mkdir()
    (disks[1] / "run").symlink_to(disks[0] / "run")  # the disk that they share
    deepspeed, port = "deepspeed --hostfile hosts --no_ssh", free_port()
    nodes = [start_node(disks[n], n, deepspeed, preset, port, logs[n]) for n in (0, 1)]
    wait_for_step(disks[0] / "run", 3, nodes[0], logs[0])
    (rank,) = ranks_of(nodes[0])
    kill(nodes[1])
    rank.wait(PATIENCE)
    assert nodes[0].wait(PATIENCE) == 1  # and its launcher
    assert re.search("closed by peer|reset by peer", logs[0].read_text())  # torch's words
    before = losses(disks[0] / "run")
    assert 3 <= len(before) < 6

    port = free_port()
    nodes = [start_node(disks[n], n, "torchrun", preset, port, logs[n]) for n in (0, 1)]
    assert [node.wait(PATIENCE) for node in nodes] == [0, 0], logs[0].read_text()[-3000:]
    assert "resumes from run/step_00000" in logs[0].read_text()

    shared = tmp_path / "shared"
    tasks = start_slurm(shared, preset, tmp_path / "slurm")
    assert [t.wait(PATIENCE) for t in tasks] == [0, 0], (tmp_path / "slurm").read_text()[-3000:]
    assert losses(disks[0] / "run") == losses(shared / "run")
    weights = [folder / "run/step_000006/model.safetensors" for folder in (disks[0], shared)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
