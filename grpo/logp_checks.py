"""Checks by log-probs that the trainer trains what was sampled, and that the reference is right."""

import math
from pathlib import Path

# Largest mean k3 = exp(d) - d - 1 that counts as rounding, where d is the difference between two
# computations of a token's log-prob. A higher limit misses small errors. Published: 1.5e-3 (sd of d
# 0.055) in bfloat16, for Qwen2.5-0.5B, a trainer against vLLM or against itself at another batch
# size (trl #6789); about 4e-3 (mean |d| 0.067) in FP8, for a mixture of experts (miles #2722).
# Measured with the demo's models (986c616:benchmarks/results/noise.md): bfloat16 4e-5, float32
# 6e-14; with a layer that is 100 updates old 0.012 to 0.06
NOISE = {"float32": 1e-6, "bfloat16": 1e-2}
# The same for float32 with products in TF32, which have 10 bits. A guess: |d| of 0.01 gives 5e-5
TF32_NOISE = 1e-4
MISMATCH = "sampling/sampling_logp_difference/mean"  # mean |d|, by TRL's name
# Largest relative difference between the temperatures of sampler and trainer, as sampler_stats
# estimates it. The same table has 0.003 at most at equal temperatures, and 0.047 for a sampler 5%
# hotter, which mean k3 (2e-4 to 5e-4) can't separate from rounding.
TILT = 0.03
EVIDENCE = 200.0  # nats^2 of surprise (about 1000 tokens), below which TILT is not checked


def check_gap(gap, limit, what):
    if not gap <= limit:  # also if it is NaN
        raise RuntimeError(
            f"{what}: the KL estimate k3 of their log-probs is {gap:.2g} (limit {limit}); see"
            " docs/troubleshooting.md"
        )


# --- What is trained is what was sampled ------------------------------------------------
def check_sampler(metrics, sampler, by_workers=False, rounded=False):
    """Raises RuntimeError if the trainer's log-probs of freshly sampled tokens differ from the
    sampler's by more than its rounding; workers (`by_workers`) may sample in bfloat16. Then the two
    compute different things (temperature, dropout, attention), or the sampler's weights are old or
    damaged.
    Logits that are `rounded` to bfloat16 tilt like another temperature, if a policy is sure.
    """
    if not math.isfinite(metrics["loss"]):  # the step will be skipped anyway
        return
    if "sampler_k3" in metrics:
        what = "trainer and sampler should have the same weights, but differ"
        check_gap(metrics["sampler_k3"], max(sampler.noise, by_workers * NOISE["bfloat16"]), what)
    tilt = metrics.get("sampler_tilt", 0.0)
    if abs(tilt) > TILT and not rounded:
        raise RuntimeError(
            f"the sampler seems to draw at {1 + tilt:.3f} times the trainer's temperature, though"
            " TEMPERATURE sets both; see docs/troubleshooting.md"
        )


def check_reference(metrics, dtype, reference, *, model):
    """Raises RuntimeError if, at the run's first update, the reference has the policy's name but
    other weights: log-probs that differ by more than rounding. `reference` is its /info."""
    if "kl" in metrics and Path(reference["model"]).name == Path(model).name:
        what = f"at the first update the reference's weights differ from those of {model}"
        check_gap(metrics["kl"], max(NOISE[dtype], NOISE[reference["dtype"]]), what)
