"""Makes a step of a run again, from the checkpoint before it, and compares it with the run's log.

    python -m grpo.commands.replay RUN_DIR STEP                    # also the step that failed
    python -m grpo.commands.replay RUN_DIR STEP TEMPERATURE=0.9    # what this would have changed
    torchrun --nproc-per-node 8 -m grpo.commands.replay RUN_DIR STEP    # of a run of 8 ranks

It trains the steps between in memory, and writes only to a new temporary folder. NAME=value holds
from the checkpoint on. On a CPU without workers all is equal; a GPU or a server may round.
"""

import json
import tempfile
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

import grpo_ref_split as trainer
from grpo import checks, ranks
from grpo.checkpoint import examine, place_of, saved_in, state_file, step_of
from grpo.constants import read_words
from grpo.log import progress_bar, say
from grpo.options.training.evidence import gather_logps, size_of, summary, tokens_of
from grpo.prepare import prepare
from grpo.start import start_run

OFF = {"SAVE_STEPS": 0, "EVAL_STEPS": 0, "REPORT_TO": []}
OFF |= {"PUBLISH_STEPS": 0, "TRAINER_SAMPLES": True}
VARY = "time", "seconds", "tokens_per_second", "gpu_memory_gb"  # how these values' names begin


def start_of(folder, step, every, updates):
    """Returns the newest complete checkpoint before the step, or None: the run's beginning.
    SystemExit if it is farther away than SAVE_STEPS (`every`; 0: never) and a rollout's updates."""
    starts = {0: None} | {step_of(path): path for path in saved_in(folder) if not examine(path)[1]}
    begin = max(n for n in starts if n < step)
    if every and step >= begin + every + updates:
        gone = f"the last checkpoint before step {step} is gone (SAVE_STEPS = {every}"
        can = ", ".join(f"{n + 1} to {n + every}" for n in starts)
        raise SystemExit(f"{gone}, KEEP_CHECKPOINTS). These steps can be replayed: {can}")
    return starts[begin]


def begin(folder, step, changes):
    """Collective: returns the Run as it was before the step, in a temporary folder."""
    # The process that made the step saved the first checkpoint that has it, or began last
    files = [state_file(p) for p in saved_in(folder) if step_of(p) >= step] + [folder / "run.json"]
    if not files[-1].exists():
        raise SystemExit(f"{folder} is not the RUN_DIR of a run: it has no run.json")
    facts = json.loads(next(filter(Path.exists, files)).read_text())
    old, again = facts["constants"], tempfile.mkdtemp(prefix="replay_")
    old |= {} if any(old["REWARD_WEIGHTS"].values()) else {"REWARD_WEIGHTS": {}}  # as it was set
    if gone := {name: old.pop(name) for name in old.keys() - trainer.DEFAULTS.keys()}:
        say(f"these constants of the run exist no longer, and have no effect: {gone}")
    c = checks.settled(trainer.DEFAULTS, old | OFF | changes | {"RUN_DIR": again})
    tokenizer, recipe, server = prepare(c, needs_server=bool(c.REF_SERVER and c.KL_BETA))
    ranks.join_ranks(c.WAIT_LIMIT_SECONDS)  # collective
    world = len(facts["files"]) if "files" in facts else facts["uses"]["ranks"]
    if world != dist.get_world_size():
        raise SystemExit(f"{world} ranks made step {step}: start as many, as each has its seeds")
    if start := start_of(folder, step, old["SAVE_STEPS"], old["UPDATES_PER_ROLLOUT"]):
        Path(again, start.name).symlink_to(start.absolute())  # the replay resumes from it
    return start_run(c, tokenizer, recipe, [], server, trainer.batch_loss)  # collective


def show(run, groups, sampled):
    """Collective: logs the completions of the groups that all ranks trained and this rank sampled:
    advantage, rewards, and the largest difference of a log-prob to the sampler's."""
    samples, decode = [s for group in groups for s in group.samples], run.policy.tokenizer.decode
    gather_logps(samples)  # collective
    for group in {group.id: group for group in sampled + groups}.values():
        lines = [f"group {group.id}{', left out' * group.skipped}: {decode(group.prompt)!r}"]
        for s in group.samples:
            rewards = ", ".join(f"{name} {value:g}" for name, value in s.rewards.items())
            tokens = [(size_of(t, "sampler"), t["token"]) for t in tokens_of([s], "sampler")]
            gap = "gap {:.1g} at token {}".format(*max(tokens)) if tokens else "not trained"
            lines.append(f"  {s.advantage:+.2f} ({rewards}; {gap}) {decode(s.ids)!r:.150}")
        say("\n".join(lines))
    say(f"gaps to the sampler: {summary(samples, 'sampler')}")


def records_in(path):
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError):  # the line is incomplete
            yield json.loads(line)


def compare(folder, again, step, title):
    """Logs the values that differ between what the run and the replay have logged of the step."""
    for name in ("metrics.jsonl", "samples.jsonl"):
        found = []
        for path in (folder / name, again / name):
            lines = [r for r in records_in(path) if r["step"] == step and "eval_truncated" not in r]
            found.append({(k, i): v for i, r in enumerate(lines) for k, v in r.items()})
        old, new = ({k: v for k, v in f.items() if not k[0].startswith(VARY)} for f in found)
        other = [k for k in old | new if old and (k not in old or old[k] != new.get(k))]
        say(f"{name}: {len(old.keys() - other)} of {len(old)} values of the run are equal")
        for k, i in other:
            say(f"  {k}[{i}]: {old.get((k, i))!r:.150}; {title}: {new.get((k, i))!r:.150}")
    then, now = (json.loads(Path(x, "run.json").read_text()).get("uses") for x in (folder, again))
    if then != now:
        say(f"the run used {then}; {title}: {now}")


@ranks.explained()
@ranks.no_child_stays()
def main(folder, step, **changes):
    """Collective: replays a step, with `changes`. Raises the error of a check that fails."""
    run, failure = begin(folder := Path(folder), step, changes), None
    while run.progress.step < step and not failure:
        groups, metrics, sampled = trainer.sample_rollout(run)  # collective
        rest = place_of(run), step, progress_bar(run.progress.step, step)
        try:
            trainer.train_on(run, groups, metrics, sampled, *rest)  # collective
        except ranks.RunFailed as error:  # a check: its evidence is in the temporary folder
            failure = error
    show(run, groups, sampled)  # collective
    compare(folder, run.folder.path, step, f"with {changes}" if changes else "replay")
    run.close()
    if failure:
        raise failure


if __name__ == "__main__":
    constants, words = read_words(trainer.DEFAULTS, presets=False)
    if len(words) != 2 or not words[1].isdecimal() or not int(words[1]):
        raise SystemExit(__doc__)
    main(*words[:1], int(words[1]), **constants)
