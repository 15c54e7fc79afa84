"""Questions that our ancestors left open: cases of the demo's task, five seeds each.

    python experiments/questions.py                # names the questions
    python experiments/questions.py updates        # trains what is missing, then draws
    python experiments/questions.py plain 0        # trains one case with one seed

A run takes half a minute to two on a free core, and as many run at once as there are cores. They
are kept in runs/experiments/CASE/SEED, and shared by the questions that have the case; delete the
folder to train anew. A question gives docs/experiments/NAME.png and
benchmarks/results/experiments/NAME.md. What they say: docs/experiments.md.
"""

import itertools
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from experiments.cases import CASES, COMMON, STEPS
from experiments.defects import REFUSAL
from experiments.runs import (
    ROOT,
    RUNS,
    SEEDS,
    changed,
    made_by,
    records_of,
    save_picture,
    train,
    values,
)

PICTURES = ROOT / "docs/experiments"
TABLES = ROOT / "benchmarks/results/experiments"


# --- Questions ----------------------------------------------------------------------
ACCURACY, GREEDY, FORMAT = "accuracy", "eval_accuracy", "eval_positive_format"
DIFFERENCE = "sampling/sampling_logp_difference/mean"


@dataclass(frozen=True)
class Question:
    title: str
    cases: tuple  # names; the first is what the others are compared with
    panels: tuple = (ACCURACY, "kl")  # metrics that are drawn
    columns: tuple = ()  # (metric, a key of KINDS): what the table has, beside accuracy
    against: tuple = ()  # (case, the one that it is compared with) where that is not the first
    x: str = "rollouts"  # or "seconds"
    logarithmic: tuple = ()  # panels with such an axis
    smooth: int = 5  # rollouts that a drawn point is the mean of


LAST_FORMAT, LAST_KL, MOST_NORM = (FORMAT, "last"), ("kl", "end"), ("grad_norm", "max")
QUESTIONS = {
    "updates": Question(
        "Do several updates on a rollout help?",
        ("plain", "mu4", "mu4_unclipped", "mu4_slow"),
        columns=(LAST_KL, ("clip_ratio/high_mean", "mean"), MOST_NORM),
    ),
    "accumulation": Question(
        "Is gradient accumulation equal to a larger batch?",
        ("plain", "accumulated", "sums", "small", "counted"),
        panels=(ACCURACY, "grad_norm"),
        columns=(LAST_KL, ("grad_norm", "mean"), MOST_NORM),
        against=(("counted", "small"),),
    ),
    "group_size": Question(
        "Which group size, at equal completions?",
        ("group8", "group2", "group4", "group16", "group32"),
        panels=(ACCURACY, "rewards/format/mean", "frac_reward_zero_std"),
        columns=(LAST_FORMAT, ("frac_reward_zero_std", "mean"), LAST_KL),
    ),
    "kl_beta": Question(
        "Which KL_BETA?",
        ("plain", "kl0", "kl02"),
        columns=(LAST_FORMAT, LAST_KL),
    ),
    "kl_beta_hacked": Question(
        "Does the KL prevent that a reward is hacked?",
        ("hacked", "hacked0", "hacked02"),
        panels=(ACCURACY, "reward", "kl"),
        columns=(("reward", "end"), LAST_KL, ("kl", "max")),
        logarithmic=("kl",),
    ),
    "std": Question(
        "Does dividing by the std help?",
        ("plain", "centred"),
        panels=(ACCURACY, "kl"),
        columns=(LAST_FORMAT, LAST_KL, MOST_NORM),
    ),
    "length_bias": Question(
        "Which loss type, where answers differ in length?",
        ("grpo", "dapo", "dr_grpo"),
        panels=("rewards/short/mean", "rewards/long/mean", "rewards/wrong_steps/mean"),
        columns=(
            ("rewards/short/mean", "mean"),
            ("rewards/long/mean", "mean"),
            ("rewards/right_steps/mean", "mean"),
            ("rewards/wrong_steps/mean", "end"),
        ),
    ),
    "spikes": Question(
        "Where do spikes of the loss come from?",
        ("plain", "no_positions", "no_mask", "hacked"),
        panels=("loss", "kl", "sampler_ratio_max"),
        columns=(
            ("loss", "max"),
            ("kl", "max"),
            ("sampler_ratio_max", "max"),
            (DIFFERENCE, "mean"),
        ),
        logarithmic=("loss", "kl", "sampler_ratio_max"),
        smooth=1,
    ),
    "staleness": Question(
        "What do old samples cost, with and without the correction?",
        ("plain", "stale4", "stale4_raw", "stale16", "stale16_raw"),
        panels=(ACCURACY, "grad_norm"),
        columns=(LAST_KL, (DIFFERENCE, "mean"), MOST_NORM),
        against=(("stale4_raw", "stale4"), ("stale16_raw", "stale16")),
        logarithmic=("grad_norm",),
    ),
    "flat_groups": Question(
        "Are flat groups kept, skipped or refilled, at equal time?",
        ("flat_refilled", "flat_kept", "flat_skipped"),
        panels=(ACCURACY, "groups_sampled"),
        columns=(LAST_FORMAT, ("groups_sampled", "mean"), ("seconds", "sum")),
        x="seconds",
    ),
    "format": Question(
        "How large may a reward for the format be?",
        ("format1", "format4", "format16"),
        panels=(ACCURACY, "rewards/format/mean"),
        columns=(LAST_FORMAT, LAST_KL),
    ),
    "ancestors": Question(
        "What does each defect of our ancestors cost?",
        ("plain", "retokenised", "no_eos", "cooler"),
        panels=(ACCURACY, "completions/mean_length"),
        columns=(LAST_FORMAT, LAST_KL, ("retokenised", "mean"), (DIFFERENCE, "mean")),
    ),
    "micro_means": Question(
        "Micro-batch means against the step's mean",
        ("dapo", "micro_means"),
        panels=(ACCURACY, "rewards/long/mean"),
        columns=(("rewards/short/mean", "mean"), ("rewards/long/mean", "mean"), MOST_NORM),
    ),
}


def folder_of(name, seed):
    return RUNS / name / str(seed)


# --- Train --------------------------------------------------------------------------
def train_missing(question):
    """Trains what a question needs and is not there, as many at once as there are cores."""
    runs = [(name, seed) for seed in SEEDS for name in question.cases]
    missing = [(name, seed) for name, seed in runs if not folder_of(name, seed).exists()]
    for name, seed in runs:
        folder = folder_of(name, seed)
        if folder.exists() and (names := changed(CASES[name], seed, folder, COMMON)):
            raise SystemExit(
                f"{folder} was trained with other {', '.join(names)} than {name} has now: delete it"
                " to train anew"
            )
    if not missing:
        return
    print(f"{len(missing)} runs to train; what each says: {RUNS}/CASE/SEED.log", flush=True)
    began = time.perf_counter()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            for number, _ in enumerate(pool.map(train_apart, missing), 1):
                seconds = time.perf_counter() - began
                print(f"{number} of {len(missing)} runs trained, {seconds:.0f} s", flush=True)
        except BaseException:  # Ctrl-C too: none of those that wait begins
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def train_apart(case_and_seed):
    """Trains a case in a process of its own, which writes beside the run."""
    name, seed = case_and_seed
    folder = folder_of(name, seed)
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_name(f"{seed}.log")
    command = [sys.executable, __file__, name, str(seed)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with log.open("w") as out:
        code = subprocess.call(command, stdout=out, stderr=out, env=environment, cwd=ROOT)
    if code:
        raise SystemExit(f"{name} with seed {seed} ended with {code}: see {log}")


# --- Draw ---------------------------------------------------------------------------
COLORS = ("tab:blue", "tab:red", "tab:green", "tab:orange", "tab:purple")


def curve(records, metric, *, x, smooth):
    """Returns ([x], [value]) of a run's metric: rollouts, or seconds of training, and means of the
    last `smooth` values."""
    xs, ys, rollouts, seconds = [], [], 0, 0.0
    for record in records:
        rollouts += ACCURACY in record
        seconds += record.get("seconds", 0.0)
        if record.get(metric) is not None:
            xs.append(rollouts if x == "rollouts" else seconds)
            ys.append(record[metric])
    return xs, [statistics.mean(ys[max(0, i - smooth + 1) : i + 1]) for i in range(len(ys))]


def draw_band(ax, runs, metric, color, label, **drawn):
    """Draws the mean of several runs, and a band from the least to the most of them."""
    import numpy

    curves = [curve(run, metric, **drawn) for run in runs]
    curves = [(xs, ys) for xs, ys in curves if len(xs) > 1]
    if not curves:
        return
    first, last = max(xs[0] for xs, _ in curves), min(xs[-1] for xs, _ in curves)
    at = numpy.linspace(first, last, 120)
    rows = numpy.array([numpy.interp(at, xs, ys) for xs, ys in curves])
    ax.plot(at, rows.mean(0), color=color, lw=1.4, label=label)
    ax.fill_between(at, rows.min(0), rows.max(0), color=color, alpha=0.15, lw=0)


def draw(name, runs):
    """Draws a question: each panel a metric, each color a case. `runs`: {case: [records]}."""
    from matplotlib.figure import Figure

    question = QUESTIONS[name]
    width = 3.4 * len(question.panels)
    figure = Figure(figsize=(width, 3.2), layout="constrained")
    axes = figure.subplots(1, len(question.panels))
    for metric, ax in zip(question.panels, axes, strict=True):
        for (case, records), color in zip(runs.items(), COLORS, strict=False):
            label, drawn = CASES[case].label, {"x": question.x, "smooth": question.smooth}
            draw_band(ax, records, metric, color, label, **drawn)
        ax.set_title(metric, fontsize=9)
        ax.set_xlabel(question.x, fontsize=8)
        ax.tick_params(which="both", labelsize=7)
        ax.grid(alpha=0.3)
        if metric in question.logarithmic:
            ax.set_yscale("symlog", linthresh=0.01)
    axes[0].legend(fontsize=7)
    save_picture(figure, PICTURES / f"{name}.png")


# --- The table ------------------------------------------------------------------------
END = 10  # rollouts
KINDS = {  # what a column has of a run's values
    "mean": statistics.mean,
    "max": max,
    "sum": sum,
    "last": lambda values: values[-1],
    "end": lambda values: statistics.mean(values[-END:]),  # one rollout is noisy
}


def value_of(records, metric, kind):
    """Returns a number of a run's values of a metric; None if it has none."""
    found = [value for _, value in values(records, metric)]
    return KINDS[kind](found) if found else None


def within(records, seconds):
    """Returns the records of a run's first seconds of training."""
    spent = itertools.accumulate(record.get("seconds", 0.0) for record in records)
    return [record for record, so_far in zip(records, spent, strict=True) if so_far <= seconds]


def timely(runs):
    """Returns {case: runs}, each seed's cut at the time that the fastest case took for it."""
    seconds = [[value_of(run, "seconds", "sum") for run in seeds] for seeds in runs.values()]
    least = [min(column) for column in zip(*seconds, strict=True)]
    return {
        case: [within(run, time) for run, time in zip(seeds, least, strict=True)]
        for case, seeds in runs.items()
    }


def cell(runs, metric, kind):
    """Returns "mean (least to most)" of the seeds."""
    found = [v for records in runs if (v := value_of(records, metric, kind)) is not None]
    if not found:
        return ""
    return f"{statistics.mean(found):.3g} ({min(found):.3g} to {max(found):.3g})"


def compared(runs, base, metric, kind):
    """Returns "mean difference, how many seeds are higher" of a case and the first one, in pairs
    of the same seed."""
    pairs = zip(runs, base, strict=True)
    both = [(value_of(one, metric, kind), value_of(other, metric, kind)) for one, other in pairs]
    gaps = [one - other for one, other in both if None not in (one, other)]
    if not gaps:
        return ""
    higher, equal = sum(gap > 0 for gap in gaps), sum(gap == 0 for gap in gaps)
    ties = f", {equal} equal" if equal else ""
    return f"{round(statistics.mean(gaps), 3) + 0.0:+.3f}, {higher} of {len(gaps)} higher{ties}"


def table(name, runs):
    """Returns a question's table, as Markdown."""
    question, first = QUESTIONS[name], QUESTIONS[name].cases[0]
    columns = ["greedy accuracy", "... less", "sampled accuracy, mean", "... less"]
    if question.x == "seconds":
        columns += ["sampled accuracy, end of the fastest case's time", "... less"]
    columns += [f"{metric}, {kind}" for metric, kind in question.columns]
    lines = [f"| case | less: | {' | '.join(columns)} |", "|---|---|" + "---|" * len(columns)]
    for case, records in runs.items():
        other = dict(question.against).get(case, first)
        cells = ["" if case == first else CASES[other].label]
        for column in ((GREEDY, "last"), (ACCURACY, "mean")):
            cells.append(cell(records, *column))
            cells.append("" if case == first else compared(records, runs[other], *column))
        if question.x == "seconds":
            cut = timely(runs)
            cells.append(cell(cut[case], ACCURACY, "end"))
            less = "" if case == first else compared(cut[case], cut[other], ACCURACY, "end")
            cells.append(less)
        cells += [cell(records, *column) for column in question.columns]
        lines.append(f"| {CASES[case].label} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def report(name):
    """Draws a question, and writes its table."""
    question = QUESTIONS[name]
    runs = {c: [records_of(folder_of(c, seed)) for seed in SEEDS] for c in question.cases}
    draw(name, runs)
    made = made_by([folder_of(case, seed) for case in question.cases for seed in SEEDS])
    cases = "\n".join(
        f"- {CASES[case].label}: {CASES[case].settings() or 'presets/demo.py'}"
        for case in question.cases
    )
    refused = {
        path.read_text().replace(f"{ROOT}/", "")
        for case in question.cases
        for path in [folder_of(case, SEEDS[0]) / REFUSAL]
        if path.exists()
    }
    told = "\n".join(
        f"\nThe trainer would have ended (seed 0): {words}" for words in sorted(refused)
    )
    TABLES.mkdir(exist_ok=True)
    (TABLES / f"{name}.md").write_text(f"""# {question.title}

`python experiments/questions.py {name}`: {made}
{STEPS} rollouts unless a case says otherwise, seeds {SEEDS[0]} to {SEEDS[-1]}, each after its own
warm start: mean over the seeds (least to most). Greedy accuracy is the last on 500 test questions;
sampled accuracy is that of all rollouts, so that who learns faster has more. "less" is a case's
value less that of another one, in pairs of a seed. "end" is the mean of the last {END} rollouts.

{cases}

{table(name, runs)}{told}""")


def main(argument):
    names = QUESTIONS if argument == "all" else [argument]
    for name in names:
        train_missing(QUESTIONS[name])
        report(name)
        print((TABLES / f"{name}.md").read_text())


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] in CASES and sys.argv[2] in map(str, SEEDS):
        name, seed = sys.argv[1], int(sys.argv[2])
        train(CASES[name], seed, folder_of(name, seed), COMMON)
    elif len(sys.argv) == 2 and sys.argv[1] in {*QUESTIONS, "all"}:
        main(sys.argv[1])
    else:
        told = "\n".join(f"    {name:16}{q.title}" for name, q in QUESTIONS.items())
        sys.exit(f"{__doc__}\nQuestions, or all:\n{told}\n\nCases: {', '.join(CASES)}")
