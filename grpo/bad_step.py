"""A step that went wrong: why there was nothing to train on, and what a bad update leaves.

An update that fails a check leaves its samples and their log-probs in RUN_DIR/bad_step_000138.json:

    {"step", "why", "metrics": {name: number},
     "samples": [a Sample as a dict, ...]}  # "logps", "ref_logps", "trainer_logps": per id

docs/troubleshooting.md compares them. A group's id names its worker.
"""

import os

import torch.distributed as dist

from grpo.log import say
from grpo.ranks import RunFailed, gathered
from grpo.rewards import functions_of


def log_bad_step(run, groups, samples, metrics):
    """Collective: logs why a step has not changed the policy: it had no samples, or its update was
    skipped. `groups` are those that were not skipped, `metrics` the rollout's and the update's."""
    if samples:
        skip_step(run, samples, metrics)  # collective
    else:
        log_idle(run, metrics, groups)


def log_idle(run, metrics, groups):
    """Logs which constants and numbers are the reason."""
    p, recipe, c = run.progress, run.recipe, run.c
    cut = f"{metrics['completions/clipped_ratio']:.0%} of the completions were truncated"
    kept = f"{len(groups)} of {metrics['groups_sampled']} groups were kept"
    names = "accuracy", "reward", "frac_reward_zero_std"
    found = ", ".join(f"{name} {metrics[name]:.2f}" for name in names if name in metrics)
    why = (
        f"{kept} (SKIP_FLAT_GROUPS = {c.SKIP_FLAT_GROUPS}, OUTCOME = {recipe.outcome!r}:"
        f" {found}), and {cut} (MASK_TRUNCATED = {c.MASK_TRUNCATED}, MAX_COMPLETION_TOKENS ="
        f" {c.MAX_COMPLETION_TOKENS})"
    )
    if c.MASK_TRUNCATED and (groups or metrics["completions/clipped_ratio"] == 1):  # all of them
        why += "; raise that limit, or train on them: MASK_TRUNCATED = False"
    if metrics.get("tools/call_share") == 0:
        why += "; reply() never returned a text: does the model never make a call"
        why += ", or is STOP_STRINGS wrong?" if c.STOP_STRINGS else "?"
    if metrics.get("rewards/none") == 1:
        why = (
            f"no completion had a reward: {' and '.join(functions_of(recipe.task))} returned"
            " None for all of them (is a `return` missing, or a service down?), or took too long"
        )
    p.idle_reason = why
    say(f"step {p.step} has nothing to train on ({p.idle} in a row): {why}")


def per_id(sample):
    """Returns the trainer's log-probs as a list with an entry per id, None for the task's."""
    left = iter(sample.trainer_logps or ())
    by_model = sample.is_model_token or [True] * len(sample.ids)
    return [next(left, None) if mine else None for mine in by_model]


def keep_evidence(run, step, samples, metrics, why):
    """Collective: rank 0 writes the file of an update with all ranks' `samples`. Returns a text
    that names the file. Keeps the files of the last IDLE_LIMIT such steps."""
    mine = [(i, s.trainer_logps, s.old_logps) for i, s in enumerate(samples) if s.trainer_logps]
    for part in gathered(mine):  # collective; each rank has those of its micro-batches
        for number, logps, old in part:
            samples[number].trainer_logps, samples[number].old_logps = logps, old
    path = run.folder.path / f"bad_step_{step:06d}.json"
    record = {"step": step, "why": str(why), "metrics": metrics}
    of_group = lambda g: {"group": g.id, "version": g.version, "prompt": g.prompt}
    record["samples"] = [
        vars(s) | of_group(s.group) | {"trainer_logps": per_id(s)} for s in samples
    ]
    try:
        if dist.get_rank() == 0:
            path.unlink(missing_ok=True)  # of an earlier start
            run.folder.log(path.name, record)
            files = sorted(path.parent.glob("bad_step_*"), key=os.path.getmtime)
            for old in files[: -run.c.IDLE_LIMIT]:
                old.unlink()
    except (OSError, SystemExit) as error:  # the check's error is the one to see
        return f"step {step}: {path} can't be written: {error}"
    return f"step {step}: its samples and all log-probs are in {path} (docs/troubleshooting.md)"


def skip_step(run, samples, metrics):
    """Collective: logs that a step is skipped, as its loss or gradient was not finite, and keeps
    its samples. Raises RunFailed after IDLE_LIMIT skipped steps in a row."""
    p = run.progress
    p.bad += 1
    why = f"loss {metrics['loss']}, norm of the gradient {metrics['grad_norm']}"
    found = keep_evidence(run, p.step, samples, metrics, why)  # collective
    say(f"step {p.step} is skipped: {why}; {p.bad} in a row; {found}")
    if p.bad >= run.c.IDLE_LIMIT:
        raise RunFailed("too many steps were skipped") from RuntimeError(
            f"{p.bad} steps in a row had a loss or gradient that was not finite: is LEARNING_RATE"
            f" too high? The last one, {found}"
        )
