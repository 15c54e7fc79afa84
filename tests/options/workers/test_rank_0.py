"""Rank 0's side of workers: what it serves, what it takes, and what it refuses."""

import json
import math
import threading
from itertools import chain

import pytest
import requests
from helpers import call, refused
from trainer_side import Policy, change, file_of, post, publish, sample_of, serving, weights

from grpo.options.workers import rank_0 as workers_module
from grpo.options.workers.policy_proof import check_proof
from grpo.options.workers.shared_settings import settings_of
from grpo.options.workers.worker import TrainerClient
from grpo.proof import NOISE
from grpo.sample import Sample
from grpo.wire import sha256_of


@pytest.fixture
def side(tmp_path):
    with serving(tmp_path / "run") as workers:
        yield workers


def asked(workers, worker="me"):
    """-> (record, room), as a worker gets them."""
    answer = call(workers.app, "GET", "/policy", QUERY_STRING=f"worker={worker}")[2]
    return tuple(json.loads(answer).values())


# --- GET /policy --------------------------------------------------------------------
def test_a_policy_is_published_with_all_that_a_worker_checks(side):
    assert asked(side) == (None, 4)
    record = publish(side, 3)
    assert asked(side) == (json.loads(json.dumps(record)), 4)
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
    before, go_on = weights(0), threading.Event()
    save = workers_module.safetensors.torch.save_file
    monkeypatch.setattr(
        workers_module.safetensors.torch, "save_file", lambda *a: go_on.wait(60) and save(*a)
    )
    side.publish(0)
    side.policy.become(weights(1))
    assert asked(side)[0] is None  # and training goes on
    go_on.set()
    side.finish()
    assert (side.folder / side.record["sha256"]).read_bytes() == file_of(before)


def test_the_room_is_divided_among_the_workers_that_are_heard_of(side, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(workers_module.time, "monotonic", lambda: now[0])
    assert [asked(side, name)[1] for name in ("a", "b", "c", "a")] == [4, 2, 2, 2]
    publish(side, 0)
    assert post(side, sample_of(side))[0] == 200
    assert asked(side, "a")[1] == 1
    now[0] += workers_module.ACTIVE_SECONDS  # b and c are gone
    assert asked(side, "a")[1] == 3
    for number in range(1, 4):
        post(side, sample_of(side, number))
    assert asked(side, "a")[1] == 0


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
    request = trainer.session.request

    def breaks(*args, **named):
        reply = request(*args, **named)
        reply.iter_content = lambda size: chain([b"half"], cut_off())
        return reply

    def cut_off():
        raise requests.exceptions.ChunkedEncodingError
        yield

    trainer.session.request = breaks
    assert not trainer.fetch(record, tmp_path / "got")
    trainer.session.request = request
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
    assert post(side, sample_of(side))[0] == 503  # no policy yet: from before a restart
    publish(side, 0)
    bodies = [sample_of(side, number) for number in range(5)]
    assert [post(side, body)[0] for body in (bodies[0], *bodies[:4])] == [200] * 5
    assert [group.id for group in side.groups] == [f"me-{n}" for n in range(4)]
    assert post(side, bodies[4])[0] == 503
    assert post(side, bodies[2])[0] == 200  # its first answer was lost, and it needs no room
    assert len(side.take(0)) == 4
    assert post(side, bodies[0])[0] == 200 and not side.groups  # also once it was trained
    assert post(side, bodies[4])[0] == 200 and len(side.groups) == 1


def test_a_worker_waits_for_room_longer_than_for_an_answer(side, no_pause):
    """A step, or an evaluation, may take longer than WAIT_LIMIT_SECONDS."""
    publish(side, 0)
    for number in range(4):
        post(side, sample_of(side, number))
    trainer, answers = TrainerClient(side.c.TRAINER, 0), []
    request = trainer.session.request

    def note(*args, **named):
        answers.append(request(*args, **named))
        if len(answers) == 5:
            side.take(0)
        return answers[-1]

    trainer.session.request = note
    assert trainer.put_group(sample_of(side, 4)) == ""
    assert [answer.status_code for answer in answers] == [503] * 5 + [200]


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


FOREIGN = {
    "another prompt": {"prompt": [5, 7]},
    "no such item": {"index": 99},
    "one completion": {"samples": [Sample([7], [-1.0], rewards={"correctness": 1, "format": 0})]},
    "unknown ids": {"ids": [7, 400]},
    "negative ids": {"ids": [7, -1]},
    "rewards in another order": {"reward_names": ["format", "correctness"]},
    "another outcome": {"outcome": "format"},
    "a longer completion": {"ids": [7] * 201},
    "any difference of log-probs as noise": {"noise": math.inf},
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_group_that_the_trainer_could_not_have_sampled_is_refused(side, what):
    publish(side, 0)
    body = sample_of(side, **FOREIGN[what])
    assert refused(call(side.app, "POST", "/group", body), 400)
    assert not side.groups


def test_sequence_ratios_take_no_groups_of_a_sampler_with_rounding(tmp_path):
    with serving(tmp_path / "run", RATIO_LEVEL="sequence") as side:
        publish(side, 0)
        for noise, status in ((NOISE["bfloat16"], 400), (NOISE["float32"], 200)):
            assert call(side.app, "POST", "/group", sample_of(side, noise=noise))[0] == status


# --- take() -----------------------------------------------------------------------------
def test_groups_that_are_too_old_are_dropped_and_counted(tmp_path):
    """With MAX_STALENESS 2."""
    with serving(tmp_path / "run", PROMPTS_PER_STEP=9) as side:
        publish(side, 9)
        for number in range(8):
            post(side, sample_of(side, number, version=number))
        groups = side.take(7)
        assert [group.version for group in groups] == [5, 6, 7]
        metrics = side.metrics(groups, 7)
        assert metrics == {"staleness": 1.0, "staleness_max": 2, "groups_dropped": 5}
        assert side.metrics([], 7) == {"staleness": 0, "staleness_max": 0, "groups_dropped": 5}
        assert side.take(7) == []  # at once: the ranks sample
        for number in range(10, 14):
            post(side, sample_of(side, number, version=9))
        change(side, PROMPTS_PER_STEP=3)
        assert [len(side.take(9)) for _ in range(2)] == [3, 1]  # what a step trains


def test_a_policy_that_can_not_be_written_ends_the_run_with_its_error(side, monkeypatch):
    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(workers_module.safetensors.torch, "save_file", fail)
    side.publish(0)
    with pytest.raises(OSError):
        side.publish(1)
    side.error = None
