"""A worker: samples groups for a trainer on another machine, with the trainer's newest policy.

    python grpo_ref_split.py worker                  # the constants of that file
    python grpo_ref_split.py worker SAMPLER=vllm     # with vLLM

It needs the address of the trainer's rank 0 (TRAINER), and GRPO_TOKEN if the trainer has one. It
fetches the newest policy, proves that it computes the same log-probs, and samples a round of
prompts in a separate order, again and again. It may start and end at any time.
"""

import os
import socket
import tempfile
import time

import safetensors.torch

from grpo.client import CUT_OFF, Client, Wait, text_of
from grpo.log import tell
from grpo.options.workers.policy_proof import SharedPolicy, check_proof
from grpo.options.workers.shared_settings import check_settings, settings_of
from grpo.policy import NOISE
from grpo.prepare import make_policy
from grpo.rollout import Order, sampled_and_rewarded, seed_of
from grpo.wire import pack_group, sha256_of


def worker_policy(c, tokenizer):
    """Returns the policy of a process that only samples."""
    if c.SAMPLER == "vllm":
        from grpo.options.vllm_policy import VLLMPolicy

        return VLLMPolicy(c, tokenizer)
    return SharedPolicy(**vars(make_policy(c, tokenizer)))


def run_worker(policy, recipe, name=None):
    """Samples until no trainer has answered for WAIT_LIMIT_SECONDS; then it raises TooLong.

    `policy` is a SharedPolicy, or has its stream, text, load, logps, dtype, noise, tokenizer and
    eos_ids. Raises RuntimeError if its log-probs differ from the trainer's, SystemExit if its model
    or settings differ, or if the trainer refuses a group as wrong.
    """
    worker = Worker(policy, recipe, name or unique_name())
    while True:
        if worker.load(worker.trainer.policy(worker.round)):
            worker.sample_round()


def unique_name():
    """Returns a name that no other process has. A process in a restarted container may have the
    same host name and number, but must not give its groups the same ids."""
    return f"{socket.gethostname()}-{os.getpid()}-{os.urandom(3).hex()}"


class Worker:
    """The policy that is loaded, and the groups that are being sampled with it."""

    def __init__(self, policy, recipe, name):
        self.policy, self.recipe, self.c, self.name = policy, recipe, recipe.c, name
        self.trainer = TrainerClient(self.c.TRAINER, self.c.WAIT_LIMIT_SECONDS)
        self.order = Order(recipe.prompts, f"{self.c.SEED}/{name}")
        # In a round: what fits SAMPLE_BATCH, or what a step needs
        self.round = min(recipe.c.PROMPTS_PER_STEP, recipe.c.SAMPLE_BATCH // recipe.c.GROUP_SIZE)
        self.groups = 0  # sampled in all, each with the next prompt of the order
        self.settings = settings_of(recipe)
        self.loaded = {"run": "", "version": -1, "sha256": ""}

    def load(self, record):
        """Fetches a policy, unless its weights are there, and checks its log-probs. Returns False
        if the trainer does not have it any more, or if the connection breaks."""
        if all(record[key] == self.loaded[key] for key in ("run", "sha256")):
            self.loaded = record  # perhaps a new version of the same weights
            return True
        check_settings(record["settings"], self.settings)
        if self.c.RATIO_LEVEL == "sequence" and self.policy.noise > NOISE["float32"]:
            raise SystemExit(
                "RATIO_LEVEL = 'sequence' needs workers with DTYPE=float32 SAMPLER=torch"
            )
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

    def sample_round(self):
        """Samples a round of groups, and sends each when it has ended. All are finished: the first
        groups to end would favor short completions."""
        started, tokens, refused = time.perf_counter(), 0, []
        run, version, first = self.loaded["run"], self.loaded["version"], self.groups
        prompts = (self.order[first + i] for i in range(self.round))
        seed = seed_of(self.name, run, version, first)
        for group in sampled_and_rewarded(self.policy, self.recipe, prompts, seed=seed):
            self.groups, tokens = self.groups + 1, tokens + len(group.ids)
            group.id, group.run, group.version = f"{self.name}-{self.groups:08d}", run, version
            group.sampler, group.outcome = self.name, self.recipe.outcome
            refused += filter(None, [self.trainer.put_group(pack_group(group))])
        speed = tokens / (time.perf_counter() - started)
        why = f" ({len(refused)} refused: {refused[0]})" if refused else ""
        tell(
            f"policy {version}: {self.round} groups{why}, {speed:.0f} tokens/s;"
            f" {self.groups} groups in all"
        )


class TrainerClient(Client):
    """The client of the trainer's rank 0 (rank_0.py)."""

    command = "deepspeed grpo_ref_split.py PUBLISH_STEPS=1"
    limit_of_body = "MAX_GROUP_BYTES in grpo/options/workers/rank_0.py"

    def policy(self, groups):
        """Returns the newest policy's record, for a round of `groups`. Waits while the trainer has
        none, or has enough groups."""
        named = "policy", "the trainer to want groups"
        return self.patiently("GET", "/policy", *named, params={"groups": groups})

    def patiently(self, method, path, name, what, **request):
        """Returns a part of an answer. Waits without a limit while the trainer is busy, as a step
        or an evaluation may take long."""
        wait, request = Wait(f"{what}, at {self.url}"), request | {"timeout": 60, "expected": [503]}
        while (reply := self.call(method, path, **request)).status_code == 503:
            wait.sleep(text_of(reply))
        return self.read(reply, name)[name]

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
        """Sends a group. Returns "", or why the trainer does not train it."""
        what = "the trainer to have room for a group"
        return self.patiently("POST", "/group", "refused", what, data=body)
