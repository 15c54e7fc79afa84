"""The seconds of a step of the trainer, by part: computed, not measured.

    python benchmarks/simulate.py Qwen2.5-3B A800 --flat 0.5    # one job, by part
    python benchmarks/simulate.py --calibrate                   # beside what others have published
    python benchmarks/simulate.py --write                       # all of it: results/simulate.md

A part is counted, then divided by what the card does in a second (cost.py). Sampling: the columns
that the sampler's scheduling gives (a column is one more token of each sequence of the batch) times
the seconds of a column: the weights' bytes, then the kernels of the recorded graph, one after the
other. Training: the FLOP of the micro-batches that the trainer's own plan_micro_batches makes, or
their launches, whichever take longer. Left out: rewards, uploads, evaluations, checkpoints; LoRA;
an optimiser in CPU memory.

Symbols: the trainer's, and L layers, W ranks. Units: seconds, bytes, FLOP, tokens.
"""

import argparse
import functools
import io
import random
import sys
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import cost
import published
from cost import CARDS, column_seconds, count, work
from measure import facts
from memory import BF16, MODELS, USUAL, gb, need, phases_of, sizes_of, table, trainer
from schedule import columns_of, lengths, run_rounds

from grpo.packing import plan_micro_batches

JOB = {  # an option for each, such as --flat 0.3; the trainer's constants
    "flat": 0.5,  # share of flat groups
    "ranks": 7,  # that sample and train; the reference has a card of its own
    "prompts": trainer.PROMPTS_PER_STEP,
    "group": trainer.GROUP_SIZE,
    "batch": USUAL["SAMPLE_BATCH"],  # of "auto", what a CPU takes
    "longest": trainer.MAX_COMPLETION_TOKENS,
    "refills": trainer.MAX_REFILLS,
    "budget": USUAL["MICRO_BATCH_TOKENS"],
    "kl": trainer.KL_BETA,
    "publish": trainer.PUBLISH_STEPS,
    "prompt": 150,  # tokens of a prompt
    "lengths": "",  # a file of real completions' lengths, in tokens
    "kernels": cost.KERNELS,  # of a layer in the recorded graph
    "steps": 20,  # that are simulated
}


def changed(c, **values):
    return SimpleNamespace(**vars(c) | values)


@functools.cache
def steps(key):
    """Returns [(rounds, turns)] of simulated steps; a turn has for each rank (prompts, lengths)."""
    c, made = SimpleNamespace(**dict(key)), []
    for seed in range(c.steps):
        rounds = run_rounds(c, lengths(c), random.Random(seed))
        ended = [group for ranks in rounds for batch in ranks for group in batch.ended]
        groups = [tokens for _, tokens, flat in ended if not flat]
        sizes = [(number, c.prompt, t) for number, tokens in enumerate(groups) for t in tokens]
        turns = []
        for turn in plan_micro_batches(sizes, c.ranks, c.budget) if sizes else []:
            parts = [[sizes[i] for i in rows] for rows in turn if rows]
            turns.append([(len({p for p, *_ in x}), [t for *_, t in x]) for x in parts])
        made.append((rounds, turns))
    return made


# --- Parts of a step ----------------------------------------------------------------------
def sampling_parts(batch, m, card, c):
    """Returns {part: seconds} of a rank's Batch."""
    if not batch.columns:
        return Counter()
    rows, keys = batch.rows / batch.columns, batch.keys / batch.columns
    large = cost.LARGE_KERNELS * m.layers
    small = cost.OUTSIDE + c.kernels * m.layers - large
    column = column_seconds(m, card, rows, keys, large, small, extra=cost.DRAW * rows * m.vocab)
    first = cost.EAGER + c.kernels * m.layers  # launches of a column that is not recorded yet
    prefills = [
        work(m, card, n * c.prompt, n, c.prompt / 2, count(cost.PREFILL, m.layers), (1, 1))
        for n in batch.admitted
    ]
    return Counter(
        {
            "sampling": batch.columns * (column + cost.REPLAY * cost.LAUNCH),
            "recordings": batch.recordings * first * (2 * cost.LAUNCH + cost.NODE),
            "prefill": sum(prefills),
        }
    )


def sample_parts(rounds, m, card, c):
    """Returns ({part: seconds} of the slowest rank of each round, [(second at which a group to
    train has ended, lengths)])."""
    parts, ended = Counter(), []
    for ranks in rounds:
        begun, every = sum(parts.values()), [sampling_parts(batch, m, card, c) for batch in ranks]
        for batch, seconds in zip(ranks, every, strict=True):
            pace = sum(seconds.values()) / max(batch.columns, 1)
            ended += [(begun + end * pace, tokens) for end, tokens, flat in batch.ended if not flat]
        parts += max(every, key=lambda seconds: sum(seconds.values()))
    return parts, sorted(ended)


def score_groups(ended, m, card, c):
    """Returns (when the server has scored all groups, one after the other; its own seconds)."""
    now, busy = 0.0, 0.0
    for second, tokens in ended:
        size = c.prompt + sum(tokens)
        launches = count(cost.SCORING, m.layers) * size / c.budget
        seconds = work(m, card, size, sum(tokens), c.prompt, launches, (1, 1))
        now, busy = max(now, second) + seconds, busy + seconds
    return now, busy


def turn_seconds(turn, m, card, c):
    """Of the forward and backward of a turn: of its slowest micro-batch."""
    launches = count(cost.MICRO_BATCH, m.layers) + cost.PER_MATRIX[0] * cost.matrices(m)

    def seconds(prompts, tokens):
        size = prompts * c.prompt + len(tokens) * max(tokens)
        keys = c.prompt + max(tokens) / 2
        # A layer runs forward, again, and backward: 1 + 1 + 2. The head is not recomputed
        return work(m, card, size, sum(tokens), keys, launches, (4, 3))

    return max(seconds(*micro_batch) for micro_batch in turn)


def step_parts(rounds, turns, m, card, c):
    """Returns ({part: seconds} of a step, seconds of the server's scoring)."""
    parts, ended = sample_parts(rounds, m, card, c)
    sampled, gradient, others = sum(parts.values()), BF16 * m.total, (c.ranks - 1) / c.ranks
    parts["forward and backward"] = sum(turn_seconds(turn, m, card, c) for turn in turns)
    # Each turn all-reduces all gradients, and nothing is computed meanwhile
    parts["gradients, over the ranks"] = len(turns) * 2 * others * gradient / card.link
    trained = parts["forward and backward"] + parts["gradients, over the ranks"]
    scored, scoring = score_groups(ended, m, card, c) if c.kl else (0.0, 0.0)
    parts["waiting for the reference"] = max(0.0, scored - sampled - trained)
    states = cost.OPTIMISER * m.total / c.ranks / (card.bandwidth * cost.BANDWIDTH)
    launches = cost.PER_MATRIX[1] * cost.matrices(m) * cost.LAUNCH
    parts["optimiser"] = states + launches + others * gradient / card.link
    parts["publishing"] = gradient / cost.TO_HOST / c.publish if c.publish else 0.0
    return parts, scoring


def simulate(name, card, c):
    """Returns ({part: seconds}, {fact: number}), means over c.steps simulated steps."""
    m, parts, numbers = sizes_of(name, 0), Counter(), Counter()
    made = steps(tuple(sorted(vars(c).items())))  # a key: cards and models share the scheduling
    for rounds, turns in made:
        seconds, scoring = step_parts(rounds, turns, m, CARDS[card], c)
        batches = [batch for ranks in rounds for batch in ranks]
        counted = {
            "columns, slowest rank": columns_of(rounds),
            "rows in the batch": sum(b.rows for b in batches) / sum(b.columns for b in batches),
            "rounds": len(rounds),
            "groups begun": sum(len(b.ended) for b in batches),
            "groups trained": sum(not flat for b in batches for *_, flat in b.ended),
            "tokens sampled": sum(sum(tokens) for b in batches for _, tokens, _ in b.ended),
            "micro-batches of a rank": len(turns),
            "scoring on the server's own GPU, seconds": scoring,
        }
        parts.update({part: value / len(made) for part, value in seconds.items()})
        numbers.update({fact: value / len(made) for fact, value in counted.items()})
    return parts, numbers


def step_seconds(name, card, c):
    return sum(simulate(name, card, c)[0].values())


# --- Tables -----------------------------------------------------------------------------
def memory_of(name, c):
    """Returns the bytes that a rank needs, by memory.py."""
    return need(phases_of(sizes_of(name, 0), trainer.MAX_PROMPT_TOKENS, c.longest, c.ranks))[0]


def print_job(name, card, c):
    parts, numbers = simulate(name, card, c)
    total, size = sum(parts.values()), memory_of(name, c)
    print(f"{name}, {c.ranks} x {card} and one for the reference, {c.flat:.0%} flat groups,")
    print(f"{c.kernels} kernels a layer in the recorded graph.\n")
    rows = [[part, f"{seconds:.2f}", f"{seconds / total:.0%}"] for part, seconds in parts.items()]
    table(["computed", "seconds a step", "share"], [*rows, ("the step", f"{total:.2f}", "100%")])
    table(["computed", "a step"], [(fact, f"{value:.1f}") for fact, value in numbers.items()])
    if size > CARDS[card].room * 2**30:
        print(f"It needs {gb(size)} GB, more than one {card} has: see docs/memory.md.\n")


def print_cards(c):
    flats, rows = (0.0, 0.3, 0.5, 0.7), []
    for name in MODELS:
        size = memory_of(name, c)
        for card in CARDS:
            if size <= CARDS[card].room * 2**30:
                each = [step_seconds(name, card, changed(c, flat=flat)) for flat in flats]
                seconds = [f"{value:.1f}" for value in each]
                rows.append([name, f"{c.ranks} x {card}", gb(size), *seconds])
    table(["model", "cards", "GB of each", *(f"{flat:.0%} flat" for flat in flats)], rows)


def print_sensitivity(name, card, c):
    rows = []
    for constant in ("LAUNCH", "BANDWIDTH", "LARGE", "SMALL"):
        now, seconds = getattr(cost, constant), []
        for factor in (0.75, 1, 1.25):
            with mock.patch.object(cost, constant, factor * now):
                seconds.append(f"{step_seconds(name, card, c):.1f}")
        rows.append([constant, f"{now:.2g}", *seconds])
    table(["constant of cost.py", "value", "a quarter less", "as it is", "a quarter more"], rows)


def print_all(c):
    print(f"""# Seconds of a step, computed

{facts("torch")}

**Every number here is computed**, from counted kernels, bytes, FLOP and columns; none is measured.
Prompts of {c.prompt} tokens; completions log-normal, of 211 tokens on average and {c.longest} at
most, an assumption (`--lengths FILE` takes real ones); the other constants are the trainer's. The
ranks sample and train, the reference has one more card of the kind. Means over {c.steps} steps.

## Models and cards

Seconds a step, computed, by the share of flat groups; GB by memory.py. Full training without
offloading: what does not fit is left out.
""")
    print_cards(c)
    print("## By part\n")
    print_job("Qwen2.5-3B", "A800", c)
    print("## What an error of the constants does\n\nSeconds of that step, computed.\n")
    print_sensitivity("Qwen2.5-3B", "A800", c)
    published.print_table()


def options():
    """Returns (the values of JOB, the other arguments)."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", nargs="?", help=", ".join(MODELS))
    parser.add_argument("card", nargs="?", help=", ".join(CARDS))
    parser.add_argument("--calibrate", action="store_true")
    parser.add_argument("--write", action="store_true")
    for name, value in JOB.items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"{value!r}")
    values = vars(parser.parse_args())
    return SimpleNamespace(**{name: values.pop(name) for name in JOB}), SimpleNamespace(**values)


def main():
    c, asked = options()
    if not 0 <= c.flat < 1:
        sys.exit(f"--flat {c.flat}: a share of the groups, from 0 to below 1")
    if asked.calibrate:
        published.print_table()
    elif asked.write:
        path = Path(__file__).with_name("results") / "simulate.md"
        # Not into the file at once: git would call it changed, and so would the page its commit
        with redirect_stdout(io.StringIO()) as page:
            print_all(c)
        path.write_text(page.getvalue())
    elif asked.model not in MODELS:
        sys.exit(f"unknown model {asked.model}: known are {', '.join(MODELS)}")
    elif asked.card not in CARDS:
        sys.exit(f"unknown card {asked.card}: known are {', '.join(CARDS)}")
    else:
        print_job(asked.model, asked.card, c)


if __name__ == "__main__":
    main()
