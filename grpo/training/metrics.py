"""What a run reports: evaluations, metrics.jsonl, samples.jsonl, the progress bar.

What each metric means: docs/metrics.md. All ranks count, and rank 0 writes.
"""

import contextlib
import itertools
import json
import math
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from grpo.devices import accelerator
from grpo.log import SPEAK_SECONDS, say
from grpo.sampling.rollout import TALLY, sampled_and_rewarded, tally, tally_of, tally_of_one
from grpo.stop import stop
from grpo.training.ranks import add_up, all_or_none

PARTS = ("sample", "reward", "wait", "backward", "step", "publish", "other")


class Clock:
    """Seconds of a step by part, one of PARTS: "backward" with the forward, "other" the rest."""

    def __init__(self):
        self.parts, self.started = Counter(), time.perf_counter()
        self.inner = 0.0  # seconds of parts within the part that is running

    @contextlib.contextmanager
    def part(self, name):
        """Counts the block's time, without that of parts within it, which count by themselves."""
        began, outer, self.inner = time.perf_counter(), self.inner, 0.0
        yield
        seconds = time.perf_counter() - began
        self.parts[name] += seconds - self.inner
        self.inner = outer + seconds

    def lap(self):
        """Returns {"seconds": all, "seconds_sample": ...} since the last lap."""
        now = time.perf_counter()
        total, parts = now - self.started, self.parts
        parts["other"] = total - sum(parts.values())
        self.parts, self.started = Counter(), now
        return {"seconds": total} | {f"seconds_{k}": v for k, v in parts.items()}


# --- Over the ranks -----------------------------------------------------------------
def evaluate(policy, recipe, prompts):
    """Collective: returns greedy accuracy (OUTCOME > 0) and the positive share of each reward, both
    of the answers to which it applied and absent where that is none, the truncated share and the
    mean length. Begins no question once the run is asked to stop."""
    count, mine = Counter(), prompts[dist.get_rank() :: dist.get_world_size()]
    mine = itertools.takewhile(lambda _: not stop.asked, mine)
    greedy = recipe.others(GROUP_SIZE=1, TEMPERATURE=0)
    with all_or_none("evaluating"):  # collective
        for sampled in sampled_and_rewarded(policy, greedy, mine, seed=0):
            count.update(tally(recipe, sampled))
            count.update({f"positive_{name}": int(r > 0) for name, r in sampled[2][0].items()})
    judged = {name: f"applicable_{name}" for name in recipe.c.REWARD_WEIGHTS}
    shares = {"accuracy": ("right", judged[recipe.c.OUTCOME])}
    shares |= {f"positive_{name}": (f"positive_{name}", of) for name, of in judged.items()}
    shares |= {"truncated": ("truncated", "completions")}
    shares |= {"completion_tokens": ("tokens", "completions")}
    total = add_up(count, [name for pair in shares.values() for name in pair])
    return {f"eval_{k}": total[name] / total[of] for k, (name, of) in shares.items() if total[of]}


def rollout_metrics(run, count, sampled, theirs):
    """Collective: returns metrics over what all ranks and workers have sampled for a rollout. The
    sums in `count` (rollout.tally) are of this rank's groups, `sampled`; `theirs` are the workers'
    groups that this rank has taken. Counts all in the run's progress."""
    recipe, seconds = run.recipe, run.clock.parts["sample"]
    count["own_tokens"] = count["tokens"]
    for group in theirs:
        count.update(tally_of(recipe, group))
    weights, sums = recipe.c.REWARD_WEIGHTS, ("reward", "square", "applicable")
    own = [f"{kind}_{name}" for kind in sums for name in weights]
    total = add_up(count, [*TALLY, "own_tokens", *own])
    n, groups = max(total["completions"], 1), max(total["groups"], 1)
    ended = total["completions"] - total["truncated"]
    means = {"completions/mean_terminated_length": total["ended_tokens"] / ended} if ended else {}
    for name in weights:
        means |= mean_and_std(f"rewards/{name}", *(total[f"{kind}_{name}"] for kind in sums))
    if judged := total[f"applicable_{recipe.c.OUTCOME}"]:
        means["accuracy"] = total["right"] / judged
    if seconds:  # 0 where workers sampled all
        means["tokens_per_second"] = total["own_tokens"] / seconds
    return means | {
        "reward": sum(w * total[f"reward_{name}"] for name, w in weights.items()) / n,
        "reward_std": total["group_std"] / groups,
        "completions/mean_length": total["tokens"] / n,
        "completions/clipped_ratio": total["truncated"] / n,
        **extreme_lengths(sampled + theirs),
        "frac_reward_zero_std": total["flat_reward"] / groups,
        "frac_outcome_zero_std": total["flat_outcome"] / groups,
        "epoch": run.progress.count_epoch(int(total["groups"]), of=len(recipe.prompts)),
        "groups_sampled": int(total["groups"]),
        "tokens_sampled": int(total["tokens"]),
    }


def mean_and_std(name, total, squares, number):
    """Returns the mean and the (unbiased) standard deviation of so many values; {} of none."""
    mean = total / max(number, 1)
    variance = max(squares - number * mean**2, 0.0) / max(number - 1, 1)
    return {f"{name}/mean": mean, f"{name}/std": math.sqrt(variance)} if number else {}


def extreme_lengths(groups):
    """Collective: returns the lengths of the shortest and longest completion in all ranks' groups,
    and of those that are not truncated, by name; without those of none."""
    every = [n for group in groups for n in group.completion_lengths.tolist()]
    ended = [n for group in groups for n in group.completion_lengths[~group.truncated].tolist()]
    none = -math.inf
    found = {
        "completions/min_length": -min(every, default=math.inf),  # so that all are maxima
        "completions/max_length": max(every, default=none),
        "completions/min_terminated_length": -min(ended, default=math.inf),
        "completions/max_terminated_length": max(ended, default=none),
    }
    largest = torch.tensor([*found.values()], dtype=torch.float64, device=accelerator() or "cpu")
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    pairs = zip(found, largest.tolist(), strict=True)
    return {name: int(abs(value)) for name, value in pairs if value > none}


def why_idle(metrics, groups, recipe):
    """Returns why a rollout with these metrics trains nothing; `groups` are without the flat ones
    that were skipped."""
    share, limit = metrics["completions/clipped_ratio"], recipe.c.MAX_COMPLETION_TOKENS
    cut = f"{'all' if share == 1 else f'{share:.0%}'} truncated at MAX_COMPLETION_TOKENS = {limit}"
    if groups:
        kept = f"the {len(groups)} groups that are not skipped"
        return f"{kept} are all truncated (MASK_TRUNCATED), and of what was sampled {cut}"
    accuracy, outcome = metrics.get("accuracy"), f"by OUTCOME = {recipe.c.OUTCOME!r}"
    judged = "which applied to none" if accuracy is None else f"accuracy {accuracy:.2f}"
    flat = {0: "all wrong", 1: "all right"}.get(accuracy, "each all right or all wrong")
    if recipe.c.SKIP_FLAT_GROUPS == "reward" or accuracy is None:
        flat, outcome = "each of equal total rewards", f"(mean {metrics['reward']:.2g}), {outcome}"
    sampled = f"{metrics['groups_sampled']} groups, {flat} {outcome} ({judged})"
    why = f"{sampled}, {cut}, are skipped (SKIP_FLAT_GROUPS = {recipe.c.SKIP_FLAT_GROUPS!r})"
    differ = 1 - metrics["frac_reward_zero_std"]  # 0 where "reward" has skipped them
    return f'{why}; "reward" would train {differ:.0%} of them, by other rewards' if differ else why


def say_idle(run, metrics, groups):
    """Says that the next step trains nothing, and why."""
    run.idle_reason = why_idle(metrics, groups, run.recipe)
    p = run.progress
    say(f"step {p.step + 1} trains nothing ({p.idle} in a row): {run.idle_reason}")


# --- Where it goes ------------------------------------------------------------------
class RunFolder:
    """RUN_DIR's metrics.jsonl, samples.jsonl and bad steps; checkpoint.py writes there too."""

    def __init__(self, path, reporters=()):
        self.path, self.reporters = Path(path), reporters
        self.path.mkdir(parents=True, exist_ok=True)

    def log(self, file, record):
        """Appends a record, with the time, to a file of one JSON object per line."""
        if dist.get_rank() == 0:
            record = {k: finite(v) for k, v in record.items()} | {"time": round(time.time(), 2)}
            with open(self.path / file, "a") as f:
                f.write(json.dumps(record) + "\n")
            for reporter in self.reporters if file == "metrics.jsonl" else ():
                reporter.put(dict(record))

    def log_evaluation(self, evaluation, step):
        """Logs and says an evaluation; returns its accuracy, -1 where it has none."""
        self.log("metrics.jsonl", {"step": step} | evaluation)
        say(f"step {step}: " + ", ".join(f"{k} {v:.3f}" for k, v in evaluation.items()))
        return evaluation.get("eval_accuracy", -1.0)

    def log_samples(self, run, groups, advantages_of):
        """Writes SAMPLES_PER_STEP completions of one group, of those that rank 0 or a worker
        sampled for the next rollout, to samples.jsonl: those of the highest and the lowest
        advantage, then others."""
        if dist.get_rank() != 0 or not groups:
            return
        step, number = run.progress.step + 1, run.c.SAMPLES_PER_STEP
        skips = run.recipe.c.SKIP_FLAT_GROUPS  # what is flat is not trained
        group, decode = groups[step % len(groups)], run.policy.tokenizer.decode
        item = next(item for index, item, _ in run.recipe.prompts if index == group.item)
        asked = {name: item.get(name) for name in ("question", "answer")}
        advantages = advantages_of(group, run.recipe.c.REWARD_WEIGHTS).tolist()
        ids = group.completions(group.completion_ids)
        best, *others = sorted(range(len(ids)), key=advantages.__getitem__, reverse=True)
        for i in [best, *others[-1:], *others[:-1]][:number]:
            rewards = zip(group.reward_names, group.rewards[i].tolist(), strict=True)
            record = {
                "step": step,
                "group": group.id,
                "number": i,
                "prompt": decode(group.prompt_ids),
                "item": {name: value for name, value in item.items() if is_plain(value)},
                **{name: x if is_plain(x) else str(x) for name, x in asked.items()},
                "completion": decode(ids[i]),
                "rewards": {name: finite(reward) for name, reward in rewards},
                "advantage": advantages[i],
                "flat": bool(skips and tally_of_one(run.recipe, group)["flat"]),
                "truncated": group.truncated[i].item(),
                "sampler": group.sampler,
                "policy_version": group.policy_version,
            }
            self.log("samples.jsonl", record)

    def bad_step(self, progress, sequences, metrics, limit):
        """Says that a step is skipped, and keeps its sequences in a file. RuntimeError after
        `limit` such steps in a row."""
        path = self.path / f"bad_step_{progress.step:06d}.json"
        if dist.get_rank() == 0:
            path.write_text(json.dumps([asdict(s) for s in sequences], default=torch.Tensor.tolist))
            for old in sorted(self.path.glob("bad_step_*"))[:-limit]:
                old.unlink()
        progress.bad += 1
        why = f"loss {metrics['loss']}, norm of the gradient {metrics['grad_norm']}"
        say(f"step {progress.step} is skipped: {why}; {progress.bad} in a row; kept in {path}")
        if progress.bad >= limit:
            raise RuntimeError(f"{progress.bad} steps in a row were not finite; see {path}")

    def undo(self, step):
        """Removes records of steps after `step`, which the run makes again, and a line that was
        being written when the run ended."""
        for path in (self.path / "metrics.jsonl", self.path / "samples.jsonl"):
            if dist.get_rank() == 0 and path.exists():
                kept = []
                for line in path.read_text().splitlines():
                    with contextlib.suppress(ValueError):
                        if json.loads(line)["step"] <= step:
                            kept.append(line + "\n")
                draft = path.with_suffix(".draft")
                draft.write_text("".join(kept))
                draft.replace(path)

    def set_aside(self):
        """Moves the records of a run that ended before its first checkpoint to a folder of their
        own: the run begins anew."""
        files = [self.path / name for name in ("metrics.jsonl", "samples.jsonl")]
        files = [path for path in files if path.exists() and path.stat().st_size]
        if dist.get_rank() == 0 and files:
            numbers = itertools.count(1)
            folder = next(f for n in numbers if not (f := self.path / f"earlier_{n}").exists())
            folder.mkdir()
            for path in files:
                path.rename(folder / path.name)
            say(f"the run had no checkpoint and begins anew; what it logged is now in {folder}")


def is_plain(value):
    """Returns whether JSON can hold the value."""
    try:
        return json.dumps(value, allow_nan=False) is not None
    except (TypeError, ValueError, RecursionError):
        return False


def finite(value):
    """Returns the value, or None if it is NaN or infinite, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


SHOWN = {  # by the bar, those that there are
    "reward": "reward {:+.2f}",
    "accuracy": "accuracy {:.2f}",
    "kl": "kl {:.3f}",
    "completions/mean_length": "length {:.0f}",
    "tokens_per_second": "sampling at {:.0f} tokens/s",
}


def show(bar, step, metrics):
    """Advances the progress bar to a step, and shows its metrics; where no bar is drawn, says them,
    at most every SPEAK_SECONDS, and at the last step."""
    found = {name: metrics.get(name) for name in SHOWN}
    shown = [SHOWN[k].format(v) for k, v in found.items() if v is not None and math.isfinite(v)]
    bar.set_postfix_str(" ".join(shown), refresh=False)
    bar.update()
    rewarding = metrics.get("seconds_reward", 0) / metrics["seconds"]
    if rewarding > 0.5 and metrics["seconds"] > 1 and not getattr(bar, "warned", False):
        bar.warned = True
        say(f"rewards took {rewarding:.0%} of step {step}: REWARD_PROCESSES takes them aside")
    now = time.monotonic()
    if bar.disable and (
        step == bar.total or now - getattr(bar, "said", -math.inf) >= SPEAK_SECONDS
    ):
        bar.said = now
        say(f"step {step} of {bar.total}: {' '.join(shown)}, {metrics['seconds']:.1f} s a step")


def say_parts(laps):
    """Says where the time of the run's steps went."""
    total = sum(lap["seconds"] for lap in laps)
    shares = {p: sum(lap.get(f"seconds_{p}", 0) for lap in laps) / total for p in PARTS}
    parts = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    say(f"{len(laps)} steps of {total / len(laps):.2f} s: {parts}")


def say_end(run, asked):
    """Says how a run has ended. SystemExit if it was `asked` to end, or had nothing to train."""
    p, c = run.progress, run.c
    if run.laps:
        say_parts(run.laps)
    if asked:
        by = stop.asked or "a signal"
        raise SystemExit(
            f"ended by {by} after step {p.step}, which is saved: start again to resume"
        )
    if p.idle >= c.IDLE_LIMIT:
        raise SystemExit(
            f"nothing to train for {p.idle} steps, in the last one {run.idle_reason}. Read"
            f" {c.RUN_DIR}/samples.jsonl: is TASK = {c.TASK!r} too easy, too hard, or judged"
            " wrongly? Or has the model broken down (LEARNING_RATE too high)?"
        )
    if not run.laps:
        ended = f"the run in {c.RUN_DIR} has ended, at step {p.step}"
        say(f"{ended}: raise STEPS to go on with it, or choose another RUN_DIR")
