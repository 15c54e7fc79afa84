"""How the policy gets from the trainer to those who follow it, and the proof that it has arrived.

The trainer's rank 0 publishes: weights as a safetensors file, and a record (hub.RECORD) with a
proof, the log-probs that its own model gives one of its completions. A worker that has loaded the
weights computes the same: if they differ by more than rounding, it samples something else than the
policy, and refuses to. (simple_GRPO's vLLM process went on with the initial weights, unsaid.) The
first update is such a proof for sampler and reference: there all have the same weights.
"""

import tempfile
import threading
from pathlib import Path

import safetensors.torch
import torch.distributed as dist

from grpo.log import say
from grpo.proof import proof_of, sample_proof
from grpo.weights import trained_weights


class Publisher:
    """Sends the policy to the server, in a thread: training goes on with the next step."""

    def __init__(self, server, run, recipe, policy, **fixed):
        """`fixed` are the parts of hub.RECORD that stay the same."""
        self.server, self.run, self.recipe, self.policy = server, run, recipe, policy
        self.fixed = fixed | {"settings": recipe.settings()}
        self.text = None  # of the proof: sampled once, as sampling takes as long as a completion
        self.folder = tempfile.TemporaryDirectory(prefix="grpo-policy-")
        self.thread = self.error = None

    def publish(self, version, oldest):
        """Begins to send the weights as they are now. While the version before is still on its way,
        waits for it. Raises what sending that one raised."""
        self.finish()
        tensors = trained_weights(self.policy.model)
        self.text = self.text or sample_proof(self.policy, self.recipe)
        proof = proof_of(self.policy, *self.text)
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


class Followers:
    """Workers, every `publish_steps`, and the reference, every `refresh_steps`; 0 is off.

    All ranks call its methods together; only rank 0 talks to the server.
    """

    def __init__(
        self, policy, recipe, exchange, *, publish_steps, refresh_steps, max_staleness, **fixed
    ):
        """`exchange` may be None if both are off; `fixed` is Publisher's."""
        self.exchange, self.max_staleness = exchange, max_staleness
        self.publish_steps, self.refresh_steps = publish_steps, refresh_steps
        self.publisher = self.published = None  # the latter is the step of the newest policy
        if dist.get_rank() == 0 and (publish_steps or refresh_steps):
            server = exchange.server.twin()
            self.publisher = Publisher(server, exchange.run, recipe, policy, **fixed)

    def begin(self, progress, *, model, run_dir):
        """Gives workers the policy to begin with, and the server the reference that belongs to it:
        a step's, where one follows, and else its own model."""
        if not self.exchange or dist.get_rank():
            return
        server, step = self.exchange.server, progress.step
        if self.publish_steps:
            self._publish(step)
            self.finish()  # or what is sampled before it has come would be too old, or too late
        wanted = f"{progress.run}@{progress.reference}" if self.refresh_steps else ""
        there = server.info.get("weights", "")
        at_first = not progress.reference  # that is `model`, which the server has too
        if wanted == there:
            return
        if wanted and progress.reference == step:
            self._refresh(step)
        elif not wanted or (at_first and server.info.get("model") == model):
            server.set_reference(progress.run, -1)  # another run's policy was the reference
        else:
            raise SystemExit(
                f"the run's reference is its policy of step {progress.reference}; the server at"
                f" {server.url} has it no more, but {there or 'its own model'}: begin another run,"
                f" with another RUN_DIR and MODEL = '{run_dir}/step_{step:06d}'"
            )

    def hand_on(self, progress, before, clock):
        """Publishes the policy for workers, if that is due since step `before`."""
        with clock.part("publish"):
            if self.publisher and progress.passed(self.publish_steps, before):
                self._publish(progress.step)

    def follow(self, progress, before, save):
        """Makes the policy the reference, if that is due. A checkpoint, `save`, comes first: a run
        that resumes from it needs no older reference."""
        if progress.passed(self.refresh_steps, before):
            progress.reference = progress.step
            save()
            if self.publisher:
                self._refresh(progress.step)

    def finish(self):
        """Waits until what was published has arrived."""
        if self.publisher:
            self.publisher.finish()

    def _publish(self, step):
        self.publisher.publish(step, oldest=step - self.max_staleness)
        self.published = step

    def _refresh(self, step):
        if self.published != step:
            self._publish(step)
        self.finish()
        self.exchange.new_reference(step)
        say(f"the policy of step {step} is now the reference")
