"""Checkpoints, RUN_DIR/step_000100: saves, finds and loads them.

A checkpoint is a model in Hugging Face format, which MODEL may name, and a folder `trainer`:

    optimizer_0.pt ...  a rank's part of the optimizer and of the float32 weights
    state.json          the run's progress, the number of ranks, and the files' sizes

Beside them are links: `best` to the checkpoint with the best evaluation, and `final` to
the last one of a run that has made all STEPS.

The ranks share RUN_DIR. Saving is atomic: rank 0 renames RUN_DIR/.unfinished/step_000100 when all
have written to it. A checkpoint is whole if its files have the right sizes, and each rank's part of
the optimizer has the CRC that its zip file notes; otherwise all ranks skip it.
"""

import json
import os
import shutil
import socket
import tempfile
import zipfile
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from grpo.engine import give_weights, load_states
from grpo.log import announced, say
from grpo.ranks import RunFailed, all_or_none, any_rank, gathered
from grpo.report import naming_run_dir

DRAFT = ".unfinished"
FORMAT = 3  # of a checkpoint; those of other formats are refused
CONSTANTS = "grpo_split.json"  # a run's, beside its model; evaluate.py reads them
STATE_BYTES = 12  # of a trained parameter: master weight and Adam's two moments, in float32


# --- Save ---------------------------------------------------------------------------
def sync(folder):
    """Waits until a folder's files are on its disk."""
    for path in filter(Path.is_file, folder.rglob("*")):
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def save_run(run):
    """Collective: saves a checkpoint of the run, unless this step has one or SAVE_STEPS is 0;
    deletes all but the newest KEEP_CHECKPOINTS and the best.
    Raises RunFailed if it can't be written: then nothing of it is left."""
    p, c, folder, is_first = run.progress, run.c, Path(run.c.RUN_DIR), dist.get_rank() == 0
    if p.saved == p.step or not c.SAVE_STEPS:
        if p.best == p.step == p.saved:  # it was evaluated after it was saved
            point(folder, "best", p.step)
        return
    p.saved, final = p.step, folder / f"step_{p.step:06d}"
    draft = folder / DRAFT / final.name  # a new name: network disks remember old folders
    try:
        with all_or_none(), naming_run_dir(folder):  # collective
            if is_first:
                write_model(run, draft)
        with all_or_none(), naming_run_dir(folder):  # collective
            write_optimizer(run, draft)
        with all_or_none(), naming_run_dir(folder):  # collective
            if is_first:
                write_state(run, draft)
                shutil.rmtree(final, ignore_errors=True)  # it was incomplete
                draft.rename(final)
                draft.parent.rmdir()
    except RunFailed:
        if is_first:
            shutil.rmtree(draft.parent, ignore_errors=True)
        raise
    say(f"saved {final}")
    if is_first:
        if p.best == p.step:
            point(folder, "best", p.best)  # before the old best is deleted
        delete_older(c, p)


def delete_older(c, p):
    """Deletes what need not stay now that the checkpoint of step p.step is complete."""
    saved = saved_in(c.RUN_DIR)
    kept = [path for path in saved if step_of(path) <= p.step][-c.KEEP_CHECKPOINTS :]
    for path in set(saved) - set(kept):  # later ones are incomplete, or from before a resume
        if step_of(path) != p.best:
            shutil.rmtree(path, ignore_errors=True)  # the new one is complete: the run goes on
        for states in path.glob("trainer/optimizer_*.pt"):  # of the best only the model is kept
            states.unlink()


def check_disk(c, model):
    """Logs the disk space that checkpoints need. Raises SystemExit if the next one has no room."""
    if not c.SAVE_STEPS:
        return
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = sum(p.nbytes for p in (trained if c.LORA_RANK else model.parameters()))
    size = weights + STATE_BYTES * sum(p.numel() for p in trained)
    free = shutil.disk_usage(c.RUN_DIR).free
    needs = f"a checkpoint takes {size / 1e9:.3g} GB"
    if size > free:
        raise SystemExit(
            f"{needs}, but the disk of RUN_DIR = {c.RUN_DIR!r} has {free / 1e9:.3g} GB free: delete"
            " old runs, or set RUN_DIR to a folder on another disk"
        )
    say(f"{needs}; {free / 1e9:.3g} GB are free in {c.RUN_DIR}")


def try_save(c, policy):
    """Writes what a checkpoint has besides weights to a temporary folder. Raises SystemExit if this
    fails, because the run would fail at its first checkpoint, and lose what it has learned."""
    try:
        with tempfile.TemporaryDirectory(prefix=".trial_", dir=c.RUN_DIR) as folder:
            policy.save(folder, trial=True)
    except Exception as error:
        raise SystemExit(
            f"a checkpoint of MODEL = {c.MODEL!r} can't be saved to RUN_DIR = {c.RUN_DIR!r}, so the"
            f" run does not start. Correct or remove the model's file that is at fault: {error!r}"
        ) from error


def write_model(run, draft):
    """Begins a checkpoint, if there is room for all of it: the model, and the run's constants."""
    check_disk(run.c, run.policy.model)
    shutil.rmtree(draft.parent, ignore_errors=True)
    Path(draft, "trainer").mkdir(parents=True)
    run.policy.save(draft)
    Path(draft, CONSTANTS).write_text(json.dumps(run.record, indent=1))


def write_optimizer(run, draft):
    """Writes this rank's part of the optimizer."""
    # Not engine.save_checkpoint: that writes the model too, and load_checkpoint reads it everywhere
    with open(optimizer_file(draft), "wb") as file:  # a Python file, whose OSError names the cause
        torch.save(run.engine.optimizer.state_dict(), file)


def write_state(run, draft):
    """Completes a checkpoint, and waits until it is on the disk: a power cut must not lose it after
    older ones are deleted."""
    p, world = run.progress, dist.get_world_size()
    files = [*draft.rglob("*.safetensors"), *draft.rglob("*.pt")]  # people may edit the others
    state = {"format": FORMAT, "ranks": world, "step": p.step, "progress": asdict(p)}
    state |= {"data": run.data, "constants": run.record}
    state |= {"files": {str(path.relative_to(draft)): path.stat().st_size for path in files}}
    state_file(draft).write_text(json.dumps(state, indent=1))
    sync(draft)


def save_failed(run):
    """Collective: saves a run that ends by an error between two updates. Does not save if the last
    step is saved already, a weight is not finite, or the first update did not pass its check."""
    p = run.progress
    finite = all(parameter.isfinite().all() for parameter in run.policy.model.parameters())
    if p.checked and p.saved != p.step and not any_rank(not finite):  # collective
        save_run(run)  # collective


def point(folder, name, step):
    """Atomically makes folder/name a link to the checkpoint of `step`, or removes it: None. Rank 0
    does it; the others do nothing."""
    if dist.get_rank():
        return
    link, draft = Path(folder, name), Path(folder, f".{name}")
    if link.is_dir() and not link.is_symlink():
        say(f"{link} is a folder, not our link to a checkpoint, so it is not replaced")
    elif step is None:
        link.unlink(missing_ok=True)
    else:
        draft.unlink(missing_ok=True)
        draft.symlink_to(f"step_{step:06d}")
        draft.replace(link)


def state_file(checkpoint):
    return Path(checkpoint, "trainer", "state.json")


def optimizer_file(checkpoint):
    return Path(checkpoint, "trainer", f"optimizer_{dist.get_rank()}.pt")


def step_of(path):
    """Returns the N of a path step_N, or -1."""
    digits = path.name.removeprefix("step_")
    return int(digits) if digits.isdecimal() else -1


def saved_in(folder):
    """Returns the paths of a folder's checkpoints, complete or not, oldest first."""
    return sorted((p for p in Path(folder).glob("step_*") if step_of(p) >= 0), key=step_of)


# --- Find and load ------------------------------------------------------------------
def newest(folder):
    """Collective: returns (path, state) of the newest complete checkpoint, or (None, None) if there
    is none at all. Raises SystemExit if there are checkpoints but none is complete: a run must not
    start over because a disk is damaged."""
    if dist.get_rank() == 0:
        shutil.rmtree(Path(folder, DRAFT), ignore_errors=True)  # of a run that ended while it saved
    fault = None
    for path in reversed(gathered(saved_in(folder))[0]):
        states, faults = zip(*gathered(examine(path)), strict=True)
        if not (fault := next(filter(None, faults), None)):
            return path, states[0]
        say(f"{path} is incomplete or damaged, and is skipped: {fault}")
    if fault:
        raise SystemExit(
            f"no checkpoint in RUN_DIR = {folder!r} is whole: {fault}. To start a new run, choose"
            " another RUN_DIR"
        )
    return None, None


def examine(path):
    """Returns (state, None) of a checkpoint if this rank finds the files whole that it needs, else
    (None, fault). SystemExit if a run can't resume from it: another version, or another number of
    ranks, has saved it."""
    rank, world, file = dist.get_rank(), dist.get_world_size(), optimizer_file(path)
    try:
        state = json.loads(state_file(path).read_text())
        found = state.get("format", 1), state.get("ranks", world)
        if found != (FORMAT, world):
            by = f"{found[1]} ranks: start as many to resume from it, and not {world},"
            by = by if found[0] == FORMAT else "another version, and can't be resumed from:"
            raise SystemExit(
                f"{path} was saved by {by} or begin a new run from its weights with MODEL ="
                f" '{path.absolute()}' (an adapter: merge it first), and another RUN_DIR"
            )
        for name, size in state["files"].items():
            if (now := Path(path, name).stat().st_size) != size:
                raise ValueError(f"{path / name} has {now} bytes, not {size}")
        with announced(f"the CRC of {file}"), zipfile.ZipFile(file) as parts:
            if part := parts.testzip():
                raise ValueError(f"{file} is damaged: the CRC of {part} is another")
    except Exception as error:  # noqa: BLE001 (a flipped bit may raise any)
        return None, f"rank {rank} on {socket.gethostname()}: {error}"
    return state, None


def load(path, engine, seed):
    """Collective: restores the engine from what save_run has written."""
    part = load_states(optimizer_file(path))
    # DeepSpeed expects a dict of all ranks' parts and reads this rank's
    engine.optimizer.load_state_dict({dist.get_rank(): part}, load_from_fp32_weights=True)
    for state in engine.optimizer.state.values():  # in RAM Adam's moments are still the file's
        state |= {name: x.clone() for name, x in state.items() if getattr(x, "is_cpu", False)}
    dist.barrier()
    give_weights(engine, seed)  # collective
