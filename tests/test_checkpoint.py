"""Checkpoints: atomic, examined by each rank, and resumed from."""

import contextlib
import errno
import json
import math
import os
import pickle
import re
import resource
import shutil
import signal
import struct
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from rank_threads import Ranks as Threads
from safetensors import SafetensorError

from grpo import checkpoint, report, resume
from grpo.ranks import RunFailed
from grpo.run import Progress
from grpo.sample import Question

RUN = {  # the constants that checkpoints look at
    "MODEL": "a", "LORA_RANK": 0, "BASE_BITS": 16, "DTYPE": "auto", "TASK": "t", "STEPS": 5,
    "MAX_GRAD_NORM": 1.0, "WEIGHT_DECAY": 0.0, "SEED": 0, "SAVE_STEPS": 1, "KEEP_CHECKPOINTS": 2,
    "EVAL_QUESTIONS": 9, "EVAL_SPLIT": "test", "OUTCOME": "correctness",
}  # fmt: skip


DATA = "the hash of the prompts"


class FakeEngine:
    """With an optimiser as DeepSpeed's, whose state is the rank."""

    def __init__(self):
        self.optimizer, self.loaded, self.param_groups, self.state = self, None, [], {}

    def state_dict(self):
        return {"rank": checkpoint.dist.get_rank(), "masters": torch.ones(9)}

    def load_state_dict(self, states, load_from_fp32_weights):
        self.loaded = states[checkpoint.dist.get_rank()]

    def bfloat16_enabled(self):
        return False

    def update_lp_params(self):
        assert self.loaded["rank"] == checkpoint.dist.get_rank()


class FakePolicy:
    model = torch.nn.Linear(1, 1)

    def save(self, folder):
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
    return Ranks(monkeypatch, getattr(request, "param", 1))


def save(folder, step, *, keep=2, policy=None, engine=None, **progress):
    """Saves a checkpoint of a run, named "r" if it has no other name."""
    run = SimpleNamespace(data=DATA)
    folder.mkdir(exist_ok=True)
    run.c = SimpleNamespace(**RUN | {"RUN_DIR": str(folder), "KEEP_CHECKPOINTS": keep})
    run.record, run.progress = vars(run.c), Progress(**{"name": "r"} | progress, step=step)
    run.policy, run.engine = policy or FakePolicy(), engine or FakeEngine()
    checkpoint.save_run(run)


def opened(folder, *, data=None, **changes):
    """-> the Progress of a run that begins or resumes with RUN and other constants."""
    c = SimpleNamespace(**RUN | {"RUN_DIR": str(folder)} | changes)
    return resume.open_run(c, vars(c), FakeEngine(), data or DATA, {})


def names_in(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def saved(folder):
    return [checkpoint.step_of(path) for path in checkpoint.saved_in(folder)]


# --- Save, find and load --------------------------------------------------------------
class Touches:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_code_in_a_checkpoint_does_not_run(tmp_path, alone):
    save(tmp_path, 1)
    path = tmp_path / "step_000001"
    torch.save({"rank": Touches(tmp_path / "ran")}, path / "trainer/optimizer_0.pt")
    with pytest.raises(pickle.UnpicklingError, match="WeightsUnpickler error: Unsupported"):
        checkpoint.load(path, FakeEngine(), 0)
    assert not (tmp_path / "ran").exists()


def test_a_resumed_run_maps_its_optimiser_and_does_not_hold_it_twice(tmp_path, alone, monkeypatch):
    """Its peak was 11.6 bytes a parameter above DeepSpeed's 18; mapped from the file it is 1.6."""
    save(tmp_path, 1)
    found, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda *a, **how: found.append(how) or load(*a, **how))
    checkpoint.load(tmp_path / "step_000001", FakeEngine(), 0)
    assert found and all(how["mmap"] for how in found)


def test_a_checkpoint_that_was_loaded_is_not_in_use_and_one_that_stays_ends_no_run(
    tmp_path, alone, monkeypatch, capsys
):
    """torch takes moments that are in RAM, as with offload, as the file's: on NFS a file in use
    can't be deleted with its folder, and elsewhere its space stays taken."""
    engine = FakeEngine()
    engine.state_dict = lambda: {"exp_avg": torch.ones(9)}
    engine.load_state_dict = lambda states, **_: engine.state.update({0: states[0]})
    engine.update_lp_params = lambda: None
    save(tmp_path, 1, engine=engine)
    checkpoint.load(tmp_path / "step_000001", engine, 0)
    assert engine.state[0]["exp_avg"].tolist() == [1] * 9
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path, **_: None)
        save(tmp_path, 2, keep=1)
    save(tmp_path, 3, keep=1)
    assert saved(tmp_path) == [3]


# --- Other data -------------------------------------------------------------------------


def test_other_prompts_have_a_new_order(tmp_path, alone, capsys):
    """Once: the next checkpoint has the new hash."""
    save(tmp_path, 3, prompts=7, groups=9, best=3, best_accuracy=0.9)
    progress = opened(tmp_path)
    assert (progress.prompts, progress.groups) == (7, 9) and "anew" not in capsys.readouterr().out
    progress = opened(tmp_path, data="other")
    assert (progress.prompts, progress.groups, progress.best) == (0, 0, 3)
    assert "their order begins anew" in capsys.readouterr().out
    assert json.loads((tmp_path / "run.json").read_text())["data"] == "other"


def test_the_hash_is_of_the_prompts_ids(alone):
    hashed = lambda item, ids: resume.data_of(SimpleNamespace(prompts=[Question(0, item, ids)]))
    assert hashed({"answer": 4}, [5, 6]) == hashed({"answer": object()}, [5, 6])
    assert hashed({}, [6, 5]) != hashed({}, [5, 6])


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_ranks_with_different_prompts_do_not_train(ranks):
    def data(rank):
        recipe = SimpleNamespace(task=None, prompts=[Question(0, {}, [rank])])
        return resume.data_of(recipe)

    assert all("the ranks have other prompts" in text for text in ranks.each(data, [0, 1]))


def test_accuracies_of_other_questions_are_not_compared(tmp_path, alone):
    save(tmp_path, 3, best=3, best_accuracy=0.9)
    assert opened(tmp_path).best_accuracy == 0.9
    progress = opened(tmp_path, EVAL_QUESTIONS=512)
    assert (progress.best, progress.best_accuracy) == (3, None)


DAMAGE = {
    "a file is gone": lambda path: os.remove(path / "model.safetensors"),
    "a file is cut": lambda path: os.truncate(path / "trainer/optimizer_0.pt", 99),
    "no state": lambda path: os.remove(path / "trainer/state.json"),
    "half a state": lambda path: os.truncate(path / "trainer/state.json", 30),
    "an odd state": lambda path: (path / "trainer/state.json").write_text("[]"),
    "a bit": lambda path: flip(path / "trainer/optimizer_0.pt"),
    "zeros": lambda path: zero(path / "trainer/optimizer_0.pt"),
}


def flip(file):
    """Flips a bit of a tensor's first number."""
    with zipfile.ZipFile(file) as parts:
        (name,) = [name for name in parts.namelist() if name.endswith("data/0")]
        number = parts.getinfo(name)
    data = bytearray(file.read_bytes())
    head = number.header_offset
    data[head + 30 + sum(struct.unpack("<HH", data[head + 26 : head + 30]))] ^= 1
    file.write_bytes(data)


def zero(file):
    file.write_bytes(bytes(file.stat().st_size))


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_torn_checkpoint_is_named_and_skipped(tmp_path, alone, capsys, damage):
    for step in (3, 9, 10):
        save(tmp_path, step)
    assert saved(tmp_path) == [9, 10]
    (tmp_path / ".unfinished").mkdir()
    DAMAGE[damage](tmp_path / "step_000010")
    path, state = checkpoint.newest(tmp_path)
    assert path.name == "step_000009" and state["step"] == 9
    assert not (tmp_path / ".unfinished").exists()  # it may hold all free space
    assert "step_000010 is incomplete or damaged, and is skipped: rank" in capsys.readouterr().out
    save(tmp_path, 10)  # in its place
    assert checkpoint.newest(tmp_path)[1]["step"] == 10 and not (tmp_path / ".unfinished").exists()
    for path in checkpoint.saved_in(tmp_path):
        os.remove(path / "model.safetensors")
    with pytest.raises(SystemExit, match="no checkpoint in RUN_DIR = .*: rank 0 on "):
        checkpoint.newest(tmp_path)  # a run does not begin again


def test_the_checkpoint_just_saved_stays_and_torn_ones_of_later_steps_go(tmp_path, alone):
    own = {"step_000050_best", "step_notes"}  # somebody's copy of one
    for name in ("step_000200", "step_000300", *own):
        (tmp_path / name).mkdir()
    for step in (100, 999_999, 1_000_000):
        save(tmp_path, step)
        assert saved(tmp_path)[-1] == step
    assert saved(tmp_path) == [999_999, 1_000_000] and own < set(names_in(tmp_path))
    assert checkpoint.newest(tmp_path)[1]["step"] == 1_000_000


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_the_best_checkpoint_is_kept_beside_the_newest_and_has_a_name(tmp_path, ranks):
    def save_all(_):
        for step, best in ((3, 3), (6, 3), (9, 3), (12, 12), (15, 12)):
            save(tmp_path, step, keep=1, best=best)
            if step == 9:
                assert {"step_000009", "step_000003"} <= set(names_in(tmp_path))
            dist.barrier()

    ranks.each(save_all, [None] * 2)
    assert names_in(tmp_path) == ["best", "step_000012", "step_000015"]  # step 3 is best no longer
    assert os.readlink(tmp_path / "best") == "step_000012"  # relative: RUN_DIR may be moved
    states = sorted(path.parts[-3] for path in tmp_path.glob("step_*/trainer/optimizer_*.pt"))
    assert states == ["step_000015"] * 2  # the best is kept for its model
    assert checkpoint.step_of(ranks.each(checkpoint.newest, [tmp_path] * 2)[0][0]) == 15


def test_a_disk_without_room_for_a_checkpoint_is_refused(tmp_path, alone, monkeypatch, capsys):
    model, free = torch.nn.Linear(100, 100), 10_100 * (4 + 12)
    c = SimpleNamespace(**RUN | {"RUN_DIR": str(tmp_path)})
    for room in (free, free - 1):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, room=room: SimpleNamespace(free=room))
        with contextlib.nullcontext() if room == free else pytest.raises(SystemExit, match="disk"):
            checkpoint.check_disk(c, model)
    assert "takes 0.000162 GB" in capsys.readouterr().out
    c.LORA_RANK = 8
    model.weight.requires_grad_(False)
    checkpoint.check_disk(c, model)  # of what is trained alone


class Unsavable(FakePolicy):
    def save(self, folder):
        raise SafetensorError("I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("part", ["model", "optimiser", "state"])
def test_a_disk_that_fills_up_while_a_checkpoint_is_saved_is_named(part, tmp_path, alone, request):
    """The optimiser is larger than a process may write here: torch's error is "unexpected pos"."""
    engine = FakeEngine()
    engine.state_dict = lambda: {"rank": torch.zeros(10**6 if part == "optimiser" else 1)}
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit))
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**5, limit[1]))
    more = {"policy": Unsavable() if part == "model" else FakePolicy(), "engine": engine}
    more["name"] = "x" * (10**6 if part == "state" else 1)
    with pytest.raises(RunFailed) as failed:
        save(tmp_path, 5, **more)
    assert f"RUN_DIR = '{tmp_path}' can't be written" in str(failed.value.__cause__)
    assert not (tmp_path / ".unfinished").exists() and saved(tmp_path) == []


def test_a_checkpoint_without_room_is_not_begun(tmp_path, alone, monkeypatch):
    save(tmp_path, 3)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=31))
    with pytest.raises(RunFailed) as failed:  # 2 numbers of 4 and 12 bytes
        save(tmp_path, 5)
    assert "a checkpoint takes 3.2e-08 GB, " in str(failed.value.__cause__) and saved(tmp_path) == [
        3
    ]


def test_links_follow_what_the_resumed_checkpoint_knows(tmp_path, alone):
    save(tmp_path, 3, keep=9, best=3, best_accuracy=0.5)
    save(tmp_path, 6, keep=9, best=3, best_accuracy=0.5)
    save(tmp_path, 9, keep=9, best=9, best_accuracy=0.7)
    checkpoint.point(tmp_path, "final", 9)
    os.remove(tmp_path / "step_000009/model.safetensors")  # torn: step 6 is resumed from

    def resumed(**changes):
        p = opened(tmp_path, **changes)
        return p.best, p.best_accuracy

    assert resumed() == (3, 0.5) and os.readlink(tmp_path / "best") == "step_000003"
    assert not os.path.lexists(tmp_path / "final")  # until the run has ended again


def test_the_best_is_the_first_to_have_reached_its_result_and_never_the_model_itself():
    progress, seen = Progress("run"), []
    for progress.step, accuracy in enumerate((0.3, 0.2, 0.3, 0.5, 0.5, 0.4)):
        progress.take_evaluation(accuracy)
        seen.append(progress.best)
    assert seen == [None, None, None, 3, 3, 3]
    assert (progress.evaluated, progress.best_accuracy) == (5, 0.5)


def test_a_folder_that_is_no_link_stays(tmp_path, alone):
    (tmp_path / "best").mkdir()  # somebody's copy
    for step in (3, None):
        checkpoint.point(tmp_path, "best", step)
    assert (tmp_path / "best").is_dir()


# --- Several ranks --------------------------------------------------------------------
@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_ranks_without_a_common_folder_do_not_begin(tmp_path, ranks, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "mounted elsewhere").symlink_to("a")
    (tmp_path / "b").mkdir()
    same = [tmp_path / "a", tmp_path / "mounted elsewhere"]
    assert ranks.each(resume.check_shared, same) == [None, None]
    monkeypatch.setattr(resume, "SHARED_SECONDS", 0.1)
    for text in ranks.each(resume.check_shared, [tmp_path / "a", tmp_path / "b"]):
        assert re.search("RUN_DIR = .* not the same folder on rank 0 and rank 1: .*share", text)
    assert not any(list((tmp_path / name).iterdir()) for name in "ab")  # nothing is left


@pytest.mark.parametrize("ranks", [2], indirect=True)
@pytest.mark.parametrize("damage", [os.remove, flip])
def test_what_one_rank_finds_damaged_all_skip(tmp_path, ranks, damage):
    ranks.each(lambda _: [save(tmp_path, step) for step in (3, 9)], [None] * 2)
    damage(tmp_path / "step_000009/trainer/optimizer_1.pt")
    assert [opened.step for opened in ranks.each(opened, [tmp_path] * 2)] == [3, 3]


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_another_number_of_ranks_is_refused(tmp_path, ranks, monkeypatch):
    ranks.each(lambda _: save(tmp_path, 3), [None] * 2)
    for text in Ranks(monkeypatch, 3).each(checkpoint.newest, [tmp_path] * 3):
        assert re.search(
            "saved by 2 ranks: start as many .* not 3, .*MODEL = '.*step_000003'", text
        ), text


def test_a_checkpoint_of_an_earlier_version_is_refused(tmp_path, alone):
    save(tmp_path, 3)
    file = tmp_path / "step_000003/trainer/state.json"
    state = json.loads(file.read_text())
    del state["format"]
    file.write_text(json.dumps(state))
    with pytest.raises(SystemExit, match="saved by another version.* MODEL = '.*step_000003'"):
        opened(tmp_path)


# --- Begin or resume ------------------------------------------------------------------
OTHER = {"MODEL": "b", "LORA_RANK": 8, "BASE_BITS": 4, "DTYPE": "float32", "TASK": "u"}


def test_a_run_resumes_with_the_same_model(tmp_path, alone, capsys, monkeypatch):
    run = opened(tmp_path).name
    save(tmp_path, 3, name=run)
    for name, value in OTHER.items():
        refused = f"{name} = {value!r} must be {RUN[name]!r}(?s:.*)MODEL = '.*/step_000003'"
        with pytest.raises(SystemExit, match=refused):
            opened(tmp_path, **{name: value})
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match=r"MODEL = OUT .*merge"):
        patch.setitem(RUN, "LORA_RANK", 8)
        save(tmp_path, 3, name=run)
        opened(tmp_path, LORA_RANK=16)
    save(tmp_path, 3, name=run)
    assert json.loads((tmp_path / "run.json").read_text())["constants"]["MODEL"] == RUN["MODEL"]
    capsys.readouterr()
    again = opened(tmp_path, STEPS=777, WEIGHT_DECAY=0.1)
    assert (again.name, again.step) == (run, 3)
    out = capsys.readouterr().out
    assert "STEPS 5 -> 777" in out and "WEIGHT_DECAY 0.0 -> 0.1" in out and "TASK" not in out
    assert json.loads((tmp_path / "run.json").read_text())["constants"]["STEPS"] == 777


@pytest.mark.parametrize("name, one, other", [
    ("MODEL", "runs/ws", "{here}/runs/../runs//ws/"), ("MODEL", "runs/ws", "link"),
    ("MODEL", "~/ws", "{home}/ws"), ("TASK", "my.py", "./my.py"),
    ("TASK", "link/../ws/my.py", "runs/ws/my.py"),
])  # fmt: skip
def test_a_run_resumes_with_another_spelling_of_one_path(
    tmp_path, alone, capsys, monkeypatch, name, one, other
):
    (tmp_path / "runs/ws").mkdir(parents=True)
    (tmp_path / "link").symlink_to("runs/ws")
    monkeypatch.chdir(tmp_path)
    places = {"here": tmp_path, "home": Path.home(), "root": report.ROOT}
    one, other = (text.format(**places) for text in (one, other))
    for first, second in ((one, other), (other, one)):
        monkeypatch.setitem(RUN, name, first)
        save(tmp_path / "run", 3)
        assert opened(tmp_path / "run", **{name: second}).step == 3
        assert "other constants" not in capsys.readouterr().out
        for wrong in ("runs", "runs/ws2", "Ws"):
            with pytest.raises(SystemExit, match=f"{name} = '{wrong}' must be '{first}'"):
                opened(tmp_path / "run", **{name: wrong})


def test_a_run_without_a_checkpoint_begins_anew_and_what_it_logged_is_set_aside(
    tmp_path, alone, monkeypatch
):
    """Its curves must not have two first steps. It may have another model now."""
    names = {opened(tmp_path).name}
    for number in ("1", "2"):
        monkeypatch.setattr(report.time, "strftime", lambda _, number=number: number)
        for name in ("metrics", "samples"):
            (tmp_path / f"{name}.jsonl").write_text(number)
        names.add(opened(tmp_path, MODEL=number).name)
        for name in ("metrics", "samples"):
            assert (tmp_path / f"{name}.{number}.jsonl").read_text() == number
            assert not (tmp_path / f"{name}.jsonl").exists()
    assert len(names) == 3


def test_a_run_with_a_checkpoint_keeps_what_it_logged_until_then(tmp_path, alone):
    save(tmp_path, 3)
    folder = report.RunFolder(tmp_path)
    for step in range(1, 6):
        folder.log("metrics.jsonl", {"step": step, "loss": float("nan")})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "los')  # killed while writing
    assert opened(tmp_path).name == "r"
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == [1, 2, 3] and records[0]["loss"] is None
    assert not (tmp_path / "samples.jsonl").exists()


# --- A run that ends by an error --------------------------------------------------------
@pytest.mark.parametrize("saved_at, checked, weight, is_saved", [
    (3, True, 1.0, True),
    (5, True, 1.0, False),  # nothing is new
    (3, False, 1.0, False),  # not known to learn rightly
    (3, True, math.nan, False),
])  # fmt: skip
def test_a_run_that_fails_saves_what_is_sound(
    alone, monkeypatch, saved_at, checked, weight, is_saved
):
    saved = []
    monkeypatch.setattr(checkpoint, "save_run", saved.append)
    torch.nn.init.constant_((model := torch.nn.Linear(1, 1)).weight, weight)
    progress = Progress("r", step=5, saved=saved_at, checked=checked)
    run = SimpleNamespace(progress=progress, policy=SimpleNamespace(model=model))
    checkpoint.save_failed(run)
    assert saved == [run] * is_saved


# --- The lock of RUN_DIR --------------------------------------------------------------
def failing(number):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    return flock


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL])
def test_a_disk_without_locks_is_logged_and_the_run_goes_on(tmp_path, monkeypatch, capsys, number):
    monkeypatch.setattr(resume.fcntl, "flock", failing(number))
    with resume.lock_run(tmp_path):
        pass
    (line,) = capsys.readouterr().out.splitlines()
    assert f"{tmp_path} is on a disk without file locks ({os.strerror(number)})" in line


def test_only_a_lock_that_is_held_means_another_trainer(tmp_path, monkeypatch):
    with resume.lock_run(tmp_path), pytest.raises(SystemExit, match="another trainer is running"):
        resume.lock_run(tmp_path)
    with resume.lock_run(tmp_path):  # it was released
        held, holds = os.pipe()
        if not (child := os.fork()):
            os.write(holds, b"1")
            time.sleep(900)
        os.read(held, 1)
    try:
        with resume.lock_run(tmp_path):  # and a child that lives on does not hold it
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    for number in (errno.EAGAIN, errno.EACCES):
        monkeypatch.setattr(resume.fcntl, "flock", failing(number))
        with pytest.raises(SystemExit, match="another trainer is running"):
            resume.lock_run(tmp_path)
    Path(tmp_path, ".lock").unlink()
    (theirs := tmp_path / "theirs").write_text("text")
    Path(tmp_path, ".lock").symlink_to(theirs)
    with pytest.raises(SystemExit, match="another trainer is running"):
        resume.lock_run(tmp_path)
    assert theirs.read_text() == "text"
    Path(tmp_path, ".lock").unlink()
    Path(tmp_path, ".lock").mkdir()  # of another user, say
    with pytest.raises(SystemExit, match="RUN_DIR = .* can't be written"):
        resume.lock_run(tmp_path)
