"""PUBLISH_STEPS: a worker proves, by log-probs, that it has the trainer's policy."""

import torch

from grpo.proof import NOISE, check_gap, noise_of

PROOF_TOKENS = 128  # length of the completion that is compared; more detect smaller differences


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


def mean_k3(mine, theirs):
    """Returns the mean k3 between two lists of log-probs; `theirs` are of the process that sampled
    the tokens."""
    d = torch.tensor(mine).double() - torch.tensor(theirs).double()
    return (d.expm1() - d).mean().item()
