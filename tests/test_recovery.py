"""Real processes, killed without warning and started again with the same command."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest
from test_end_to_end import PRESET, QUICK, records, reference_server
from test_ranks import launch


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start_trainer(ranks, log, *presets):
    """Starts the trainer under the deepspeed launcher, in a session of its own."""
    deepspeed = Path(sys.executable).with_name("deepspeed")
    command = [deepspeed, "--num_gpus", ranks, "--no_local_rank", "--master_port", free_port()]
    command += [PRESET, "grpo_ref_split", json.dumps(presets)]
    with open(log, "a") as output:
        streams = {"stdout": output, "stderr": subprocess.STDOUT}
        return subprocess.Popen([str(x) for x in command], start_new_session=True, **streams)


def ranks_of(launcher):
    """-> the processes that train: those below the launcher's own."""
    family = psutil.Process(launcher.pid).children(recursive=True)
    return [p for p in family if "LOCAL_RANK" in p.environ() and PRESET.name in str(p.cmdline())]


def wait_for_step(folder, step, launcher, log):
    deadline, path = time.monotonic() + 150, Path(folder, "metrics.jsonl")
    while time.monotonic() < deadline:
        if path.exists() and any(r["step"] >= step for r in lines_of(path) if "loss" in r):
            return
        assert launcher.poll() is None, Path(log).read_text()[-3000:]
        time.sleep(0.02)
    raise AssertionError(Path(log).read_text()[-3000:])


def lines_of(path):
    """-> the records of a file that is being written."""
    return [json.loads(x) for x in path.read_text().split("\n")[:-1]]


def preset_of(tiny, url, folder, **changes):
    return (
        QUICK
        | {
            "MODEL": str(tiny),
            "REF_SERVER": url,
            "RUN_DIR": str(folder),
            "TASK": "even",
            "MAX_PROMPT_TOKENS": 128,
            "STEPS": 9,
            "SAVE_STEPS": 3,
            "EVAL_STEPS": 4,
        }
        | changes
    )


def test_a_run_that_is_killed_and_goes_on_gives_the_losses_of_one_that_never_stopped(
    tiny, tmp_path
):
    """kill -9 of the rank after step 4: step 3's checkpoint, and all that followed it again."""
    with reference_server(tmp_path, tiny) as url:
        killed = preset_of(tiny, url, tmp_path / "killed")
        launcher = start_trainer(1, tmp_path / "log", killed)
        wait_for_step(tmp_path / "killed", 4, launcher, tmp_path / "log")
        (rank,) = ranks_of(launcher)
        rank.kill()
        assert launcher.wait(30) != 0
        before = [r for r in records(tmp_path / "killed") if "loss" in r]
        whole = preset_of(tiny, url, tmp_path / "whole")
        launch(1, PRESET, "grpo_ref_split", json.dumps([killed, whole]))
        run = json.loads((tmp_path / "killed/run.json").read_text())["run"]
        ledger = json.load(urllib.request.urlopen(f"{url}/stats?run={run}"))["ledger"]
    after = records(tmp_path / "killed")
    expected = records(tmp_path / "whole")
    for name in ("loss", "grad_norm", "kl", "reward", "eval_accuracy", "completion_tokens"):
        mine = [(r["step"], r[name]) for r in after if name in r]
        theirs = [(r["step"], r[name]) for r in expected if name in r]
        assert [at for at, _ in mine] == [at for at, _ in theirs], name
        assert [x for _, x in mine] == pytest.approx([x for _, x in theirs], rel=1e-5, abs=1e-6), (
            name
        )
    assert len(before) >= 4 and len([r for r in after if "loss" in r]) == 9
    # each of 9 steps has its 4 groups once; what the killed run had begun is accounted for
    assert ledger["trained"] == 36 and ledger["waiting"] == ledger["failed"] == 0
    assert ledger["uploaded"] == 36 + sum(ledger["dropped"].values())
    assert ledger["dropped"].keys() <= {"sampled again"}


def test_ranks_end_when_one_of_them_or_their_launcher_is_killed(tiny, tmp_path):
    preset = preset_of(tiny, "http://127.0.0.1:9", tmp_path / "run", KL_BETA=0, STEPS=10**6)
    preset |= {"SAVE_STEPS": 10**6, "EVAL_STEPS": 10**6}
    for victim in ("rank", "launcher"):
        launcher = start_trainer(2, tmp_path / "log", preset)
        wait_for_step(tmp_path / "run", 1, launcher, tmp_path / "log")
        ranks = ranks_of(launcher)
        assert len(ranks) == 2
        os.kill(ranks[1].pid if victim == "rank" else launcher.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(ranks, timeout=30)
        launcher.wait(30)
        assert not alive, victim
        (tmp_path / "run/metrics.jsonl").unlink()
