"""A worker: samples groups for a trainer on another machine, with the trainer's newest policy.

    python grpo_ref_split.py worker                  # the constants of that file
    python grpo_ref_split.py worker SAMPLER=vllm     # with vLLM

It needs the address of the trainer's rank 0 (TRAINER), and GRPO_TOKEN if the trainer has one. It
fetches the newest policy, proves that it computes the same log-probs, and samples prompts in a
separate order while the trainer has room for groups. It may start and end at any time.
"""

import os
import socket
import tempfile
import time

import safetensors.torch

from grpo.client import CUT_OFF, Client
from grpo.log import tell
from grpo.options.workers.policy_proof import SharedPolicy, check_proof
from grpo.options.workers.shared_settings import check_settings, settings_of
from grpo.policy import make_policy
from grpo.rollout import Stream, sampled_and_rewarded, seed_of
from grpo.waits import Wait
from grpo.wire import pack_group, sha256_of

ASK_SECONDS = 0.5  # between two requests for more room while there are completions to sample


def worker_policy(c, tokenizer):
    """Returns the policy of a process that only samples."""
    if c.SAMPLER == "vllm":
        from grpo.options.sampling.vllm_policy import VLLMPolicy

        return VLLMPolicy(c, tokenizer)
    return SharedPolicy(**vars(make_policy(c, tokenizer)))


def run_worker(policy, recipe, name=None):
    """Samples until no trainer has answered for WAIT_LIMIT_SECONDS; then it raises TooLong.

    `policy` has stream, text, load, logps, dtype, noise and tokenizer, as SharedPolicy, and
    for a task with reply() eos_ids. Raises RuntimeError if its log-probs
    differ from the trainer's, SystemExit if its model or its settings differ.
    """
    worker = Worker(policy, recipe, name or unique_name())
    wait, fresh = None, False  # fresh: the loaded policy has not sampled yet
    while True:
        record, room = worker.trainer.policy(worker.name)  # waits while the trainer is away
        if record is None:
            why = "it has not published a policy yet"
        elif worker.lacks(record) and not fresh:  # else it might load for ever
            if fresh := worker.load(record):
                continue
            why = "a newer policy replaced the requested one, or its download was interrupted"
        elif room:
            worker.sample(room)
            wait, fresh = None, False
            continue
        else:
            why = "it already has all groups for its next step"
        fresh = False
        wait = wait or Wait(f"the trainer at {worker.trainer.url} to have room")
        wait.sleep(why, pause=0.2)


def unique_name():
    """Returns a name that no other process has. A process in a restarted container may have the
    same host name and number, but must not give its groups the same ids."""
    return f"{socket.gethostname()}-{os.getpid()}-{os.urandom(3).hex()}"


class Worker:
    """The policy that is loaded, and the groups that are being sampled with it."""

    def __init__(self, policy, recipe, name):
        self.policy, self.recipe, self.c, self.name = policy, recipe, recipe.c, name
        self.trainer = TrainerClient(self.c.TRAINER, self.c.WAIT_LIMIT_SECONDS)
        self.order = Stream(recipe.prompts, f"{self.c.SEED}/{name}")
        self.begun = 0  # groups, each with the next prompt of the order
        self.settings = settings_of(recipe)
        self.loaded = {"run": "", "version": -1, "sha256": ""}
        self.held = 0  # groups that were started and are not sent yet
        self.asked = 0.0  # when it last requested room, on the monotonic clock
        self.groups = 0  # sampled in all

    def lacks(self, record):
        """Returns whether another policy is loaded. Notes a new version of the same weights."""
        if any(record[key] != self.loaded[key] for key in ("run", "sha256")):
            return True
        self.loaded = record
        return False

    def load(self, record):
        """Fetches a policy, loads it, and checks its log-probs. Returns False if the trainer does
        not have it any more, or if the connection breaks."""
        check_settings(record["settings"], self.settings)
        version, started = record["version"], time.perf_counter()
        # Without a name: a worker that is killed leaves no gigabytes behind
        with tempfile.TemporaryFile() as file:
            path = f"/dev/fd/{file.fileno()}"
            if not self.trainer.fetch(record, path):
                return False
            weights = safetensors.torch.load_file(path)  # mapped, also when the file is closed
        try:
            self.policy.load(weights)
        except ValueError as error:
            raise SystemExit(f"policy {version} does not fit this MODEL: {error}") from error
        gap = check_proof(self.policy, record)
        self.loaded = record
        tell(
            f"policy {version} of {record['run']}: {record['bytes'] / 1e6:.1f} MB in"
            f" {time.perf_counter() - started:.1f} s; log-probs differ from the trainer's by"
            f" {gap:.1g} in mean k3"
        )
        return True

    def sample(self, room):
        """Samples `room` groups, and more while there is room and no newer policy. Groups that were
        started are always finished: the first groups to end would favor short completions."""
        started, groups, tokens, refused = time.perf_counter(), 0, 0, 0
        run, version, first = self.loaded["run"], self.loaded["version"], self.begun
        self.held = 0
        prompts, seed = self.prompts(room), seed_of(self.name, run, version, first)
        for group in sampled_and_rewarded(self.policy, self.recipe, prompts, seed=seed):
            groups, tokens = groups + 1, tokens + len(group.ids)
            group.id = f"{self.name}-{first:08d}-{groups:04d}"
            group.run, group.version = run, version
            group.sampler, group.outcome = self.name, self.recipe.outcome
            group.noise = self.policy.noise
            refused += bool(self.trainer.put_group(pack_group(group)))
            self.held -= 1
        self.groups += groups
        speed = tokens / (time.perf_counter() - started)
        tell(
            f"policy {version}: {groups} groups ({refused} refused), {speed:.0f} tokens/s;"
            f" {self.groups} groups in all"
        )

    def prompts(self, room):
        """Yields the next prompts: first `room` of them, then more as the trainer has room; None
        while it has no room, or has a newer policy."""
        while True:
            if not room and time.monotonic() - self.asked > ASK_SECONDS:
                self.asked = time.monotonic()
                record, room = self.trainer.policy(self.name)
                room = max(0, room - self.held) if record == self.loaded else 0
            if room:
                room -= 1
                self.held, self.begun = self.held + 1, self.begun + 1
                yield self.order[self.begun - 1]
            else:
                yield None


class TrainerClient(Client):
    """The client of the trainer's rank 0 (rank_0.py)."""

    command = "deepspeed grpo_ref_split.py PUBLISH_STEPS=1"
    limit_of_body = "MAX_GROUP_BYTES in grpo/options/workers/rank_0.py"

    def policy(self, worker):
        """Returns (the newest policy's record or None, how many groups `worker` may begin)."""
        answer = self.call("GET", "/policy", params={"worker": worker}).json()
        return answer["policy"], answer["room"]

    def fetch(self, record, path):
        """Downloads the policy of `record` to `path`. Returns False if it is no longer served, or
        if the connection breaks."""
        where = f"/policy/{record['sha256']}"
        reply = self.call("GET", where, timeout=60, expected=[404], stream=True)
        if reply.status_code == 404:
            return False
        try:
            with reply, open(path, "wb") as file:
                file.writelines(reply.iter_content(1 << 20))
        except CUT_OFF:
            return False
        if sha256_of(path) != record["sha256"]:
            raise RuntimeError(f"policy {record['version']} was damaged in transit: wrong SHA-256")
        return True

    def put_group(self, body):
        """Sends a group. Returns "", or why the trainer refused it. Waits without a limit while the
        trainer's queue is full, as a step or an evaluation may take long."""
        wait = Wait(f"space for a group in the queue of {self.url}")
        while not (reply := self.call("POST", "/group", data=body, timeout=60, expected=[503])).ok:
            wait.sleep(reply.text)
        return reply.json()["refused"]
