"""Tasks may start processes, in each of multiprocessing's ways; none is left after a run."""

import contextlib
import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from processes import PATIENCE, python

TASK = """
import multiprocessing, subprocess, sys, time

LEFT = []

def load(split): return [{"question": "1"}]
def messages(item): return [{"role": "user", "content": "1"}]
def double(number): return 2 * number

def rewards(item, text):
    context = multiprocessing.get_context(item["way"])
    with context.Pool(2) as pool:
        doubled = pool.map(double, [1, 2, 3])
    process = context.Process(target=time.sleep, args=(999,))
    process.start()
    process.terminate()
    process.join(60)
    LEFT.append(context.Process(target=time.sleep, args=(999,)))
    LEFT.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(999)"]))
    LEFT[-2].start()
    return doubled == [2, 4, 6] and not process.is_alive()
"""


def run(code):
    return python("-c", textwrap.dedent(code))


@pytest.mark.long
@pytest.mark.parametrize("way", ["fork", "forkserver", "spawn"])
def test_a_reward_may_start_processes_and_none_is_left(way, tmp_path):
    (file := tmp_path / f"starts_by_{way}.py").write_text(TASK)
    done = run(f"""
        from grpo.constants import Constants, begin
        begin()
        import contextlib, psutil
        from grpo.ranks import no_child_stays
        from grpo.stop import stop
        from grpo.rewards import reward_texts
        from grpo.task import Recipe, load_task
        c = Constants({{"TASK": {str(file)!r}, "REWARD_TIMEOUT_SECONDS": 600,
                        "REWARD_WEIGHTS": None, "MAX_COMPLETION_TOKENS": 9}})
        recipe = Recipe(c, load_task(c.TASK), [], {{"reward": 1.0}}, "reward")
        with stop.listening(), no_child_stays():
            print(reward_texts(recipe, {{"way": {way!r}}}, ["", ""]))
        def is_server(process):  # of multiprocessing's
            with contextlib.suppress(psutil.Error):
                return "".join(process.cmdline()[-1:]).startswith("from multiproc")
        left = [x for x in psutil.Process().children(recursive=True) if not is_server(x)]
        print(psutil.wait_procs(left, timeout=60)[1])
    """)
    assert done.stdout == "[{'reward': 1.0}, {'reward': 1.0}]\n[]\n", done.stderr


def test_a_signal_that_meets_a_child_at_its_birth_is_not_lost():
    """The child takes 0.5 s until it has its handlers; the signal comes before."""
    done = run("""
        import multiprocessing, os, time
        os.register_at_fork(after_in_child=lambda: time.sleep(0.5))  # hooks run in this order
        from grpo.stop import stop
        with stop.listening():
            process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(999,))
            process.start()
            process.terminate()
            process.join(60)
            print(process.exitcode, repr(stop.asked))
    """)
    assert done.stdout == "-15 ''\n" and not done.stderr


def test_a_child_ignores_the_runs_ctrl_c_and_ends_with_the_run():
    done = run("""
        import multiprocessing, os, signal, time
        from grpo.stop import stop
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` would ignore it
        with stop.listening():
            process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(999,))
            process.start()
            os.killpg(0, signal.SIGINT)
            process.join(0.5)
            print(process.is_alive(), stop.asked, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    """)  # ends once no process has its stdout
    assert done.stdout == "True SIGINT\n"


def test_a_child_of_a_thread_outlives_the_thread_and_can_be_terminated():
    """Each reply() is called in a thread of its own, and may keep a process for the next one."""
    done = run("""
        import multiprocessing, threading, time
        from grpo.ranks import no_child_stays
        from grpo.stop import stop
        context, kept = multiprocessing.get_context("fork"), []
        def reply():
            kept.append(context.Process(target=time.sleep, args=(999,)))
            kept[-1].start()
        with stop.listening(), no_child_stays():
            for _ in range(2):
                thread = threading.Thread(target=reply)
                thread.start()
                thread.join()
            time.sleep(0.3)
            alive = [process.is_alive() for process in kept]
            kept[0].terminate()
            kept[0].join(60)
            print(alive, kept[0].exitcode)
        kept[1].join(60)
        print(kept[1].exitcode)
    """)
    assert done.stdout == "[True, True] -15\n-9\n", done.stderr


def test_a_pool_that_a_task_keeps_does_not_hang_the_end():
    done = run("""
        import multiprocessing
        from grpo.ranks import no_child_stays
        from grpo.stop import stop
        with no_child_stays(), stop.listening():
            pools = [multiprocessing.get_context(way).Pool(2) for way in ("fork", "forkserver")]
            print([pool.map(abs, [-1]) for pool in pools])
    """)
    assert done.stdout == "[[1], [1]]\n" and done.returncode == 0, done.stderr


def test_a_child_that_exits_does_not_wait_for_the_watchdog_of_the_time_limit():
    done = run("""
        import os, sys
        from grpo.calls import timely, watchdog
        with timely(20, "a reward"):
            pid = os.fork()
            if not pid:
                sys.exit(3)
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        assert watchdog.ends == float("inf")
    """)
    assert done.stdout == "3\n" and not done.stderr


LEAVES = """
import json, os, signal, subprocess, sys
LEFT = []
def load(split): return [{"question": "1", "answer": "1"}] * 20
def messages(item): return [{"role": "user", "content": "1"}]
def rewards(item, text):
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(999)"])
    open(__file__ + ".json", "w").write(json.dumps([os.getpid(), left.pid]))
    os.kill(os.getpid(), getattr(signal, os.environ["BY"]))
    return 1.0
"""


@pytest.mark.parametrize(("program", "by"), [
    ("grpo_ref_split.py worker TASK={task} MODEL={model}", "SIGTERM"),
    ("-m tasks {task} MODEL={model}", "SIGHUP"),
])  # fmt: skip
def test_no_child_of_a_task_outlives_a_program_that_a_signal_ends(program, by, tiny, tmp_path):
    (file := tmp_path / "leaves.py").write_text(LEAVES)
    command = [sys.executable, *program.format(task=file, model=tiny).split()]
    environment = os.environ | {"BY": by}
    options = {"cwd": Path(__file__).parent.parent, "env": environment, "timeout": PATIENCE}
    done = subprocess.run(command, check=False, capture_output=True, text=True, **options)
    assert done.returncode and "ended by Ctrl-C" in done.stderr, done.stderr[-2000:]
    _, left = json.loads((tmp_path / "leaves.py.json").read_text())
    for _ in range(600):  # a minute, in which it does not end by itself
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(left).status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.1)
                continue
        return
    raise AssertionError("the reward's process is still there")
