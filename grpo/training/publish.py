"""The trainer's policy on its way to the server: for workers to sample with, and as the reference.

Rank 0 publishes: the weights as a safetensors file, and a record (fields: grpo.serving.policies)
with a proof, the log-probs that the trainer gives to one of its own completions. A worker computes
the same with the weights that it has loaded; if they differ by more than rounding it refuses to
sample. (simple_GRPO's vLLM process kept the initial weights, and nobody was told.)
"""

import tempfile
import threading
from pathlib import Path

import safetensors.torch

from grpo.log import say
from grpo.proof import proof_of, sample_proof
from grpo.weights import trained_weights


class Publisher:
    """Sends the policy to the server in a thread, while training resumes."""

    def __init__(self, server, run, recipe, policy, *, capacity, scored):
        """`capacity` is how many groups may be outstanding at workers or wait for training;
        `scored` says whether they need the reference's log-probs."""
        self.server, self.run, self.recipe, self.policy = server, run, recipe, policy
        self.capacity, self.scored = capacity, scored
        self.text = None  # of the proof: sampled once, as that takes as long as a completion
        self.folder = tempfile.TemporaryDirectory(prefix="grpo-policy-")
        self.thread = self.error = None

    def publish(self, version, oldest):
        """Begins to send the weights as they are now; workers may sample with this policy and those
        from version `oldest` on. Waits while the one before is still being sent, and raises what
        sending that one raised."""
        self.finish()
        self.text = self.text or sample_proof(self.policy, self.recipe)
        record = {
            "run": self.run,
            "version": version,
            "oldest": oldest,
            "capacity": self.capacity,
            "scored": self.scored,
            "settings": self.recipe.settings(),
            "proof": proof_of(self.policy, *self.text),
        }
        arguments = trained_weights(self.policy.model), record
        self.thread = threading.Thread(target=self._send, args=arguments, daemon=True)
        self.thread.start()

    def _send(self, tensors, record):
        try:
            path = Path(self.folder.name, "policy.safetensors")
            safetensors.torch.save_file(tensors, path)
            self.server.publish(path, record)
        except Exception as error:  # noqa: BLE001 (raised in the main thread, by finish)
            self.error = error

    def finish(self):
        """Waits until what was published has arrived."""
        if self.thread:
            self.thread.join()
        if self.error:
            raise self.error


def reference_at_start(progress, *, refreshes, serves, own_model):
    """Returns what rank 0 does so that the server has the reference that the run was left with:
    "keep" it, "publish" the policy as the reference, take the server's "own model", or "lost" if
    neither the server nor the trainer has it any more.

    `serves` is the policy that is the server's reference, as "run@version", or "" for the server's
    own model; `own_model` says whether that is what the run's policy began with.
    """
    wanted = f"{progress.run}@{progress.reference}" if refreshes else ""
    if wanted == serves:
        return "keep"
    if wanted and progress.reference == progress.step:
        return "publish"
    if not wanted or (progress.reference == 0 and own_model):
        return "own model"
    return "lost"


class Publishing:
    """Publishes the policy every `publish_steps`, and makes it the reference every `refresh_steps`;
    0 is never. Rank 0 does it, which has an `inbox`; on the others that is None."""

    def __init__(
        self,
        policy,
        recipe,
        inbox,
        *,
        publish_steps,
        refresh_steps,
        max_staleness,
        capacity,
        scored,
    ):
        """`capacity` and `scored` are Publisher's."""
        self.inbox, self.max_staleness = inbox, max_staleness
        self.publish_steps, self.refresh_steps = publish_steps, refresh_steps
        self.published = None  # the step of the newest policy that was published
        self.publisher = None
        if inbox and (publish_steps or refresh_steps):
            server = inbox.server.twin()
            self.publisher = Publisher(
                server, inbox.run, recipe, policy, capacity=capacity, scored=scored
            )

    def begin(self, progress, *, model, run_dir):
        """Gives workers the policy to begin with, and the server the run's reference. SystemExit if
        that reference is lost."""
        if not self.inbox:
            return
        server = self.inbox.server
        if self.publish_steps:
            self._publish(progress.step)
            self.publisher.finish()  # what is sampled before it has arrived would be too old
        action = reference_at_start(
            progress,
            refreshes=bool(self.refresh_steps),
            serves=server.info.get("weights", ""),
            own_model=server.info.get("model") == model,
        )
        if action == "publish":
            self._refresh(progress.step)
        elif action == "own model":
            server.set_reference(progress.run, -1)
        elif action == "lost":
            raise SystemExit(
                f"the run's reference is its policy of step {progress.reference}; the server at"
                f" {server.url} no longer has it: begin another run, with another RUN_DIR and"
                f" MODEL = '{run_dir}/step_{progress.step:06d}'"
            )

    def publish_if_due(self, progress, before, clock):
        """Publishes the policy for workers, if that is due since step `before`."""
        with clock.part("publish"):
            if self.publisher and progress.passed(self.publish_steps, before):
                self._publish(progress.step)

    def refresh_if_due(self, progress, before, save):
        """Collective: makes the policy the reference, if that is due since step `before`. `save`, a
        checkpoint, comes first: a run that resumes from it needs no older reference."""
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
        self.publisher.finish()
        self.inbox.server.set_reference(self.inbox.run, step)
        self.inbox.forget_groups()
        say(f"the policy of step {step} is now the reference")
