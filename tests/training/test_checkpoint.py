"""Checkpoints: atomic, and agreed on by machines with disks of their own."""

import json
import math
import os
import random
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from rank_threads import Ranks as Threads

from grpo.sampling.rollout import Stream
from grpo.training import checkpoint, report
from grpo.training.checkpoint import check_resumable
from grpo.training.report import constants_of

RUN = {"MODEL": "a", "LORA_RANK": 0, "DTYPE": "auto", "TASK": "t", "STEPS": 5}


class FakeEngine:
    """With an optimiser as DeepSpeed's, whose state is the rank."""

    def __init__(self):
        self.optimizer, self.loaded, self.param_groups = self, None, []

    def state_dict(self):
        return {"rank": checkpoint.dist.get_rank()}

    def load_state_dict(self, states, load_from_fp32_weights):
        self.loaded = states[checkpoint.dist.get_rank()]

    def update_lp_params(self):
        assert self.loaded == self.state_dict()


class FakePolicy:
    def save(self, folder):
        Path(folder).mkdir()
        Path(folder, "model.safetensors").write_bytes(b"weights")


class Ranks(Threads):
    def each(self, function, values):
        """-> what function(value), of a value for each rank, gives there; or SystemExit's text."""

        def run(rank):
            try:
                return function(values[rank])
            except SystemExit as error:
                return str(error)

        return self.run(run)


@pytest.fixture
def ranks(monkeypatch, request):
    return Ranks(monkeypatch, getattr(request, "param", 1), seconds=20)


@pytest.fixture
def alone(ranks):
    pass


def save(folder, step, stream, keep=2, constants=None, **progress):
    state = {"step": step, "progress": {"run": "r", "step": step} | progress}
    state["constants"] = constants or {}
    checkpoint.save(folder, FakePolicy(), FakeEngine(), stream, state, keep, "card")


def test_a_checkpoint_brings_back_the_place_in_the_data_and_the_random_numbers(tmp_path, alone):
    stream = Stream([(i, {}, [i]) for i in range(5)], 0, rank=0, world=2)
    [next(stream) for _ in range(3)]
    save(tmp_path, 7, stream)
    expected = [next(stream) for _ in range(4)], random.random(), torch.rand(3).tolist()
    path, state = checkpoint.newest(tmp_path)
    assert path.name == "step_000007" and state["progress"] == {"run": "r", "step": 7}
    fresh = Stream(stream.prompts, 0, rank=0, world=2)
    checkpoint.load(path, FakeEngine(), fresh)
    assert ([next(fresh) for _ in range(4)], random.random(), torch.rand(3).tolist()) == expected


DAMAGE = {
    "a file is gone": lambda path: os.remove(path / "model.safetensors"),
    "a file is cut": lambda path: os.truncate(path / "trainer/optimizer_0.pt", 99),
    "no state": lambda path: os.remove(path / "trainer/state.json"),
    "half a state": lambda path: os.truncate(path / "trainer/state.json", 30),
    "an odd state": lambda path: (path / "trainer/state.json").write_text("[]"),
    "an earlier layout": lambda path: (path / "trainer/state.json").write_text(
        '{"files": {"a": 3}}'
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_torn_checkpoint_is_named_and_skipped(tmp_path, alone, capsys, damage):
    stream = Stream([(0, {}, [0])], 0, 0, 1)
    for step in (3, 9, 10):
        save(tmp_path, step, stream)
    assert sorted(p.name for p in tmp_path.glob("step_*")) == ["step_000009", "step_000010"]
    (tmp_path / ".unfinished").mkdir()
    DAMAGE[damage](tmp_path / "step_000010")
    path, state = checkpoint.newest(tmp_path)
    assert path.name == "step_000009" and state["step"] == 9
    out = capsys.readouterr().out
    assert "step_000010 is incomplete and is skipped" in out and "that one does not count" in out
    save(tmp_path, 10, stream)  # in its place
    assert checkpoint.newest(tmp_path)[1]["step"] == 10 and not (tmp_path / ".unfinished").exists()


@pytest.mark.parametrize("keep", [1, 2])
def test_the_checkpoint_just_saved_stays_and_torn_ones_of_later_steps_go(tmp_path, alone, keep):
    stream = Stream([(0, {}, [0])], 0, 0, 1)
    own = {"step_000050_best", "step_notes"}  # somebody's copy of one
    for name in ("step_000200", "step_000300", *own):
        (tmp_path / name).mkdir()
    save(tmp_path, 100, stream, keep)
    assert {p.name for p in tmp_path.glob("step_*")} == {"step_000100", *own}
    for step in (999_999, 1_000_000):
        save(tmp_path, step, stream, keep)
    left = sorted(checkpoint.step_of(p) for p in tmp_path.glob("step_*") if p.name not in own)
    assert left == [999_999, 1_000_000][-keep:]
    assert checkpoint.newest(tmp_path)[1]["step"] == 1_000_000


def names_in(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


@pytest.mark.parametrize("ranks", [1, 2], indirect=True)
def test_the_best_checkpoint_is_kept_beside_the_newest_and_has_a_name(tmp_path, ranks):
    stream = Stream([(0, {}, [0])], 0, 0, 1)

    def save_all(_):
        for step, best in ((3, 3), (6, 3), (9, 3), (12, 12), (15, 12)):
            save(tmp_path, step, stream, keep=1, best=best)
            left = {"step_000009", "step_000003"} if step == 9 else None
            assert left is None or left <= set(names_in(tmp_path))
            dist.barrier()

    ranks.each(save_all, [None] * ranks.get_world_size())
    assert names_in(tmp_path) == ["best", "step_000012", "step_000015"]  # step 3 is best no longer
    assert os.readlink(tmp_path / "best") == "step_000012"  # relative: RUN_DIR may be moved
    assert (tmp_path / "best/README.md").read_text() == "card"
    (tmp_path / "step_000015/README.md").write_text("a card that somebody has finished")
    assert checkpoint.step_of(ranks.each(checkpoint.newest, [tmp_path] * 2)[0][0]) == 15


def test_links_follow_what_the_resumed_checkpoint_knows(tmp_path, alone):
    stream = Stream([(0, {}, [0])], 0, 0, 1)
    constants = {"run": "r", "constants": RUN | {"RUN_DIR": str(tmp_path)}}
    (tmp_path / "run.json").write_text(json.dumps(constants))
    first = {"best": 3, "best_accuracy": 0.5}
    for step, facts in ((3, first), (6, first), (9, {"best": 9, "best_accuracy": 0.7})):
        extra = {"progress": {"run": "r", "step": step} | facts, "constants": RUN}
        state = {"step": step} | extra
        checkpoint.save(tmp_path, FakePolicy(), FakeEngine(), stream, state, 9, "")
    checkpoint.point(tmp_path, "final", 9)
    os.remove(tmp_path / "step_000009/model.safetensors")  # torn: step 6 is resumed from

    def resumed(**changes):
        names = {"MAX_GRAD_NORM": 1.0, "ADAM_BETAS": (0.9, 0.99), "WEIGHT_DECAY": 0.0}
        names |= {"RUN_DIR": str(tmp_path), "KEEP_BEST": True} | changes
        engine = FakeEngine()
        p = checkpoint.open_run(str(tmp_path), RUN | names, engine, stream, None)
        return p.best, p.best_accuracy

    assert resumed() == (3, 0.5) and os.readlink(tmp_path / "best") == "step_000003"
    assert not os.path.lexists(tmp_path / "final")  # until the run has ended again
    assert resumed(KEEP_BEST=False) == (-1, -1) and not os.path.lexists(tmp_path / "best")
    shutil.rmtree(tmp_path / "step_000003")
    assert resumed() == (-1, -1)  # so the next evaluation is the best
    assert not os.path.lexists(tmp_path / "best")


def test_the_best_is_the_first_to_have_reached_its_result_and_never_the_model_itself():
    progress, seen = checkpoint.Progress("run"), []
    for progress.step, accuracy in enumerate((0.3, 0.2, 0.3, 0.5, 0.5, 0.4)):
        progress.take_evaluation(accuracy, keep_best=True)
        seen.append(progress.best)
    assert seen == [-1, -1, -1, 3, 3, 3]
    assert (progress.accuracy, progress.evaluated, progress.best_accuracy) == (0.4, 5, 0.5)
    progress.take_evaluation(0.9, keep_best=False)
    assert progress.best == 3


def test_what_is_no_link_stays_and_a_disk_without_links_gets_a_file(tmp_path, alone, monkeypatch):
    (tmp_path / "best").mkdir()  # somebody's copy
    checkpoint.point(tmp_path, "best", 3)
    checkpoint.point(tmp_path, "best", -1)
    assert (tmp_path / "best").is_dir()

    def refuse(*_):
        raise OSError("no links here")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    checkpoint.point(tmp_path, "final", 12)
    assert (tmp_path / "final").read_text() == "step_000012\n"
    assert names_in(tmp_path) == ["best", "final"]


def test_ranks_meet_before_they_gather_the_weights_that_they_read(tmp_path, alone, monkeypatch):
    """One may read for longer than a collective waits."""
    stream, events = Stream([(0, {}, [0])], 0, 0, 1), []
    save(tmp_path, 3, stream)
    engine = FakeEngine()
    monkeypatch.setattr(dist, "barrier", lambda: events.append("meet"))
    engine.load_state_dict = lambda *_, **__: events.append("read")
    engine.update_lp_params = lambda: events.append("gather")
    checkpoint.load(tmp_path / "step_000003", engine, stream)
    assert events == ["read", "meet", "gather"]


def test_two_trainers_do_not_share_a_folder(tmp_path):
    first = checkpoint.lock_run(str(tmp_path / "run"))
    with pytest.raises(SystemExit, match="another trainer is running in RUN_DIR"):
        checkpoint.lock_run(str(tmp_path / "run"))
    first.close()
    checkpoint.lock_run(str(tmp_path / "run")).close()


def test_no_checkpoint_is_no_error(tmp_path, alone):
    assert checkpoint.newest(tmp_path / "no folder") == (None, None)


def test_a_run_does_not_begin_again_because_no_checkpoint_is_complete(tmp_path, alone):
    save(tmp_path, 3, Stream([(0, {}, [0])], 0, 0, 1))
    os.remove(tmp_path / "step_000003/model.safetensors")
    with pytest.raises(SystemExit, match="no checkpoint in RUN_DIR = .* is complete: rank 0 on "):
        checkpoint.newest(tmp_path)


# Which folder each rank sees -> who makes and renames what is in it
@pytest.mark.parametrize(
    "ranks, folders, leaders",
    [
        (1, "a", [True]),
        (4, "aaaa", [True, False, False, False]),
        (4, "aabb", [True, False, True, False]),
        (4, "abab", [True, True, False, False]),
        (3, "abc", [True, True, True]),
        (3, "aAb", [True, False, True]),  # the same disk, mounted elsewhere
    ],
    indirect=["ranks"],
)
def test_each_folder_has_one_rank_that_leads(tmp_path, ranks, folders, leaders):
    (tmp_path / "A").symlink_to(tmp_path / "a")
    (tmp_path / "a").mkdir()
    seen = [tmp_path / name for name in folders]
    assert ranks.each(checkpoint.leads, seen) == leaders
    assert not any(list(folder.iterdir()) for folder in seen)  # nothing is left


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_a_checkpoint_counts_only_when_every_machine_has_its_part(tmp_path, ranks):
    disks, stream = [tmp_path / "a", tmp_path / "b"], Stream([(0, {}, [0])], 0, 0, 1)
    disks[1].mkdir()
    (disks[1] / "step_000003").write_text("in the way")
    with pytest.raises(OSError, match="step_000003"):
        ranks.each(lambda disk: save(disk, 3, stream), disks)
    assert not list(disks[0].glob("step_*"))


def swap(one, other):
    one.rename(one.with_name("aside"))
    other.rename(one)
    one.with_name("aside").rename(other)


# What happens to the disks of two machines -> the step that both resume from, or what they say
DISKS = {
    "nothing": (lambda a, b: None, 9),
    "a part is gone": (lambda a, b: os.remove(b / "step_000009/trainer/rank_1.json"), 3),
    "a part is cut": (lambda a, b: os.truncate(b / "step_000009/trainer/optimizer_1.pt", 9), 3),
    "killed in between": (lambda a, b: (a / "step_000009").rename(a / ".unfinished"), 3),
    "the second is new": (lambda a, b: shutil.rmtree(b), "rank 1 on .*b/step_0000.* Start each"),
    "the first is new": (lambda a, b: shutil.rmtree(a), "rank 1, on .*, holds the run a-.* none"),
    "they changed places": (swap, "is complete: rank 0 on .*a/step_0000"),
}


@pytest.mark.parametrize("ranks", [2], indirect=True)
@pytest.mark.parametrize("damage", DISKS)
def test_machines_with_disks_of_their_own_agree_on_what_is_complete(tmp_path, ranks, damage):
    disks, damage, expected = [tmp_path / "a", tmp_path / "b"], *DISKS[damage]
    stream = Stream([(0, {}, [0])], 0, 0, 1)

    def begin(disk):
        checkpoint.leads(disk)
        run, before = checkpoint.run_of(str(disk), RUN)
        assert before == {}
        checkpoint.write_run(str(disk), run, RUN)
        [save(disk, step, stream) for step in (1, 3, 9)]
        return run

    def resume(disk):
        checkpoint.leads(disk)
        run, before = checkpoint.run_of(str(disk), RUN)
        assert before == RUN
        path, _ = checkpoint.newest(str(disk))
        checkpoint.load(path, FakeEngine(), stream)
        save(disk, 9, stream)
        return run, checkpoint.step_of(path)

    run, same = ranks.each(begin, disks)
    assert run == same
    for disk in disks:
        assert sorted(p.name for p in disk.glob("step_*")) == ["step_000003", "step_000009"]
    models = [(disk / "step_000009/model.safetensors").exists() for disk in disks]
    assert models == [True, False]  # a model for people is where rank 0 is
    damage(*disks)
    found = ranks.each(resume, disks)
    if isinstance(expected, int):
        assert found == [(run, expected)] * 2
        assert [step for _, step in ranks.each(resume, disks)] == [9, 9]
    else:
        assert all(re.search(expected, text) for text in found), found


def test_a_run_resumes_with_as_many_ranks_and_the_same_model(capsys):
    import grpo_ref_split as trainer

    now = dict(vars(trainer))
    state = {"constants": constants_of(now), "ranks": 2, "step": 40, "files": [{}, {}]}
    assert state["constants"]["ADAM_BETAS"] == [0.9, 0.99]
    check_resumable("runs/a/step_000040", state, now, 2)
    assert capsys.readouterr().out == ""
    refusal = "of a run on 2 ranks, here are 3: launch 2, or begin .* MODEL = 'runs/a/step_000040'"
    with pytest.raises(SystemExit, match=refusal):
        check_resumable("runs/a/step_000040", state, now, 3)
    for name in ("MODEL", "LORA_RANK", "DTYPE", "TASK"):
        with pytest.raises(SystemExit) as refused:
            check_resumable("runs/a/step_000040", state, now | {name: "other"}, 2)
        assert f"{name} = 'other'" in str(refused.value)
        assert "MODEL = 'runs/a/step_000040'" in str(refused.value)  # the remedy
    check_resumable("step_000040", state, now | {"STEPS": 777, "CLIP_LOW": 0.1}, 2)
    out = capsys.readouterr().out
    assert "STEPS 500 -> 777" in out and "CLIP_LOW 0.2 -> 0.1" in out


def opened(folder, reference=None, **changes):
    """-> run.json, after a start with RUN and other constants."""
    constants = RUN | {"RUN_DIR": str(folder), "MAX_GRAD_NORM": 1.0, "ADAM_BETAS": (0.9, 0.99)}
    constants |= {
        "WEIGHT_DECAY": 0.0,
        "KEEP_BEST": True,
        "REF_SERVER": None,
        "KL_BETA": 0.04,
    } | changes
    engine, stream = FakeEngine(), Stream([(0, {}, [0])], 0, 0, 1)
    progress = checkpoint.open_run(str(folder), constants, engine, stream, reference)
    record = json.loads((folder / "run.json").read_text())
    assert record["run"] == progress.run
    return record


def test_run_json_has_the_constants_of_the_last_start(tmp_path, alone):
    first = opened(tmp_path)
    assert opened(tmp_path) == first and first["constants"]["STEPS"] == 5
    again = opened(tmp_path, STEPS=7)
    assert again["run"] == first["run"] and again["constants"]["STEPS"] == 7
    state = {"step": 3, "constants": again["constants"], "progress": {"run": first["run"]}}
    checkpoint.save(
        tmp_path, FakePolicy(), FakeEngine(), Stream([(0, {}, [0])], 0, 0, 1), state, 1, ""
    )
    last = opened(tmp_path, STEPS=9)
    assert last["run"] == first["run"] and last["constants"]["STEPS"] == 9
    for name in ("MODEL", "TASK"):
        with pytest.raises(SystemExit) as refused:
            opened(tmp_path, **{name: "other"})
        assert f"MODEL = '{tmp_path}/step_000003'" in str(refused.value)
    assert json.loads((tmp_path / "run.json").read_text()) == last


@pytest.mark.parametrize("name", ["MODEL", "LORA_RANK", "DTYPE", "TASK"])
def test_a_run_without_a_checkpoint_resumes_as_the_same_or_not_at_all(
    tmp_path, alone, capsys, name
):
    first = opened(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(SystemExit, match=f"{name} = 'other' must be .* choose another RUN_DIR"):
        opened(tmp_path, **{name: "other"})
    assert json.loads((tmp_path / "run.json").read_text()) == first
    # Not one that failed before anything came of it
    (tmp_path / "metrics.jsonl").write_text("")
    other = opened(tmp_path, **{name: "other"})
    assert other["run"] != first["run"] and other["constants"][name] == "other"
    assert f"with another {name} a new one begins" in capsys.readouterr().out


def test_what_was_logged_after_the_checkpoint_is_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(report.dist, "get_rank", lambda: 0)
    folder = report.RunFolder(tmp_path)
    for step in range(1, 6):
        folder.log("metrics.jsonl", {"step": step, "loss": float("nan")})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "los')  # killed while writing
    folder.undo(3)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == [1, 2, 3] and records[0]["loss"] is None


# --- A run without a checkpoint ---------------------------------------------------------
def test_what_a_run_without_a_checkpoint_logged_is_set_aside(tmp_path, alone):
    """It begins anew: its curves must not have two first steps."""
    first = opened(tmp_path)
    for number in (1, 2):
        for name in ("metrics.jsonl", "samples.jsonl"):
            (tmp_path / name).write_text(f'{{"step": {number}}}\n')
        assert opened(tmp_path)["run"] == first["run"]
        for name in ("metrics.jsonl", "samples.jsonl"):
            assert not (tmp_path / name).exists()
            (aside,) = (tmp_path / f"earlier_{number}").glob(name)
            assert aside.read_text() == f'{{"step": {number}}}\n'
    (tmp_path / "metrics.jsonl").touch()  # nothing was logged
    opened(tmp_path)
    assert names_in(tmp_path) == ["earlier_1", "earlier_2", "metrics.jsonl", "run.json"]


def test_a_run_with_a_checkpoint_keeps_what_it_logged_until_then(tmp_path, alone):
    run = opened(tmp_path)["run"]
    save(tmp_path, 3, Stream([(0, {}, [0])], 0, 0, 1), constants=RUN, run=run)
    (tmp_path / "metrics.jsonl").write_text('{"step": 3}\n{"step": 4}\n')
    opened(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 3}\n'
    assert not list(tmp_path.glob("earlier_*"))


# --- A reference that was refreshed -----------------------------------------------------
class FakeReference:
    def __init__(self, value):
        self.value = torch.tensor([value])

    def weights(self):
        return {"value": self.value}

    def load(self, tensors):
        self.value = tensors["value"]


@pytest.mark.parametrize("refreshed", [0, 2])
def test_a_refreshed_reference_is_part_of_a_checkpoint(tmp_path, alone, refreshed):
    stream, kept = Stream([(0, {}, [0])], 0, 0, 1), FakeReference(2.0)
    progress = {"run": opened(tmp_path)["run"], "step": 3, "reference": refreshed}
    state = {"step": 3, "progress": progress, "constants": RUN}
    written = [FakePolicy(), FakeEngine(), stream, state, 2, "", kept if refreshed else None]
    checkpoint.save(tmp_path, *written)
    path = tmp_path / "step_000003/trainer/reference.safetensors"
    assert path.exists() == bool(refreshed)
    opened(tmp_path, model := FakeReference(1.0))
    assert model.value.item() == (2.0 if refreshed else 1.0)
    if refreshed:
        with pytest.raises(SystemExit) as refused:  # that server has MODEL
            opened(tmp_path, REF_SERVER="http://127.0.0.1:9")
        assert "REF_SERVER = 'http://127.0.0.1:9'" in str(refused.value)
        with pytest.raises(SystemExit, match="KL_BETA"):  # it would be lost at the next checkpoint
            opened(tmp_path, KL_BETA=0)
        os.truncate(path, 9)  # as any file of a checkpoint
        assert checkpoint.examine(tmp_path / "step_000003")[1]


# --- A run that ends by an error --------------------------------------------------------
@pytest.mark.parametrize(
    ("progress", "weight", "is_saved"),
    [
        ({"step": 5, "saved": 3, "checked": True}, 1.0, True),
        ({"step": 5, "saved": 5, "checked": True}, 1.0, False),  # nothing is new
        ({"step": 5, "saved": 3, "checked": False}, 1.0, False),  # not known to learn rightly
        ({"step": 5, "saved": 3, "checked": True}, math.nan, False),
    ],
)
def test_a_run_that_fails_saves_what_is_sound(alone, monkeypatch, progress, weight, is_saved):
    saved = []
    monkeypatch.setattr(checkpoint, "save_run", saved.append)
    model = torch.nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(weight)
    run = SimpleNamespace(
        progress=checkpoint.Progress("r", **progress), policy=SimpleNamespace(model=model)
    )
    checkpoint.save_failed(run)
    assert saved == [run] * is_saved
