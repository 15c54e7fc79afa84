"""The trainer's policy on its way to the server: for workers to sample with, and as the reference.

Rank 0 publishes the weights as a safetensors file, and a record (grpo.serving.policies) with a
proof: the log-probs that the trainer gives to a completion of its own. A worker computes the same
with the weights that it has loaded, and refuses to sample if they differ by more than rounding.
(In simple_GRPO a bare except hides a failed load: the sampler then keeps its old weights.)
"""

import tempfile
from pathlib import Path

import safetensors.torch

from grpo.log import in_background, say
from grpo.proof import proof_of, sample_proof
from grpo.weights import trained_weights


class PolicySender:
    """Sends the policy to the server in a thread, while training continues."""

    def __init__(self, server, run, recipe, policy, *, capacity, scored):
        """At most `capacity` groups may be outstanding at workers or wait for training; `scored`
        says whether they need the reference's log-probs."""
        self.server, self.recipe, self.policy = server, recipe, policy
        self.record = {"run": run, "capacity": capacity, "scored": scored}
        self.record["settings"] = recipe.settings()
        self.proof_ids = None  # (prompt, completion), sampled once: it takes as long as that
        self.folder = tempfile.TemporaryDirectory(prefix="grpo-policy-")
        self.thread = self.error = None

    def send(self, version, oldest):
        """Begins to send the weights as they are now; workers may sample with this policy and with
        older ones down to version `oldest`. Finishes the previous policy first."""
        self.finish()
        self.proof_ids = self.proof_ids or sample_proof(self.policy, self.recipe)
        proof = proof_of(self.policy, *self.proof_ids)
        record = self.record | {"version": version, "oldest": oldest, "proof": proof}
        self.thread = in_background(self._send, trained_weights(self.policy.model), record)

    def _send(self, tensors, record):
        try:
            path = Path(self.folder.name, "policy.safetensors")
            safetensors.torch.save_file(tensors, path)
            self.server.publish(path, record)
        except Exception as error:  # noqa: BLE001 (raised in the main thread, by finish)
            self.error = error

    def finish(self):
        """Waits until the policy has arrived; raises what sending it raised."""
        if self.thread:
            self.thread.join()
        if self.error:
            raise self.error


def reference_at_start(progress, *, refreshes, serves, own_model):
    """Returns how rank 0 makes the run's reference the server's: "keep" it, "publish" the policy,
    take the server's "own model"; or "lost" if nobody has it any longer.

    `serves` names the server's reference, "run@version", or "" for the server's own model;
    `own_model` says whether the run's policy began with that model.
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
    """Publishes the policy every PUBLISH_STEPS, and makes it the reference every
    REFERENCE_REFRESH_STEPS. `c` has the trainer's constants as attributes; `inbox` is rank 0's,
    which does this, and None on the other ranks."""

    def __init__(self, c, policy, recipe, inbox):
        self.c, self.inbox = c, inbox
        self.published = None  # the step of the newest published policy
        self.sender = None
        if inbox and (c.PUBLISH_STEPS or c.REFERENCE_REFRESH_STEPS):
            # A policy is at most PUBLISH_STEPS updates old, and each rollout that waits before a
            # group adds UPDATES_PER_ROLLOUT: beyond these it would be older than MAX_STALENESS
            rollouts = max(1, (c.MAX_STALENESS - c.PUBLISH_STEPS) // c.UPDATES_PER_ROLLOUT)
            self.sender = PolicySender(
                inbox.server.copy(),
                inbox.run,
                recipe,
                policy,
                capacity=c.PROMPTS_PER_STEP * rollouts,
                scored=bool(c.KL_BETA),
            )

    def begin(self, progress):
        """Gives workers their first policy, and the server the run's reference. SystemExit if that
        reference is lost."""
        if not self.inbox:
            return
        server = self.inbox.server
        if self.c.PUBLISH_STEPS:
            self._publish(progress.step)
            self.sender.finish()  # groups sampled before it has arrived would be too old
        action = reference_at_start(
            progress,
            refreshes=bool(self.c.REFERENCE_REFRESH_STEPS),
            serves=server.info.get("weights", ""),
            own_model=server.info.get("model") == self.c.MODEL,
        )
        if action == "publish":
            self._refresh(progress.step)
        elif action == "own model":
            server.set_reference(progress.run, -1)
        elif action == "lost":
            raise SystemExit(
                f"the run's reference is its policy of step {progress.reference}; the server at"
                f" {server.url} no longer has it: begin another run, with another RUN_DIR and"
                f" MODEL = '{self.c.RUN_DIR}/step_{progress.step:06d}'"
            )

    def publish_if_due(self, progress, before, clock):
        """Publishes the policy for workers, if that is due since step `before`."""
        with clock.part("publish"):
            if self.sender and progress.passed(self.c.PUBLISH_STEPS, before):
                self._publish(progress.step)

    def refresh_if_due(self, progress, before, save):
        """Collective: makes the policy the reference, if that is due since step `before`. `save`, a
        checkpoint, comes first: a run that resumes from it needs no older reference."""
        if progress.passed(self.c.REFERENCE_REFRESH_STEPS, before):
            progress.reference = progress.step
            save()
            if self.sender:
                self._refresh(progress.step)

    def finish(self):
        """Waits until the published policy has arrived."""
        if self.sender:
            self.sender.finish()

    def _publish(self, step):
        self.sender.send(step, oldest=step - self.c.MAX_STALENESS)
        self.published = step

    def _refresh(self, step):
        if self.published != step:
            self._publish(step)
        self.sender.finish()
        self.inbox.server.set_reference(self.inbox.run, step)
        self.inbox.forget_groups()
        say(f"the policy of step {step} is now the reference")
