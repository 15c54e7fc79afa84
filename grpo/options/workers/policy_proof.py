"""PUBLISH_STEPS: a worker proves, by log-probs, that it has the trainer's policy."""

import torch

from grpo.forward import CompletionModel
from grpo.proof import NOISE, check_gap, noise_of
from grpo.sampler import sample_groups
from grpo.scoring import score_batch

PROOF_TOKENS = 128  # length of the completion that is compared; more detect smaller differences


def sample_proof(policy, recipe):
    """Returns (prompt, completion) ids: the first prompt and the policy's sampled completion.
    Rounding is larger in other text, and few tokens may not reveal a stale layer."""
    prompt = recipe.prompts[0][2]
    room = recipe.c.MAX_PROMPT_TOKENS + recipe.c.MAX_COMPLETION_TOKENS - len(prompt)
    return prompt, continuation(policy, prompt, min(PROOF_TOKENS, room)).ids


def continuation(policy, prompt, size):
    """Returns a Sample of exactly `size` ids, sampled after the prompt at temperature 1; no EOS
    ends it."""
    if hasattr(policy, "continuation"):  # vLLM's
        return policy.continuation(prompt, size)
    ((completion,),) = sample_groups(
        policy.model,
        [prompt],
        group_size=1,
        max_new_tokens=size,
        temperature=1.0,
        eos_ids={-1},
        vocab_size=policy.vocab_size,
        generator=policy.generator(seed=0),
    )
    return completion


def logps_of(policy, prompt, completion):
    """Returns the log-probs (floats, temperature 1) of the completion's ids."""
    if hasattr(policy, "logps"):  # vLLM's
        return policy.logps(prompt, completion)
    model = CompletionModel(policy.model)
    (logps,) = score_batch(model, [prompt], [completion], 1.0, policy.vocab_size)
    return logps.tolist()


def proof_of(policy, prompt, completion):
    """Returns {"prompt", "completion", "logps", "dtype"} for check_proof in another process."""
    logps = logps_of(policy, prompt, completion)
    return {"prompt": prompt, "completion": completion, "logps": logps, "dtype": policy.dtype}


def check_proof(policy, record):
    """Returns the mean k3 to the publisher's log-probs. Raises RuntimeError if it is too large.

    Then the policy samples a completion, whose log-probs must equal those of scoring it. On a GPU
    the recorded sampling graph may still read old weights while scoring reads the new ones.
    """
    proof, version = record["proof"], record["version"]
    limit = max(NOISE[proof["dtype"]], noise_of(policy))
    prompt, completion = proof["prompt"], proof["completion"]
    gap = mean_k3(logps_of(policy, prompt, completion), proof["logps"])
    check_gap(gap, limit, f"policy {version} is loaded, but differs from the trainer's")
    resampled = continuation(policy, prompt, len(completion))
    decoded = mean_k3(logps_of(policy, prompt, resampled.ids), resampled.logps)
    check_gap(decoded, limit, f"policy {version} is right, but what is sampled here differs")
    return gap


def mean_k3(mine, sampled):
    """Returns the mean k3 between two lists of log-probs; `sampled` are of the process that
    sampled the tokens."""
    d = torch.tensor(mine).double() - torch.tensor(sampled).double()
    return (d.expm1() - d).mean().item()
