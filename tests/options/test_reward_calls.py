"""Calls of a task's reward functions: their time limit, and the processes that compute them."""

import itertools
import os
import signal
import subprocess
import sys
import time
import traceback
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from fakes import MIXED, FakeEngine, a_recipe, prompts_of, sampled

import grpo_ref_split as trainer
from grpo import log, remote, rollout
from grpo import task as task_module
from grpo.constants import Constants
from grpo.options.reward_processes import start_processes
from grpo.prepare import prepare
from grpo.rewards import TooSlow, import_file, timely

ROOT = Path(__file__).parents[2]
SLOW = ROOT / "tests" / "tasks" / "slow.py"
import_file("slow", SLOW)
TASK = sys.modules["slow"]
REWARDS = {"correctness": 2.0, "format": 1.0, "longest": 0.0}


# --- The time limit -------------------------------------------------------------------
def for_ever():
    while True:
        pass


def careful():
    try:
        time.sleep(60)
    except Exception:  # noqa: BLE001
        return 0.0


@pytest.mark.parametrize("busy", [for_ever, careful, lambda: time.sleep(60)])
def test_what_takes_too_long_is_interrupted(busy):
    """Also in a task that catches everything."""
    started = time.monotonic()
    with pytest.raises(TooSlow, match="this took more than 0.2 s"), timely(0.2, "this"):
        busy()
    assert time.monotonic() - started < 5


def test_what_is_in_time_is_left_alone():
    for _ in range(20):
        with timely(0.05, "this"):
            time.sleep(0.001)
    time.sleep(0.1)  # nothing follows


NEVER_BACK = """
    ctypes.pythonapi.PyThread_acquire_lock.restype = ctypes.c_int
    lock = ctypes.pythonapi.PyThread_allocate_lock
    lock.restype = ctypes.c_void_p
    mutex = ctypes.c_void_p(lock())
    while True:
        ctypes.pythonapi.PyThread_acquire_lock(mutex, 1)  # keeps the interpreter while it waits
"""
OWN_ALARM = """
    signal.alarm(100)
    signal.alarm(0)
    time.sleep(60)
"""


@pytest.mark.parametrize("block", [NEVER_BACK, OWN_ALARM])
def test_what_can_not_be_interrupted_ends_the_process_with_a_traceback(block):
    """Also an alarm that the task has cancelled, as math-verify does. The watchdog needs no
    interpreter: here one that another thread never gives up."""
    program = f"""
import ctypes, signal, time
from grpo import rewards
rewards.GRACE_SECONDS = 0.4
with rewards.timely(0.1, "this"):{block}"""
    options = {"capture_output": True, "text": True, "cwd": ROOT, "timeout": 60}
    run = subprocess.run([sys.executable, "-c", program], check=False, **options)
    assert run.returncode == 1 and 'File "<string>"' in run.stderr


# --- In processes ---------------------------------------------------------------------
class Saying(FakeEngine):
    """Completions with these texts, one after the other."""

    def __init__(self, *texts):
        super().__init__()
        self.texts, self.given = texts, 0

    def text(self, completion):
        self.given += 1
        return self.texts[(self.given - 1) % len(self.texts)]


@contextmanager
def processes(number=2, limit_seconds=30):
    """-> a recipe with so many, which end with the block; without any, it has the time limit."""
    before = set(psutil.Process().children())
    submit = start_processes(TASK, number, limit_seconds) if number else None
    mine = set(psutil.Process().children()) - before
    try:
        limits = {"submit": submit, "REWARD_TIMEOUT_SECONDS": limit_seconds}
        yield a_recipe(task=TASK, REWARD_WEIGHTS=REWARDS, **limits)
    finally:
        ended(mine)


def ended(processes):
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes)


@pytest.fixture(scope="module")
def two():
    with processes(2) as recipe:
        yield recipe


def rewarded(recipe, *texts, groups=1, **changes):
    """-> the rewards of groups whose completions have these texts in turn."""
    found = sampled(Saying(*texts), recipe, prompts_of([MIXED] * groups), **changes)
    return [[s.rewards for s in group.samples] for group in found]


def test_rewards_are_the_same_in_the_same_order(two):
    texts = ["sleep 0.05", "sleep 0", "look", "sleep 0.0", "sleep 0.01"]
    there = rewarded(two, *texts, groups=5)
    here = rewarded(a_recipe(task=TASK, REWARD_WEIGHTS=REWARDS), *texts, groups=5)
    for name in ("format", "longest"):  # of a completion, and of a whole group
        found = [[[r[name] for r in group] for group in groups] for groups in (there, here)]
        assert found[0] == found[1]
    looks = [r["correctness"] for group in there for r in group if r["format"] == 4.0]
    assert looks and set(looks) == {1.0}  # no torch, no GPU


def test_the_completions_of_a_group_are_rewarded_at_the_same_time(two, tmp_path):
    (group,) = rewarded(two, f"meet {tmp_path}")  # one alone would wait for ever
    assert len(group) == 2 and len(os.listdir(tmp_path)) == 2


def test_sampling_goes_on_beside(two):
    """Groups are sampled while rewards of the first sleep; each is yielded in its turn."""
    engine, seen, waits = Saying(*["sleep 0.3"] * 2, *["sleep 0"] * 12), [], []
    one_by_one = itertools.chain.from_iterable((p, None) for p in prompts_of([MIXED] * 7))

    @contextmanager
    def waiting():
        began = time.monotonic()
        yield
        waits.append(time.monotonic() - began)

    groups = rollout.sampled_and_rewarded(engine, two, one_by_one, seed=0, timed=waiting)
    for group in groups:
        seen.append((group.index, engine.given // 2))
    assert [number for number, _ in seen] == list(range(7))
    assert seen[0][1] == 7
    assert 0.1 < sum(waits) < 3  # which is what the step's "reward" counts


@pytest.mark.parametrize("number", [0, 1])
def test_an_exception_comes_with_its_traceback_and_what_it_was_given(number, capfd):
    with processes(number) as recipe:
        with pytest.raises(RuntimeError, match=r"fake.py.*KeyError\('answer'\).*'fail now'") as e:
            rewarded(recipe, "sleep 0", "fail now")
        trace = "".join(traceback.format_exception(e.value.__cause__))
        assert 'raise KeyError("answer")' in (capfd.readouterr().err if number else trace)
        assert rewarded(recipe, "sleep 0")  # the process lives
        if number:
            with pytest.raises(RuntimeError, match="pickle"):
                rewarded(recipe, "odd")


@pytest.mark.parametrize(("number", "text", "reason"), [
    (0, "sleep 60", r"took more than 0.4 s.*REWARD_TIMEOUT_SECONDS"),
    (2, "hang for ever", r"took more than 0.4 s.*REWARD_TIMEOUT_SECONDS"),
    (2, "exit 3", "exit code 3"),
    (2, "crash", "SIGSEGV"),
])  # fmt: skip
def test_what_hangs_or_dies_ends_the_run_with_question_and_completion(number, text, reason):
    with processes(number, 30 if reason[0] != "t" else 0.4) as recipe:
        children = psutil.Process().children()
        with pytest.raises(RuntimeError, match=f"(?s)tasks/fake.py: rewards.*{reason}.*'{text}'"):
            rewarded(recipe, "sleep 0", text)
        assert len(psutil.Process().children()) == len(children) - bool(number)


def test_a_process_that_was_killed_between_two_groups_is_said():
    with processes(1) as recipe:
        ((first, _),) = rewarded(recipe, "pid")
        os.kill(int(first["correctness"]), signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="SIGKILL"):
                rewarded(recipe, "sleep 0")


def test_a_task_that_can_not_be_imported_there_is_said(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("import sys\nif sys.argv[1:]: raise ValueError('no judge')\n")
    task = type(sys)("broken")
    task.__file__, task.rewards = str(broken), lambda item, text: {}
    recipe = a_recipe(task=task, submit=start_processes(task, 1, 30))
    with pytest.raises(RuntimeError, match="ValueError.'no judge'.*'first'"):
        sampled(FakeEngine(), recipe, prompts_of([MIXED]))


@pytest.mark.parametrize("number", [0, 1])
def test_rewards_are_not_waited_for_in_silence(number, monkeypatch, capsys):
    monkeypatch.setattr(log, "SPEAK_SECONDS", 0.4)
    with processes(number) as recipe:
        rewarded(recipe, "sleep 0")  # once its processes have started
        capsys.readouterr()
        rewarded(recipe.others(GROUP_SIZE=1), "sleep 1")
    assert capsys.readouterr().err.count("tasks/fake.py's rewards of question '?'") == 2


@pytest.mark.parametrize("number", [0, 2])
def test_as_many_begin_as_the_constant_says(number, tiny, monkeypatch):
    constants = {"TASK": "slow", "MODEL": str(tiny), "REWARD_PROCESSES": number}
    constants |= {"MAX_PROMPT_TOKENS": 128, "MAX_COMPLETION_TOKENS": 128}
    c = Constants(trainer.DEFAULTS | constants)
    children = set(psutil.Process().children())
    refusing = SimpleNamespace(check=lambda *_: sys.exit("another model"))
    monkeypatch.setattr(remote, "ReferenceClient", lambda *_: refusing)
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="another model"):
        patch.setattr(task_module, "load_split", None)  # the server is asked before
        prepare(c, needs_server=True)
    assert set(psutil.Process().children()) == children  # none before the checks
    _, recipe, _ = prepare(c, needs_server=False)
    recipe.batch = 16
    mine = set(psutil.Process().children()) - children
    found = {r["correctness"] for group in rewarded(recipe, "pid") for r in group}
    assert len(mine) == number and found <= {float(p.pid) for p in mine or [psutil.Process()]}
    ended(mine)


PARENT = f"""
import sys, time
sys.path[:0] = [{str(ROOT)!r}]
from grpo.options.reward_processes import start_processes
from grpo.rewards import import_file
import_file("slow", {str(SLOW)!r})
submit = start_processes(sys.modules["slow"], 2, 30)
for future in [submit("rewards", {{}}, "meet " + sys.argv[1]) for _ in range(2)]:
    future.result()
print("both are there", flush=True)
sys.stdin.readline()
for future in [submit("rewards", {{}}, "sleep 0") for _ in range(2)]:
    future.result()
submit("rewards", {{}}, "hang"), submit("rewards", {{}}, "hang")
print("they hang", flush=True)
time.sleep(60)
"""


def test_they_end_with_their_parent_but_not_by_its_signals(tmp_path):
    """Also after kill -9 of the parent, while they hang in C."""
    command, pipe = [sys.executable, "-c", PARENT, str(tmp_path)], subprocess.PIPE
    parent = subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe)
    try:
        assert parent.stdout.readline() == "both are there\n"
        children = psutil.Process(parent.pid).children()
        assert len(children) == 2
        for child in children:  # deepspeed ends the whole tree, and ranks save what they have
            child.send_signal(signal.SIGTERM)
            child.send_signal(signal.SIGINT)
        parent.stdin.write("\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == "they hang\n"
        time.sleep(0.2)
        assert all(child.is_running() for child in children)
    finally:
        parent.kill()
        parent.wait()
    assert not psutil.wait_procs(children, timeout=10)[1]
