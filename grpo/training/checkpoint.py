"""Checkpoints, RUN_DIR/step_000100, and how a run begins or resumes from the newest one.

A checkpoint is a model in Hugging Face format, which MODEL may name, and a folder `trainer`:

    optimizer_0.pt ...  a rank's part of the optimiser and of the float32 weights
    rank_0.json ...     its position in the data and its random number generators
    reference.safetensors    the reference, once REFERENCE_REFRESH_STEPS has replaced it
    state.json          the run's progress, and the sizes of every rank's files

Beside them are links: `best` to the checkpoint with the best evaluation (KEEP_BEST), and `final` to
the last one of a run that has ended.

Saving is atomic: RUN_DIR/.unfinished is renamed when all ranks have written to it. Where machines
have RUN_DIR on disks of their own, each keeps the files of its ranks: the first rank that sees a
folder makes and renames it, and the folder of rank 0, which alone has the model, is renamed last. A
checkpoint is complete if every rank finds its files, at their sizes; otherwise all ranks skip it.
"""

import contextlib
import fcntl
import json
import random
import shutil
import socket
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist

from grpo.log import say
from grpo.training.ranks import RunFailed, any_rank, gathered, note
from grpo.training.report import RunFolder, commit, constants_of, model_card

DRAFT = ".unfinished"
FADE = 0.8  # from step to step: flat_share is of about 1 / (1 - FADE) = 5 of them
SAME = ("MODEL", "TASK", "LORA_RANK", "DTYPE")  # a run can't be resumed with other values
REFERENCE = "reference.safetensors"


# --- Save ---------------------------------------------------------------------------
def leads(folder):
    """Collective: returns whether this rank is the first of those that see the same `folder`. Each
    leaves a file in it and looks for the others'."""
    token = Path(folder, f".rank_{uuid.uuid4().hex}")  # a new name: network disks cache old ones
    token.parent.mkdir(parents=True, exist_ok=True)
    token.touch()
    seen = [Path(folder, name).exists() for name in gathered(token.name)]
    dist.barrier()  # until all have looked
    token.unlink()
    return seen.index(True) == dist.get_rank()


def save_run(run):
    """Collective: saves a checkpoint of the run, unless this step has one."""
    progress, c = run.progress, run.c
    if progress.saved == progress.step:
        if progress.best == progress.step:  # it was evaluated after it was saved
            point(c.RUN_DIR, "best", progress.step)
        return
    note(f"saving step {progress.step}")
    progress.saved = progress.step
    state = {"step": progress.step, "progress": asdict(progress)}
    state["constants"] = constants_of(vars(c))
    card = model_card(c, state) if dist.get_rank() == 0 else ""
    reference = run.reference if progress.reference else None
    keep = c.KEEP_CHECKPOINTS
    save(c.RUN_DIR, run.policy, run.engine, run.stream, state, keep, card, reference)


@contextlib.contextmanager
def undone_if_failed(run):
    """If the block raises RunFailed, the run's progress and its place in the data are again what
    they were before: a run that resumes from what save_failed saves samples the same prompts."""
    progress, position = dict(vars(run.progress)), run.stream.position
    try:
        yield
    except RunFailed:
        vars(run.progress).update(progress)
        run.stream.position = position
        raise


def save_failed(run):
    """Collective: saves a run that ends by an error between two updates; but not if its last step
    is saved already, a weight is not finite, or the first update was not what it should be."""
    p = run.progress
    finite = all(parameter.isfinite().all() for parameter in run.policy.model.parameters())
    if p.checked and p.saved < p.step and not any_rank(not finite):  # collective
        save_run(run)  # collective


def save(folder, policy, engine, stream, state, keep, card, reference=None):
    """Collective: saves step_N, where N is state["step"], with `card` as its README.md, and the
    weights of the `reference`, if one is given; deletes all but the newest `keep` and the best."""
    rank, leader = dist.get_rank(), leads(folder)
    draft, final = Path(folder, DRAFT), Path(folder, f"step_{state['step']:06d}")
    files = []
    if leader:
        for leftover in (draft, final):  # `final` is incomplete, here or on another machine
            shutil.rmtree(leftover, ignore_errors=True)
        if rank == 0:
            policy.save(draft)
            files = [p for p in draft.rglob("*") if p.is_file() and p.name != "README.md"]
            Path(draft, "README.md").write_text(card)  # may be edited: its size is not checked
        Path(draft, "trainer").mkdir(parents=True)
        if reference:
            files.append(Path(draft, "trainer", REFERENCE))
            safetensors.torch.save_file(reference.weights(), files[-1])
    dist.barrier()
    files += save_part(Path(draft, "trainer"), engine, stream)
    sizes = gathered({str(path.relative_to(draft)): path.stat().st_size for path in files})
    text = json.dumps(state | {"ranks": len(sizes), "files": sizes}, indent=1)
    for last in (False, True):  # rank 0's folder, which alone has the model
        if leader and (rank == 0) == last:
            Path(draft, "trainer", "state.json").write_text(text)
            draft.rename(final)
        dist.barrier()
    say(f"saved {final}")
    best = state["progress"].get("best", -1)
    if leader and best == state["step"]:
        point(folder, "best", best)  # before the old one goes
    saved = saved_in(folder) if leader else []
    kept = [path for path in saved if step_of(path) <= state["step"]][-keep:]
    kept += [path for path in saved if step_of(path) == best]
    for path in set(saved) - set(kept):  # later ones are incomplete, or from before a resume
        shutil.rmtree(path)


def point(folder, name, step):
    """Makes folder/name a link to the checkpoint of `step`, atomically; removes it if that is -1.
    Where the disk has no links it is a file with the checkpoint's name in it."""
    link, draft = Path(folder, name), Path(folder, f".{name}_{dist.get_rank()}")
    if link.is_dir() and not link.is_symlink():
        say(f"{link} is a folder, not our link to a checkpoint, and is left alone")
    elif step < 0:
        link.unlink(missing_ok=True)
    else:
        draft.unlink(missing_ok=True)
        try:
            draft.symlink_to(f"step_{step:06d}")
        except OSError:
            draft.write_text(f"step_{step:06d}\n")
        draft.replace(link)


def point_final(run, asked):
    """Links RUN_DIR/final to the last checkpoint, unless the run was `asked` to end."""
    if not asked:
        point(run.c.RUN_DIR, "final", run.progress.saved)


def save_part(trainer, engine, stream):
    """Writes this rank's files to the folder `trainer`; returns their paths."""
    rank = dist.get_rank()
    own = {"position": stream.position, "random": random.getstate()}
    own["torch"] = torch.get_rng_state().tolist()
    files = [trainer / f"optimizer_{rank}.pt", trainer / f"rank_{rank}.json"]
    # Not engine.save_checkpoint: that writes the model too, and load_checkpoint reads it everywhere
    torch.save(engine.optimizer.state_dict(), files[0])
    files[1].write_text(json.dumps(own))
    return files


def step_of(path):
    """Returns the N of a path step_N, or -1."""
    digits = path.name.removeprefix("step_")
    return int(digits) if digits.isdecimal() else -1


def saved_in(folder):
    """Returns the paths of a folder's checkpoints, complete or not, oldest first."""
    return sorted((p for p in Path(folder).glob("step_*") if step_of(p) >= 0), key=step_of)


# --- Find and load ------------------------------------------------------------------
def newest(folder):
    """Collective: returns (path, state) of the newest complete checkpoint, or (None, None) if rank
    0 has no checkpoint. SystemExit if it has some and none is complete: a run must not start over
    because a disk is missing."""
    if Path(folder, DRAFT).exists():
        say(f"{folder}: the run ended while a checkpoint was being saved; that one does not count")
    fault = None
    for name in reversed(gathered([path.name for path in saved_in(folder)])[0]):
        path = Path(folder, name)
        states, faults = zip(*gathered(examine(path)), strict=True)
        if not any(faults):
            return path, states[0]
        fault = next(filter(None, faults))
        say(f"{path} is incomplete and is skipped: {fault}")
    if fault:
        raise SystemExit(
            f"no checkpoint in RUN_DIR = {folder!r} is complete: {fault}. Start each rank on the"
            " machine that it was on, or put RUN_DIR on a disk that all machines share; for another"
            " run choose another RUN_DIR"
        )
    return None, None


def examine(path):
    """Returns (state, None) of a checkpoint where this rank finds its files; else (None, fault)."""
    rank, path = dist.get_rank(), path.absolute()
    try:
        state = json.loads(Path(path, "trainer", "state.json").read_text())
        files = state["files"]
        mine = files[rank] if rank < len(files) else {}  # check_resumable refuses a further rank
        for name, size in mine.items():
            if Path(path, name).stat().st_size != size:
                raise ValueError(f"{path / name} should have {size} bytes")
    except (OSError, ValueError, KeyError, TypeError) as error:
        return None, f"rank {rank} on {socket.gethostname()}: {error}"
    return state, None


def load(path, engine, stream, reference=None):
    """Collective: restores engine, stream, random number generators and, if one is given, the
    `reference` from what save() wrote."""
    rank, trainer = dist.get_rank(), Path(path, "trainer")
    part = torch.load(trainer / f"optimizer_{rank}.pt", map_location="cpu", weights_only=False)
    # DeepSpeed expects all ranks' parts and takes its own
    engine.optimizer.load_state_dict({rank: part}, load_from_fp32_weights=True)
    dist.barrier()
    engine.optimizer.update_lp_params()  # the model's weights, from all ranks' float32 ones
    if reference:
        reference.load(safetensors.torch.load_file(trainer / REFERENCE))
    own = json.loads(Path(trainer, f"rank_{rank}.json").read_text())
    stream.position = own["position"]
    version, numbers, gauss = own["random"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(torch.tensor(own["torch"], dtype=torch.uint8))


# --- Begin or resume a run ----------------------------------------------------------
@dataclass
class Progress:
    """What a checkpoint keeps beside weights, optimiser and random number generators."""

    run: str  # its name: of its folder, and a random part
    step: int = 0  # updates made
    evaluated: int = -1  # the step of the last evaluation,
    accuracy: float = 0.0  # and its result
    saved: int = -1  # the step of the last checkpoint
    best: int = -1  # the step of the best evaluation (KEEP_BEST), from the first update on,
    best_accuracy: float = -1.0  # and its result, or that of step 0 where none was better
    reference: int = 0  # the step whose policy is the reference; 0: MODEL is
    idle: int = 0  # steps in a row that had nothing to train
    bad: int = 0  # updates in a row that were not finite
    checked: bool = False  # whether check_first_update is done
    sampled: float = 0.0  # groups that the ranks sampled, those of earlier steps counting less,
    flat: float = 0.0  # and how many of them were flat
    groups: int = 0  # sampled since step 0, by ranks and workers

    def passed(self, every, before):
        """Returns whether a multiple of `every` lies after step `before`, up to now; 0: never."""
        return bool(every and self.step // every > before // every)

    def take_evaluation(self, accuracy, keep_best):
        """Notes this step's evaluation. The first to have reached the best result is the best; one
        of step 0 is of MODEL itself, which needs no checkpoint."""
        self.accuracy, self.evaluated = accuracy, self.step
        if keep_best and accuracy > self.best_accuracy:
            self.best_accuracy = accuracy
            self.best = self.step or -1

    @property
    def flat_share(self):
        """The share of flat groups in the last steps; 0 before the first."""
        return self.flat / self.sampled if self.sampled else 0.0

    def begin_rollout(self):
        """Has the steps so far count less than the one that begins."""
        self.sampled, self.flat = FADE * self.sampled, FADE * self.flat

    def count_round(self, *, groups, usable):
        self.sampled += groups
        self.flat += groups - usable


def check_run_dir(folder, resume):
    """Raises SystemExit where a run would be overwritten."""
    resumable = Path(folder, "run.json").exists()
    begun = Path(folder, "metrics.jsonl").exists() or saved_in(folder)
    if (resumable or begun) and not (resumable and resume):
        raise SystemExit(
            f"RUN_DIR = {folder!r} must be a folder that holds no run: choose another, move that"
            " one, or resume it (RESUME = True)"
        )


def lock_run(folder):
    """Returns a file that stays locked until it is closed or this process ends. SystemExit if
    another trainer holds the lock: the two would undo each other's steps."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    file = open(Path(folder, ".lock"), "w")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise SystemExit(f"another trainer is running in RUN_DIR = {folder!r}") from None
    return file


def open_run(folder, constants, engine, stream, reference):
    """Collective: returns the Progress of the run in `folder`: a new run, or one that resumes from
    its newest complete checkpoint. `constants` are values by name, such as vars() of the trainer's;
    `reference` gets the checkpoint's, if that was refreshed."""
    run, before = run_of(folder, constants)
    path, state = newest(folder)
    if path:
        check_resumable(path, state, constants, dist.get_world_size())
    elif before:
        check_same(before, constants)
    write_run(folder, run, constants)
    progress = Progress(run)
    if path:
        kept = {k: v for k, v in state["progress"].items() if k in Progress.__annotations__}
        progress = Progress(**kept | {"idle": 0, "bad": 0})
        if progress.reference and (constants["REF_SERVER"] or not constants["KL_BETA"]):
            raise SystemExit(
                f"REF_SERVER = {constants['REF_SERVER']!r} must be None, and KL_BETA ="
                f" {constants['KL_BETA']} above 0: the reference of the run in RUN_DIR ="
                f" {folder!r} is its policy after {progress.reference} updates, which is in its"
                f" checkpoint. For another run choose another RUN_DIR, and MODEL = '{path}' to"
                " start from these weights"
            )
        load(path, engine, stream, reference if progress.reference else None)
        # DeepSpeed restores these too; the learning rate is set at each step
        engine.optimizer.clip_grad = constants["MAX_GRAD_NORM"]
        for group in engine.optimizer.param_groups:
            group["betas"] = tuple(constants["ADAM_BETAS"])
            group["weight_decay"] = constants["WEIGHT_DECAY"]
        say(f"the run {run} resumes from {path}")
        RunFolder(folder).undo(progress.step)
    else:
        RunFolder(folder).set_aside()
    point_best(folder, progress, constants["KEEP_BEST"])
    point(folder, "final", -1)
    return progress


def point_best(folder, progress, keep_best):
    """Collective: links RUN_DIR/best to what the checkpoint that is resumed from knows as the best.
    Where that is gone, the next evaluation is the best."""
    there = progress.best < 0 or Path(folder, f"step_{progress.best:06d}").exists()
    everywhere = all(gathered(there))  # collective
    if not keep_best or not everywhere:
        progress.best, progress.best_accuracy = -1, -1.0
    point(folder, "best", progress.best)


def run_of(folder, constants):
    """Collective: returns (name, earlier constants) of the run in rank 0's run.json. Returns a new
    name and {} if there is none, or if that run ended before its first step and had another model
    or task. SystemExit if another rank finds another run."""
    path, metrics = Path(folder, "run.json"), Path(folder, "metrics.jsonl")
    found = json.loads(path.read_text()) if path.exists() else {}
    begun = bool(saved_in(folder)) or (metrics.exists() and metrics.stat().st_size > 0)
    new = f"{path.parent.name}-{uuid.uuid4().hex[:8]}"
    ranks = gathered((found.get("run"), socket.gethostname(), found, begun, new))
    check_one_run(folder, [(run, host) for run, host, *_ in ranks])
    run, _, found, begun, new = ranks[0]  # rank 0 decides
    if not found:
        return new, {}
    others = differing(found["constants"], constants, SAME)
    if begun or not others:
        return run, found["constants"]
    say(f"the run {run} ended without a step: with another {others[0]} a new one begins")
    return new, {}


def check_one_run(folder, ranks):
    """Raises SystemExit if a rank's RUN_DIR holds another run than rank 0's; `ranks` are pairs of
    a run, or None, and a machine's name."""
    (ours, host), *_ = ranks
    for rank, (run, there) in enumerate(ranks):
        if run and run != ours:
            raise SystemExit(
                f"RUN_DIR = {folder!r} of rank {rank}, on {there}, holds the run {run}, and rank"
                f" 0's, on {host}, {'another' if ours else 'none'}: start each rank on the machine"
                " that it was on, or choose another RUN_DIR"
            )


def write_run(folder, run, constants):
    """Writes run.json: the run's name, the code's commit and the constants of this start."""
    draft = Path(folder, f".run_{dist.get_rank()}.json")  # other ranks may write to the same folder
    record = {"run": run, "code": commit(), "constants": constants_of(constants)}
    draft.write_text(json.dumps(record))
    draft.replace(Path(folder, "run.json"))


# --- The constants of a run that resumes --------------------------------------------
def check_resumable(path, state, constants, ranks):
    """Raises SystemExit if a run on this number of `ranks`, or with these constants, can't resume
    from the checkpoint `path`. Says which other constants have changed."""
    before, there = state["constants"], state["ranks"]
    if there != ranks:  # each has its part of the optimiser
        raise SystemExit(
            f"{path} is of a run on {there} ranks, here are {ranks}: launch {there}, or begin"
            f" another run from its weights, with another RUN_DIR and MODEL = '{path}'"
        )
    check_same(before, constants, path)
    now = constants_of(constants)
    changed = [f"{k} {before[k]!r} -> {v!r}" for k, v in now.items() if before.get(k, v) != v]
    if changed:
        say(f"the run resumes with other constants: {', '.join(changed)}")


def check_same(before, constants, path=None):
    """Raises SystemExit if a constant that must not change has changed; `path` is the checkpoint
    that the run would resume from."""
    for name in differing(before, constants, SAME):
        weights = f", and MODEL = '{path}' to start it from these weights" if path else ""
        raise SystemExit(
            f"{name} = {constants[name]!r} must be {before.get(name)!r}, as the run in RUN_DIR ="
            f" {constants['RUN_DIR']!r} has it; for another run choose another RUN_DIR{weights}"
        )


def differing(before, constants, names):
    return [name for name in names if before.get(name) != constants[name]]
