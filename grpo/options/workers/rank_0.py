"""Rank 0's part in work with workers: it serves its newest policy, and receives their groups.

    GET  /policy?worker=NAME   {"policy": its record or null, "room": groups that NAME may begin}
    GET  /policy/SHA256        the file of that policy, if there is no newer one
    POST /group                a group (wire.pack_group); {"refused": "" or the reason}

A policy is a safetensors file of the trained weights. Its record holds the run, the version
(updates made), the file's size and hash, the settings that a worker must share, and a proof: the
trainer's log-probs of one of its completions. A worker computes these log-probs with the weights
that it has loaded, and refuses to sample if they differ by more than rounding. Whether a group has
zero variance is decided here, so workers send all.
"""

import shutil
import threading
import time
import uuid
from collections import deque
from pathlib import Path
from urllib.parse import urlsplit

import safetensors.torch

from grpo.log import announced, in_background, say
from grpo.options.workers.gate import Busy, Gate, listen, token_for
from grpo.options.workers.policy_proof import proof_of, sample_proof
from grpo.options.workers.shared_settings import settings_of
from grpo.options.workers.weights import trained_weights
from grpo.proof import NOISE
from grpo.rewards import total_of
from grpo.rollout import skip_if_flat
from grpo.wire import sha256_of, unpack_group

MAX_GROUP_BYTES = 16 << 20  # of one group: 64 completions of 8192 tokens are 6 MB
THREADS = 16  # requests served at once; none of them waits
SKIPPED = 4096  # groups of zero variance that are kept until a step counts them
ACTIVE_SECONDS = 30  # a worker that has been silent for longer gets no share of the room


class Workers:
    """Serves workers until close(). Threads of the HTTP server call the routes."""

    def __init__(self, c, recipe, policy, run):
        """`c` has the trainer's constants as attributes, `run` is the run's name."""
        self.c, self.recipe, self.policy = c, recipe, policy
        # Another one at each start: a resume may undo steps, and change what workers must share
        self.run = f"{run}-{uuid.uuid4().hex[:4]}"
        self.settings = settings_of(recipe)
        self.questions = {question.index: question for question in recipe.prompts}
        self.lock = threading.Lock()
        self.record = None  # of the newest policy
        self.groups = deque()  # the groups that wait to be trained, oldest first
        self.skipped = deque(maxlen=SKIPPED)  # those that are only counted
        self.ids = deque(maxlen=10_000)  # a group arrives twice if the first answer was lost
        self.heard = {}  # {worker: when it last asked for a policy}
        self.dropped = 0  # groups that were too old
        self.proof = None  # (prompt, completion), sampled once because sampling is slow
        self.thread = self.error = None
        # Absolute, as a reward may change the process's folder while _publish writes
        self.folder = Path(c.RUN_DIR, ".policy").absolute()
        shutil.rmtree(self.folder, ignore_errors=True)  # what kill -9 has left
        self.folder.mkdir(parents=True)
        address = urlsplit(c.TRAINER)
        token = token_for(address.hostname, "TRAINER")
        self.app = Gate(token=token)
        self.app.get("/policy", callback=self.answer_policy)
        self.app.get("/policy/<sha256>", callback=self.answer_file)
        self.app.post("/group", callback=self.answer_group)
        self.server = listen(self.app, address.hostname, address.port, THREADS, MAX_GROUP_BYTES)
        in_background(self.server.run)
        say(f"workers can join at {c.TRAINER}: python grpo_ref_split.py worker TRAINER=...")

    # --- Routes -----------------------------------------------------------------------
    def answer_policy(self):
        worker = self.app.query("worker")
        with self.lock:
            now = time.monotonic()
            self.heard = {w: at for w, at in self.heard.items() if now - at < ACTIVE_SECONDS}
            self.heard[worker] = now
            free = max(0, self.c.PROMPTS_PER_STEP - len(self.groups))
            return {"policy": self.record, "room": -(-free // len(self.heard))}

    def answer_file(self, sha256):
        with self.lock:
            if self.record is None or sha256 != self.record["sha256"]:
                self.app.refuse(404, "there is a newer policy")
            return self.app.file(self.folder / sha256)  # opened here, before it is deleted

    def answer_group(self):
        group, record = unpack_group(self.app.read_body()), self.record
        if record is None:
            raise Busy("no policy is published yet")
        if group.run != self.run:
            return {"refused": "its policy is of another run, or of this one before it resumed"}
        self.check(group)
        for sample in group.samples:
            sample.total = total_of(self.recipe, sample)
        skip_if_flat(self.c, group)
        with self.lock:
            if group.id not in self.ids:
                if len(self.groups) >= self.c.PROMPTS_PER_STEP and not group.skipped:
                    raise Busy(f"{len(self.groups)} groups wait for the next step")
                (self.skipped if group.skipped else self.groups).append(group)
                self.ids.append(group.id)
        return {"refused": ""}

    def check(self, group):
        """Raises ValueError if this is not a group that the trainer could have sampled."""
        recipe, question = self.recipe, self.questions.get(group.index)
        names = list(group.samples[0].rewards)
        same = (names, group.outcome) == (list(recipe.weights), recipe.outcome)
        same = same and len(group.samples) == self.c.GROUP_SIZE
        if not same or not question or question.ids != group.prompt:
            raise ValueError("the group does not have the prompt, rewards or size of this run")
        if min(group.ids) < 0 or max(group.ids) >= self.policy.vocab_size:
            raise ValueError("the group has ids that the tokenizer does not have")
        longest = max(sample.length for sample in group.samples)
        if longest > self.c.MAX_COMPLETION_TOKENS or not group.noise <= max(NOISE.values()):
            raise ValueError("the group's completions or its noise exceed what this run allows")
        if self.c.RATIO_LEVEL == "sequence" and group.noise > NOISE["float32"]:
            raise ValueError(
                "with RATIO_LEVEL = 'sequence' workers need DTYPE=float32 SAMPLER=torch"
            )

    # --- The trainer's side -----------------------------------------------------------
    def publish(self, step):
        """Publishes the weights as they are now; a thread writes the file."""
        self.finish()
        self.proof = self.proof or sample_proof(self.policy, self.recipe)
        record = {"run": self.run, "version": step, "settings": self.settings}
        record["proof"] = proof_of(self.policy, *self.proof)
        self.thread = in_background(self._publish, trained_weights(self.policy.model), record)

    def _publish(self, weights, record):
        try:
            draft = self.folder / "draft"
            safetensors.torch.save_file(weights, draft)
            record |= {"bytes": draft.stat().st_size, "sha256": sha256_of(draft)}
            draft.replace(self.folder / record["sha256"])
            with self.lock:
                old, self.record = self.record, record
            if old and old["sha256"] != record["sha256"]:
                (self.folder / old["sha256"]).unlink()
        except Exception as error:  # noqa: BLE001 (raised in the main thread, by finish)
            self.error = error

    def finish(self):
        """Waits until the newest policy is published; raises what that raised."""
        if self.thread:
            with announced("the policy's file to be written"):
                self.thread.join()
        if self.error:
            raise self.error

    def take(self, step):
        """Returns at most PROMPTS_PER_STEP waiting groups, and all that are skipped. Drops and
        counts groups whose policy is more than MAX_STALENESS updates old."""
        groups = []
        with self.lock:
            while self.groups and len(groups) < self.c.PROMPTS_PER_STEP:
                group = self.groups.popleft()
                fits = step - self.c.MAX_STALENESS <= group.version
                self.dropped += not fits
                groups += [group] * fits
            groups += self.skipped
            self.skipped.clear()
        return groups

    def metrics(self, groups, step):
        """Returns the updates since the groups were sampled (mean and largest), and the number of
        groups dropped so far."""
        ages = [max(0, step - group.version) for group in groups]
        mean, most = sum(ages) / max(len(ages), 1), max(ages, default=0)
        return {"staleness": mean, "staleness_max": most, "groups_dropped": self.dropped}

    def close(self):
        if self.thread:
            self.thread.join()
        if self.error:
            say(f"the last policy was not published: {self.error!r}")
        self.server.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
