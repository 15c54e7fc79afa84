"""An update that failed a check: its samples and their log-probs, in RUN_DIR/bad_step_000138.json.

    {"step", "why", "metrics": {name: number},
     "compared": ["trainer", "sampler"],    # or "reference": whose log-probs differ
     "gaps": {...},                         # summary(): what docs/troubleshooting.md reads
     "worst": [{"sample", "token", "id", "text", "trainer", "sampler"}, ...],
     "samples": [a Sample as a dict, ...]}  # "logps", "ref_logps", "trainer_logps": per id

"sample" and "token" are indices into "samples" and its "ids". A group's id names its worker.
"""

import itertools
import math
import os
import statistics
from dataclasses import asdict

import torch.distributed as dist

from grpo.log import say
from grpo.ranks import RunFailed, gathered

WORST, SHOWN = 10, 3  # tokens in the file, and in the message
LISTS = {"sampler": "logps", "reference": "ref_logps"}  # a Sample's log-probs, by who says so


# --- What differs -----------------------------------------------------------------------
def per_id(sample, logps):
    """Returns log-probs of the model's tokens as a list with an entry per id, None for others."""
    left = iter(logps or ())
    by_model = sample.is_model_token or [True] * len(sample.ids)
    return [next(left, None) if mine else None for mine in by_model]


def tokens_of(samples, other, version=None):
    """Returns the model's tokens whose log-probs both sides have, as dicts (the module's "worst",
    without texts), in order. `other` is "sampler" or "reference". With a `version`, tokens that
    another policy sampled are left out, whose log-probs differ rightly, unless not finite."""
    found = []
    for number, sample in enumerate(samples):
        lists = per_id(sample, sample.trainer_logps), getattr(sample, LISTS[other]) or ()
        for at, (id, ours, theirs) in enumerate(zip(sample.ids, *lists, strict=False)):
            if ours is not None:
                token = {"sample": number, "token": at, "id": id, "trainer": ours, other: theirs}
                same = version in (None, sample.version) or other != "sampler"
                found += [token] if same or size_of(token, other) == math.inf else []
    return found


def size_of(token, other):
    """Returns |trainer - other| of a token in nats; infinite if a log-prob is not finite."""
    gap = abs(token["trainer"] - token[other])
    return gap if math.isfinite(gap) else math.inf


def summary(samples, other, version=None):
    """Returns what tells causes apart, in nats, over the model's tokens with finite log-probs:

    mean       of trainer - other; the next are of the absolute gap
    median, largest
    quarters   means over the first, second, third and last quarter of each completion's ids
    moved      means if the other's log-probs were those of the token before, or after
    """
    tokens = [t for t in tokens_of(samples, other, version) if size_of(t, other) < math.inf]
    if not tokens:
        return {}
    sizes, quarters = [size_of(token, other) for token in tokens], [[], [], [], []]
    for token, size in zip(tokens, sizes, strict=True):
        quarters[4 * token["token"] // len(samples[token["sample"]].ids)].append(size)
    pairs = [(a, b) for a, b in itertools.pairwise(tokens) if a["sample"] == b["sample"]]
    before = [abs(b["trainer"] - a[other]) for a, b in pairs]
    after = [abs(a["trainer"] - b[other]) for a, b in pairs]
    mean = lambda values: statistics.fmean(values) if values else 0.0
    return {
        "tokens": len(tokens),
        "mean": mean([token["trainer"] - token[other] for token in tokens]),
        "median": statistics.median(sizes),
        "largest": max(sizes),
        "quarters": [mean(values) for values in quarters],
        "moved": [mean(before), mean(after)],
    }


# --- What is kept -----------------------------------------------------------------------
def gather_logps(samples):
    """Collective: gives each rank the trainer's log-probs of all samples of an update."""
    mine = {i: s.trainer_logps for i, s in enumerate(samples) if s.trainer_logps is not None}
    for part in gathered(mine):  # collective; each rank has those of the samples it trained
        for number, logps in part.items():
            samples[number].trainer_logps = logps


def keep_evidence(run, step, samples, metrics, why, other="sampler"):
    """Collective: rank 0 writes the file of an update with all ranks' `samples`. Returns a text
    that names the file and the worst tokens. Keeps the files of the last IDLE_LIMIT such steps."""
    gather_logps(samples)  # collective
    found = tokens_of(samples, other, version := step - 1)
    tokens = sorted(found, key=lambda token: -size_of(token, other))[:WORST]
    worst = [token | {"text": run.policy.tokenizer.decode([token["id"]])} for token in tokens]
    path = run.folder.path / f"bad_step_{step:06d}.json"
    record = {"step": step, "why": str(why), "metrics": metrics, "compared": ["trainer", other]}
    record |= {"gaps": summary(samples, other, version), "worst": worst}
    record["samples"] = [asdict(s) | {"trainer_logps": per_id(s, s.trainer_logps)} for s in samples]
    where = f"its samples and all log-probs are in {path} (docs/troubleshooting.md)"
    try:
        if dist.get_rank() == 0:
            path.unlink(missing_ok=True)  # of an earlier start
            run.folder.log(path.name, record)
            files = sorted(path.parent.glob("bad_step_*"), key=os.path.getmtime)
            for old in files[: -run.c.IDLE_LIMIT]:
                old.unlink()
    except (OSError, SystemExit) as error:  # the check's error is the one to see
        where = f"{path} can't be written: {error}"
    shown = [
        f"at token {t['token']} of sample {t['sample']}, {t['text']!r}, the {other} says"
        f" {t[other]:.3g}, the trainer {t['trainer']:.3g}"
        for t in worst[:SHOWN]
    ]
    return "; ".join([f"step {step}: {where}", *shown])


def skip_step(run, samples, metrics):
    """Collective: logs that a step is skipped, as its loss or gradient was not finite, and keeps
    its samples. Raises RunFailed after IDLE_LIMIT skipped steps in a row."""
    p = run.progress
    p.bad += 1
    why = f"loss {metrics['loss']}, norm of the gradient {metrics['grad_norm']}"
    found = keep_evidence(run, p.step, samples, metrics, why)  # collective
    say(f"step {p.step} is skipped: {why}; {p.bad} in a row; {found}")
    if p.bad >= run.c.IDLE_LIMIT:
        raise RunFailed("too many steps were skipped") from RuntimeError(
            f"{p.bad} steps in a row had a loss or gradient that was not finite: is LEARNING_RATE"
            f" too high? The last one, {found}"
        )
