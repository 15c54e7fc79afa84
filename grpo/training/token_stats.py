"""Means over all tokens of an update, all micro-batches and ranks; each metric: docs/metrics.md."""

import torch
import torch.distributed as dist

from grpo.proof import MISMATCH, tilt_of

LOSS = ("ratio", "kl", "clip_low", "clip_high", "entropy")  # of what grpo_loss returns, per token
SAMPLER = ("mismatch", "sampler_ratio", "sampler_k3", "tilt", "surprise")  # trainer against sampler
MAX_GAP = "sampling/sampling_logp_difference/max"
NAMES = {  # TRL's
    "clip_low": "clip_ratio/low_mean",
    "clip_high": "clip_ratio/high_mean",
    "mismatch": MISMATCH,
}


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
