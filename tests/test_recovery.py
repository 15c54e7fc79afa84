"""Real processes, killed without warning and started again with the same command."""

import os
import re
import signal
import statistics
import sys
import time
from pathlib import Path

import psutil
import pytest
from documents import TEXT
from processes import (
    PATIENCE,
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

from grpo.logp_checks import MISMATCH

HERE = Path(__file__).parent
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


def wait_for(log, pattern):
    until = time.monotonic() + PATIENCE
    while not re.search(pattern, log.read_text()):
        assert time.monotonic() < until, log.read_text()[-3000:]
        time.sleep(0.05)


def check_same(after, expected):
    """A server scores in batches as they arrive, which round otherwise: measured 1e-6."""
    for name in ("loss", "grad_norm", "kl", "reward", "eval_accuracy", "completions/mean_length"):
        mine, theirs = ([(r["step"], r[name]) for r in x if name in r] for x in (after, expected))
        assert [at for at, _ in mine] == [at for at, _ in theirs], name
        assert [x for _, x in mine] == pytest.approx([x for _, x in theirs], rel=1e-5, abs=1e-6)


def test_a_run_that_is_killed_and_goes_on_gives_the_losses_of_one_that_never_stopped(
    tiny, tmp_path
):
    """kill -9 after step 4: step 3's checkpoint, and all that followed it again. Then kill -9 of
    the server, in the middle of a step: the run waits. test_nodes.py kills one of two ranks."""
    log, port = tmp_path / "log", free_port()
    url = f"http://127.0.0.1:{port}"
    serve = command_of("ref_server", {"MODEL": str(tiny), "PORT": int(port)}), tmp_path / "server"
    server = start(*serve)
    seed = {"SEED": 1}  # with 0 the scores' rounding decides a token of step 8
    killed = preset_of(tiny, tmp_path / "killed", url, **seed)
    (process,) = start_ranks(1, command_of("grpo_ref_split", killed), log)
    wait_for_step(tmp_path / "killed", 4, process, log)
    kill(process)
    killed |= {"grpo.client.SPEAK_SECONDS": 1}  # and not 10
    (process,) = start_ranks(1, command_of("grpo_ref_split", killed), log)
    wait_for_step(tmp_path / "killed", 6, process, log)
    kill(server)
    wait_for(log, f"so far for the reference's log-probs from {url}")
    assert process.poll() is None
    start(*serve)
    assert process.wait(PATIENCE) == 0, log.read_text()[-4000:]
    whole = preset_of(tiny, tmp_path / "whole", url, **seed)
    launch(1, command_of("grpo_ref_split", whole), log)
    check_same(records(tmp_path / "killed"), records(tmp_path / "whole"))
    assert len(steps_in(tmp_path / "killed")) == 9


@pytest.mark.long
def test_a_run_that_is_asked_to_end_saves_its_last_step_and_goes_on_from_it(tiny, tmp_path):
    """SIGTERM to one of two ranks, in the middle of a step: no step is lost, none is made again."""
    log, changes = tmp_path / "log", {"SAVE_STEPS": NEVER, "STEPS": 12, "EVAL_STEPS": 5}
    stopped = preset_of(tiny, tmp_path / "stopped", **changes)
    processes = start_ranks(2, command_of("grpo_ref_split", stopped), log)
    wait_for_step(tmp_path / "stopped", 3, processes[0], log)
    processes[-1].send_signal(signal.SIGTERM)
    assert [process.wait(PATIENCE) for process in processes] == [1, 1]
    before = steps_in(tmp_path / "stopped")
    last = before[-1]["step"]
    assert 3 <= last < 12 and (tmp_path / f"stopped/step_{last:06d}/trainer/state.json").exists()
    assert not os.path.lexists(tmp_path / "stopped/final")  # it is to resume
    output = log.read_text()
    assert "SIGTERM" in output and f"step {last} is saved" in output
    whole = preset_of(tiny, tmp_path / "whole", **changes)
    launch(2, command_of("grpo_ref_split", stopped, whole), log)
    after, expected = records(tmp_path / "stopped"), records(tmp_path / "whole")
    results = {r["step"]: r["eval_accuracy"] for r in expected if "eval_accuracy" in r}
    best = max(results, key=results.get)  # the first of equal ones; saved for that alone
    assert 0 < best < 12 and os.readlink(tmp_path / "whole/best") == f"step_{best:06d}"
    assert (tmp_path / "stopped/best/trainer").exists()
    assert [r for r in after if "loss" in r][:last] == before  # not made again
    check_same(after, expected)


@pytest.mark.long
@pytest.mark.parametrize("victim", ["launcher", "Ctrl-C"])
def test_ranks_end_when_their_launcher_does(tiny, tmp_path, victim):
    """Ctrl-C in a terminal reaches them all. They save their last step."""
    preset = preset_of(tiny, tmp_path / "run", **ENDLESS)
    launcher = start_launcher(2, command_of("grpo_ref_split", preset), tmp_path / "log")
    wait_for_step(tmp_path / "run", 1, launcher, tmp_path / "log")
    ranks = ranks_of(launcher)
    assert len(ranks) == 2
    threads = max(1, len(os.sched_getaffinity(0)) // 2)  # not all cores for each
    assert f"{threads} CPU threads a rank" in Path(tmp_path / "log").read_text()
    if victim == "Ctrl-C":
        os.killpg(launcher.pid, signal.SIGINT)
    else:
        ranks[0].parent().kill()
    _, alive = psutil.wait_procs(ranks, timeout=PATIENCE)
    launcher.wait(PATIENCE)
    assert not alive
    # Nor has deepspeed killed them, after 30 s: they have saved
    last = steps_in(tmp_path / "run")[-1]["step"]
    assert [path.name for path in (tmp_path / "run").glob("step_*")] == [f"step_{last:06d}"]


@pytest.mark.long
def test_workers_come_and_go_and_find_a_trainer_that_resumes(tiny, tmp_path):
    """kill -9 of the first worker, with groups in hand, and of the trainer, a step after its
    checkpoint. A worker is fast here, and its groups are of the policy before the newest."""
    preset = preset_of(tiny, tmp_path / "run", None, PUBLISH_STEPS=1, TASK="slow")
    preset |= {"TRAINER": f"http://127.0.0.1:{free_port()}"}
    preset |= {"STEPS": 16, "SAVE_STEPS": 4, "EVAL_STEPS": 0}
    logs = {name: tmp_path / name for name in ("trainer", "first", "second", "misfit")}

    def worker(name, **changes):
        command = command_of("grpo_ref_split:worker", preset | changes)
        return start(command, logs[name], OMP_NUM_THREADS="1")

    def trainer():
        return start_ranks(1, command_of("grpo_ref_split", preset), logs["trainer"])[0]

    first, misfit, killed = worker("first"), worker("misfit", GROUP_SIZE=3), trainer()
    wait_for(logs["first"], r"policy [1-9]: \d+ groups")
    kill(first)
    second = worker("second")
    wait_for(logs["second"], r"policy \d+: \d+ groups")
    wait_for_step(tmp_path / "run", 9, killed, logs["trainer"])
    kill(killed)
    assert trainer().wait(PATIENCE) == 0, logs["trainer"].read_text()[-3000:]
    assert second.poll() is None, logs["second"].read_text()
    assert misfit.wait(PATIENCE) == 1 and "GROUP_SIZE" in logs["misfit"].read_text()
    steps = steps_in(tmp_path / "run")
    assert [r["step"] for r in steps] == list(range(1, 17))
    assert steps[0][MISMATCH] < 1e-5 and steps[0]["kl"] < 1e-6
    old = [r for r in steps if r["staleness_max"] > 0]  # sampled by a policy before the newest
    assert any(r["sampler_ratio"] != 1 and r["sampler_ratio_max"] > 1 for r in old)
    # alone, the second worker may have waited with groups of a step that was undone
    assert max(r["staleness_max"] for r in steps) <= 4
    assert 0 < statistics.mean(r["staleness"] for r in steps) < 1.5
    proofs = re.findall(r"log-probs differ from the trainer's by (\S+)", logs["second"].read_text())
    assert proofs and all(float(gap) < 1e-5 for gap in proofs)
    samplers = {r["sampler"] for r in records(tmp_path / "run", "samples.jsonl")}
    assert len(samplers) == 3 and "trainer" in samplers
    assert not (tmp_path / "run/.policy").exists()


def test_the_commands_of_the_docs_make_the_last_policy_the_next_runs_reference(tiny, tmp_path):
    """docs/loss.md; the outer loop of algorithm 1."""
    lines = r"^    python grpo_ref_split.py (.*?)(?:  +#.*)?$"
    commands = re.findall(lines, TEXT["docs/loss.md"], re.MULTILINE)
    assert len(commands) == 2
    words = preset_of(tiny, "", None, STEPS=3, EVAL_STEPS=0, TASK=HERE / "tasks/even.py")
    for number, command in enumerate(commands):
        own = [word.replace("presets/", f"{HERE.parent}/presets/") for word in command.split()]
        left = ("RUN_DIR", "REF_SERVER", *["MODEL"] * number)
        more = [f"{name}={value}" for name, value in words.items() if name not in left]
        run = [sys.executable, HERE.parent / "grpo_ref_split.py", *own, *more]
        process = start(run, tmp_path / "log", WORKING_FOLDER=str(tmp_path), OMP_NUM_THREADS="1")
        assert process.wait(PATIENCE) == 0, (tmp_path / "log").read_text()[-3000:]
    first, second = (steps_in(tmp_path / f"runs/{name}") for name in ("first", "second"))
    assert first[0]["kl"] < 1e-9 and first[2]["kl"] > 1e-4
    assert second[0]["kl"] < 1e-9  # not of MODEL of the first run, from which it has moved
