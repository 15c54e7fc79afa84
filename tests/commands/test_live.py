"""grpo/commands/live.py: what the live page reads from run folders, and what it answers."""

import json
import os
from urllib.parse import urlencode

import helpers
import pytest

from grpo.commands import live
from grpo.constants import STOPPED
from grpo.report import RunFolder


def record(step, **more):
    return {"step": step, "reward": step / 100, "time": 1000.0 + 10 * step} | more


def sample(step, number=0, **more):
    group = {"group": f"{step:06d}-0000-0001", "prompt": "1 + 1?", "flat": False}
    own = {"completion": f"{step} {number}", "rewards": {"correct": 1.0}, "advantage": 0.5}
    return {"step": step, "number": number} | group | own | more


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


def write(folder, records=(), samples=(), steps=100):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"run": "x", "constants": {"STEPS": steps}}))
    (folder / "metrics.jsonl").write_text(lines(*records))
    (folder / "samples.jsonl").write_text(lines(*samples))
    return folder


def replace(folder, text, name="metrics.jsonl"):
    """As the trainer's RunFolder.undo does it."""
    draft = folder / "file.draft"
    draft.write_text(text)
    draft.replace(folder / name)


def age(folder):
    for file in folder.iterdir():
        os.utime(file, (1, 1), follow_symlinks=False)


def append(folder, text, name="metrics.jsonl"):
    with open(folder / name, "a") as file:
        file.write(text)


def call(app, path, query="", **environ):
    return helpers.call(app, "GET", path, QUERY_STRING=query, **environ)


def look(app, run="", **query):
    query = {"run": run, "metric": ["reward", "eval_accuracy"]} | query
    status, headers, body = call(app, "/live", urlencode(query, doseq=True))
    assert (status, headers["Content-Type"]) == (200, "application/json")
    return json.loads(body, parse_constant=pytest.fail)  # a browser takes no NaN


def curve(app, run="", name="reward"):
    return look(app, run)["curves"][0]["charts"].get(name, {"steps": [], "values": []})


@pytest.fixture
def app(tmp_path):
    return live.make_app(tmp_path)


# --- What it answers ----------------------------------------------------------------
def test_curves_of_several_runs_and_their_groups(tmp_path, app):
    first = [{"step": 0, "eval_accuracy": 0.25}, record(1), record(2, kl=1 / 3)]
    evaluation = {"step": 2, "eval_accuracy": 0.5, "time": 1025.0}
    write(tmp_path / "a", [*first, evaluation], [sample(1), sample(2, 0), sample(2, 1)])
    write(tmp_path / "b", [record(step) for step in range(1, 2001)], steps=3000)
    age(tmp_path / "a")
    now = look(app)
    assert [run["name"] for run in now["runs"]] == ["b", "a"]  # the one that wrote last is first
    assert (now["run"], now["step"], now["steps"], now["step_seconds"]) == ("b", 2000, 3000, 10)
    (shown,) = now["curves"]
    steps = shown["charts"]["reward"]["steps"]
    assert len(steps) == live.POINTS and steps[-1] == 2000
    now = look(app, "a", **{"with": ["b", "a", "nobody"], "metric": ["eval_accuracy", "kl", "x"]})
    assert [curves["run"] for curves in now["curves"]] == ["a", "b"]
    assert now["curves"][0]["charts"] == {
        "eval_accuracy": {"steps": [0, 2], "values": [0.25, 0.5]},
        "kl": {"steps": [2], "values": [0.3333]},
    }
    assert now["curves"][1]["charts"] == {"kl": {"steps": [], "values": []}} | {
        "eval_accuracy": {"steps": [], "values": []}
    }
    assert now["last"]["reward"] == 0.02 and now["metrics"] == ["eval_accuracy", "kl", "reward"]
    assert now["groups"] == [[1, 1], [2, 2]]
    status, _, body = call(app, "/group", "run=a&step=2")
    assert status == 200 and json.loads(body) == {"completions": [sample(2, 0), sample(2, 1)]}


def test_what_is_not_there_and_a_name_that_leads_here(tmp_path, app):
    write(tmp_path / "a", [record(1)], [sample(1)])
    assert call(app, "/group", "run=a&step=1")[0] == 200
    for query in ("", "run=a", "step=1", "run=a&step=2", "run=%ff&step=x"):
        status, _, body = call(app, "/group", query)
        assert (status, json.loads(body)) == (404, {"completions": []}), query
    for query in ("", "run=../a", "metric=x&with=y&with=a"):
        status, _, body = call(app, "/live", query)
        assert status == 200 and json.loads(body)["run"] == "a", query
    assert call(app, "/nothing")[0] == 404
    assert call(app, "/live", HTTP_HOST="evil.example")[0] == 403


def test_before_any_run_and_runs_that_appear_later(tmp_path, app):
    now = look(app)
    assert now["run"] == "" and now["runs"] == now["groups"] == now["curves"] == []
    assert now["step"] is now["wrote_s"] is None
    (tmp_path / "a").mkdir()
    (tmp_path / "a/run.json").write_text("[1, NaN")
    now = look(app)
    assert (now["run"], now["step"], now["steps"]) == ("a", None, None)  # before its first step
    write(tmp_path / "a", [record(1)])
    assert look(app)["step"] == 1


def test_equal_names_odd_names_and_a_folder_that_is_a_run(tmp_path, app):
    odd = "é & <b>?#%/+ \u202e"
    for step, name in enumerate(("x/seed", "y/seed", odd, "x"), 1):
        write(tmp_path / name, [record(step)])
    names = [run["name"] for run in look(app)["runs"]]
    assert sorted(names) == sorted(["x/seed", "y/seed", odd, "x"])
    assert [look(app, name)["step"] for name in ("x/seed", "y/seed", odd, "x")] == [1, 2, 3, 4]
    one = live.make_app(tmp_path / "x")
    assert {run["name"] for run in look(one)["runs"]} == {"x", "x/seed"}


# --- Files that change --------------------------------------------------------------
def test_a_half_written_line_is_read_when_it_is_whole(tmp_path, app):
    folder, whole = write(tmp_path / "a", [record(1)]), lines(record(2, text="é" * 9))
    append(folder, whole[:-2])
    assert curve(app)["steps"] == [1]
    append(folder, whole[-2:])
    assert curve(app)["steps"] == [1, 2]


def test_a_file_that_a_resumed_run_replaces_is_read_anew(tmp_path, app):
    folder = write(tmp_path / "a", map(record, range(1, 11)), [sample(9), sample(10)])
    assert curve(app)["steps"][-1] == 10
    for steps in (2, 20):
        replace(folder, lines(*map(record, range(1, steps))))
        assert curve(app)["steps"] == list(range(1, steps))
    rest = [record(step) for step in range(2, 20)]
    for reward in (9.5, 5.5):  # the second file has the same size and the same end
        replace(folder, lines(record(1, reward=reward), *rest))
        assert curve(app)["values"][:2] == [reward, 0.02]
    (folder / "metrics.jsonl").write_text(lines(record(1)))  # shorter, in the same inode
    assert curve(app)["steps"] == [1]
    replace(folder, lines(sample(9, completion="new")), "samples.jsonl")
    assert look(app)["groups"] == [[9, 1]]
    body = call(app, "/group", "run=a&step=9")[2]
    assert json.loads(body)["completions"][0]["completion"] == "new"


def test_of_a_long_file_the_end_is_read_and_only_after_a_change(tmp_path, app, monkeypatch):
    monkeypatch.setattr(live, "MAX_READ", 2000)
    folder = write(tmp_path / "a", map(record, range(1, 101)), map(sample, range(1, 101)))
    steps, before = curve(app)["steps"], live.read(folder / "metrics.jsonl")[0]
    assert len(steps) > 20 and steps == list(range(steps[0], 101))
    assert curve(app)["steps"] == steps and live.read(folder / "metrics.jsonl")[0] is before
    append(folder, lines(record(101)))
    assert curve(app)["steps"][-1] == 101


def test_running_stopped_and_ended(tmp_path, app):
    """The end of a run is written, and shown at once."""
    folder = write(tmp_path / "a", [record(1)])
    run = RunFolder(folder)
    assert look(app)["status"] == "running"
    run.close()
    assert look(app)["status"] == "stopped"
    (folder / STOPPED).unlink()  # it resumes
    assert look(app)["status"] == "running"
    age(folder)
    assert look(app)["status"] == "stopped"
    (folder / "final").symlink_to("step_000001")  # its checkpoint may be gone
    assert look(app)["runs"] == [{"name": "a", "status": "ended"}]


# --- The page and its command -------------------------------------------------------
def test_the_page_takes_texts_as_texts_and_nothing_from_elsewhere(app):
    status, headers, html = call(app, "/")
    assert status == 200 and headers["Content-Type"].lower() == "text/html; charset=utf-8"
    for word in (b"innerHTML", b"outerHTML", b"insertAdjacent", b"document.write", b"eval("):
        assert word not in html
    assert b" src=" not in html and html.count(b" href=") == html.count(b' href="data:,"') == 1


DAMAGED = ["", "{", "[]", "null", '{"constants": null}', '{"constants": 5}', "\0\0", '"x"', None]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_run_is_named_and_breaks_no_page(content, tmp_path):
    write(tmp_path / "good", [record(1)])
    bad = write(tmp_path / "bad", [record(1)], [sample(1)])
    append(bad, '{"step": "x"}\n{"step": [1]}\n5\n{"step": null}\n{"step": 2, "reward": NaN}\n')
    (bad / "run.json").unlink()
    if content is None:
        (bad / "run.json").mkdir()
    else:
        (bad / "run.json").write_text(content)
    app = live.make_app(tmp_path)
    states = {run["name"]: run["status"] for run in look(app, "bad")["runs"]}
    assert states == {"good": "running", "bad": "damaged"} and look(app, "good")["step"] == 1
