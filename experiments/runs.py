"""One run of an experiment: the demo's task, with a case's constants, from a seed's warm start.

A case has constants that differ from presets/demo.py's, and may have a defect: a function of
experiments/defects.py that puts into the trainer what it does not allow. All runs stand alone
(REF_SERVER=None), in one process.
"""

import io
import json
import os
import platform
import re
import shutil
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "runs/experiments"
WARM_STEPS = 800
SEEDS = range(5)
ALONE = {"REF_SERVER": None, "RESUME": False}


@dataclass(frozen=True)
class Case:
    constants: dict = field(default_factory=dict)
    defect: object = None  # what puts a defect into the trainer; None: none
    label: str = ""  # what pictures and tables call it
    model: str = "arithmetic"  # the task that the warm start has learned

    def settings(self):
        """Returns what differs from presets/demo.py, and the defect, as words."""
        words = [f"`{n}={v}`".replace(f"{ROOT}/", "") for n, v in self.constants.items()]
        if self.defect:
            own = getattr(self.defect, "keywords", {})
            given = ", ".join(f"{name}={value}" for name, value in own.items())
            words.append(f"`{self.defect.__name__}({given})`")
        return ", ".join(words)


def warm_start(case, seed):
    """Returns the folder of a seed's warm start, which is made if it is missing: half a minute."""
    from grpo import tiny_model
    from grpo.sampling.task import load_task

    folder = RUNS / "models" / f"{case.model}-{seed}"
    if not folder.exists():
        name = case.model if case.model == "arithmetic" else f"{ROOT}/experiments/{case.model}.py"
        unfinished = folder.with_name(f"{folder.name}-{os.getpid()}")
        tiny_model.warm_start(str(unfinished), load_task(name), seed, WARM_STEPS)
        try:
            unfinished.rename(folder)
        except OSError:  # another run has made it meanwhile
            shutil.rmtree(unfinished)
    return folder


def constants_of(case, seed, folder, common):
    """Returns the constants of a run that differ from the trainer's, by name; `common` are those
    that all cases of an experiment have."""
    from grpo.constants import read_preset

    model = RUNS / "models" / f"{case.model}-{seed}"
    own = {"MODEL": str(model), "RUN_DIR": str(folder), "SEED": seed}
    return read_preset(ROOT / "presets/demo.py") | ALONE | own | common | case.constants


def train(case, seed, folder, common):
    """Trains a case; `folder`, which may be that of an older run, gets it once it is done."""
    import grpo_ref_split as trainer  # before torch

    unfinished = folder.with_name(f"{folder.name}-unfinished-{os.getpid()}")
    warm_start(case, seed)
    shutil.rmtree(unfinished, ignore_errors=True)
    if case.defect:
        case.defect(trainer)
    constants = constants_of(case, seed, unfinished, common)
    try:
        trainer.main(**constants)
        if (step := max(record["step"] for record in records_of(unfinished))) < constants["STEPS"]:
            raise SystemExit(
                f"stopped at step {step} of {constants['STEPS']}: not a run to compare"
            )
    except SystemExit as end:
        if "nothing to train" not in str(end):  # IDLE_LIMIT: of a sick run that is the result
            raise
        print(end)
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


def changed(case, seed, folder, common):
    """Returns the names of constants that a finished run was trained with, and its case has not."""
    import grpo_ref_split as trainer

    then = json.loads((folder / "run.json").read_text())["constants"]
    shipped = vars(trainer.constants())  # without what an earlier main() has set
    own = {name: shipped[name] for name in then if name in shipped}
    own = {name: value for name, value in own.items() if value not in (None, "auto")}  # set by main
    now = json.loads(json.dumps(own | constants_of(case, seed, folder, common)))
    places = {"MODEL", "RUN_DIR", "IDLE_LIMIT"}  # a run that ended was not ended by it
    return [name for name in then.keys() & now.keys() - places if now[name] != then[name]]


def commit_of(folder):
    """Returns the commit of a finished run, abbreviated, with "+" where files had changed."""
    code = json.loads((folder / "run.json").read_text())["code"]
    found = re.search(r"`([0-9a-f]{7})", code)
    return f"{found[1] if found else 'none'}{'+' if 'not committed' in code else ''}"


def made_by(folders):
    """Returns with what finished runs were made: the commits are the runs' own, the rest is that of
    this process, which draws them."""
    from benchmarks.measure import machine

    commits = ", ".join(sorted(set(map(commit_of, folders))))
    return (
        f"{machine()}, Python {platform.python_version()}, drawn {date.today()};\n"
        f"commits of the runs (+: with changes that were not committed): {commits}."
    )


def save_picture(figure, path):
    """Saves a figure as a small PNG, of 256 colors: with 64 those of five lines ran together."""
    from PIL import Image

    stored = io.BytesIO()
    figure.savefig(stored, dpi=100)
    path.parent.mkdir(exist_ok=True)
    Image.open(stored).convert("RGB").quantize(256).save(path, optimize=True)


def records_of(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def values(records, metric):
    """Returns [(step, value)] of a metric."""
    return [(r["step"], r[metric]) for r in records if r.get(metric) is not None]
