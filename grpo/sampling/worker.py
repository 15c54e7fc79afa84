"""A worker: samples groups for a trainer on another machine, with the trainer's newest policy.

    python grpo_ref_split.py worker     # with transformers; the constants of that file
    python vllm_worker.py               # with vLLM

It needs the reference server alone (REF_SERVER, and GRPO_TOKEN if that has one). It asks the server
for work, fetches the policy when there is a newer one, proves that it has it, samples what it was
given, rewards, uploads. It may be started and ended at any time: what it had in hand is given to
nobody else, and missed by nobody.
"""

import hashlib
import os
import socket
import tempfile
import time
from collections import Counter
from pathlib import Path

import safetensors.torch

from grpo.client import Wait
from grpo.proof import check_proof
from grpo.sampling.rollout import Order, make_group, sampled_and_rewarded, tally
from grpo.sampling.upload import Uploader
from grpo.wire import is_flat

ASK_SECONDS = 0.5  # between two questions for more work while rows are running


def run_worker(engine, server, recipe, name=None):
    """Samples until the server has had no open run for WAIT_LIMIT_SECONDS: RuntimeError.

    `engine` has stream, text, load, logps and dtype, as policy.Policy. Raises RuntimeError where
    the policy can't be proved to have arrived, SystemExit where it is another model's.
    """
    name = name or f"{socket.gethostname()}-{os.getpid()}"
    state = {"run": None, "version": -1, "sha256": "", "held": 0, "skipped": Counter()}
    order, total, pulled = Order(recipe.prompts, recipe.seed), Counter(), False
    no_run = Wait(f"a run to sample for, from {server.url}", server.limit)
    no_room = Wait(f"work from {server.url}", 10 * server.limit)  # a trainer may evaluate for long
    with tempfile.TemporaryDirectory(prefix="grpo-worker-") as folder:
        while True:
            work = ask(server, name, state, recipe.sample_batch // recipe.group_size, pulled)
            policy = work["policy"]
            if policy is None:
                no_run.turn("no run has published a policy (PUBLISH_STEPS), or all have ended")
                continue
            no_run.moved()
            if work["count"]:
                pulled = False
                sample(engine, server, recipe, name, order, work, state, total)
                no_room.moved()
            elif is_newer(policy, state) and not pulled:
                pulled = take_policy(engine, server, recipe, policy, Path(folder, "policy"), state)
                if not pulled:
                    no_room.turn(f"policy {policy['version']} is gone, and no newer one has come")
            else:
                pulled = False
                no_room.turn("as many groups wait to be trained as MAX_STALENESS allows", pause=0)


def ask(server, name, state, want, pulled=False):
    return server.work(
        name,
        held=state["held"],
        want=want,
        run=state["run"] or "",
        version=state["version"],
        sha256=state["sha256"],
        pulled=pulled,
    )


def is_newer(policy, state):
    """Whether it is another than the worker has; a resumed run may give a version other weights."""
    return any(policy[name] != state[name] for name in ("run", "version", "sha256"))


def take_policy(engine, server, recipe, policy, path, state):
    """Fetches a policy, loads it, and proves that it is there; -> False if it is gone."""
    check_settings(policy["settings"], recipe.settings())
    started = time.perf_counter()
    if not server.fetch(policy, path):
        return False  # a newer one has come meanwhile
    try:
        engine.load(safetensors.torch.load_file(path))
    except ValueError as error:
        raise SystemExit(f"policy {policy['version']} does not fit MODEL here: {error}") from error
    gap = check_proof(engine, policy)
    state |= {name: policy[name] for name in ("run", "version", "sha256")}
    tell(
        f"policy {policy['version']} of {policy['run']}: {policy['bytes'] / 1e6:.1f} MB in"
        f" {time.perf_counter() - started:.1f} s; log-probs differ from the trainer's by"
        f" {gap:.1g} in mean k3"
    )
    return True


def check_settings(theirs, mine):
    """Raises SystemExit with the constants that differ from the trainer's."""
    differ = [k for k in mine if mine[k] != theirs.get(k)]
    if differ:
        raise SystemExit(
            "this worker's constants differ from the trainer's: "
            + ", ".join(f"{k} is {mine[k]!r} here, {theirs.get(k)!r} there" for k in differ)
        )


def sample(engine, server, recipe, name, order, work, state, total):
    """Samples the given prompts, and those that are given meanwhile; uploads what is of use."""

    def answered():
        state["held"] -= 1

    given = list(range(work["first"], work["first"] + work["count"]))
    state["held"], asked, stale = len(given), time.monotonic(), False
    uploader, count = Uploader(server.twin(), answered), Counter()
    version, run = state["version"], state["run"]
    seed = hashlib.sha256(f"{name}/{run}/{version}/{work['first']}".encode()).digest()[:7]

    def take(room):
        nonlocal asked, stale
        if room and not given and not stale and time.monotonic() - asked > ASK_SECONDS:
            more = ask(server, name, state, room)
            asked = time.monotonic()
            stale = more["policy"] is None or is_newer(more["policy"], state)
            if not stale:
                given.extend(range(more["first"], more["first"] + more["count"]))
                state["held"] += more["count"]
        taken = [given.pop(0) for _ in range(min(room, len(given)))]
        return [order[position] for position in taken]

    started = time.perf_counter()
    sampled_groups = sampled_and_rewarded(
        engine,
        recipe,
        take,
        group_size=recipe.group_size,
        temperature=recipe.temperature,
        seed=int.from_bytes(seed, "big"),
        count=count,
    )
    for number, sampled in enumerate(sampled_groups):
        flat = is_flat([r[recipe.outcome] for r in sampled[2]])
        of_use = not (flat and recipe.skip_flat_groups)
        id = f"{name}-{work['first']:08d}-{number:04d}"
        if of_use or server.regroups:
            names = {"id": id, "run": run, "version": version, "sampler": name}
            names |= {
                "outcome": recipe.outcome,
                "skipped": dict(state["skipped"]) if of_use else {},
            }
            uploader.put(make_group(sampled, **names), pool=not of_use)
        else:
            answered()
        if of_use:
            state["skipped"] = Counter()
        else:
            state["skipped"].update(tally(recipe, sampled, flat))
        count.update(groups=1, flat=flat, tokens=sum(len(c.ids) for c in sampled[1]))
    replies = uploader.finish()
    state["held"] = 0  # all is answered; two threads counted
    seconds = time.perf_counter() - started
    count["late"] = sum(reply.get("dropped", False) for reply in replies)
    total.update(count)
    tell(
        f"policy {version}: {count['groups']} groups ({count['flat']} flat, {count['late']} too"
        f" late), {count['tokens'] / seconds:.0f} tokens/s; {total['groups']} groups in all"
    )


def tell(text):
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)
