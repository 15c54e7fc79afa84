"""A worker: samples groups for a trainer on another machine, with the trainer's newest policy.

    python grpo_ref_split.py worker     # with transformers; the constants of that file
    python vllm_worker.py               # with vLLM

It talks to the reference server alone (REF_SERVER, and GRPO_TOKEN if that has one): asks for work,
fetches a newer policy if there is one, proves that it has it, then samples, rewards and uploads the
prompts it was given. It may start and end at any time: the groups it leaves behind are given to
nobody else, and nobody waits for them.
"""

import os
import socket
import tempfile
import time
from collections import Counter
from pathlib import Path

import safetensors.torch

from grpo.log import tell
from grpo.proof import check_proof
from grpo.sampling.rollout import Stream, make_group, sampled_and_rewarded, seed_of, tally
from grpo.sampling.upload import Uploader
from grpo.stop import Wait

ASK_SECONDS = 0.5  # between two requests for more work while completions are being sampled


def run_worker(policy, server, recipe, name=None):
    """Samples until it raises RuntimeError: no open run at the server for WAIT_LIMIT_SECONDS.

    `policy` has stream, text, load, rest, logps, continuation and dtype, as policy.Policy. Raises
    RuntimeError, too, if it computes other log-probs than the trainer's, SystemExit if it is
    another model.
    """
    worker = Worker(policy, server, recipe, name or f"{socket.gethostname()}-{os.getpid()}")
    no_run = Wait(f"a run to sample for, from {server.url}", server.limit)
    no_work = Wait(f"work from {server.url}", 10 * server.limit)  # a trainer may evaluate for long
    pulled = False  # whether a policy was fetched since the last work
    with tempfile.TemporaryDirectory(prefix="grpo-worker-") as folder:
        while True:
            work = worker.ask(recipe.sample_batch // recipe.group_size, pulled)
            newest = work["policy"]
            if newest is None:
                policy.rest()
                no_run.turn("no run has published a policy (PUBLISH_STEPS), or all have ended")
                continue
            no_run.moved()
            if work["count"]:
                pulled = False
                worker.sample(work["first"], work["count"])
                no_work.moved()
            elif worker.lacks(newest) and not pulled:
                pulled = worker.load(newest, Path(folder, "policy"))
                if not pulled:
                    no_work.turn(f"policy {newest['version']} is gone, and no newer one has come")
            else:
                pulled = False
                policy.rest()
                no_work.turn("as many groups wait to be trained as MAX_STALENESS allows", pause=0)


class Worker:
    """The policy that is loaded, and the groups that it was given to sample."""

    def __init__(self, policy, server, recipe, name):
        self.policy, self.server, self.recipe, self.name = policy, server, recipe, name
        self.loaded = {"run": "", "version": -1, "sha256": ""}  # which policy
        self.order = Stream(recipe.prompts, recipe.seed)
        self.given = range(0)  # positions in the order, not begun
        self.outstanding = 0  # groups given, and neither uploaded nor left out
        self.asked = 0.0  # for work, on the monotonic clock
        self.superseded = False  # a newer policy waits: ask for no more work
        self.skipped = Counter()  # the tally of flat groups since the last usable one
        self.groups = 0  # sampled in all

    def ask(self, want, pulled=False):
        """Returns {"policy", "first", "count"}: the newest policy's record, and which positions of
        the order to sample next, at most `want`; none while there is a newer policy."""
        held = self.outstanding
        work = self.server.work(self.name, held=held, want=want, pulled=pulled, **self.loaded)
        self.asked = time.monotonic()
        return work

    def lacks(self, record):
        """Returns whether another policy is loaded; a resumed run repeats versions, not hashes."""
        return any(record[key] != value for key, value in self.loaded.items())

    def load(self, record, path):
        """Fetches a policy, to `path` where it must be sent, loads it, and proves that it has
        arrived. Returns False if a newer one has replaced it."""
        check_settings(record["settings"], self.recipe.settings())
        version, started = record["version"], time.perf_counter()
        if not (found := self.server.fetch(record, path)):
            return False
        try:
            self.policy.load(safetensors.torch.load_file(found))
        except FileNotFoundError:  # the server's own file, which it has deleted just now
            return False
        except ValueError as error:
            raise SystemExit(f"policy {version} does not fit MODEL here: {error}") from error
        gap = check_proof(self.policy, record)
        if record["run"] != self.loaded["run"]:
            self.skipped = Counter()  # of a run that has ended
        self.loaded = {key: record[key] for key in self.loaded}
        tell(
            f"policy {version} of {record['run']}: {record['bytes'] / 1e6:.1f} MB in"
            f" {time.perf_counter() - started:.1f} s; log-probs differ from the trainer's by"
            f" {gap:.1g} in mean k3"
        )
        return True

    def sample(self, first, count):
        """Samples the prompts at `count` positions from `first` on, and those given meanwhile."""
        started, counts = time.perf_counter(), Counter()
        self.given, self.outstanding, self.superseded = range(first, first + count), count, False
        uploader = Uploader(self.server.copy(), self.answered)
        run, version = self.loaded["run"], self.loaded["version"]
        seed = seed_of(self.name, run, version, first)
        groups = sampled_and_rewarded(self.policy, self.recipe, self.take, seed=seed, beside=True)
        for number, sampled in enumerate(groups):
            own = tally(self.recipe, sampled)
            counts.update(own)
            if own["flat"] and self.recipe.skip_flat_groups:
                self.skipped.update(own)
                self.answered()
                continue
            group = make_group(
                sampled,
                id=f"{self.name}-{first:08d}-{number:04d}",
                run=run,
                version=version,
                sampler=self.name,
                outcome=self.recipe.outcome,
                skipped=dict(self.skipped),
            )
            uploader.put(group)
            self.skipped = Counter()
        late = sum(reply.get("dropped", False) for reply in uploader.finish())
        self.outstanding = 0  # several threads counted
        self.groups += counts["groups"]
        tell(
            f"policy {version}: {counts['groups']} groups ({counts['flat']} flat, {late} too"
            f" late), {counts['tokens'] / (time.perf_counter() - started):.0f} tokens/s;"
            f" {self.groups} groups in all"
        )

    def take(self, room):
        """Returns up to `room` prompts; asks for more work once all given ones have begun."""
        due = time.monotonic() - self.asked > ASK_SECONDS
        if room and due and not self.given and not self.superseded:
            work = self.ask(room)
            self.superseded = work["policy"] is None or self.lacks(work["policy"])
            if not self.superseded:
                self.given = range(work["first"], work["first"] + work["count"])
                self.outstanding += work["count"]
        begun, self.given = self.given[:room], self.given[room:]
        return [self.order[position] for position in begun]

    def answered(self):
        self.outstanding -= 1


def check_settings(theirs, mine):
    """Raises SystemExit with the constants that differ from the trainer's."""
    differ = [k for k in mine if mine[k] != theirs.get(k)]
    if differ:
        raise SystemExit(
            "this worker's constants differ from the trainer's: "
            + ", ".join(f"{k} is {mine[k]!r} here, {theirs.get(k)!r} there" for k in differ)
        )
