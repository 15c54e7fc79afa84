"""Checkpoints, RUN_DIR/step_000100: whole or not at all, and enough to go on as if nothing was.

A checkpoint is a model in Hugging Face format, which MODEL may name, and a folder `trainer`:

    deepspeed/       the optimiser and its float32 weights, of every rank, as DeepSpeed writes them
    rank_0.json ...  a rank's place in the data, and its random numbers
    state.json       where the run is, and the size of every file; written last

It is written under another name, which is changed when all is there. One that is torn all the same
(a full disk, a copy broken off) is found by its sizes, and passed over. All ranks call save() and
load() together.
"""

import fcntl
import json
import random
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from config import check_same_run, constants_of
from report import RunFolder, say
from watch import announced

DRAFT = ".unfinished"


def save(folder, policy, engine, stream, state, keep):
    """Saves step_N, N being state["step"], and deletes all but the newest `keep`."""
    rank, draft = dist.get_rank(), Path(folder, DRAFT)
    if rank == 0:
        shutil.rmtree(draft, ignore_errors=True)
        policy.save(draft)
        Path(draft, "trainer").mkdir()
    dist.barrier()
    engine.save_checkpoint(
        str(draft / "trainer"), tag="deepspeed", save_latest=False, exclude_frozen_parameters=True
    )
    own = {"position": stream.position, "random": random.getstate()}
    own["torch"] = torch.get_rng_state().tolist()
    if torch.cuda.is_available():
        own["cuda"] = torch.cuda.get_rng_state().tolist()
    Path(draft, "trainer", f"rank_{rank}.json").write_text(json.dumps(own))
    with announced("the other ranks' part of the checkpoint"):
        dist.barrier()
    if rank == 0:
        files = [path for path in draft.rglob("*") if path.is_file()]
        sizes = {str(path.relative_to(draft)): path.stat().st_size for path in files}
        text = json.dumps(state | {"ranks": dist.get_world_size(), "files": sizes}, indent=1)
        Path(draft, "trainer", "state.json").write_text(text)
        final = Path(folder, f"step_{state['step']:06d}")
        shutil.rmtree(final, ignore_errors=True)  # a torn one
        draft.rename(final)
        for old in sorted(Path(folder).glob("step_*"), key=number)[::-1]:
            newer = number(old) > state["step"]  # torn, and of a history that is no more
            keep -= not newer
            if newer or keep < 0:
                shutil.rmtree(old)
        say(f"saved {final}")
    dist.barrier()


def number(path):
    """-> the N of step_N."""
    digits = path.name.removeprefix("step_")
    return int(digits) if digits.isdecimal() else -1


def newest(folder):
    """-> (path, state) of the newest whole checkpoint, or (None, None); names torn ones."""
    if Path(folder, DRAFT).exists():
        say(f"{folder}: the run ended while a checkpoint was being saved; that one does not count")
    for path in sorted(Path(folder).glob("step_*"), key=number, reverse=True):
        try:
            state = json.loads(Path(path, "trainer", "state.json").read_text())
            for name, size in state["files"].items():
                if Path(path, name).stat().st_size != size:
                    raise ValueError(f"{name} has not its {size} bytes")
        except (OSError, ValueError, KeyError, TypeError) as error:
            say(f"{path} is not whole, and passed over: {error}")
        else:
            return path, state
    return None, None


def load(path, engine, stream):
    """Gives engine and stream what save() found."""
    engine.load_checkpoint(
        str(Path(path, "trainer")), tag="deepspeed", load_module_strict=False
    )  # not strict: what LoRA keeps frozen is not in it
    own = json.loads(Path(path, "trainer", f"rank_{dist.get_rank()}.json").read_text())
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


def open_run(folder, constants, engine, stream, server):
    """-> the Progress of the run in `folder`: a new one, or from its newest whole checkpoint, where
    everything is then as it was. `constants` are the trainer's globals(). All ranks call it."""
    found = [None]
    if dist.get_rank() == 0:
        named = Path(folder, "run.json")
        if not named.exists():
            name = f"{Path(folder).name}-{uuid.uuid4().hex[:8]}"
            draft = named.with_suffix(".draft")
            draft.write_text(json.dumps({"run": name, "constants": constants_of(constants)}))
            draft.replace(named)
        found = [(json.loads(named.read_text())["run"], *newest(folder))]
    dist.broadcast_object_list(found, src=0)
    run, path, state = found[0]
    progress = Progress(run)
    if path:
        check_same_run(state, constants, dist.get_world_size())
        load(path, engine, stream)
        # DeepSpeed brings back these too; the learning rate is set at each step
        engine.optimizer.clip_grad = constants["MAX_GRAD_NORM"]
        for group in engine.optimizer.param_groups:
            group["betas"] = tuple(constants["ADAM_BETAS"])
            group["weight_decay"] = constants["WEIGHT_DECAY"]
        progress = Progress(**state["progress"] | {"idle": 0, "bad": 0})
        say(f"the run {run} goes on from {path}")
    RunFolder(folder).cut(progress.step if path else -1)
    if server and dist.get_rank() == 0:
        undone = server.resume(run, progress.step)
        if any(undone.values()):
            say(f"of what the server had for later steps: {undone}")
    return progress
