"""Checkpoints, RUN_DIR/step_000100: whole or not at all, and enough to go on as if nothing was.

A checkpoint is a model in Hugging Face format, which MODEL may name, and a folder `trainer`:

    deepspeed/       the optimiser and its float32 weights, of every rank, as DeepSpeed writes them
    rank_0.json ...  a rank's place in the data, and its random numbers
    state.json       where the run is, and the size of every file; written last

It is written under another name, which is changed when all is there. One that is torn all the same
(a full disk, a copy broken off) is found by its sizes, and passed over. All ranks call save() and
load() together.
"""

import json
import random
import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from report import say
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
        for old in sorted(Path(folder).glob("step_*"))[:-keep]:
            shutil.rmtree(old)
        say(f"saved {final}")
    dist.barrier()


def newest(folder):
    """-> (path, state) of the newest whole checkpoint, or (None, None); names torn ones."""
    if Path(folder, DRAFT).exists():
        say(f"{folder}: the run ended while a checkpoint was being saved; that one does not count")
    for path in sorted(Path(folder).glob("step_*"), reverse=True):
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
