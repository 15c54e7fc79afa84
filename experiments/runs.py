"""One run of an experiment: the demo's task, with a case's constants, from a seed's warm start.

A case has constants that differ from presets/demo.py, and may have another student and a teacher
from experiments/students.py. A run is one process, without a server (REF_SERVER=None).
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "runs/experiments"
SEEDS = range(5)
HACKABLE = {"TASK": str(ROOT / "experiments/hackable.py")}
HACKABLE |= {"MASK_TRUNCATED": True}  # as in the first runs, so that runs compare


@dataclass(frozen=True)
class Case:
    constants: dict
    label: str = ""  # its name in pictures and tables
    student: str = "arithmetic"  # MODEL, one of students.MODELS
    teacher: str = ""  # REFERENCE, another of these models; "": none

    def settings(self):
        """Returns a text: the differences from presets/demo.py."""
        words = [f"`{n}={v}`".replace(f"{ROOT}/", "") for n, v in self.constants.items()]
        words += [f"the student {self.student}"] * (self.student != "arithmetic")
        words += [f"the reference is {self.teacher}"] * bool(self.teacher)
        return ", ".join(words) or "presets/demo.py"


def model_of(name, seed):
    return RUNS / "models" / f"{name}-{seed}"


def warm_start(name, seed):
    """Makes a model of experiments/students.py if it is missing; takes half a minute to two."""
    from experiments.students import MODELS
    from grpo.commands import tiny_model

    folder, (task, first) = model_of(name, seed), MODELS[name]
    if not folder.exists():
        unfinished = folder.with_name(f"{folder.name}-{os.getpid()}")
        tiny_model.warm_start(str(unfinished), task, first + seed, steps=800)
        try:
            unfinished.rename(folder)
        except OSError:  # another run has made it meanwhile
            shutil.rmtree(unfinished)


def constants_of(case, seed, folder, common):
    """Returns the constants of a run that differ from the trainer's, by name; `common` are the
    constants that all cases of an experiment have."""
    from grpo.constants import read_preset

    run = {"MODEL": str(model_of(case.student, seed)), "RUN_DIR": str(folder), "SEED": seed}
    run |= {"REF_SERVER": None}
    run |= {"REFERENCE": str(model_of(case.teacher, seed))} if case.teacher else {}
    return read_preset(ROOT / "presets/demo.py") | run | common | case.constants


def train(case, seed, folder, common):
    """Trains a case. A finished run replaces the contents of `folder`, such as an older run."""
    import grpo_ref_split as trainer  # before torch

    unfinished = folder.with_name(f"{folder.name}-unfinished-{os.getpid()}")
    for name in filter(None, (case.student, case.teacher)):
        warm_start(name, seed)
    shutil.rmtree(unfinished, ignore_errors=True)
    constants = constants_of(case, seed, unfinished, common)
    try:
        trainer.main(**constants)
        if (step := records_of(unfinished)[-1]["step"]) < constants["STEPS"]:
            raise SystemExit(f"stopped at step {step}, so the run can't be compared")
    except SystemExit as end:
        if "nothing to train" not in str(end):  # IDLE_LIMIT ends a sick run: that is its result
            raise
        print(end)
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


def is_trained(case, seed, folder, common):
    """Returns whether `folder` has a finished run of these constants; train() replaces others."""
    if not folder.exists():
        return False
    then = json.loads((folder / "run.json").read_text())["constants"]
    now = json.loads(json.dumps(constants_of(case, seed, folder, common)))
    moved = {name: now[name] for name in ("MODEL", "REFERENCE", "RUN_DIR") if name in now}
    return all((then | moved).get(n, v) == v or v == {} for n, v in now.items())  # {}: now zeros


def made_by(folders):
    """Returns the machine of this process, which draws finished runs, and the code of the runs."""
    from benchmarks.measure import machine

    codes = {json.loads((folder / "run.json").read_text())["code"] for folder in folders}
    return f"{machine()};\nthe runs: {'; '.join(sorted(codes))}."


def save_picture(figure, path):
    """Saves a figure as a small PNG of 256 colors: with 64, five lines looked alike."""
    from PIL import Image

    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=100)
    Image.open(path).convert("RGB").quantize(256).save(path, optimize=True)


def records_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def values(records, metric):
    """Returns [(step, value)] of a metric."""
    return [(r["step"], r[metric]) for r in records if r.get(metric) is not None]
