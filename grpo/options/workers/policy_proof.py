"""PUBLISH_STEPS: a worker proves, by log-probs, that it has the trainer's policy."""

import torch

from grpo.forward import CompletionModel
from grpo.options.worker_weights import load_weights
from grpo.policy import NOISE, Policy, check_gap
from grpo.reference import score_batch
from grpo.sampler import sample_groups

PROOF_TOKENS = 128  # length of the completion that is compared; more detect smaller differences


class SharedPolicy(Policy):
    """A policy that rank 0 publishes, or a worker's that takes its weights."""

    def load(self, tensors):
        """Takes trained weights. Raises ValueError, and changes nothing, if they do not fit."""
        load_weights(self.model, tensors)

    def logps(self, prompt, completion):
        """Returns the log-probs (floats, temperature 1) of the completion's ids."""
        model = CompletionModel(self.model)
        (logps,) = score_batch(model, [prompt], [completion], 1.0, self.vocab_size)
        return logps.tolist()


def sample_proof(policy, recipe):
    """Returns (prompt, completion) ids: the first prompt, and what the policy samples after it at
    temperature 1, as far as there is room; no EOS ends it. Rounding is larger in other text, and
    few tokens may not reveal a stale layer."""
    prompt = recipe.prompts[0].ids
    room = recipe.c.MAX_PROMPT_TOKENS + recipe.c.MAX_COMPLETION_TOKENS - len(prompt)
    ((completion,),) = sample_groups(
        policy.model,
        [prompt],
        group_size=1,
        max_new_tokens=min(PROOF_TOKENS, room),
        temperature=1.0,
        eos_ids={-1},
        vocab_size=policy.vocab_size,
        generator=policy.generator(seed=0),
        decoder=policy.decoder,
    )
    return prompt, completion.ids


def proof_of(policy, prompt, completion):
    """Returns {"prompt", "completion", "logps", "dtype"} for check_proof in another process."""
    logps = policy.logps(prompt, completion)
    return {"prompt": prompt, "completion": completion, "logps": logps, "dtype": policy.dtype}


def check_proof(policy, record):
    """Returns the mean k3 to the publisher's log-probs. Raises RuntimeError if it is too large. At
    the trainer, check_sampler compares what the worker then samples with it."""
    proof, version = record["proof"], record["version"]
    mine = policy.logps(proof["prompt"], proof["completion"])
    d = torch.tensor(mine).double() - torch.tensor(proof["logps"]).double()
    gap, limit = (d.expm1() - d).mean().item(), max(NOISE[proof["dtype"]], policy.noise)
    check_gap(gap, limit, f"policy {version} is loaded, but differs from the trainer's")
    return gap
