"""Proofs by log-probs that two processes hold the same policy."""

import torch

PROOF_TOKENS = 128  # of a completion
# Largest mean k3 = exp(d) - d - 1 that passes for rounding, d the difference of a token's log-probs
# between two computations of one policy. Published: k3 1.5e-3 (sd of d 0.055) in bfloat16, for
# Qwen2.5-0.5B, a trainer against vLLM or against itself at another batch size (trl #6789); some
# 4e-3 (mean |d| 0.067) in FP8, for a mixture of experts (miles #2722). Ours, for the demo's models
# (benchmarks/results/noise.md): bfloat16 4e-5, float32 6e-14; a layer 100 updates old 0.012 to 0.06
NOISE = {"float32": 1e-6, "bfloat16": 1e-2}
MISMATCH = "sampling/sampling_logp_difference/mean"  # mean |d|, by TRL's name
# Largest relative difference of the sampler's temperature from the trainer's, as sampler_stats
# estimates it. The same table has 0.003 at most at equal temperatures, and 0.047 for a sampler 5 %
# hotter, which mean k3 (2e-4 to 5e-4) can't tell from rounding.
TILT = 0.03
EVIDENCE = 200.0  # nats^2 of surprise, some 1000 tokens: with less the tilt is not judged


# --- A worker's policy is the trainer's -----------------------------------------------
def sample_proof(policy, recipe):
    """Returns (prompt, completion) ids: the first prompt and what the policy draws after it.
    Rounding is larger in other text, and with few tokens a stale layer may pass for it."""
    prompt = recipe.prompts[0][2]
    room = recipe.c.MAX_PROMPT_TOKENS + recipe.c.MAX_COMPLETION_TOKENS - len(prompt)
    return prompt, policy.continuation(prompt, min(PROOF_TOKENS, room)).ids


def proof_of(policy, prompt, completion):
    """Returns {"prompt", "completion", "logps", "dtype"}, for check_proof in another process."""
    logps = policy.logps(prompt, completion)
    return {"prompt": prompt, "completion": completion, "logps": logps, "dtype": policy.dtype}


def check_proof(policy, record):
    """Returns the mean k3 to the publisher's log-probs. Raises RuntimeError if beyond rounding.

    Then the policy draws a completion of its own, whose log-probs must be those that it scores: on
    a GPU what was recorded for sampling may still read old weights, while a score reads the new.
    """
    proof, version = record["proof"], record["version"]
    limit = max(NOISE[proof["dtype"]], NOISE[policy.dtype])
    prompt, completion = proof["prompt"], proof["completion"]
    gap = mean_k3(policy.logps(prompt, completion), proof["logps"])
    check_gap(gap, limit, f"policy {version} is loaded, but differs from the trainer's")
    own = policy.continuation(prompt, len(completion))
    decoded = mean_k3(policy.logps(prompt, own.ids), own.logps)
    check_gap(decoded, limit, f"policy {version} is right, but what is sampled here differs")
    return gap


def mean_k3(mine, theirs):
    """Returns the mean k3 of two computations of the log-probs of tokens that `theirs` drew."""
    d = torch.tensor(mine).double() - torch.tensor(theirs).double()
    return (d.expm1() - d).mean().item()


def check_gap(gap, limit, what):
    if not gap <= limit:  # nor NaN
        raise RuntimeError(f"{what}: log-probs are {gap:.2g} apart in mean k3 (limit {limit})")


# --- The first update is what theory says ---------------------------------------------
def check_first_update(metrics, policy_dtype, reference, *, model):
    """Returns a sentence on how far log-probs of trainer, sampler and reference are apart at the
    run's first update.

    The three then have the same weights: their log-probs differ by rounding alone. Raises
    RuntimeError if they differ by more: they do not compute the same thing (temperature, dropout,
    attention, wrong weights). `reference` is /info's answer.
    """
    gap, limit = metrics["sampler_k3"], NOISE[policy_dtype]
    check_gap(gap, limit, "at the first update trainer and sampler, of one policy, differ")
    tilt = metrics.get("sampler_tilt", 0.0)
    if abs(tilt) > TILT:
        raise RuntimeError(
            f"at the first update the sampler seems to draw at {1 + tilt:.3f} times the trainer's"
            " temperature: both must be TEMPERATURE"
        )
    said = f"trainer and sampler differ by {gap:.1g} in mean k3 (limit {limit})"
    said += f", by {metrics[MISMATCH]:.1g} a token"
    if "kl" not in metrics or reference["model"] != model:
        return said  # no reference, or another model, from which the KL is not 0
    limit = max(limit, NOISE[reference["dtype"]])
    what = f"at the first update the reference has other weights than {model}"
    check_gap(metrics["kl"], limit, what)
    return f"{said}, trainer and reference by {metrics['kl']:.1g}"
