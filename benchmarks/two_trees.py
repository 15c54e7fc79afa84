"""Two checkouts in turn: seconds that each takes to sample with SmolLM2, and for a step.

    python benchmarks/two_trees.py BEFORE AFTER MODEL OUT.md

BEFORE and AFTER are folders of checkouts, MODEL the folder that grpo/commands/smollm2.py makes. Each
checkout runs in two processes that wait while another one works, on all cores: one samples questions
of tasks/sums.py, 8 and 64 sequences of exactly 16 and 64 tokens, 8 a prompt, at temperature 0.8; one
makes steps of presets/smollm2.py without a server (KL_BETA = 0), of 64 completions.
Which of the two is first alternates. Ratios are of AFTER to BEFORE, of ten pairs after one that does not count.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PAIRS = 10
SIZES = [(8, 16), (64, 16), (8, 64), (64, 64)]


def ready(answer):
    """In a process: answers, and waits for its turn. Returns the case to run."""
    print("READY", json.dumps(answer), flush=True)
    return json.loads(sys.stdin.readline())


def sample(folder):
    import torch

    from grpo.models import load_tokenizer, prompt_ids, whole_model
    from grpo.sampler import sample_groups
    from tasks import sums

    tokenizer, model = load_tokenizer(folder), whole_model(folder, dtype=torch.float32).eval()
    prompts = [prompt_ids(tokenizer, sums.messages(item)) for item in sums.load("test")[:8]]
    answer = None
    while True:
        sequences, tokens, seed = ready(answer)
        began = time.perf_counter()
        settings = {"group_size": 8, "max_new_tokens": tokens, "temperature": 0.8, "eos_ids": {-1}}
        settings |= {"generator": torch.Generator().manual_seed(seed), "vocab_size": len(tokenizer)}
        sample_groups(model, prompts[: sequences // 8], **settings)
        answer = time.perf_counter() - began


def step(folder):
    import grpo_ref_split as trainer
    from grpo.constants import read_preset

    given = {k: v for k, v in read_preset("presets/smollm2.py").items() if k in trainer.DEFAULTS}
    given |= {"MODEL": folder, "RUN_DIR": tempfile.mkdtemp(), "REF_SERVER": None, "KL_BETA": 0.0}
    given |= {"EVAL_STEPS": 0, "SAVE_STEPS": 0, "STEPS": 1000, "PROMPTS_PER_STEP": 8}
    given |= {"SKIP_FLAT_GROUPS": False}
    waits = trainer.evaluate_if_due

    def turn(run):
        ready(run.laps[-1] if run.laps else None)
        waits(run)

    trainer.evaluate_if_due = turn
    trainer.main(**given)


class Tree:
    def __init__(self, root, kind, model):
        env = os.environ | {"PYTHONPATH": str(root)}
        words = [sys.executable, str(Path(__file__).resolve()), kind, str(Path(model).resolve())]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(words, cwd=root, env=env, text=True, **pipes)
        self.wait()

    def wait(self):
        for line in self.process.stdout:
            if line.startswith("READY "):
                return json.loads(line.removeprefix("READY "))
        raise SystemExit("a process has ended")

    def run(self, case):
        self.process.stdin.write(json.dumps(case) + "\n")
        self.process.stdin.flush()
        return self.wait()


def pairs(trees, case):
    """Returns the results of PAIRS pairs."""
    found = []
    for number in range(1 + PAIRS):
        both = {}
        for i in (0, 1) if number % 2 else (1, 0):
            both[i] = trees[i].run([*case, number])
        found.append((both[0], both[1]))
        print(case, found[-1], flush=True)
    return found[1:]


def row(name, found):
    ratios = sorted(after / before for before, after in found)
    medians = [statistics.median(x) for x in zip(*found, strict=True)]
    cells = [f"{x:.2f}" for x in (*medians, statistics.median(ratios), ratios[0], ratios[-1])]
    return f"| {name} | {' | '.join(cells)} |"


def main(before, after, model, out):
    rows = ["| | before, s | after, s | ratio | least | most |", "|---|---|---|---|---|---|"]
    trees = [Tree(root, "step", model) for root in (before, after)]
    laps = pairs(trees, [])
    for part in ("seconds", "seconds_sample", "seconds_backward"):
        found = [(one[part], two[part]) for one, two in laps]
        rows.append(row(f"a step: {part}", found))
    for tree in trees:
        tree.process.kill()
    trees = [Tree(root, "sample", model) for root in (before, after)]
    for sequences, tokens in SIZES:
        found = pairs(trees, [sequences, tokens])
        rows.append(row(f"{sequences} sequences of {tokens} tokens", found))
    for tree in trees:
        tree.process.kill()
    Path(out).write_text("\n".join([*rows, ""]))


if __name__ == "__main__":
    if len(sys.argv) == 3:
        sys.path.insert(0, os.getcwd())
        {"sample": sample, "step": step}[sys.argv[1]](sys.argv[2])
    else:
        main(*sys.argv[1:])
