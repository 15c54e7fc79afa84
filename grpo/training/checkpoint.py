"""Checkpoints, RUN_DIR/step_000100: whole or not at all, and enough to go on as if nothing was.

A checkpoint is a model in Hugging Face format, which MODEL may name, and a folder `trainer`:

    optimizer_0.pt ...  a rank's part of the optimiser, and of the float32 weights
    rank_0.json ...     its place in the data, and its random numbers
    state.json          where the run is, and of every rank its files' sizes

It is written under another name, which is changed when all is there. Machines that have RUN_DIR on
disks of their own each keep their ranks' part: the first rank that sees a folder makes and renames
it, and rank 0's, which alone has the model, comes last and makes it count. A checkpoint is whole if
every rank finds what it wrote. One that is torn all the same (a full disk, a disk that is gone) is
found by its sizes, and passed over by all. All ranks call save() and open_run() together.
"""

import fcntl
import json
import random
import shutil
import socket
import uuid
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from grpo.log import say
from grpo.training.checks import check_same, check_same_run, constants_of, differing
from grpo.training.liveness import meet
from grpo.training.metrics import RunFolder

DRAFT = ".unfinished"
BASIS = ("MODEL", "LORA_RANK", "DTYPE", "TASK")  # what a run without a checkpoint goes on with


def gathered(value):
    """-> every rank's `value`, by rank."""
    everyone = [None] * dist.get_world_size()
    meet("the other ranks' part in RUN_DIR")  # a slow disk may take long
    dist.all_gather_object(everyone, value)
    return everyone


def leads(folder):
    """-> whether this rank is the first of those that see the same `folder`: each leaves a file in
    it, and looks for the others'."""
    token = Path(folder, f".rank_{uuid.uuid4().hex}")  # a new name: network disks remember old ones
    token.parent.mkdir(parents=True, exist_ok=True)
    token.touch()
    seen = [Path(folder, name).exists() for name in gathered(token.name)]
    gathered(None)  # until all have looked
    token.unlink()
    return seen.index(True) == dist.get_rank()


def save(folder, policy, engine, stream, state, keep):
    """Saves step_N, N being state["step"], and deletes all but the newest `keep`."""
    rank, draft, first = dist.get_rank(), Path(folder, DRAFT), leads(folder)
    final = Path(folder, f"step_{state['step']:06d}")
    if first:
        for old in (draft, final):  # the latter is torn, or another part of it is
            shutil.rmtree(old, ignore_errors=True)
        if rank == 0:
            policy.save(draft)
        Path(draft, "trainer").mkdir(parents=True)
    files = [path for path in draft.rglob("*") if path.is_file()] if rank == 0 else []
    gathered(None)
    files += save_part(Path(draft, "trainer"), engine, stream)
    sizes = gathered({str(path.relative_to(draft)): path.stat().st_size for path in files})
    text = json.dumps(state | {"ranks": len(sizes), "files": sizes}, indent=1)
    for last in (False, True):
        if first and last == (rank == 0):
            Path(draft, "trainer", "state.json").write_text(text)
            draft.rename(final)
        gathered(None)
    say(f"saved {final}")
    for old in sorted(Path(folder).glob("step_*"), key=number)[::-1] if first else []:
        newer = number(old) > state["step"]  # torn, and of a history that is no more
        keep -= not newer
        if newer or keep < 0:
            shutil.rmtree(old)


def save_part(trainer, engine, stream):
    """Writes what this rank alone knows; -> the files."""
    rank = dist.get_rank()
    own = {"position": stream.position, "random": random.getstate()}
    own["torch"] = torch.get_rng_state().tolist()
    if torch.cuda.is_available():
        own["cuda"] = torch.cuda.get_rng_state().tolist()
    files = [trainer / f"optimizer_{rank}.pt", trainer / f"rank_{rank}.json"]
    # Not engine.save_checkpoint: that writes the model too, and load_checkpoint reads it everywhere
    torch.save(engine.optimizer.state_dict(), files[0])
    files[1].write_text(json.dumps(own))
    return files


def number(path):
    """-> the N of step_N."""
    digits = path.name.removeprefix("step_")
    return int(digits) if digits.isdecimal() else -1


def newest(folder):
    """-> (path, state) of the newest whole checkpoint, or (None, None) if rank 0 has none; names
    torn ones. SystemExit if all are: the run must not begin again because a disk is not there."""
    if Path(folder, DRAFT).exists():
        say(f"{folder}: the run ended while a checkpoint was being saved; that one does not count")
    paths = sorted(Path(folder).glob("step_*"), key=number, reverse=True)
    missing = None
    for name in gathered([path.name for path in paths])[0]:
        states, wrong = zip(*gathered(look(Path(folder, name))), strict=True)
        if not any(wrong):
            return Path(folder, name), states[0]
        missing = next(filter(None, wrong))
        say(f"{Path(folder, name)} is not whole, and passed over: {missing}")
    if missing:
        raise SystemExit(
            f"no checkpoint in RUN_DIR = {folder!r} is whole: {missing}. Start each rank on the"
            " machine that it was on, or put RUN_DIR on a disk that all machines share; for another"
            " run choose another RUN_DIR"
        )
    return None, None


def look(path):
    """-> (state, None) of a checkpoint of which this rank finds its part; else (None, why not)."""
    rank, path = dist.get_rank(), path.absolute()
    try:
        state = json.loads(Path(path, "trainer", "state.json").read_text())
        files = state["files"]  # older checkpoints have one dict for all ranks
        mine = [files] if isinstance(files, dict) else files[rank : rank + 1]
        for name, size in (item for part in mine for item in part.items()):
            if Path(path, name).stat().st_size != size:
                raise ValueError(f"{path / name} has not its {size} bytes")
    except (OSError, ValueError, KeyError, TypeError) as error:
        return None, f"rank {rank} on {socket.gethostname()}: {error}"
    return state, None


def load(path, engine, stream):
    """Gives engine and stream what save() found."""
    rank, trainer = dist.get_rank(), Path(path, "trainer")
    old = list(trainer.glob(f"deepspeed/*zero_pp_rank_{rank}_*"))  # as DeepSpeed saved it
    part = old[0] if old else trainer / f"optimizer_{rank}.pt"
    part = torch.load(part, map_location="cpu", weights_only=False)
    # DeepSpeed wants a list of all ranks' parts, and takes its own
    own = {rank: part["optimizer_state_dict"] if old else part}
    engine.optimizer.load_state_dict(own, load_from_fp32_weights=True)
    meet("the other ranks' part of the checkpoint")
    engine.optimizer.update_lp_params()  # the model's weights, from all ranks' float32 ones
    own = json.loads(Path(trainer, f"rank_{rank}.json").read_text())
    stream.position = own["position"]
    version, numbers, gauss = own["random"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(torch.tensor(own["torch"], dtype=torch.uint8))
    if "cuda" in own and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(own["cuda"], dtype=torch.uint8))


# --- A run, from its beginning or from a checkpoint -----------------------------------
@dataclass
class Progress:
    """Where the run is: what a checkpoint keeps beside weights, optimiser and random numbers."""

    run: str  # its name at the server
    step: int = 0  # updates made
    evaluated: int = -1  # the step of the last evaluation,
    accuracy: float = 0.0  # its result,
    best: float = 0.0  # and the best of all
    saved: int = -1  # the step of the last checkpoint
    reference: int = 0  # the step whose policy is the reference, where one follows
    idle: int = 0  # steps in a row that had nothing to train
    bad: int = 0  # updates in a row that were not finite
    checked: bool = False  # whether check_first_update has been

    def passed(self, every, before):
        """Whether a multiple of `every` lies after step `before`, up to now; `every` 0 is never."""
        return bool(every and self.step // every > before // every)


def check_run_dir(folder, resume):
    """Raises SystemExit where a run would be written over."""
    files = [Path(folder, name).exists() for name in ("run.json", "metrics.jsonl")]
    holds_one = any(files) or any(Path(folder).glob("step_*"))
    if holds_one and not (resume and files[0]):
        raise SystemExit(
            f"RUN_DIR = {folder!r} must be a folder that holds no run: choose another, move that"
            " one, or go on with it (RESUME = True)"
        )


def lock_run(folder):
    """-> a file that is locked until it is closed, or this process ends. SystemExit if another
    trainer has it: the two would undo each other's steps."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    file = open(Path(folder, ".lock"), "w")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise SystemExit(f"another trainer is running in RUN_DIR = {folder!r}") from None
    return file


def run_of(folder, now, server):
    """-> (name, constants before) of the run in `folder`, as rank 0's run.json has them; those of a
    new run, without constants, where there is none, or where it failed before its first step and
    was another. SystemExit if another rank finds another run."""
    named = Path(folder, "run.json")
    found = json.loads(named.read_text()) if named.exists() else {}
    chosen = name_run(named.parent, found, now, server) if dist.get_rank() == 0 else None
    everyone = gathered((found.get("run"), chosen, socket.gethostname()))
    ours, chosen, our_host = everyone[0]
    for rank, (other, _, host) in enumerate(everyone):
        if other and other != ours:
            raise SystemExit(
                f"RUN_DIR = {folder!r} of rank {rank}, on {host}, holds the run {other}, and"
                f" rank 0's, on {our_host}, {'another' if ours else 'none'}: start each rank on the"
                " machine that it was on, or choose another RUN_DIR"
            )
    return chosen


def name_run(folder, found, now, server):
    """-> run_of's, from what its run.json holds; called by rank 0."""
    if found:
        others, metrics = differing(found["constants"], now, BASIS), Path(folder, "metrics.jsonl")
        begun = any(folder.glob("step_*")) or metrics.exists() and metrics.stat().st_size
        if begun or not others:
            return found["run"], found["constants"]
        ended, other = found["run"], others[0]
        say(f"the run {ended} ended before its first step; with another {other} a new one begins")
        if server:
            server.end(ended)  # what it holds of that run is of no use to this one
    return f"{folder.name}-{uuid.uuid4().hex[:8]}", {}


def keep_run(folder, run, now):
    """Writes run.json: the run's name, and the constants of this start."""
    draft = Path(folder, f".run_{dist.get_rank()}.json")  # the folder may be that of several ranks
    draft.write_text(json.dumps({"run": run, "constants": constants_of(now)}))
    draft.replace(Path(folder, "run.json"))


def open_run(folder, constants, engine, stream, server):
    """-> the Progress of the run in `folder`: a new one, or from its newest whole checkpoint, where
    everything is then as it was. `constants` are the trainer's globals(). All ranks call it."""
    run, before = run_of(folder, constants, server)
    path, state = newest(folder)
    progress = Progress(run)
    if path:
        check_same_run(state, constants, dist.get_world_size())
    elif before:
        check_same(before, constants, BASIS)
    keep_run(folder, run, constants)
    if path:
        load(path, engine, stream)
        # DeepSpeed brings back these too; the learning rate is set at each step
        engine.optimizer.clip_grad = constants["MAX_GRAD_NORM"]
        for group in engine.optimizer.param_groups:
            group["betas"] = tuple(constants["ADAM_BETAS"])
            group["weight_decay"] = constants["WEIGHT_DECAY"]
        progress = Progress(**state["progress"] | {"idle": 0, "bad": 0})
        say(f"the run {run} goes on from {path}")
    RunFolder(folder).undo(progress.step if path else -1)
    if server and dist.get_rank() == 0:
        undone = server.resume(run, progress.step)
        if any(undone.values()):
            say(f"of what the server had for later steps: {undone}")
    return progress
