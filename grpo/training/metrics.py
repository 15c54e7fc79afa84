"""What a run measures: seconds by part, means over the tokens of an update, over what was sampled
for a rollout, and over an evaluation.

What each metric means: docs/metrics.md. All ranks count; report.py writes.
"""

import contextlib
import itertools
import math
import time
from collections import Counter

import torch
import torch.distributed as dist

from grpo.devices import accelerator
from grpo.proof import MISMATCH, tilt_of
from grpo.sampling.rollout import TALLY, sampled_and_rewarded, tally, tally_of
from grpo.stop import stop
from grpo.training.ranks import add_up, all_or_none

PARTS = ("sample", "reward", "wait", "backward", "step", "publish", "other")
LOSS = ("ratio", "kl", "clip_low", "clip_high", "entropy")  # of what grpo_loss returns, per token
SAMPLER = ("mismatch", "sampler_ratio", "sampler_k3", "tilt", "surprise")  # trainer against sampler
MAX_GAP = "sampling/sampling_logp_difference/max"
NAMES = {  # TRL's
    "clip_low": "clip_ratio/low_mean",
    "clip_high": "clip_ratio/high_mean",
    "mismatch": MISMATCH,
}


class Clock:
    """Seconds of a step by part, one of PARTS: "backward" with the forward, "other" the rest."""

    def __init__(self):
        self.parts, self.started = Counter(), time.perf_counter()
        self.inner = 0.0  # seconds of parts within the part that is running

    @contextlib.contextmanager
    def part(self, name):
        """Counts the block's time, without that of parts within it, which count by themselves."""
        began, outer, self.inner = time.perf_counter(), self.inner, 0.0
        yield
        seconds = time.perf_counter() - began
        self.parts[name] += seconds - self.inner
        self.inner = outer + seconds

    def lap(self):
        """Returns {"seconds": all, "seconds_sample": ...} since the last lap."""
        now = time.perf_counter()
        total, parts = now - self.started, self.parts
        parts["other"] = total - sum(parts.values())
        self.parts, self.started = Counter(), now
        return {"seconds": total} | {f"seconds_{k}": v for k, v in parts.items()}


# --- Over the tokens of an update ---------------------------------------------------
class TokenStats:
    """The sums; `over_ranks` gives the means."""

    def __init__(self, device):
        # float64: sums over a million tokens
        self.sums = torch.zeros(2 + len(LOSS + SAMPLER), dtype=torch.float64, device=device)
        self.largest = torch.zeros(2, device=device)  # mismatch, sampler_ratio
        self.device = device

    def add(self, loss, per_token):
        """Adds a micro-batch of this rank: its part of the step's loss, a scalar, and tensors (N,)
        by name: grpo_loss's stats and "sampler_logps"."""
        values = per_token | sampler_stats(
            per_token["logps"], per_token["entropy"], per_token["sampler_logps"]
        )
        tokens = torch.ones_like(per_token["logps"]).sum()
        sums = [loss.detach(), tokens, *(values[name].sum() for name in LOSS + SAMPLER)]
        self.sums += torch.stack([value.double() for value in sums])
        largest = torch.stack([values["mismatch"].max(), values["sampler_ratio"].max()])
        self.largest = torch.maximum(self.largest, largest)  # NaN stays NaN

    def over_ranks(self):
        """Collective: returns the metrics over all ranks' tokens, by name."""
        dist.all_reduce(self.sums)
        peak = torch.tensor(peak_gb(self.device), device=self.device)
        self.largest = torch.cat([self.largest, peak])
        dist.all_reduce(self.largest, op=dist.ReduceOp.MAX)
        loss, tokens, *sums = self.sums.tolist()
        sums = dict(zip(LOSS + SAMPLER, sums, strict=True))
        tilt = tilt_of(sums.pop("tilt"), sums.pop("surprise"))
        means = {NAMES.get(name, name): total / tokens for name, total in sums.items()}
        names = MAX_GAP, "sampler_ratio_max", "gpu_memory_gb"  # the last on a GPU
        largest = dict(zip(names, self.largest.tolist(), strict=False))
        return {"loss": loss} | means | tilt | largest


def peak_gb(device):
    """Returns [GB], the most that tensors had of the GPU since the last call, [] on a CPU."""
    if torch.device(device).type == "cpu":
        return []
    peak = torch.accelerator.max_memory_allocated() / 1e9
    torch.accelerator.reset_peak_memory_stats()
    return [peak]


def sampler_stats(logps, entropy, sampler_logps):
    """Returns, per token, how far the trainer's log-probs are from the sampler's; all are (N,). Of
    tokens that the sampler drew, mean k3 estimates KL(sampler || trainer)."""
    gap, surprise = logps - sampler_logps, logps + entropy
    return {
        "mismatch": gap.abs(),
        "sampler_ratio": gap.exp(),
        "sampler_k3": gap.expm1() - gap,
        # Ours: surprise is how far a log-prob is above its mean, -entropy. A sampler at (1 + x)
        # times the temperature gives log-probs that differ by x * surprise, to first order: x, the
        # tilt, is the slope of gap on surprise, in which noise averages out
        "tilt": gap * surprise,
        "surprise": surprise**2,
    }


# --- Over what was sampled ----------------------------------------------------------
def evaluate(policy, recipe, prompts):
    """Collective: returns greedy accuracy (OUTCOME > 0) and the positive share of each reward, both
    of the answers to which it applied and absent where that is none, the truncated share and the
    mean length. Begins no question once the run is asked to stop."""
    count, mine = Counter(), iter(prompts[dist.get_rank() :: dist.get_world_size()])

    def take(room):
        return [] if stop.asked else list(itertools.islice(mine, room))

    greedy = recipe.others(GROUP_SIZE=1, TEMPERATURE=0)
    with all_or_none("evaluating"):  # collective
        for sampled in sampled_and_rewarded(policy, greedy, take, seed=0):
            count.update(tally(recipe, sampled))
            count.update({f"positive_{name}": int(r > 0) for name, r in sampled[2][0].items()})
    judged = {name: f"applicable_{name}" for name in recipe.c.REWARD_WEIGHTS}
    shares = {"accuracy": ("right", judged[recipe.c.OUTCOME])}
    shares |= {f"positive_{name}": (f"positive_{name}", of) for name, of in judged.items()}
    shares |= {"truncated": ("truncated", "completions")}
    shares |= {"completion_tokens": ("tokens", "completions")}
    total = add_up(count, [name for pair in shares.values() for name in pair])
    return {f"eval_{k}": total[name] / total[of] for k, (name, of) in shares.items() if total[of]}


def rollout_metrics(run, count, sampled, theirs):
    """Collective: returns metrics over what all ranks and workers have sampled for a rollout. The
    sums in `count` (rollout.tally) are of this rank's groups, `sampled`; `theirs` are the workers'
    groups that this rank has taken. Counts all in the run's progress."""
    recipe, seconds = run.recipe, run.clock.parts["sample"]
    count["own_tokens"] = count["tokens"]
    for group in theirs:
        count.update(tally_of(recipe, group))
    weights, sums = recipe.c.REWARD_WEIGHTS, ("reward", "square", "applicable")
    own = [f"{kind}_{name}" for kind in sums for name in weights]
    total = add_up(count, [*TALLY, "own_tokens", *own])
    n, groups = max(total["completions"], 1), max(total["groups"], 1)
    ended = total["completions"] - total["truncated"]
    means = {"completions/mean_terminated_length": total["ended_tokens"] / ended} if ended else {}
    for name in weights:
        means |= mean_and_std(f"rewards/{name}", *(total[f"{kind}_{name}"] for kind in sums))
    if judged := total[f"applicable_{recipe.c.OUTCOME}"]:
        means["accuracy"] = total["right"] / judged
    if seconds:  # 0 where workers sampled all
        means["tokens_per_second"] = total["own_tokens"] / seconds
    return means | {
        "reward": sum(w * total[f"reward_{name}"] for name, w in weights.items()) / n,
        "reward_std": total["group_std"] / groups,
        "completions/mean_length": total["tokens"] / n,
        "completions/clipped_ratio": total["truncated"] / n,
        **extreme_lengths(sampled + theirs),
        "frac_reward_zero_std": total["flat_reward"] / groups,
        "frac_outcome_zero_std": total["flat_outcome"] / groups,
        "epoch": run.progress.count_epoch(int(total["groups"]), of=len(recipe.prompts)),
        "groups_sampled": int(total["groups"]),
        "tokens_sampled": int(total["tokens"]),
    }


def mean_and_std(name, total, squares, number):
    """Returns the mean and the (unbiased) standard deviation of so many values; {} of none."""
    mean = total / max(number, 1)
    variance = max(squares - number * mean**2, 0.0) / max(number - 1, 1)
    return {f"{name}/mean": mean, f"{name}/std": math.sqrt(variance)} if number else {}


def extreme_lengths(groups):
    """Collective: returns the lengths of the shortest and longest completion in all ranks' groups,
    and of those that are not truncated, by name; without those of none."""
    every = [n for group in groups for n in group.completion_lengths.tolist()]
    ended = [n for group in groups for n in group.completion_lengths[~group.truncated].tolist()]
    none = -math.inf
    found = {
        "completions/min_length": -min(every, default=math.inf),  # so that all are maxima
        "completions/max_length": max(every, default=none),
        "completions/min_terminated_length": -min(ended, default=math.inf),
        "completions/max_terminated_length": max(ended, default=none),
    }
    largest = torch.tensor([*found.values()], dtype=torch.float64, device=accelerator() or "cpu")
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    pairs = zip(found, largest.tolist(), strict=True)
    return {name: int(abs(value)) for name, value in pairs if value > none}
