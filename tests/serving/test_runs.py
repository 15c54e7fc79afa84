"""What the page keeps of the runs, and says of them."""

import itertools
import sqlite3
import threading

import pytest
from helpers import member, record, sample

from grpo.serving import runs as runs_module
from grpo.serving.runs import Runs


def steps_of(runs, run="run", curve="reward"):
    return runs.snapshot(run, metrics=[curve])["curves"][run].get(curve, {"steps": []})["steps"]


def groups_of(runs, run="run"):
    """-> all groups of the run that the page may ask for, oldest first."""
    return [runs.group(number) for number, *_ in runs.snapshot(run)["groups"]]


# --- Metrics ------------------------------------------------------------------------
def test_a_post_that_the_disk_had_no_room_for_is_written_when_it_is_repeated(store, monkeypatch):
    runs, execute = Runs(store.db), store.db.execute
    runs.log("run", [record(step) for step in range(1, 6)], [])

    def full(query, *values):
        if query.startswith("INSERT"):
            raise sqlite3.OperationalError("database or disk is full")
        return execute(query, *values)

    with monkeypatch.context() as patch:
        patch.setattr(store.db, "execute", full)
        for _ in range(2):
            with pytest.raises(sqlite3.OperationalError):
                runs.log("run", [record(3)], [sample()])  # the run resumed from a checkpoint
    assert steps_of(runs) == steps_of(Runs(store.db)) == [1, 2, 3, 4, 5]
    assert groups_of(runs) == []
    runs.log("run", [record(3), record(4)], [])
    assert steps_of(runs) == steps_of(Runs(store.db)) == [1, 2, 3, 4]


def test_curves_survive_a_restart_of_the_server(store):
    runs = Runs(store.db)
    runs.log("old", [record(1)], [])
    runs.log("run", [{"step": 0, "eval_accuracy": 0.25}, record(1, kl=0.5, entropy=2)], [sample()])
    runs.log("run", [{"step": 1, "eval_accuracy": 0.75}, record(2)], [])
    asked = ["reward", "eval_accuracy", "kl", "kl", "nothing"]
    now, again = runs.snapshot("run", [], asked), Runs(store.db).snapshot("", [], asked)
    assert [run["name"] for run in again["runs"]] == ["run", "old"]
    assert again["run"] == "run"  # the one that logged last
    assert again["metrics"] == ["accuracy", "entropy", "eval_accuracy", "kl", "reward"]
    assert again["curves"]["run"] == now["curves"]["run"] == {
        "reward": {"steps": [1, 2], "values": [0.01, 0.02]},
        "eval_accuracy": {"steps": [0, 1], "values": [0.25, 0.75]},
        "kl": {"steps": [1], "values": [0.5]},
    }  # fmt: skip
    assert again["last"] == now["last"] == record(2)
    assert again["step"] == 2 and 0 <= again["logged_s"] < 60


def test_an_earlier_versions_store_opens_without_its_curves(store):
    store.db.execute("CREATE TABLE curves (run TEXT, curve TEXT, step INTEGER, value REAL)")
    store.db.execute("INSERT INTO curves VALUES ('run', 'reward', 1, 0.5)")
    runs = Runs(store.db)
    assert runs.snapshot()["runs"] == []
    runs.log("run", [record(2)], [])
    assert steps_of(runs) == [2]


def test_a_trainer_that_resumes_undoes_what_came_after_its_checkpoint(store):
    runs = Runs(store.db)
    runs.log("run", [record(step, kl=1) for step in range(1, 11)], [])
    runs.log("run", [{"step": 10, "eval_accuracy": 0.5}], [])
    assert steps_of(runs) == list(range(1, 11))  # an evaluation follows its step, and undoes none
    runs.log("run", [record(7, reward=-1)], [])
    for now in (runs, Runs(store.db)):
        assert steps_of(now) == list(range(1, 8)) and now.snapshot()["step"] == 7
        assert now.snapshot()["last"]["reward"] == -1
        assert steps_of(now, curve="kl") == list(range(1, 8))
        assert steps_of(now, curve="eval_accuracy") == []


@pytest.mark.parametrize("stride", [1, 2, 7, 2**40])
def test_a_long_run_is_thinned_evenly_and_ends_with_its_newest_step(store, monkeypatch, stride):
    monkeypatch.setattr(runs_module, "MAX_STEPS", 40)
    monkeypatch.setattr(runs_module, "SENT_POINTS", 40)
    runs, counts = Runs(store.db), []
    for step in range(1, 1000 * stride, stride):
        runs.log("run", [record(step)], [])
        counts.append(store.db.value("SELECT COUNT(*) FROM logged"))
    assert max(counts) == 40 and min(counts[40:]) > 10
    curve = runs.snapshot(metrics=["reward"])["curves"]["run"]["reward"]
    assert curve["steps"][0] == 1 and curve["steps"][-1] == step
    assert curve["values"] == [float(f"{s / 100:.4g}") for s in curve["steps"]]
    assert steps_of(Runs(store.db)) == curve["steps"]
    monkeypatch.setattr(runs_module, "SENT_POINTS", 5)
    gaps = [b - a for a, b in itertools.pairwise(steps_of(Runs(store.db)))]
    assert len(gaps) == 4 and max(gaps) <= 2 * min(gaps)


def test_no_evaluation_is_lost_where_there_are_few(store, monkeypatch):
    """Every second step may be the one that has none, or the one that has it."""
    monkeypatch.setattr(runs_module, "MAX_STEPS", 40)
    runs = Runs(store.db)
    runs.log("run", [{"step": 0, "eval_accuracy": 0.5}], [])
    for step in range(1, 201):
        runs.log("run", [record(step)], [])
        if step % 20 == 0:
            runs.log("run", [{"step": step, "eval_accuracy": 0.5}], [])
    monkeypatch.setattr(runs_module, "SENT_POINTS", 20)
    assert steps_of(runs, curve="eval_accuracy") == list(range(0, 201, 20))


def test_what_is_kept_and_sent_is_bounded(store, monkeypatch):
    runs = Runs(store.db)
    for n in range(25):
        runs.log(f"run {n}", [record(1)], [sample(1)])
    for now in (runs, Runs(store.db)):
        names = [run["name"] for run in now.snapshot()["runs"]]
        assert names == [f"run {n}" for n in reversed(range(5, 25))]
    for table in ("shown", "plan", "logged", "sampled"):
        assert store.db.value(f"SELECT COUNT(*) FROM {table}") == 20
    assert len(runs.heard) == 20
    monkeypatch.setattr(runs_module, "SENT_POINTS", 3)
    for steps, sent in ((range(3), [0, 1, 2]), (range(101), [0, 50, 100])):
        runs.log(f"{len(steps)} steps", [record(step) for step in steps], [])
        assert steps_of(runs, f"{len(steps)} steps") == sent


def test_what_is_added_to_a_step_is_bounded(store):
    runs = Runs(store.db)
    runs.log("run", [{f"{n:5}": n for n in range(190)} | {"step": 1}], [])
    with pytest.raises(ValueError, match="a record must be at most 200 numbers"):
        runs.log("run", [{f"more {n}": n for n in range(10)} | {"step": 1}], [])
    with pytest.raises(ValueError, match="at most 10000 characters of JSON"):
        runs.log("run", [{"step": 2}, {f"{n:0100}": n for n in range(100)} | {"step": 3}], [])
    assert len(runs.snapshot()["last"]) == 191 and runs.snapshot()["step"] == 1


def test_many_threads_at_once(store):
    runs = Runs(store.db)

    def work(n):
        for step in range(50):
            runs.log(f"run {n}", [record(step)], [sample(step)])
            runs.snapshot(f"run {n}", metrics=["reward"])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for n in range(4):
        assert steps_of(runs, f"run {n}") == steps_of(Runs(store.db), f"run {n}") == list(range(50))
        assert [group["step"] for group in groups_of(runs, f"run {n}")] == list(range(50))


def test_runs_are_laid_over_one_another(store, monkeypatch):
    runs = Runs(store.db)
    for n in range(4):
        runs.log(f"run {n}", [record(step, **{"a/b": n}) for step in range(n + 1)], [])
    now = runs.snapshot("run 1", ["run 3", "run 1", "nobody", "run 0"], ["a/b"])
    assert list(now["curves"]) == ["run 1", "run 3", "run 0"] and now["step"] == 1
    assert now["curves"]["run 3"]["a/b"] == {"steps": [0, 1, 2, 3], "values": [3, 3, 3, 3]}
    monkeypatch.setattr(runs_module, "MAX_COMPARED", 2)
    monkeypatch.setattr(runs_module, "MAX_CURVES", 1)
    now = runs.snapshot("run 1", ["run 3", "run 0"], ["reward", "a/b"])
    assert {run: list(curves) for run, curves in now["curves"].items()} == {
        "run 1": ["reward"],
        "run 3": ["reward"],
    }


# --- Whether the trainer lives ---------------------------------------------------------
def test_a_run_whose_trainer_is_silent_is_gone_unless_it_has_ended(store, monkeypatch):
    clock = [1000.0]
    for name in ("monotonic", "time"):
        monkeypatch.setattr(runs_module.time, name, lambda: clock[0])
    runs = Runs(store.db)

    def status_after(seconds, now=None):
        clock[0] += seconds
        shown = (now or runs).snapshot("run")
        return shown["status"], shown["heard_s"], shown["logged_s"]

    runs.log("run", [], [], steps=10)  # a beat, before the first step
    assert status_after(5) == ("running", 5, 5) and runs.snapshot()["steps"] == 10
    runs.log("run", [record(1)], [])
    runs.log("other", [record(1)], [])
    for _ in range(4):
        clock[0] += 30
        runs.log("run", [], [], steps=10)
    assert status_after(7) == ("running", 7, 127)  # busy with a long step
    assert runs.snapshot()["run"] == "other"  # a beat does not push the run to the front
    assert [run["status"] for run in runs.snapshot()["runs"]] == ["gone", "running"]
    assert status_after(54) == ("gone", 61, 181)
    assert status_after(0, Runs(store.db)) == ("gone", 181, 181)  # all that a restart knows
    runs.log("run", [], [], steps=10)
    assert status_after(1)[0] == "running"
    runs.end("run")
    runs.log("run", [], [], steps=10)  # a beat that comes late
    assert status_after(0)[0] == status_after(10**6)[0] == "ended"
    assert status_after(0, Runs(store.db))[0] == "ended"
    runs.end("run", ended=False)  # it resumes, with more steps
    runs.log("run", [record(2)], [], steps=20)
    assert status_after(0)[0] == "running" and runs.snapshot("run")["steps"] == 20


# --- Sampled groups --------------------------------------------------------------------
def test_a_groups_completions_are_kept_together(store):
    runs = Runs(store.db)
    first = member(1, 0, rewards={"correctness": None, "format": 1}, flat=True)
    runs.log("run", [], [first, member(1, 1), member(1, 0, group="another")])
    runs.log("run", [record(1)], [member(1, 2), member(1, 1, completion="again")])  # sent twice
    for now in (runs, Runs(store.db)):
        assert [row[1:] for row in now.snapshot()["groups"]] == [(1, 3), (1, 1)]
        group, other = groups_of(now)
        assert (group["group"], other["group"]) == ("000001-0000-0001", "another")
        assert [c["completion"] for c in group["completions"]][1:] == [
            "again",
            "<answer>2</answer>",
        ]
        assert group["prompt"] == "<|user|>1 + 1?" and group["item"]["kind"] == "sum"
        assert not group["flat"] and group["policy_version"] == 0 and group["answer"] == "2"
        assert group["completions"][0] == {
            "completion": "<answer>2</answer>",
            "rewards": {"correctness": None, "format": 1},
            "truncated": False,
            "advantage": 0.35,
            "number": 0,
        }


def test_samples_of_an_earlier_version_are_groups_by_their_question(store):
    runs = Runs(store.db)
    runs.log("run", [], [sample(1), sample(1), sample(1, question="2?"), sample(2, question=None)])
    groups = groups_of(runs)
    assert [len(group["completions"]) for group in groups] == [2, 1, 1]
    assert [c["number"] for c in groups[0]["completions"]] == [0, 1]


def test_a_trainer_that_resumes_undoes_the_later_groups(store):
    runs = Runs(store.db)
    for step in range(1, 6):
        runs.log("run", [], [member(step)])  # a step's groups come before its metrics
        runs.log("run", [record(step)], [])
    assert [group["step"] for group in groups_of(runs)] == [1, 2, 3, 4, 5]
    runs.log("run", [record(3), record(4)], [])
    assert [group["step"] for group in groups_of(runs)] == [1, 2, 3]


def test_what_is_kept_of_groups_is_bounded(store, monkeypatch):
    runs = Runs(store.db)
    long = {"completion": "y" * 10_000, "answer": "z" * 10_000, "prompt": "p" * 10_000}
    runs.log(
        "long", [], [member(1, n, **long, question=5, item={"a": "b" * 999}) for n in range(70)]
    )
    (group,) = groups_of(runs, "long")
    assert len(group["completions"]) == 64
    assert group["completions"][0]["completion"] == "y" * 4000 + " … (6000 more characters)"
    assert group["answer"].startswith("z" * 200 + " …") and group["question"] == "5"
    assert group["prompt"].startswith("p" * 8000 + " …") and group["item"]["a"][500:503] == " … "
    many = {"item": {str(n): n for n in range(60)}}
    runs.log("many", [record(1)], [member(1, **many)])  # nor are the step's metrics refused for it
    (group,) = groups_of(runs, "many")
    assert group["item"] == {str(n): str(n) for n in range(50)} | {"…": "(10 more fields)"}
    monkeypatch.setattr(runs_module, "MAX_GROUPS", 40)
    for step in range(1, 301):
        runs.log("run", [], [member(step), member(step, group="another")])
        assert len(runs.snapshot("run")["groups"]) <= 40
    steps = sorted({group["step"] for group in groups_of(runs)})
    assert len(steps) > 8 and (steps[0], steps[-1]) == (1, 300)
    assert 4 <= sum(step <= 150 for step in steps)  # of the whole run
    monkeypatch.setattr(runs_module, "MAX_GROUP_BYTES", 5000)
    runs.log("run", [], [member(301)])
    assert 1 <= len(groups_of(runs)) < 10
    runs.log("run", [], [member(301, n, group=str(n)) for n in range(60)])
    assert len(groups_of(runs)) <= 40 and runs.group(10**9) is None
