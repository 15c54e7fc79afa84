"""Real processes, killed without warning and started again with the same command."""

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import chaos
import psutil
import pytest
from processes import (
    QUICK,
    command_of,
    free_port,
    kill,
    launch,
    ranks_of,
    records,
    start,
    start_launcher,
    start_ranks,
    wait_for_step,
)

NOBODY = "http://127.0.0.1:9"  # where nothing listens
NEVER = 10**6
ENDLESS = {"SAVE_STEPS": NEVER, "STEPS": NEVER, "EVAL_STEPS": NEVER}


def preset_of(tiny, folder, url=NOBODY, **changes):
    """Without a URL there is no KL penalty, and no reference is asked for."""
    own = {"MODEL": str(tiny), "REF_SERVER": url, "RUN_DIR": str(folder), "TASK": "even"}
    own |= {"MAX_PROMPT_TOKENS": 128, "STEPS": 9, "SAVE_STEPS": 3, "EVAL_STEPS": 4}
    return QUICK | own | ({"KL_BETA": 0} if url == NOBODY else {}) | changes


def steps_in(folder):
    return [r for r in records(folder) if "loss" in r]


class Server:
    """A reference server that can be killed and started again, on the same port."""

    def __init__(self, tiny, folder):
        port, self.log = free_port(), folder / "server.log"
        self.url = f"http://127.0.0.1:{port}"
        self.command = command_of("ref_server", {"MODEL": str(tiny), "PORT": int(port)})

    def start(self):
        self.process = start(self.command, self.log, OMP_NUM_THREADS="1")

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        kill(self.process)


def wait_for_text(log, text, seconds=60):
    until = time.monotonic() + seconds
    while text not in log.read_text():
        assert time.monotonic() < until, log.read_text()[-3000:]
        time.sleep(0.05)


def check_same(after, expected):
    """A server scores in batches as they come, which round otherwise: measured 1e-6."""
    for name in ("loss", "grad_norm", "kl", "reward", "eval_accuracy", "completions/mean_length"):
        mine, theirs = ([(r["step"], r[name]) for r in x if name in r] for x in (after, expected))
        assert [at for at, _ in mine] == [at for at, _ in theirs], name
        assert [x for _, x in mine] == pytest.approx([x for _, x in theirs], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_run_that_is_killed_and_goes_on_gives_the_losses_of_one_that_never_stopped(
    tiny, tmp_path, ranks
):
    """kill -9 of a rank after step 4: step 3's checkpoint, and all that followed it again. Then
    kill -9 of the server, in the middle of a step: the run waits, says so, and goes on."""
    log = tmp_path / "log"
    with Server(tiny, tmp_path) as server:
        killed = preset_of(tiny, tmp_path / "killed", server.url)
        command = command_of("grpo_ref_split", killed)
        processes = start_ranks(ranks, command, log)
        wait_for_step(tmp_path / "killed", 4, processes[0], log)
        kill(processes[-1])  # the other one ends by itself
        codes = [process.wait(30) for process in processes]
        before = steps_in(tmp_path / "killed")
        killed |= {"grpo.stop.SPEAK_SECONDS": 1}  # and not 10
        processes = start_ranks(ranks, command_of("grpo_ref_split", killed), log)
        wait_for_step(tmp_path / "killed", 6, processes[0], log)
        kill(server.process)
        wait_for_text(log, f"waiting for the reference's log-probs from {server.url}")
        assert all(process.poll() is None for process in processes)
        server.start()
        assert [process.wait(100) for process in processes] == [0] * ranks, log.read_text()[-4000:]
        whole = preset_of(tiny, tmp_path / "whole", server.url)
        launch(ranks, command_of("grpo_ref_split", whole), log)
    assert all(codes)
    check_same(records(tmp_path / "killed"), records(tmp_path / "whole"))
    assert len(before) >= 4 and len(steps_in(tmp_path / "killed")) == 9


def test_a_run_that_is_asked_to_end_saves_its_last_step_and_goes_on_from_it(tiny, tmp_path):
    """SIGTERM to one of two ranks, in the middle of a step: no step is lost, none is made again."""
    log, changes = tmp_path / "log", {"SAVE_STEPS": NEVER, "STEPS": 20, "EVAL_STEPS": 7}
    stopped = preset_of(tiny, tmp_path / "stopped", **changes)
    processes = start_ranks(2, command_of("grpo_ref_split", stopped), log)
    try:
        wait_for_step(tmp_path / "stopped", 3, processes[0], log)
        processes[-1].send_signal(signal.SIGTERM)
        assert [process.wait(60) for process in processes] == [1, 1]
    finally:
        kill(*processes)
    before = steps_in(tmp_path / "stopped")
    last = before[-1]["step"]
    assert 3 <= last < 20 and (tmp_path / f"stopped/step_{last:06d}/trainer/state.json").exists()
    assert not os.path.lexists(tmp_path / "stopped/final")  # it is to resume
    output = log.read_text()
    assert "SIGTERM" in output and f"step {last} is saved" in output
    whole = preset_of(tiny, tmp_path / "whole", **changes)
    launch(2, command_of("grpo_ref_split", stopped, whole), log)
    after, expected = records(tmp_path / "stopped"), records(tmp_path / "whole")
    results = {r["step"]: r["eval_accuracy"] for r in expected if "eval_accuracy" in r}
    best = max(results, key=results.get)  # the first of equal ones; saved for that alone
    assert 0 < best < 20 and os.readlink(tmp_path / "whole/best") == f"step_{best:06d}"
    assert (tmp_path / "stopped/best/trainer").exists()
    assert [r for r in after if "loss" in r][:last] == before  # not made again
    check_same(after, expected)


@pytest.mark.long
def test_a_run_saves_its_last_step_also_where_nobody_reads_its_output_any_more(tiny, tmp_path):
    """As with `| tee log`, which the same Ctrl-C ends."""
    preset = preset_of(tiny, tmp_path / "run", **ENDLESS)
    # What a script starts with an & ignores Ctrl-C, and so would what these tests start
    settings = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    settings |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command_of("grpo_ref_split", preset), **settings) as process:
        try:
            wait_for_step(tmp_path / "run", 3, process, os.devnull)
            process.stdout.close()
            process.send_signal(signal.SIGINT)
            process.wait(60)
        finally:
            process.kill()
    last = steps_in(tmp_path / "run")[-1]["step"]
    assert (tmp_path / f"run/step_{last:06d}/trainer/state.json").exists()


@pytest.mark.long
@pytest.mark.parametrize("victim", ["launcher", "Ctrl-C"])
def test_ranks_end_when_their_launcher_does(tiny, tmp_path, victim):
    """Ctrl-C in a terminal comes to them all. They save their last step."""
    preset = preset_of(tiny, tmp_path / "run", **ENDLESS)
    launcher = start_launcher(2, command_of("grpo_ref_split", preset), tmp_path / "log")
    try:
        wait_for_step(tmp_path / "run", 1, launcher, tmp_path / "log")
        ranks = ranks_of(launcher)
        assert len(ranks) == 2
        threads = max(1, len(os.sched_getaffinity(0)) // 2)  # not all cores for each
        assert f"{threads} threads of each rank" in Path(tmp_path / "log").read_text()
        if victim == "Ctrl-C":
            os.killpg(launcher.pid, signal.SIGINT)
        else:
            os.kill(launcher.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(ranks, timeout=25)  # deepspeed would kill them after 30
        launcher.wait(30)
        assert not alive
        last = steps_in(tmp_path / "run")[-1]["step"]
        assert [path.name for path in (tmp_path / "run").glob("step_*")] == [f"step_{last:06d}"]
    finally:
        kill(launcher)


@pytest.mark.long
def test_chaos_in_short(tiny, tmp_path):
    """See chaos.py, whose 100 kills end with the demo's accuracy."""
    preset = preset_of(tiny, "", "", EVAL_STEPS=NEVER, LORA_RANK=2)
    for name in ("REF_SERVER", "RUN_DIR", "STEPS"):
        del preset[name]
    victims, draw = ["server", "worker", "trainer"], random.Random(0)
    found, records, kills = chaos.run(tmp_path, victims, draw, ranks=2, steps=25, **preset)
    assert found == [] and sum(kills.values()) == 3 - len(victims) > 0
    assert any("eval_accuracy" in r for r in records)
    assert any(r.get("staleness", 0) > 0 for r in records)  # some groups were the worker's
