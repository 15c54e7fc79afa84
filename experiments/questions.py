"""Questions that short GRPO trainers leave open: cases of the demo's task, five seeds each.

    python experiments/questions.py                # names the questions
    python experiments/questions.py updates        # trains the missing runs, then draws
    python experiments/questions.py plain 0        # trains one case with one seed

A run takes half a minute to two minutes on a free core; each core trains one run at a time. Runs
stay in runs/experiments/CASE/SEED, and questions share them; delete the folder to train again. A
question writes docs/experiments/NAME.png and benchmarks/results/experiments/NAME.md.
docs/experiments.md reports the findings.
"""

import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from experiments import runs
from experiments.runs import HACKABLE, ROOT, SEEDS, Case, records_of, values

PICTURES = ROOT / "docs/experiments"
TABLES = ROOT / "benchmarks/results/experiments"

# --- Cases --------------------------------------------------------------------------
STEPS = 60
COMMON = {"STEPS": STEPS, "IDLE_LIMIT": STEPS, "EVAL_STEPS": 20}
COMMON |= {"PROMPTS_PER_STEP": 16}


def updates(number, **constants):
    """Returns constants for `number` updates on each of STEPS rollouts."""
    scaled = {"STEPS": STEPS * number, "EVAL_STEPS": 20 * number, "WARMUP_STEPS": 5 * number}
    return scaled | {"UPDATES_PER_ROLLOUT": number, "MAX_STALENESS": 20} | constants


def groups_of(size):
    """Returns constants for 128 completions a step, in groups of `size`."""
    return {"GROUP_SIZE": size, "PROMPTS_PER_STEP": 128 // size}


TAUGHT = {"STEPS": 200, "IDLE_LIMIT": 200, "EVAL_STEPS": 25}
BOTH = TAUGHT | {"KL_BETA": 0.2, "UNBIASED_KL": True, "SKIP_FLAT_GROUPS": False}
ALONE = BOTH | {"KL_BETA": 1.0, "REWARD_WEIGHTS": {}, "LOSS_TYPE": "dapo"}


CASES = {
    "plain": Case({}, "as the demo"),
    "mu4": Case(updates(4), "4 updates, clipped"),
    "mu4_unclipped": Case(updates(4, CLIP_LOW=1.0, CLIP_HIGH=1e9), "4 updates, not clipped"),
    "mu4_slow": Case(updates(4, LEARNING_RATE=1.75e-4), "4 updates, a quarter of the rate"),
    "kl0": Case({"KL_BETA": 0.0}, "beta 0"),
    "kl02": Case({"KL_BETA": 0.2}, "beta 0.2"),
    "hacked": Case(HACKABLE, "beta 0.04, hackable reward"),
    "hacked0": Case(HACKABLE | {"KL_BETA": 0.0}, "beta 0, hackable reward"),
    "hacked02": Case(HACKABLE | {"KL_BETA": 0.2}, "beta 0.2, hackable reward"),
    "centred": Case({"ADVANTAGE_STD": False}, "without std"),
    **{f"group{size}": Case(groups_of(size), f"G = {size}") for size in (2, 4, 16, 32)},
    "flat_kept": Case({"SKIP_FLAT_GROUPS": False}, "none"),
    "rambles": Case({}, "trained", "rambler"),
    "rambles_masked": Case({"MASK_TRUNCATED": True}, "masked", "rambler"),
    "rare": Case(TAUGHT, "rewards", "rare"),
    "rare_alone": Case(ALONE, "teacher", "rare", "teacher"),
    "rare_both": Case(BOTH, "both", "rare", "teacher"),
    "adder": Case(TAUGHT, "rewards, adder", "adder"),
    "adder_alone": Case(ALONE, "teacher, adder", "adder", "teacher"),
    "adder_both": Case(BOTH, "both, adder", "adder", "teacher"),
}


# --- Questions ----------------------------------------------------------------------
ACCURACY, GREEDY, FORMAT = "accuracy", "eval_accuracy", "rewards/format/mean"
CUT = "completions/clipped_ratio"
LAST_FORMAT, LAST_KL = ("eval_positive_format", "last"), ("kl", "end")
MOST_NORM = ("grad_norm", "max")
TOKENS = ("tokens_sampled", "sum")


@dataclass(frozen=True)
class Question:
    title: str
    cases: tuple  # names; the others are compared with the first
    panels: tuple = (ACCURACY, "kl")  # metrics that are drawn
    columns: tuple = (LAST_FORMAT, LAST_KL)  # the table's after accuracy: a metric, a key of KINDS


QUESTIONS = {
    "updates": Question(
        "Do several updates on a rollout help?",
        ("plain", "mu4", "mu4_unclipped", "mu4_slow"),
        columns=(LAST_KL, ("clip_ratio/high_mean", "mean"), MOST_NORM),
    ),
    "group_size": Question(
        "Which group size, at equal completions?",
        ("plain", "group2", "group4", "group16", "group32"),
        panels=(ACCURACY, FORMAT, "frac_reward_zero_std"),
        columns=(LAST_FORMAT, ("frac_reward_zero_std", "mean"), LAST_KL),
    ),
    "kl_beta": Question("Which KL_BETA?", ("plain", "kl0", "kl02")),
    "kl_beta_hacked": Question(
        "Does the KL prevent that a reward is hacked?",
        ("hacked", "hacked0", "hacked02"),
        panels=(ACCURACY, "reward", "kl"),
        columns=(("reward", "end"), LAST_KL, ("kl", "max")),
    ),
    "std": Question(
        "Does dividing by the std help?",
        ("plain", "centred"),
        columns=(LAST_FORMAT, LAST_KL, MOST_NORM),
    ),
    "flat": Question(
        "Which zero-variance groups are skipped?",
        ("plain", "flat_kept"),
        panels=(ACCURACY, FORMAT),
    ),
    "truncated": Question(
        "Are truncated completions trained, if answers tend to run on?",
        ("rambles", "rambles_masked"),
        panels=(ACCURACY, CUT),
        columns=(LAST_FORMAT, (CUT, "end"), TOKENS),
    ),
    "teacher": Question(
        "Does a teacher help a student that is rarely right?",
        ("rare", "rare_alone", "rare_both"),
        panels=(ACCURACY, FORMAT, TOKENS[0]),
        columns=(LAST_FORMAT, TOKENS),
    ),
    "teacher_blind": Question(
        "Does a teacher help a student that is sure and wrong?",
        ("adder", "adder_alone", "adder_both"),
        panels=(ACCURACY, FORMAT, "entropy"),
        columns=(LAST_FORMAT, TOKENS, ("teacher_kl", "end")),
    ),
}


def folder_of(name, seed):
    return runs.RUNS / name / str(seed)


# --- Train --------------------------------------------------------------------------
def train_missing(question):
    """Trains the runs of a question that are missing, one on each core."""
    missing = [
        (name, seed)
        for seed in SEEDS
        for name in question.cases
        if not runs.is_trained(CASES[name], seed, folder_of(name, seed), COMMON)
    ]
    print(f"{len(missing)} runs to train; their output: {runs.RUNS}/CASE/SEED.log", flush=True)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        try:
            for number, _ in enumerate(pool.map(train_apart, missing), 1):
                print(f"{number} of {len(missing)} runs trained", flush=True)
        except BaseException:  # Ctrl-C too: no other run begins
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def train_apart(case_and_seed):
    """Trains a case in a process, which prints into a file next to the run."""
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
COLORS = ("tab:blue", "tab:red", "tab:green", "tab:orange", "tab:purple", "tab:brown")
SMOOTH = 5  # rollouts: a drawn point is the mean over them


def curve(records, metric):
    """Returns ([rollouts], [mean of the last SMOOTH values]) of a run's metric."""
    xs, ys, rollouts = [], [], 0
    for record in records:
        rollouts += ACCURACY in record  # not at later updates on the same rollout
        if record.get(metric) is not None:
            xs.append(rollouts)
            ys.append(record[metric])
    return xs, [statistics.mean(ys[max(0, i - SMOOTH + 1) : i + 1]) for i in range(len(ys))]


def draw_band(ax, seeds, metric, color, label):
    """Draws the mean over the seeds' runs, and a band from their minimum to their maximum."""
    import numpy

    curves = [line for records in seeds if len((line := curve(records, metric))[0]) > 1]
    if not curves:
        return
    first, last = max(xs[0] for xs, _ in curves), min(xs[-1] for xs, _ in curves)
    at = numpy.linspace(first, last, 120)
    ys = numpy.array([numpy.interp(at, xs, ys) for xs, ys in curves])
    ax.plot(at, ys.mean(0), color=color, lw=1.4, label=label)
    ax.fill_between(at, ys.min(0), ys.max(0), color=color, alpha=0.15, lw=0)


def draw(name, found):
    """Draws a question: each panel a metric, each color a case. `found`: {case: [records]}."""
    from matplotlib.figure import Figure

    question = QUESTIONS[name]
    figure = Figure(figsize=(3.4 * len(question.panels), 3.2), layout="constrained")
    axes = figure.subplots(1, len(question.panels))
    for metric, ax in zip(question.panels, axes, strict=True):
        for (case, seeds), color in zip(found.items(), COLORS, strict=False):
            draw_band(ax, seeds, metric, color, CASES[case].label)
        ax.set_title(metric, fontsize=9)
        ax.set_xlabel("rollouts", fontsize=8)
        ax.tick_params(which="both", labelsize=7)
        ax.grid(alpha=0.3)
        if metric == "kl":  # it begins at 0, and grows large if a reward is hacked
            ax.set_yscale("symlog", linthresh=0.01)
    axes[0].legend(fontsize=7)
    runs.save_picture(figure, PICTURES / f"{name}.png")


# --- The table ------------------------------------------------------------------------
END = 10  # rollouts
KINDS = {  # how a column summarizes the values of a run
    "mean": statistics.mean,
    "max": max,
    "sum": sum,
    "last": lambda values: values[-1],
    "end": lambda values: statistics.mean(values[-END:]),  # one rollout is noisy
}


def numbers(seeds, metric, kind):
    """Returns a number for each seed's run that has the metric."""
    found = [[value for _, value in values(records, metric)] for records in seeds]
    return [KINDS[kind](each) for each in found if each]


def cell(seeds, metric, kind):
    """Returns "mean (least to most)" of the seeds; "" if no run has the metric."""
    if not (found := numbers(seeds, metric, kind)):
        return ""
    return f"{statistics.mean(found):.3g} ({min(found):.3g} to {max(found):.3g})"


def compared(seeds, base, metric, kind):
    """Returns "mean difference, how many seeds are higher" of a case minus the first case, in pairs
    of equal seeds."""
    both = zip(numbers(seeds, metric, kind), numbers(base, metric, kind), strict=True)
    gaps = [one - other for one, other in both]
    higher, equal = sum(gap > 0 for gap in gaps), sum(gap == 0 for gap in gaps)
    ties = f", {equal} equal" if equal else ""
    return f"{round(statistics.mean(gaps), 3) + 0.0:+.3f}, {higher} of {len(gaps)} higher{ties}"


def table(name, found):
    """Returns a question's table, as Markdown."""
    question, first = QUESTIONS[name], QUESTIONS[name].cases[0]
    columns = ["greedy accuracy", "... less", "sampled accuracy, mean", "... less"]
    columns += [f"{metric}, {kind}" for metric, kind in question.columns]
    lines = [f"| case | less: | {' | '.join(columns)} |", "|---|---|" + "---|" * len(columns)]
    for case, seeds in found.items():
        cells = ["" if case == first else CASES[first].label]
        for column in ((GREEDY, "last"), (ACCURACY, "mean")):
            cells.append(cell(seeds, *column))
            cells.append("" if case == first else compared(seeds, found[first], *column))
        cells += [cell(seeds, *column) for column in question.columns]
        lines.append(f"| {CASES[case].label} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def report(name):
    """Draws a question, writes its table, and returns it."""
    question = QUESTIONS[name]
    found = {c: [records_of(folder_of(c, seed)) for seed in SEEDS] for c in question.cases}
    draw(name, found)
    made = runs.made_by([folder_of(case, seed) for case in question.cases for seed in SEEDS])
    settings = "\n".join(f"- {CASES[c].label}: {CASES[c].settings()}" for c in question.cases)
    text = f"""# {question.title}

`python experiments/questions.py {name}`: {made}
{STEPS} rollouts of 16 prompts unless a case has others, seeds {SEEDS[0]} to {SEEDS[-1]},
each after a separate warm start: mean over the seeds (least to most). Greedy accuracy is the last
on 500 test questions; sampled accuracy is the mean over all rollouts, so a case that learns faster
has more. "less" is a case's value less that of another case, in pairs of equal seeds. "end" is the
mean of the last {END} rollouts.

{settings}

{table(name, found)}"""
    (TABLES / f"{name}.md").write_text(text)
    return text


if __name__ == "__main__":
    match sys.argv[1:]:
        case [name, seed] if name in CASES and seed in map(str, SEEDS):
            runs.train(CASES[name], int(seed), folder_of(name, seed), COMMON)
        case [name] if name in {*QUESTIONS, "all"}:
            for question in QUESTIONS if name == "all" else [name]:
                train_missing(QUESTIONS[question])
                print(report(question))
        case _:
            listed = "\n".join(f"    {name:16}{q.title}" for name, q in QUESTIONS.items())
            sys.exit(f"{__doc__}\nQuestions, or all:\n{listed}\n\nCases: {', '.join(CASES)}")
