"""Checks by log-probs that two processes have the same policy."""

import math

import torch

PROOF_TOKENS = 128  # length of the completion that is compared; more detect smaller differences
# Largest mean k3 = exp(d) - d - 1 that counts as rounding, where d is the difference between two
# computations of a token's log-prob. A higher limit misses small errors. Published: 1.5e-3 (sd of d
# 0.055) in bfloat16, for Qwen2.5-0.5B, a trainer against vLLM or against itself at another batch
# size (trl #6789); about 4e-3 (mean |d| 0.067) in FP8, for a mixture of experts (miles #2722).
# Measured here with the demo's models (benchmarks/results/noise.md): bfloat16 4e-5, float32 6e-14;
# with a layer that is 100 updates old 0.012 to 0.06
NOISE = {"float32": 1e-6, "bfloat16": 1e-2}
# The same for float32 with products in TF32, which have 10 bits. A guess: |d| of 0.01 gives 5e-5
TF32_NOISE = 1e-4
MISMATCH = "sampling/sampling_logp_difference/mean"  # mean |d|, by TRL's name
# Largest relative difference between the temperatures of sampler and trainer, as sampler_stats
# estimates it. The same table has 0.003 at most at equal temperatures, and 0.047 for a sampler 5 %
# hotter, which mean k3 (2e-4 to 5e-4) can't tell from rounding.
TILT = 0.03
EVIDENCE = 200.0  # nats^2 of surprise (about 1000 tokens), below which TILT is not checked


# --- A worker's policy is the trainer's -----------------------------------------------
def sample_proof(policy, recipe):
    """Returns (prompt, completion) ids: the first prompt and the policy's sampled completion.
    Rounding is larger in other text, and few tokens may not reveal a stale layer."""
    prompt = recipe.prompts[0][2]
    room = recipe.c.MAX_PROMPT_TOKENS + recipe.c.MAX_COMPLETION_TOKENS - len(prompt)
    return prompt, policy.continuation(prompt, min(PROOF_TOKENS, room)).ids


def proof_of(policy, prompt, completion):
    """Returns {"prompt", "completion", "logps", "dtype"} for check_proof in another process."""
    logps = policy.logps(prompt, completion)
    return {"prompt": prompt, "completion": completion, "logps": logps, "dtype": policy.dtype}


def check_proof(policy, record):
    """Returns the mean k3 to the publisher's log-probs. Raises RuntimeError if it is too large.

    Then the policy samples a completion, whose log-probs must equal those of scoring it. On a GPU
    the recorded sampling graph may still read old weights while scoring reads the new ones.
    """
    proof, version = record["proof"], record["version"]
    limit = max(NOISE[proof["dtype"]], noise_of(policy))
    prompt, completion = proof["prompt"], proof["completion"]
    gap = mean_k3(policy.logps(prompt, completion), proof["logps"])
    check_gap(gap, limit, f"policy {version} is loaded, but differs from the trainer's")
    own = policy.continuation(prompt, len(completion))
    decoded = mean_k3(policy.logps(prompt, own.ids), own.logps)
    check_gap(decoded, limit, f"policy {version} is right, but what is sampled here differs")
    return gap


def noise_of(policy):
    """Returns the largest mean k3 to a policy's log-probs that counts as rounding."""
    return getattr(policy, "noise", NOISE[policy.dtype])


def mean_k3(mine, theirs):
    """Returns the mean k3 between two lists of log-probs; `theirs` are of the process that sampled
    the tokens."""
    d = torch.tensor(mine).double() - torch.tensor(theirs).double()
    return (d.expm1() - d).mean().item()


def check_gap(gap, limit, what):
    if not gap <= limit:  # also if it is NaN
        raise RuntimeError(
            f"{what}: the KL estimate k3 of their log-probs is {gap:.2g} (limit {limit}); see"
            " docs/troubleshooting.md"
        )


# --- What is trained is what was sampled ------------------------------------------------
def check_sampler(metrics, sampler):
    """Raises RuntimeError if the trainer's log-probs of freshly sampled tokens differ from the
    sampler's by more than its rounding. Then the two compute different things (temperature,
    dropout, attention), or the sampler's weights are old or damaged."""
    if not math.isfinite(metrics["loss"]):  # the step will be skipped anyway
        return
    if "sampler_k3" in metrics:
        what = "trainer and sampler should have the same weights, but differ"
        check_gap(metrics["sampler_k3"], noise_of(sampler), what)
    tilt = metrics.get("sampler_tilt", 0.0)
    if abs(tilt) > TILT:
        raise RuntimeError(
            f"the sampler seems to draw at {1 + tilt:.3f} times the trainer's temperature, though"
            " TEMPERATURE sets both; see docs/troubleshooting.md"
        )


def check_reference(metrics, dtype, reference, *, model):
    """Raises RuntimeError if, at the run's first update, the reference has the policy's name but
    other weights: log-probs that differ by more than rounding. `reference` is its /info."""
    if "kl" in metrics and reference["model"] == model:
        what = f"at the first update the reference's weights differ from those of {model}"
        check_gap(metrics["kl"], max(NOISE[dtype], NOISE[reference["dtype"]]), what)
