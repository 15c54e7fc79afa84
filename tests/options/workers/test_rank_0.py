"""Rank 0's side of workers: what it serves, what it takes, and what it refuses."""

import json
import math
import threading

import pytest
import requests
import safetensors.torch
import torch
from helpers import call, refused
from trainer_side import Policy, change, file_of, post, publish, sample_of, serving, weights

from grpo.options.workers.policy_proof import check_proof
from grpo.options.workers.shared_settings import settings_of
from grpo.options.workers.worker import TrainerClient
from grpo.sample import Sample
from grpo.wire import read_group, sha256_of


@pytest.fixture
def side(tmp_path):
    with serving(tmp_path / "run") as workers:
        yield workers


def asked(workers):
    """-> the record, as a worker gets it."""
    return json.loads(call(workers.app, "GET", "/policy", QUERY_STRING="groups=1")[2])["policy"]


# --- GET /policy --------------------------------------------------------------------
def test_a_policy_is_published_with_all_that_a_worker_checks(side):
    refused(call(side.app, "GET", "/policy"), 503)
    record = publish(side, 3)
    assert asked(side) == json.loads(json.dumps(record))
    assert (record["run"], record["version"]) == (side.run, 3)
    assert record["settings"] == settings_of(side.recipe)
    (path,) = side.folder.iterdir()
    assert (record["bytes"], record["sha256"]) == (path.stat().st_size, sha256_of(path))
    assert check_proof(Policy(version=3), record) == 0
    with pytest.raises(RuntimeError):
        check_proof(Policy(version=2), record)
    first, second = record["proof"], publish(side, 4)["proof"]
    assert first["completion"] == second["completion"] and first["logps"] != second["logps"]


def test_what_is_published_is_the_policy_as_it_was(side, monkeypatch):
    """The next step changes the weights while they are being written."""
    before, go_on, save = weights(0), threading.Event(), safetensors.torch.save_file
    late = lambda *arguments: go_on.wait(60) and save(*arguments)
    monkeypatch.setattr(safetensors.torch, "save_file", late)
    side.publish(0)
    side.policy.become(weights(1))
    refused(call(side.app, "GET", "/policy"), 503)  # and training goes on
    go_on.set()
    side.finish()
    assert (side.folder / side.record["sha256"]).read_bytes() == file_of(before)


def test_no_round_begins_while_enough_groups_wait_or_come_and_what_has_aged_makes_room(side):
    publish(side, 3)
    for number in range(4):
        assert asked(side)
        post(side, sample_of(side, number, version=number))
    refused(call(side.app, "GET", "/policy", QUERY_STRING="groups=1"), 503)
    side.step = 3  # MAX_STALENESS is 2
    assert asked(side) and side.dropped == 1 and len(side.groups) == 3
    refused(call(side.app, "GET", "/policy", QUERY_STRING="groups=1"), 503)  # one is coming
    side.take(3)
    assert asked(side)
    refused(call(side.app, "GET", "/policy", QUERY_STRING="groups=x"), 400)


def test_all_routes_want_the_token(tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_TOKEN", "secret")
    with serving(tmp_path / "run") as workers:
        for method, path in [("GET", "/policy"), ("GET", "/policy/0"), ("POST", "/group")]:
            refused(call(workers.app, method, path, b"x"), 401)


# --- GET /policy/SHA256 -----------------------------------------------------------------
def test_a_policy_is_downloaded_or_asked_for_anew(side, tmp_path, monkeypatch):
    record, trainer = publish(side, 1), TrainerClient(side.c.TRAINER, 5)
    assert trainer.fetch(record, tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == file_of(weights(1))

    def cut_off(self, size):
        yield b"half"
        raise requests.exceptions.ChunkedEncodingError

    with monkeypatch.context() as patch:
        patch.setattr(requests.Response, "iter_content", cut_off)
        assert not trainer.fetch(record, tmp_path / "got")
    with pytest.raises(RuntimeError):  # damaged: not the bytes that were published
        (side.folder / record["sha256"]).write_bytes(b"damaged")
        trainer.fetch(record, tmp_path / "got")
    publish(side, 2)
    assert not trainer.fetch(record, tmp_path / "got")
    for sha256 in ("..", "%2e%2e", "draft"):
        assert call(side.app, "GET", f"/policy/{sha256}")[0] == 404


def test_a_policy_is_sent_whole_though_a_newer_one_replaces_it(side):
    """A download may take longer than a step: a worker would never get a policy."""
    sha256 = publish(side, 1)["sha256"]
    environ = {"REQUEST_METHOD": "GET", "PATH_INFO": f"/policy/{sha256}"}
    begun = side.app(environ, lambda *_: None)  # none of it was read yet
    publish(side, 2)
    assert [path.name for path in side.folder.iterdir()] == [side.record["sha256"]]
    assert b"".join(begun) == file_of(weights(1))


def test_what_a_killed_trainer_left_is_removed_and_close_leaves_nothing(tmp_path):
    folder = tmp_path / "run/.policy"
    folder.mkdir(parents=True)
    (folder / "old").write_bytes(b"old")
    with serving(tmp_path / "run") as workers:
        publish(workers, 0)
        assert [path.name for path in folder.iterdir()] == [workers.record["sha256"]]
    assert not folder.exists()
    with pytest.raises(requests.ConnectionError):  # and the port is free
        requests.get(workers.c.TRAINER, timeout=5)


# --- POST /group ------------------------------------------------------------------------
def test_groups_wait_in_a_bounded_queue_and_come_once(side):
    publish(side, 0)
    bodies = [sample_of(side, number) for number in range(5)]
    assert [post(side, body)[0] for body in (bodies[0], *bodies[:4])] == [200] * 5
    assert [group.id for group in side.groups] == [f"me-{n}" for n in range(4)]
    assert post(side, bodies[4])[0] == 503
    assert post(side, bodies[2])[0] == 200  # its first answer was lost, and it needs no room
    assert len(side.take(0)) == 4
    assert post(side, bodies[0])[0] == 200 and not side.groups  # also once it was trained
    assert post(side, bodies[4])[0] == 200 and len(side.groups) == 1


def test_groups_of_another_run_or_from_before_a_resume_are_not_wanted(side, tmp_path):
    """A resume may undo steps: their numbers come again, with other weights."""
    with serving(tmp_path / "before") as before:
        undone = sample_of(before, version=5)
    publish(side, 5)
    trainer = TrainerClient(side.c.TRAINER, 5)
    for group in (sample_of(side, run="another"), undone):
        assert trainer.put_group(group)
    assert not side.groups
    assert trainer.put_group(sample_of(side, version=5)) == "" and side.groups


ONE = Sample([7], [-1.0], rewards={"correctness": 1.0, "format": 0.0})
FOREIGN = {
    "another prompt": {"prompt": [5, 7]},
    "no such item": {"index": 99},
    "one completion": {"samples": [ONE]},
    "unknown ids": {"ids": [7, 400]},
    "rewards in another order": {"reward_names": ["format", "correctness"]},
    "another outcome": {"outcome": "format"},
    "a longer completion of the task's": {"ids": [7] * 201, "mask": [True] + [False] * 200},
    "no id of the model": {"ids": [7, 2], "mask": [False, False]},
    "fewer log-probs": {"logps": [-1.0] * 2},
    "a probability of 2": {"logps": [-1.0, 0.7, -1.0]},
    "no log-prob": {"logps": [-1.0, math.nan, -1.0]},
    "a reward beyond 1e30": {"correctness": -3e38},
    "no probability": {"logps": [-1.0, -1e38, -1.0]},
    "a version to come": {"version": 1},
    "a negative version": {"version": -1},
    "the trainer's name": {"sampler": "trainer"},
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_group_that_the_trainer_could_not_have_sampled_is_refused(side, what, capsys):
    publish(side, 0)
    changes = dict(FOREIGN[what])
    own = {name: changes.pop(name) for name in ("mask", "correctness", "logps") if name in changes}
    body = sample_of(side, **changes)
    meta, tensors = read_group(body)
    if "mask" in own:
        tensors["is_model_token"] = torch.tensor([*own["mask"], True])
    if "logps" in own:
        tensors["logps"] = torch.tensor(own["logps"])
    tensors["rewards"][0, 0] = own.get("correctness", 1.0)
    body = safetensors.torch.save(tensors, {"grpo": json.dumps(meta)})
    assert refused(call(side.app, "POST", "/group", body), 400)
    assert not side.groups and f"worker {changes.get('sampler', 'me')!r}" in capsys.readouterr().out


# --- take() -----------------------------------------------------------------------------
def test_groups_that_are_too_old_are_dropped_and_counted(tmp_path):
    """With MAX_STALENESS 2."""
    with serving(tmp_path / "run", PROMPTS_PER_STEP=9) as side:
        publish(side, 9)
        for number in range(8):
            post(side, sample_of(side, number, version=number))
        groups = side.take(7)
        assert json.loads(post(side, sample_of(side, 20, version=4))[1])["refused"]
        assert [group.version for group in groups] == [5, 6, 7]
        metrics = side.metrics(groups, 7)
        assert metrics == {"staleness": 1.0, "staleness_max": 2, "groups_dropped": 6}
        assert side.metrics([], 7) == {"staleness": 0, "staleness_max": 0, "groups_dropped": 6}
        assert side.take(7) == []  # at once: the ranks sample
        for number in range(10, 14):
            post(side, sample_of(side, number, version=9))
        change(side, PROMPTS_PER_STEP=3)
        assert [len(side.take(9)) for _ in range(2)] == [3, 1]  # what a step trains


def test_a_policy_that_can_not_be_written_ends_the_run_with_its_error(side, monkeypatch):
    monkeypatch.setattr(safetensors.torch, "save_file", lambda *_: 1 / 0)
    side.publish(0)
    with pytest.raises(ZeroDivisionError):
        side.publish(1)
