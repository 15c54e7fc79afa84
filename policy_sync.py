"""How the policy gets from the trainer to the workers, and the proof that it has arrived.

The trainer's rank 0 publishes: weights as a safetensors file, and a record (hub.RECORD) with a
proof, the log-probs that its own model gives a fixed text. A worker that has loaded the weights
computes the same: if they differ by more than rounding, it samples something else than the policy,
and refuses to. (simple_GRPO's vLLM process went on with the initial weights, without a word.)
"""

import tempfile
import threading
from pathlib import Path

import safetensors.torch
import torch

from policy import trained_weights

PROOF_TOKENS = 64  # of a completion
# Largest mean |log-prob difference| between two computations of the same policy that passes for
# rounding. Measured on a CPU, tiny models: float32 4e-7, bfloat16 3e-3.
NOISE = {"float32": 1e-4, "bfloat16": 5e-2}


def proof_of(policy, prompts, most_tokens):
    """-> {"prompt", "completion", "logps", "dtype"}: any ids do for a completion, so it takes the
    next prompt's."""
    prompt, completion = prompts[0][2], prompts[-1][2][: min(PROOF_TOKENS, most_tokens)]
    logps = policy.logps(prompt, completion)
    return {"prompt": prompt, "completion": completion, "logps": logps, "dtype": policy.dtype}


def check_proof(engine, record):
    """-> the mean difference to the publisher's log-probs. RuntimeError if beyond rounding."""
    proof = record["proof"]
    mine = torch.tensor(engine.logps(proof["prompt"], proof["completion"]))
    gap = (mine - torch.tensor(proof["logps"])).abs().mean().item()
    limit = max(NOISE[proof["dtype"]], NOISE[engine.dtype])
    if not gap <= limit:  # nor NaN
        raise RuntimeError(
            f"policy {record['version']} is loaded, but its log-probs differ from the trainer's by"
            f" {gap:.2g} a token on average (limit {limit}): it is not the trainer's policy that"
            " this worker would sample"
        )
    return gap


class Publisher:
    """Sends the policy to the server, in a thread: training goes on with the next step."""

    def __init__(self, server, run, recipe, policy, **fixed):
        """`fixed` are the parts of hub.RECORD that stay the same."""
        self.server, self.run, self.recipe, self.policy = server, run, recipe, policy
        self.fixed = fixed | {"settings": recipe.settings()}
        self.folder = tempfile.TemporaryDirectory(prefix="grpo-policy-")
        self.thread = self.error = None

    def publish(self, version, oldest):
        """Begins to send the weights as they are now. While the version before is still on its way,
        waits for it. Raises what sending that one raised."""
        self.finish()
        tensors = trained_weights(self.policy.model)
        proof = proof_of(self.policy, self.recipe.prompts, self.recipe.max_completion_tokens)
        record = {"run": self.run, "version": version, "oldest": oldest, "proof": proof}
        record |= self.fixed

        def send():
            try:
                path = Path(self.folder.name, "policy.safetensors")
                safetensors.torch.save_file(tensors, path)
                self.server.publish(path, record)
            except Exception as error:  # noqa: BLE001 (raised in the main thread, by finish)
                self.error = error

        self.thread = threading.Thread(target=send, daemon=True)
        self.thread.start()

    def finish(self):
        """Waits until the last one has arrived."""
        if self.thread:
            self.thread.join()
        if self.error:
            raise self.error
