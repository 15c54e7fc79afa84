"""Rank 0's part in work with workers: it serves its newest policy, and receives their groups.

    GET  /policy?groups=N    {"policy": its record}, before a round of N groups; or 503 while
                             enough groups wait or are being sampled
    GET  /policy/SHA256      the file of that policy, if there is no newer one
    POST /group              a group (wire.pack_group); {"refused": "" or the reason}

A policy is a safetensors file of the trained weights. Its record holds the run, the version
(updates made), the file's size and hash, the settings that a worker must share, and a proof: the
trainer's log-probs of one of its completions. A worker computes these log-probs with the weights
that it has loaded, and refuses to sample if they differ by more than rounding. Whether a group has
zero variance is decided here, so workers send all.
"""

import shutil
import threading
import uuid
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import bottle
import safetensors.torch
import torch

from grpo.gate import Busy, Gate, listen, token_for
from grpo.log import announced, in_background, say
from grpo.options.worker_weights import trained_weights
from grpo.options.workers.policy_proof import proof_of, sample_proof
from grpo.options.workers.shared_settings import settings_of
from grpo.rewards import total_of
from grpo.rollout import skip_if_flat
from grpo.wire import check_parts, group_of, read_group, require, sha256_of

MAX_GROUP_BYTES = 16 << 20  # of one group: 64 completions of 8192 tokens are 6 MB
THREADS = 16  # requests served at once; none of them waits
SKIPPED = 4096  # groups of zero variance that are kept until a step counts them


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
        self.step = 0  # updates that the trainer has made
        self.groups = []  # the groups that wait for a step, oldest first
        self.coming = 0  # groups of the rounds that have begun since the last step
        self.skipped = deque(maxlen=SKIPPED)  # those that are only counted
        self.ids = deque(maxlen=10_000)  # a group arrives twice if the first answer was lost
        self.dropped = 0  # groups that were too old
        self.proof = None  # (prompt, completion), sampled once because sampling is slow
        self.writer = ThreadPoolExecutor(1)
        self.written = self.writer.submit(lambda: None)  # the Future of the newest policy's file
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
        with self.lock:
            if self.record is None:
                raise Busy("no policy is published yet")
            self.check_room(self.coming)
            self.coming += max(0, int(self.app.query("groups")))
            return {"policy": self.record}

    def check_room(self, coming=0):
        """Raises Busy if enough groups for a step wait, or are `coming`."""
        self.drop_old()
        if len(self.groups) + coming >= self.c.PROMPTS_PER_STEP:
            raise Busy(f"{len(self.groups)} groups wait for the next step, {coming} are coming")

    def drop_old(self):
        fresh = [group for group in self.groups if not self.is_old(group)]
        self.dropped, self.groups = self.dropped + len(self.groups) - len(fresh), fresh

    def is_old(self, group):
        return group.version < self.step - self.c.MAX_STALENESS

    def answer_file(self, sha256):
        with self.lock:
            if self.record is None or sha256 != self.record["sha256"]:
                self.app.refuse(404, "there is a newer policy")
            return bottle.static_file(sha256, self.folder)  # opened here, before it is deleted

    def answer_group(self):
        meta, tensors = read_group(self.app.read_body())
        if meta["run"] != self.run or self.record is None:
            return {"refused": "its policy is of another run, or of this one before it resumed"}
        try:
            self.check(meta, tensors)
        except ValueError as error:
            say(f"a group of the worker {meta['sampler']!r:.100} is refused: {error}")
            raise
        group = group_of(meta, tensors)
        for sample in group.samples:
            sample.total = total_of(self.recipe, sample)
        skip_if_flat(self.c, group)
        with self.lock:
            if group.id in self.ids:
                return {"refused": ""}
            if self.is_old(group):
                self.dropped += 1
                return {"refused": f"it is more than {self.c.MAX_STALENESS} updates old"}
            if not group.skipped:
                self.check_room()
            (self.skipped if group.skipped else self.groups).append(group)
            self.ids.append(group.id)
            self.coming = max(0, self.coming - 1)
        return {"refused": ""}

    def check(self, meta, tensors):
        """Raises ValueError with the reason unless the trainer could have sampled this group."""
        c, question = self.c, self.questions.get(meta["index"])
        same = question and question.ids == tensors["prompt_ids"].tolist()
        require(same, "its prompt is not that of this run's question")
        names = list(self.recipe.weights), self.recipe.outcome
        require((meta["reward_names"], meta["outcome"]) == names, "it has other rewards")
        ids, lengths = tensors["completion_ids"], tensors["completion_lengths"]
        check_parts("completion", ids, lengths, self.policy.vocab_size)
        most, size = c.MAX_COMPLETION_TOKENS, c.GROUP_SIZE
        fits = len(lengths) == size and lengths.max() <= most
        require(fits, f"it must have {size} completions of at most {most} tokens")
        shapes = {"logps": (len(ids),), "truncated": (size,), "tool_calls": (size, 2)}
        shapes |= {"is_model_token": (len(ids),), "rewards": (size, len(names[0]))}
        wrong = [name for name, x in tensors.items() if x.shape != shapes.get(name, x.shape)]
        require(not wrong, f"the shape of {wrong} is wrong")
        masks = tensors["is_model_token"].split(lengths.tolist())
        require(all(map(torch.any, masks)), "in a completion the model has no token")
        logps, rewards = tensors["logps"], tensors["rewards"]
        small = logps.max() < 1e-3 and logps.min() > -1e6  # neither holds for NaN
        require(small, "log-probs must be finite and <= 0")
        small = not (rewards.abs() >= 1e30).any() and tensors["tool_calls"].min() >= 0
        require(small, "rewards must be finite, or NaN: does not apply; and calls 0 or more")
        known = 0 <= meta["version"] <= self.record["version"] and meta["sampler"] != "trainer"
        require(known, "it is of a policy that was never published, or of the trainer")

    # --- The trainer's side -----------------------------------------------------------
    def publish(self, step):
        """Publishes the weights as they are now; a thread writes the file."""
        self.finish()
        self.proof = self.proof or sample_proof(self.policy, self.recipe)
        record = {"run": self.run, "version": step, "settings": self.settings}
        record["proof"] = proof_of(self.policy, *self.proof)
        weights = trained_weights(self.policy.model)
        self.written = self.writer.submit(self._publish, weights, record)

    def _publish(self, weights, record):
        draft = self.folder / "draft"
        safetensors.torch.save_file(weights, draft)
        record |= {"bytes": draft.stat().st_size, "sha256": sha256_of(draft)}
        draft.replace(self.folder / record["sha256"])
        with self.lock:
            old, self.record = self.record, record
        if old and old["sha256"] != record["sha256"]:
            (self.folder / old["sha256"]).unlink()

    def finish(self):
        """Waits until the newest policy is published; raises what that raised."""
        with announced("the policy's file to be written"):
            self.written.result()

    def take(self, step):
        """Returns at most PROMPTS_PER_STEP waiting groups, and all that are skipped. Drops and
        counts groups whose policy is more than MAX_STALENESS updates old."""
        most = self.c.PROMPTS_PER_STEP
        with self.lock:
            self.step, self.coming = step, 0  # a worker that has died leaves its place
            self.drop_old()
            taken, self.groups = self.groups[:most], self.groups[most:]
            taken += self.skipped
            self.skipped.clear()
        return taken

    def metrics(self, groups, step):
        """Returns the updates since the groups of a step were sampled (mean and largest), and the
        number of groups dropped so far."""
        ages = [max(0, step - group.version) for group in groups if not group.skipped]
        mean, most = sum(ages) / max(len(ages), 1), max(ages, default=0)
        return {"staleness": mean, "staleness_max": most, "groups_dropped": self.dropped}

    def close(self):
        if error := self.written.exception():
            say(f"the last policy was not published: {error!r}")
        self.server.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
