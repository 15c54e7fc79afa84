"""Nothing is lost, trained twice or leaked: checkpoints, and the store when a run resumes."""

import json
import os
import random
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import test_server
import torch
from test_server import done, lease, mark_scored
from test_wire import make_group

from grpo.sampling.rollout import Stream
from grpo.serving.pool import Pool
from grpo.serving.store import Store
from grpo.training import checkpoint, liveness
from grpo.training import metrics as report
from grpo.training.checkpoint import check_resumable, constants_of
from grpo.wire import pack_group


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "store.sqlite", max_bytes=10**6)
    yield store
    store.db.close()


def put(store, *seeds):
    """Stores groups of a worker; -> their bodies by id."""
    return test_server.put(store, *seeds, sampler="worker")


def adds_up(store, run="run"):
    """-> the ledger, having checked that it adds up and that the bytes are what is there."""
    ledger = store.ledger(run)
    ends = ("trained", "waiting", "joined", "failed")
    total = sum(ledger[name] for name in ends) + sum(ledger["dropped"].values())
    assert ledger["uploaded"] + ledger["regrouped"] == total, ledger
    (held,) = store.db.execute("SELECT IFNULL(SUM(LENGTH(body)), 0) FROM bodies").fetchone()
    (said,) = store.db.execute("SELECT IFNULL(SUM(bytes), 0) FROM groups").fetchone()
    assert held == said == store.bytes
    return ledger


# --- The store ----------------------------------------------------------------------
def test_what_workers_sampled_is_kept_until_a_checkpoint_covers_it(store):
    put(store, 0, 1, 2, 3)
    mark_scored(store)
    order = list(lease(store))
    assert store.ack("run", order[:2], 5) == 2 and store.ack("run", order[2:], 6) == 2
    assert store.ack("run", order, 7) == 0  # once is all
    assert store.stats()["trained"] == 4 and store.stats()["kept_bytes"] == store.bytes > 0
    store.cover("run", 6)  # the checkpoint after 6 updates: the rollout after 5 is in it
    assert (store.stats()["done"], store.stats()["trained"]) == (2, 2)
    assert adds_up(store)["trained"] == 4
    store.cover("run", 7)
    assert store.bytes == 0 and lease(store) == {} and adds_up(store)["trained"] == 4


def test_a_run_that_resumes_is_handed_the_same_in_the_same_order(store):
    bodies = put(store, 3, 1, 0, 2, 4)
    mark_scored(store)
    first, second = list(lease(store, limit=2)), list(lease(store, limit=2))
    store.ack("run", second, 5)  # not the order of upload
    store.ack("run", first, 6)
    held = list(lease(store))  # and one was in the trainer's hands
    assert store.resume("run", 5) == {"handed_out_again": 5, "sampled_again": 0}
    again = lease(store)
    assert list(again) == second + first + held
    assert all(again[id] == bodies[id] + b"scored" for id in again)
    adds_up(store)


def test_what_a_checkpoint_covers_is_not_handed_out_again(store):
    put(store, 0, 1, 2)
    mark_scored(store)
    a, b, c = lease(store)
    for step, id in enumerate((a, b, c)):
        store.ack("run", [id], step)
    assert store.resume("run", 2)["handed_out_again"] == 1
    assert list(lease(store)) == [c]
    assert store.resume("run", 2)["handed_out_again"] == 1  # and once more
    assert adds_up(store) == {
        "uploaded": 3, "regrouped": 0, "trained": 2, "waiting": 1, "joined": 0, "failed": 0,
        "dropped": {},
    }  # fmt: skip


def test_what_the_ranks_sampled_is_sampled_again_under_the_same_ids(store):
    groups = [make_group(seed=s, sampler="trainer", policy_version=s) for s in range(3)]
    for group in groups:
        store.put(group, pack_group(group))
    mark_scored(store)
    leased = list(lease(store))
    for step, id in enumerate(leased):
        store.ack("run", [id], step)
    assert store.bytes == 0  # they need not be kept
    assert store.resume("run", 1) == {"handed_out_again": 0, "sampled_again": 2}
    assert lease(store) == {}
    assert [store.put(g, pack_group(g)) for g in groups] == [False, True, True]
    assert len(store.waiting(9, 0)) == 2
    ledger = adds_up(store)
    assert ledger["dropped"] == {"sampled again": 2} and ledger["uploaded"] == 5


def flat_group(outcome, version, seed, sampler="trainer"):
    group = make_group((1, 1), seed=seed, policy_version=version, item=7, sampler=sampler)
    return make_group(
        (1, 1), seed=seed, policy_version=version, item=7, sampler=sampler,
        rewards=torch.full_like(group.rewards, outcome),
    )  # fmt: skip


def test_a_join_of_the_ranks_is_undone_with_the_step_that_made_it(store):
    old, new = flat_group(-1.0, 3, 0), flat_group(1.0, 5, 1)
    assert Pool(store).add(old, pack_group(old), 0) == []
    joined = Pool(store).add(new, pack_group(new), 0)
    assert len(joined) == 2 and store.stats()["joined"] == 2
    adds_up(store)
    assert store.resume("run", 5) == {"handed_out_again": 1, "sampled_again": 3}
    assert store.stats()["pooled"] == 1 and store.stats()["waiting"] == 0
    assert Pool(store).add(new, pack_group(new), 0) == joined  # the same again
    store.cover("run", 6)
    assert store.stats()["pooled"] == 0 and len(store.waiting(9, 0)) == 2
    adds_up(store)


def test_a_pooled_group_that_grew_too_old_is_young_again(store):
    old = flat_group(-1.0, 3, 0)
    Pool(store).add(old, pack_group(old), 0)
    Pool(store).drop_old("run", 4, step=8)
    assert store.drop_old("run", 4) == 0 and store.stats()["pooled"] == 0
    store.resume("run", 6)
    assert store.stats()["pooled"] == 1
    Pool(store).drop_old("run", 4, step=8)
    store.cover("run", 9)
    store.resume("run", 9)
    assert store.bytes == 0 and adds_up(store)["dropped"] == {"too old": 1}


def test_a_workers_part_of_a_join_with_an_undone_group_is_pooled_again(store):
    """Or the ranks' completions would be trained twice: once joined, and once sampled again."""
    own, workers = flat_group(-1.0, 5, 0), flat_group(1.0, 3, 1, sampler="worker")
    Pool(store).add(own, pack_group(own), 0)
    assert len(Pool(store).add(workers, pack_group(workers), 0)) == 2
    adds_up(store)
    store.resume("run", 4)
    ledger = adds_up(store)
    assert ledger["waiting"] == 1 and ledger["dropped"] == {"sampled again": 3}
    assert store.stats()["pooled"] == 1
    assert len(Pool(store).add(own, pack_group(own), 0)) == 2  # sampled again, and joined again
    adds_up(store)
    store.cover("run", 6)
    assert store.stats()["pooled"] == 0 and adds_up(store)["waiting"] == 2


def test_a_group_that_could_not_be_scored_is_tried_again_when_the_run_resumes(store):
    put(store, 0)
    ((seq, body),) = store.waiting(9, 0)
    store.failed(seq, "out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        lease(store)
    assert adds_up(store)["failed"] == 1
    store.resume("run", 0)
    assert store.waiting(9, 0) == [(seq, body)]
    assert lease(store) == {}


def test_what_other_runs_left_does_not_hasten_a_checkpoint(store):
    put(store, 0, 1)
    mark_scored(store)
    store.ack("run", list(lease(store)), 0)
    assert store.kept("run") == store.bytes > 0 and store.kept("other") == 0


def test_a_run_that_is_over_leaves_nothing_behind(store):
    put(store, 0, 1, 2)
    mark_scored(store)
    store.ack("run", list(lease(store, limit=1)), 0)
    lease(store, limit=1)
    store.forget("run")
    assert store.bytes == 0
    assert adds_up(store)["trained"] == 1
    assert store.ledger("run")["dropped"] == {"the run was over": 2}


def test_another_reference_scores_again_what_is_handed_out_again(store):
    put(store, 0)
    mark_scored(store)
    store.ack("run", list(lease(store)), 5)
    store.use_reference({"model": "other"})
    store.resume("run", 5)
    assert store.stats()["waiting"] == 1 and lease(store) == {}


def test_the_ledger_adds_up_whatever_happens(store, monkeypatch):
    """Random uploads, leases, checkpoints, crashes: what is trained in the history that survives is
    trained once, and nothing is left in nobody's hands."""
    draw, made, step, checkpointed = random.Random(0), 0, 0, 0
    trained = {}  # id -> step, in the history that survives
    held = []
    for _ in range(600):
        what = draw.choice(
            ["upload", "upload", "lease", "train", "train", "save", "crash", "server"]
        )
        if what == "upload":
            made += bool(put(store, made))
            mark_scored(store)
        elif what == "lease":
            held += list(lease(store, limit=draw.randint(1, 3)))
        elif what == "train" and held:
            assert not trained.keys() & set(held), "trained twice"
            store.ack("run", held, step)
            trained |= dict.fromkeys(held, step)
            step, held = step + 1, []
        elif what == "save":
            checkpointed = step
            store.cover("run", step)
        elif what == "crash":
            step, held = checkpointed, []
            trained = {id: at for id, at in trained.items() if at < step}
            store.resume("run", step)
        elif what == "server":
            free = "UPDATE groups SET state='scored' WHERE state='leased'"  # as Store() does
            store.db.execute(free)
            held = []
        assert adds_up(store)["uploaded"] == made
        assert store.ledger("run")["trained"] == len(trained)
    assert made > 100 and len(trained) > 30
    left = list(lease(store, limit=999))
    assert len(left) + len(trained) == made and not trained.keys() & set(left)
    assert done(store, left) == len(left) and store.bytes == 0


# --- Checkpoints --------------------------------------------------------------------
class Ranks:
    """A process group of threads, in the place of torch.distributed."""

    def __init__(self, world):
        self.values, self.mine = [None] * world, threading.local()
        self.barrier = threading.Barrier(world, timeout=20)

    def get_rank(self):
        return getattr(self.mine, "rank", 0)

    def get_world_size(self):
        return len(self.values)

    def all_gather_object(self, everyone, value):
        self.values[self.get_rank()] = value
        self.barrier.wait()
        everyone[:] = self.values
        self.barrier.wait()

    def each(self, function, values):
        """-> what function(value), of a value for each rank, gives there; or SystemExit's text."""

        def run(rank, value):
            self.mine.rank = rank
            try:
                return function(value)
            except SystemExit as error:
                return str(error)
            except OSError:
                self.barrier.abort()  # the launcher ends the other ranks
                raise

        with ThreadPoolExecutor(len(self.values)) as threads:
            return list(threads.map(run, range(len(self.values)), values))


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


@pytest.fixture
def ranks(monkeypatch, request):
    ranks = Ranks(getattr(request, "param", 1))
    for module in (checkpoint, liveness, report):
        monkeypatch.setattr(module, "dist", ranks)
    for module in (checkpoint, liveness):
        monkeypatch.setattr(module, "meet", lambda what: ranks.barrier.wait())
    return ranks


@pytest.fixture
def alone(ranks):
    pass


def save(folder, step, stream, keep=2):
    state = {"step": step, "progress": {"run": "r", "step": step}}
    checkpoint.save(folder, FakePolicy(), FakeEngine(), stream, state, keep)


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
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_torn_checkpoint_is_named_and_passed_over(tmp_path, alone, capsys, damage):
    stream = Stream([(0, {}, [0])], 0, 0, 1)
    for step in (3, 9, 10):
        save(tmp_path, step, stream)
    assert sorted(p.name for p in tmp_path.glob("step_*")) == ["step_000009", "step_000010"]
    (tmp_path / ".unfinished").mkdir()
    DAMAGE[damage](tmp_path / "step_000010")
    path, state = checkpoint.newest(tmp_path)
    assert path.name == "step_000009" and state["step"] == 9
    out = capsys.readouterr().out
    assert "step_000010 is not whole, and passed over" in out and "that one does not count" in out
    save(tmp_path, 10, stream)  # in its place
    assert checkpoint.newest(tmp_path)[1]["step"] == 10 and not (tmp_path / ".unfinished").exists()


@pytest.mark.parametrize("keep", [1, 2])
def test_the_checkpoint_just_saved_stays_and_torn_ones_of_later_steps_go(tmp_path, alone, keep):
    stream = Stream([(0, {}, [0])], 0, 0, 1)
    for name in ("step_000200", "step_000300"):
        (tmp_path / name).mkdir()
    save(tmp_path, 100, stream, keep)
    assert [p.name for p in tmp_path.glob("step_*")] == ["step_000100"]
    for step in (999_999, 1_000_000):
        save(tmp_path, step, stream, keep)
    left = sorted(checkpoint.step_of(p) for p in tmp_path.glob("step_*"))
    assert left == [999_999, 1_000_000][-keep:]
    assert checkpoint.newest(tmp_path)[1]["step"] == 1_000_000


def test_ranks_meet_before_they_gather_the_weights_that_they_read(tmp_path, alone, monkeypatch):
    """One may read for longer than a collective waits."""
    stream, events = Stream([(0, {}, [0])], 0, 0, 1), []
    save(tmp_path, 3, stream)
    engine = FakeEngine()
    monkeypatch.setattr(checkpoint, "meet", lambda what: events.append("meet"))
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


def test_a_run_does_not_begin_again_because_no_checkpoint_is_whole(tmp_path, alone):
    save(tmp_path, 3, Stream([(0, {}, [0])], 0, 0, 1))
    os.remove(tmp_path / "step_000003/model.safetensors")
    with pytest.raises(SystemExit, match="no checkpoint in RUN_DIR = .* is whole: rank 0 on "):
        checkpoint.newest(tmp_path)


def test_a_checkpoint_with_deepspeeds_own_files_is_refused_with_what_to_do(tmp_path, alone):
    """The layout of commit 8b2f077: one dict has the files of all ranks."""
    first, stream = opened(tmp_path), Stream([(0, {}, [0])], 0, 0, 1)
    state = {"step": 3, "constants": first["constants"], "progress": {"run": first["run"]}}
    checkpoint.save(tmp_path, FakePolicy(), FakeEngine(), stream, state, 1)
    trainer = tmp_path / "step_000003/trainer"
    (trainer / "optimizer_0.pt").unlink()
    (trainer / "deepspeed").mkdir()
    old = "deepspeed/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": {}}, trainer / old)
    state = json.loads((trainer / "state.json").read_text())
    files = {f"trainer/{name}": (trainer / name).stat().st_size for name in ("rank_0.json", old)}
    (trainer / "state.json").write_text(json.dumps(state | {"files": files}))
    anew = "begin another run from its weights, with another RUN_DIR and MODEL = '.*/step_000003'"
    with pytest.raises(SystemExit, match=f"step_000003 has an earlier version's layout .*: {anew}"):
        opened(tmp_path, STEPS=7)
    assert json.loads((tmp_path / "run.json").read_text()) == first
    (trainer / old).unlink()
    with pytest.raises(SystemExit, match="is whole: rank 0 on .*optim_states.pt"):
        opened(tmp_path)


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
    with pytest.raises((OSError, threading.BrokenBarrierError)):
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
    "they changed places": (swap, "is whole: rank 0 on .*a/step_0000"),
}


@pytest.mark.parametrize("ranks", [2], indirect=True)
@pytest.mark.parametrize("damage", DISKS)
def test_what_is_whole_is_agreed_by_machines_with_disks_of_their_own(tmp_path, ranks, damage):
    disks, damage, expected = [tmp_path / "a", tmp_path / "b"], *DISKS[damage]
    stream = Stream([(0, {}, [0])], 0, 0, 1)

    def begin(disk):
        checkpoint.leads(disk)
        run, before = checkpoint.run_of(str(disk), RUN, None)
        assert before == {}
        checkpoint.write_run(str(disk), run, RUN)
        [save(disk, step, stream) for step in (1, 3, 9)]
        return run

    def resume(disk):
        checkpoint.leads(disk)
        run, before = checkpoint.run_of(str(disk), RUN, None)
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
    for name in ("MODEL", "LORA_RANK", "DTYPE"):
        with pytest.raises(SystemExit, match=f"{name} = 'other' must be"):
            check_resumable("step_000040", state, now | {name: "other"}, 2)
    check_resumable("step_000040", state, now | {"STEPS": 777, "CLIP_LOW": 0.1}, 2)
    out = capsys.readouterr().out
    assert "STEPS 500 -> 777" in out and "CLIP_LOW 0.2 -> 0.1" in out


class FakeServer:
    def __init__(self):
        self.ended = []

    def resume(self, run, step):
        return {}

    def end(self, run):
        self.ended.append(run)


def opened(folder, server=None, **changes):
    """-> run.json, after a start with RUN and other constants."""
    constants = RUN | {"RUN_DIR": str(folder), "MAX_GRAD_NORM": 1.0, "ADAM_BETAS": (0.9, 0.99)}
    constants |= {"WEIGHT_DECAY": 0.0} | changes
    engine, stream = FakeEngine(), Stream([(0, {}, [0])], 0, 0, 1)
    progress = checkpoint.open_run(str(folder), constants, engine, stream, server)
    record = json.loads((folder / "run.json").read_text())
    assert record["run"] == progress.run
    return record


def test_run_json_has_the_constants_of_the_last_start(tmp_path, alone):
    first = opened(tmp_path)
    assert opened(tmp_path) == first and first["constants"]["STEPS"] == 5
    again = opened(tmp_path, STEPS=7)
    assert again["run"] == first["run"] and again["constants"]["STEPS"] == 7
    state = {"step": 3, "constants": again["constants"], "progress": {"run": first["run"]}}
    checkpoint.save(tmp_path, FakePolicy(), FakeEngine(), Stream([(0, {}, [0])], 0, 0, 1), state, 1)
    last = opened(tmp_path, STEPS=9, TASK="other")  # resumes with another task, and says so
    assert last["run"] == first["run"]
    assert last["constants"]["STEPS"] == 9 and last["constants"]["TASK"] == "other"
    with pytest.raises(SystemExit, match="MODEL = 'b' must be 'a'"):
        opened(tmp_path, MODEL="b")
    assert json.loads((tmp_path / "run.json").read_text()) == last


@pytest.mark.parametrize("name", ["MODEL", "LORA_RANK", "DTYPE", "TASK"])
def test_a_run_without_a_checkpoint_resumes_as_the_same_or_not_at_all(
    tmp_path, alone, capsys, name
):
    server, first = FakeServer(), opened(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(SystemExit, match=f"{name} = 'other' must be .* choose another RUN_DIR"):
        opened(tmp_path, server, **{name: "other"})
    assert json.loads((tmp_path / "run.json").read_text()) == first and not server.ended
    # Not one that failed before anything came of it: the server may forget what it has of that
    (tmp_path / "metrics.jsonl").write_text("")
    other = opened(tmp_path, server, **{name: "other"})
    assert other["run"] != first["run"] and other["constants"][name] == "other"
    assert server.ended == [first["run"]]
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
