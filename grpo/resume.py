"""How a run begins in RUN_DIR, or resumes from its newest checkpoint."""

import errno
import fcntl
import hashlib
import json
import os
import tempfile
import time
import uuid
import weakref
from pathlib import Path

import torch.distributed as dist

from grpo.checkpoint import load, newest, point
from grpo.constants import is_same
from grpo.log import say
from grpo.ranks import gathered
from grpo.report import RunFolder, commit, naming_run_dir
from grpo.run import Progress

# A run can't be resumed with other values of these
SAME = ("MODEL", "TASK", "LORA_RANK", "BASE_BITS", "DTYPE")
SHARED_SECONDS = 10  # until a network disk shows a new file on all machines
EVALUATED = ("EVAL_SPLIT", "EVAL_QUESTIONS", "OUTCOME")  # accuracies of others can't be compared


def check_run_dir(folder):
    """Makes RUN_DIR. Raises SystemExit if it can't be written, or has no symbolic links."""
    with naming_run_dir(folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".trial_", dir=folder) as trial:
            Path(trial, "best").symlink_to("a checkpoint")


def check_shared(folder):
    """Collective: raises SystemExit if RUN_DIR is not the same folder on all ranks. Its file has a
    new name, as network disks remember which names are not there."""
    path = Path(folder, gathered(f".shared_{uuid.uuid4().hex}")[0])
    if dist.get_rank() == 0:
        path.touch()
    dist.barrier()
    until = time.monotonic() + SHARED_SECONDS
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.1)
    seen = gathered(path.exists())
    if dist.get_rank() == 0:
        path.unlink()
    if not all(seen):
        raise SystemExit(
            f"RUN_DIR = {folder!r} is not the same folder on rank 0 and rank {seen.index(False)}:"
            " set it to a folder on a disk that all machines with ranks share (workers need none)"
        )


def lock_run(folder):
    """Returns a file that stays locked until it is closed or this process ends. SystemExit if
    another trainer holds the lock: the two would undo each other's steps. A disk without locks (NFS
    with nolock, some of Lustre and FUSE) is logged, and no obstacle."""
    with naming_run_dir(folder):
        file = open(Path(folder, ".lock"), "a")  # noqa: SIM115 ("w" would empty what it links to)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise SystemExit(
                f"another trainer is running in RUN_DIR = {folder!r}: stop it, or choose another"
            ) from None
        why = f"is on a disk without file locks ({error.strerror})"
        say(f"{folder} {why}: run one process at a time there")
    mine = weakref.ref(file)  # a child that outlives this process must not hold the lock
    os.register_at_fork(after_in_child=lambda: (file := mine()) and file.close())
    return file


# --- What a run is trained on -----------------------------------------------------------
def data_of(recipe):
    """Collective: returns the hash of the prompts' ids. SystemExit if ranks have others."""
    ids = json.dumps([[prompt.index, prompt.ids] for prompt in recipe.prompts]).encode()
    found = gathered(hashlib.sha256(ids).hexdigest())
    if len(set(found)) > 1:
        raise SystemExit("the ranks have other prompts: start them all with the same task and data")
    return found[0]


# --- Begin or resume ------------------------------------------------------------------
def open_run(c, record, engine, data, uses):
    """Collective: returns the Progress of the run in RUN_DIR: a new run, or one that resumes from
    its newest complete checkpoint. `record` is Run.record; run.json gets `data` (of data_of) and
    `uses` (of start.uses_of)."""
    folder, (path, state) = RunFolder(c.RUN_DIR), newest(c.RUN_DIR)
    if path:
        check_resumable(path, state, record)
        progress = Progress(**state["progress"] | {"idle": 0, "bad": 0})
        load(path, engine, c.SEED)
        # DeepSpeed has restored the old values of these; the learning rate is set at each step
        engine.optimizer.clip_grad = c.MAX_GRAD_NORM
        for group in engine.optimizer.param_groups:
            group["weight_decay"] = c.WEIGHT_DECAY
        say(f"the run {progress.name} resumes from {path}")
        if state["data"] != data:
            say("the prompts are others than at the checkpoint: their order begins anew")
            progress.prompts = progress.groups = 0
        folder.undo(progress.step)
    else:
        name = f"{folder.path.name}-{uuid.uuid4().hex[:8]}"
        progress = Progress(gathered(name)[0])
        folder.set_aside()
    if path and any(record[name] != state["constants"].get(name) for name in EVALUATED):
        progress.best_accuracy = None  # the next evaluation is then the best
    if dist.get_rank() == 0:
        facts = {"run": progress.name, "code": commit(), "data": data, "constants": record}
        (draft := folder.path / ".run.json").write_text(json.dumps(facts | {"uses": uses}))
        draft.replace(folder.path / "run.json")
    point(c.RUN_DIR, "best", progress.best)
    point(c.RUN_DIR, "final", None)
    return progress


def check_resumable(path, state, now):
    """Logs the constants that have changed. Raises SystemExit if a run with the constants `now`
    can't resume from the checkpoint `path`."""
    before = state["constants"]
    for name, value, must in ((name, now[name], before[name]) for name in SAME):
        if not is_same(name, value, must):
            how = f" (after: python -m grpo.commands.merge {path} OUT)" * bool(before["LORA_RANK"])
            model = "OUT" if how else f"'{path}'"
            raise SystemExit(
                f"{name} = {value!r} must be {must!r} to resume from {path}; to start a new run"
                f" from its weights set MODEL = {model}{how}, and another RUN_DIR"
            )
    changed = [
        f"{name} {before[name]!r} -> {value!r}"
        for name, value in now.items()
        if not is_same(name, before.get(name, value), value)
    ]
    if changed:
        say(f"the run resumes with other constants: {', '.join(changed)}")
