"""Checkpoints, RUN_DIR/step_000100: saves, finds and loads them.

A checkpoint is a model in Hugging Face format, which MODEL may name, and a folder `trainer`:

    optimizer_0.pt ...  a rank's part of the optimizer and of the float32 weights
    rank_0.json ...     its position in the data and its random number generators
    state.json          the run's progress, and the sizes of every rank's files

Beside them are links: `best` to the checkpoint with the best evaluation (KEEP_BEST), and `final` to
the last one of a run that has made all STEPS.

Saving is atomic: RUN_DIR/.unfinished is renamed when all ranks have written to it. If each machine
has RUN_DIR on a separate disk, it keeps the files of its ranks: the first rank that sees a folder
makes and renames it. Rank 0's folder, the only one with the model, is renamed last. A checkpoint is
complete if every rank finds its files with the right sizes; otherwise all ranks skip it.
"""

import contextlib
import json
import os
import random
import shutil
import socket
import tempfile
import uuid
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from grpo.engine import give_weights, load_states
from grpo.log import say
from grpo.ranks import RunFailed, any_rank, gathered
from grpo.report import naming_run_dir

DRAFT = ".unfinished"
CONSTANTS = "grpo_split.json"  # a run's, beside its model; evaluate.py reads them
STATE_BYTES = 12  # of a trained parameter: master weight and Adam's two moments, in float32


# --- Save ---------------------------------------------------------------------------
def leads(folder):
    """Collective: returns whether this rank is the first of the ranks that share this `folder`.
    Each rank makes a file in it and looks for the files of the others."""
    token = Path(folder, f".rank_{uuid.uuid4().hex}")  # a new name: network disks cache old ones
    token.parent.mkdir(parents=True, exist_ok=True)
    token.touch()
    seen = [Path(folder, name).exists() for name in gathered(token.name)]
    dist.barrier()  # until all have looked
    token.unlink()
    return seen.index(True) == dist.get_rank()


def sync(folder):
    """Waits until a folder's files are on its disk."""
    for path in filter(Path.is_file, folder.rglob("*")):
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def save_run(run):
    """Collective: saves a checkpoint of the run, unless this step has one or SAVE_STEPS is 0;
    deletes all but the newest KEEP_CHECKPOINTS, the best, and those to which links best* lead."""
    p, c, folder = run.progress, run.c, Path(run.c.RUN_DIR)
    if p.saved == p.step or not c.SAVE_STEPS:
        if p.best == p.step == p.saved:  # it was evaluated after it was saved
            point(folder, "best", p.step)
        return
    p.saved = p.step
    rank, leader = dist.get_rank(), leads(folder)
    draft, final = folder / DRAFT, folder / f"step_{p.step:06d}"
    state = {"step": p.step, "progress": asdict(p), "data": run.data, "constants": run.record}
    if leader:
        for leftover in (draft, final):  # `final` is incomplete, here or on another machine
            shutil.rmtree(leftover, ignore_errors=True)
    with naming_run_dir(folder):
        files = write_shared(run, draft, state) if leader else []
    dist.barrier()
    with naming_run_dir(folder):
        files += write_rank(run, draft / "trainer")
    sizes = gathered({str(path.relative_to(draft)): path.stat().st_size for path in files})
    for last in (False, True):  # last: rank 0's folder, the only one with the model
        if leader and (rank == 0) == last:
            text = json.dumps(state | {"files": sizes}, indent=1)
            with naming_run_dir(folder):
                state_file(draft).write_text(text)
                sync(draft)  # a power cut must not lose it after older ones are deleted
            draft.rename(final)
        dist.barrier()
    say(f"saved {final}")
    if leader and p.best == p.step:
        point(folder, "best", p.best)  # before the old best is deleted
    saved = saved_in(folder) if leader else []
    kept = [path for path in saved if step_of(path) <= p.step][-c.KEEP_CHECKPOINTS :]
    linked = {step_of(link.readlink()) for link in folder.glob("best*") if link.is_symlink()}
    for path in set(saved) - set(kept):  # later ones are incomplete, or from before a resume
        if step_of(path) not in linked | {p.best}:
            shutil.rmtree(path, ignore_errors=True)  # the new one is complete: the run goes on
            if path.exists():
                say(f"the old checkpoint {path} can't be deleted")
        for states in path.glob("trainer/optimizer_*.pt"):  # of the best only the model is kept
            states.unlink()


def check_disk(c, model):
    """Collective: logs the disk space that checkpoints need. Raises SystemExit if the next one does
    not fit on RUN_DIR's disk."""
    if not c.SAVE_STEPS:
        return say("SAVE_STEPS = 0: no checkpoint is saved, not even at the end")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = sum(p.nbytes for p in (trained if c.LORA_RANK else model.parameters()))
    size = weights + STATE_BYTES * sum(p.numel() for p in trained)
    most = size * (c.KEEP_CHECKPOINTS + 1) + weights * c.KEEP_BEST
    free = min(gathered(shutil.disk_usage(c.RUN_DIR).free))
    needs = f"a checkpoint takes {size / 1e9:.3g} GB, all of them at most {most / 1e9:.3g} GB"
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


def write_shared(run, draft, state):
    """Writes the files that ranks share: on rank 0 the model. Returns the paths whose sizes are
    checked."""
    Path(draft, "trainer").mkdir(parents=True)
    if dist.get_rank() == 0:
        run.policy.save(draft)
        Path(draft, CONSTANTS).write_text(json.dumps(state["constants"], indent=1))
    return list(draft.rglob("*.safetensors"))  # people may edit the other files


def write_rank(run, trainer):
    """Writes this rank's files to the folder `trainer`; returns their paths."""
    rank = dist.get_rank()
    mine = {"position": run.stream.position, "random": random.getstate()}
    mine["torch"] = torch.get_rng_state().tolist()
    files = [trainer / f"optimizer_{rank}.pt", trainer / f"rank_{rank}.json"]
    # Not engine.save_checkpoint: that writes the model too, and load_checkpoint reads it everywhere
    with open(files[0], "wb") as file:  # a Python file, whose OSError names the cause
        torch.save(run.engine.optimizer.state_dict(), file)
    files[1].write_text(json.dumps(mine))
    return files


def place_of(run):
    """Returns the place of a run between two updates, for back_if_failed."""
    return dict(vars(run.progress)), run.stream.position


@contextlib.contextmanager
def back_if_failed(run, place):
    """If the block raises RunFailed, puts the run's progress and its position in the data back to
    `place`, where the run had the same weights. A run that resumes from the checkpoint that
    save_failed writes then samples the same prompts."""
    try:
        yield
    except RunFailed:
        progress, run.stream.position = place
        vars(run.progress).update(progress)
        raise


def save_failed(run):
    """Collective: saves a run that ends by an error between two updates. Does not save if the last
    step is saved already, a weight is not finite, or the first update did not pass its check."""
    p = run.progress
    finite = all(parameter.isfinite().all() for parameter in run.policy.model.parameters())
    if p.checked and p.saved != p.step and not any_rank(not finite):  # collective
        save_run(run)  # collective


def point(folder, name, step):
    """Atomically makes folder/name a link to the checkpoint of `step`, or removes it: None."""
    link, draft = Path(folder, name), Path(folder, f".{name}_{dist.get_rank()}")
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


def step_of(path):
    """Returns the N of a path step_N, or -1."""
    digits = path.name.removeprefix("step_")
    return int(digits) if digits.isdecimal() else -1


def saved_in(folder):
    """Returns the paths of a folder's checkpoints, complete or not, oldest first."""
    return sorted((p for p in Path(folder).glob("step_*") if step_of(p) >= 0), key=step_of)


# --- Find and load ------------------------------------------------------------------
def newest(folder):
    """Collective: returns (path, state) of the newest complete checkpoint, or (None, None) if no
    rank has a checkpoint. Raises SystemExit if there are checkpoints but none is complete: a run
    must not start over because a disk is missing."""
    if (draft := Path(folder, DRAFT)).exists():
        say(f"{folder}: the run ended while it was saving a checkpoint, whose files are deleted")
        shutil.rmtree(draft, ignore_errors=True)
    fault, steps = None, gathered({step_of(path) for path in saved_in(folder)})
    for step in sorted(set().union(*steps), reverse=True):
        path = Path(folder, f"step_{step:06d}")
        states, faults = zip(*gathered(examine(path)), strict=True)
        fault = next(filter(None, faults), None)
        if not fault and len({state["progress"]["name"] for state in states}) > 1:
            fault = "the ranks' folders are of different runs"
        if not fault:
            return path, states[0]
        say(f"{path} is incomplete and is skipped: {fault}")
    if fault:
        raise SystemExit(
            f"no checkpoint in RUN_DIR = {folder!r} is complete: {fault}. Start each rank on the"
            " same machine as before, or put RUN_DIR on a disk that all machines share. To start a"
            " new run, choose another RUN_DIR"
        )
    return None, None


def examine(path):
    """Returns (state, None) of a checkpoint if this rank finds the files that it needs, else
    (None, fault). SystemExit if another number of ranks has saved it."""
    rank, world, path = dist.get_rank(), dist.get_world_size(), path.absolute()
    try:
        state = json.loads(state_file(path).read_text())
        if (before := len(state["files"])) != world:
            raise SystemExit(
                f"{path} was saved by {before} ranks, and {world} can't resume from it: start"
                f" {before}, or begin a new run from its weights: MODEL = '{path}' (an adapter:"
                " merge it first), and another RUN_DIR"
            )
        for name, size in state["files"][rank].items():
            if (found := Path(path, name).stat().st_size) != size:
                raise ValueError(f"{path / name} has {found} bytes, not {size}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        return None, f"rank {rank} on {socket.gethostname()}: {error}"
    return state, None


def load(path, engine, stream):
    """Collective: restores engine, stream and random number generators from what save() wrote."""
    rank, trainer = dist.get_rank(), Path(path, "trainer")
    part = load_states(trainer / f"optimizer_{rank}.pt")
    mine = json.loads(Path(trainer, f"rank_{rank}.json").read_text())
    # DeepSpeed expects a dict of all ranks' parts and reads this rank's
    engine.optimizer.load_state_dict({rank: part}, load_from_fp32_weights=True)
    for state in engine.optimizer.state.values():  # in RAM Adam's moments are still the file's
        state |= {name: x.clone() for name, x in state.items() if getattr(x, "is_cpu", False)}
    dist.barrier()
    give_weights(engine, stream.seed)  # collective
    stream.position = mine["position"]
    version, numbers, gauss = mine["random"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(torch.tensor(mine["torch"], dtype=torch.uint8))
