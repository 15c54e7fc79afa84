"""Rewards in processes of their own: the same rewards, and what becomes of the processes."""

import itertools
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from fakes import MIXED, FakeEngine, a_recipe, prompts_of, sampled

import grpo_ref_split as trainer
from grpo.sampling import reward_timeout, rollout, start
from grpo.sampling.reward_processes import begin_rewards, import_file, start_processes

ROOT = Path(__file__).parent.parent.parent
SLOW = ROOT / "tests" / "tasks" / "slow.py"
import_file("slow", SLOW)
TASK = sys.modules["slow"]
REWARDS = {"correctness": 2.0, "format": 1.0, "longest": 0.0}


class Saying(FakeEngine):
    """Completions whose texts are what the item says."""

    def __init__(self, *texts):
        super().__init__()
        self.texts, self.given = texts, 0

    def text(self, completion):
        self.given += 1
        return self.texts[(self.given - 1) % len(self.texts)]


@contextmanager
def processes(number=2, limit_seconds=30):
    """-> a recipe with so many, which end with the block."""
    before = set(psutil.Process().children())
    submit = start_processes(TASK, number, limit_seconds)
    mine = set(psutil.Process().children()) - before
    try:
        limits = {"reward_processes": submit, "REWARD_TIMEOUT_SECONDS": limit_seconds}
        yield a_recipe(task=TASK, REWARD_WEIGHTS=REWARDS, **limits)
    finally:
        for process in mine:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(mine)


@pytest.fixture(scope="module")
def two():
    with processes(2) as recipe:
        yield recipe


def rewarded(recipe, *texts, groups=1, **changes):
    """-> the rewards of groups whose completions have these texts in turn."""
    found = sampled(Saying(*texts), recipe, prompts_of([MIXED] * groups), **changes)
    return [list(rewards) for _, _, rewards in found]


def test_rewards_are_the_same_in_the_same_order(two):
    texts = ["sleep 0.05", "sleep 0", "look", "sleep 0.0", "sleep 0.01"]
    there = rewarded(two, *texts, groups=5)
    here = rewarded(a_recipe(task=TASK, REWARD_WEIGHTS=REWARDS), *texts, groups=5)
    assert [[r["format"] for r in group] for group in there] == [
        [r["format"] for r in group] for group in here
    ]
    looks = [r["correctness"] for group in there for r in group if r["format"] == 4.0]
    assert looks and set(looks) == {1.0}  # no torch, no GPU


def test_the_completions_of_a_group_are_rewarded_at_the_same_time(two, tmp_path):
    (group,) = rewarded(two, f"meet {tmp_path}")  # one alone would wait for ever
    assert len(group) == 2 and len(os.listdir(tmp_path)) == 2


def test_sampling_goes_on_beside_but_not_without_bound(two, monkeypatch):
    """Groups are sampled while rewards of the first sleep; each is yielded in its turn."""
    monkeypatch.setattr(rollout, "OUTSTANDING", 3)
    engine, seen, waits = Saying(*["sleep 0.3"] * 2, *["sleep 0"] * 12), [], []
    one_by_one = itertools.chain.from_iterable((p, None) for p in prompts_of([MIXED] * 7))
    groups = rollout.sampled_and_rewarded(
        engine, two, one_by_one, seed=0, timed=lambda: waiting(waits)
    )
    for prompt, _, _ in groups:
        seen.append((prompt[0], engine.given // 2))
    assert [number for number, _ in seen] == list(range(7))
    assert seen[0][1] == 4  # it was waited for once three more were sampled
    assert 0.1 < sum(waits) < 3  # which is what the step's "reward" counts


@contextmanager
def waiting(seconds):
    began = time.monotonic()
    yield
    seconds.append(time.monotonic() - began)


def test_the_rewards_of_a_whole_group_are_one_job(two):
    recipe, futures = begin_rewards(two, {}, ["sleep 0", "sleep 0.0"])
    assert len(futures) == 3
    assert recipe.task.group_rewards({}, []) == [{"longest": 0.0}, {"longest": 1.0}]


def test_an_exception_comes_back_with_its_traceback(two):
    with pytest.raises(RuntimeError, match=r"KeyError\('answer'\) for .* 'fail now'") as caught:
        rewarded(two, "sleep 0", "fail now")
    assert 'raise KeyError("answer")' in str(caught.value.__cause__)
    assert rewarded(two, "sleep 0")  # the process lives
    with pytest.raises(RuntimeError, match="cannot pickle"):
        rewarded(two, "odd")


@pytest.mark.parametrize("text, reason", [
    ("hang for ever", r"took more than 0.4 s, .* was killed.*\(REWARD_TIMEOUT_SECONDS\)"),
    ("exit 3", "has ended itself, with exit code 3"),
    ("crash", "was ended by SIGSEGV"),
])  # fmt: skip
def test_a_process_that_hangs_or_dies_ends_the_run_with_question_and_completion(text, reason):
    limit = 0.4 if text.startswith("hang") else 30
    with processes(2, limit) as recipe:
        children = psutil.Process().children()
        with pytest.raises(RuntimeError, match=f"(?s)tasks/fake.py: rewards.*{reason}.*'{text}'"):
            rewarded(recipe, "sleep 0", text)
        assert len(psutil.Process().children()) == len(children) - 1


def test_a_process_that_was_killed_between_two_groups_is_said():
    with processes(1) as recipe:
        ((first, _),) = rewarded(recipe, "pid")  # group_rewards may still run
        os.kill(int(first["correctness"]), signal.SIGKILL)
        with pytest.raises(RuntimeError, match="was ended by SIGKILL, perhaps because memory"):
            rewarded(recipe, "sleep 0")


def test_a_task_that_can_not_be_imported_there_is_said(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("import sys\nif sys.argv[1:]: raise ValueError('no judge')\n")
    task = type(sys)("broken")
    task.__file__, task.rewards = str(broken), lambda item, text: {}
    recipe = a_recipe(task=task, reward_processes=start_processes(task, 1, 30))
    with pytest.raises(RuntimeError, match="ValueError.'no judge'.*'first'"):
        sampled(FakeEngine(), recipe, prompts_of([MIXED]))


def test_rewards_are_not_waited_for_in_silence(two, monkeypatch, capsys):
    monkeypatch.setattr(reward_timeout, "SPEAK_SECONDS", 0.2)
    rewarded(two, "sleep 0.5")
    said = capsys.readouterr().err
    assert said.count("waiting for the rewards of question '?', tasks/fake.py, since ") == 2


@pytest.mark.parametrize("number", [0, 2])
def test_as_many_begin_as_the_constant_says(number, tiny, monkeypatch):
    """And SKIP_FLAT_GROUPS = True, of older presets, is what workers know as "outcome"."""
    constants = {"TASK": "slow", "MODEL": str(tiny), "REWARD_PROCESSES": number}
    constants |= {"SAMPLE_BATCH": 16, "SKIP_FLAT_GROUPS": True}
    for name, value in constants.items():
        monkeypatch.setattr(trainer, name, value)
    children = set(psutil.Process().children())
    refusing = SimpleNamespace(check=lambda *_: sys.exit("another model"))
    monkeypatch.setattr(start, "RefServer", lambda *_: refusing)
    with pytest.raises(SystemExit, match="another model"):
        start.prepare(trainer.constants(), needs_server=True)
    assert set(psutil.Process().children()) == children  # none before the checks
    _, recipe, _ = start.prepare(trainer.constants(), needs_server=False)
    mine = set(psutil.Process().children()) - children
    found = {r["correctness"] for group in rewarded(recipe, "pid") for r in group}
    assert len(mine) == number and found <= {float(p.pid) for p in mine or [psutil.Process()]}
    assert recipe.c.SKIP_FLAT_GROUPS == "outcome"
    for process in mine:
        process.kill()
    psutil.wait_procs(mine)


PARENT = f"""
import sys, time
sys.path[:0] = [{str(ROOT)!r}]
from grpo.sampling.reward_processes import import_file, start_processes
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
