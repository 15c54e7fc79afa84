"""The metrics of a run: means over an update's tokens, over the groups of a rollout, and over an
evaluation.

docs/metrics.md explains each metric. All ranks count; report.py writes.
"""

import itertools
import math
from collections import Counter
from statistics import fmean

import torch
import torch.distributed as dist

from grpo.logp_checks import EVIDENCE, MISMATCH
from grpo.ranks import all_or_none, gather_groups
from grpo.reference import is_teacher
from grpo.rollout import applying, is_flat, sampled_and_rewarded
from grpo.stop import stop

# Names in the per-token results of batch_loss
LOSS = ("ratio", "kl", "k1", "clip_low", "clip_high", "entropy")
SAMPLER = ("mismatch", "sampler_ratio")  # trainer against sampler
ON_POLICY = ("on_policy", "sampler_k3", "tilt", "surprise")  # the same, for on-policy tokens
SUMS = LOSS + SAMPLER + ON_POLICY
MAX_GAP = "sampling/sampling_logp_difference/max"
NAMES = {  # the metrics' names, which are TRL's and Tinker's
    "k1": "teacher_kl",
    "clip_low": "clip_ratio/low_mean",
    "clip_high": "clip_ratio/high_mean",
    "mismatch": MISMATCH,
}
EVALUATED = {  # of an evaluation, under the names of its own
    "completions/clipped_ratio": "truncated",
    "completions/mean_length": "completion_tokens",
    "num_turns/mean": "num_turns",
}


# --- Over the tokens of an update -----------------------------------------------------
class TokenStats:
    """Sums over the tokens of all micro-batches; `over_ranks` gives the means over all ranks."""

    def __init__(self, device):
        # float64: sums over a million tokens
        self.sums = torch.zeros(2 + len(SUMS), dtype=torch.float64, device=device)
        self.largest = torch.zeros(2, device=device)  # mismatch, sampler_ratio
        self.device = device

    def add(self, loss, per_token):
        """Adds a micro-batch of this rank: its part of the step's loss, a scalar, and tensors (N,)
        by name: policy_loss's stats, "logps", "entropy", "sampler_logps", "on_policy" (1 or 0)."""
        names = "logps", "entropy", "sampler_logps", "on_policy"
        values = per_token | sampler_stats(*(per_token[name] for name in names))
        tokens = loss.new_full((), len(per_token["logps"]))
        sums = [loss.detach(), tokens, *(values[name].sum() for name in SUMS)]
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
        sums = dict(zip(SUMS, sums, strict=True))
        on_policy, k3, tilt, surprise = (sums.pop(name) for name in ON_POLICY)
        means = {NAMES.get(name, name): total / tokens for name, total in sums.items()}
        names = MAX_GAP, "sampler_ratio_max", "gpu_memory_gb"  # the last only on a GPU
        largest = dict(zip(names, self.largest.tolist(), strict=False))
        if on_policy:
            means["sampler_k3"] = k3 / on_policy
        if surprise > EVIDENCE:  # with fewer tokens it would be noise
            means["sampler_tilt"] = tilt / surprise
        return {"loss": loss} | means | largest


def with_kl(metrics, reference, model):
    """Returns an update's metrics without a KL that does not apply. `reference` is the reference's
    info. Without a reference there is no `kl`; without a teacher there is no `teacher_kl`."""
    unknown = {"kl"} if reference["model"] is None else set()
    unknown |= set() if is_teacher(reference, model) else {"teacher_kl"}
    return {name: value for name, value in metrics.items() if name not in unknown}


def peak_gb(device):
    """Returns [GB], the most GPU memory that tensors took since the last call, or [] on a CPU."""
    if torch.device(device).type == "cpu":
        return []
    peak = torch.accelerator.max_memory_allocated() / 1e9
    torch.accelerator.reset_peak_memory_stats()
    return [peak]


def sampler_stats(logps, entropy, sampler_logps, on_policy):
    """Returns how far the trainer's log-probs are from the sampler's, per token (N,). Over the
    `on_policy` tokens, sampled with these weights, the mean k3 estimates KL(sampler || trainer)."""
    gap, surprise = logps - sampler_logps, logps + entropy
    return {
        "mismatch": gap.abs(),
        "sampler_ratio": gap.exp(),
        "sampler_k3": on_policy * (gap.expm1() - gap),
        # Ours: surprise is how far a log-prob is above its mean, -entropy. A sampler at (1 + x)
        # times the temperature gives log-probs that differ by x * surprise, to first order: x, the
        # tilt, is the slope of gap on surprise, in which noise averages out
        "tilt": on_policy * gap * surprise,
        "surprise": on_policy * surprise**2,
    }


# --- Over what was sampled ------------------------------------------------------------
def evaluate(sampler, step, greedy, questions):
    """Collective: returns the policy's greedy accuracy (OUTCOME > 0) after `step` steps, the share
    of positive values of each reward, the truncated share and the mean length. A reward's share is
    over the answers to which it applies; without any, it is absent. Once a stop is requested, no
    further question begins."""
    mine = questions[dist.get_rank() :: dist.get_world_size()]
    mine = itertools.takewhile(lambda _: not stop.asked, mine)
    with all_or_none(), sampler.follow(step):  # collective
        groups = list(sampled_and_rewarded(sampler, greedy, mine, seed=0))
    groups = gather_groups(groups)  # collective
    found = means_over(greedy, groups)
    positive = {f"positive_{name}": values for name, values in rewards_of(greedy, groups).items()}
    shares = {name: [value > 0 for value in values] for name, values in positive.items()}
    found |= {name: fmean(share) for name, share in shares.items() if share}
    names = ["accuracy", *shares, *EVALUATED]
    return {f"eval_{EVALUATED.get(name, name)}": found[name] for name in names if name in found}


def rollout_metrics(run, groups, seconds):
    """Returns metrics over the groups that all ranks and workers sampled for a rollout; this rank
    has sampled for `seconds`."""
    found, lengths = means_over(run.recipe, groups), Counter()
    for group in groups:
        lengths[group.sampler] += sum(sample.length for sample in group.samples)
    if seconds:  # 0 if workers sampled all groups
        found["tokens_per_second"] = lengths["trainer"] / seconds
    if run.workers:
        found |= run.workers.metrics(groups, run.progress.step)
    return found | {
        "epoch": (run.progress.groups + len(groups)) / max(len(run.recipe.prompts), 1),
        "groups_sampled": len(groups),
        "tokens_sampled": lengths.total(),
    }


def rewards_of(recipe, groups):
    """Returns {name: the values of this reward that apply}."""
    samples = [sample for group in groups for sample in group.samples]
    return {name: applying(s.rewards[name] for s in samples) for name in recipe.weights}


def means_over(recipe, groups):
    """Returns the means over the samples of groups; what applies to none of them is absent."""
    samples, rewards = [s for group in groups for s in group.samples], rewards_of(recipe, groups)
    totals = [[0.0 if math.isnan(s.total) else s.total for s in group.samples] for group in groups]
    values = {
        "reward": list(itertools.chain(*totals)),  # as TRL's nansum
        "reward_std": [spread(applying(s.total for s in group.samples)) for group in groups],
        "frac_reward_zero_std": list(map(is_flat, groups)),
        "accuracy": [value > 0 for value in rewards[recipe.outcome]],
        "completions/mean_length": [s.length for s in samples],
        "completions/clipped_ratio": [s.truncated for s in samples],
        "completions/mean_terminated_length": [s.length for s in samples if not s.truncated],
    }
    values |= {f"rewards/{name}/mean": found for name, found in rewards.items()}
    means = {name: fmean(found) for name, found in values.items() if found}
    means |= {f"rewards/{name}/std": spread(found) for name, found in rewards.items() if found}
    if none := sum(math.isnan(s.total) for s in samples):
        means["rewards/none"] = none / len(samples)
    if recipe.turns:
        means |= recipe.turns.turn_metrics(samples)
    return means


def spread(values):
    """Returns the unbiased standard deviation of a list, 0 if it has fewer than two values."""
    return torch.tensor(values, dtype=torch.float64).std().item() if values[1:] else 0.0
