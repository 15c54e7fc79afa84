"""The whole trainer against TRL's GRPOTrainer: the same model, questions and settings, in one run.

    python benchmarks/end_to_end.py ../venv-peers/bin/python               # all cases
    python benchmarks/end_to_end.py ../venv-peers/bin/python mixed out.md  # one, and a file

Each case runs our two scripts as they are and TRL, both with one rank, which has two threads (ours:
in forward and backward), and with two ranks of one thread; the faster of each are compared. A
step's seconds are medians over all steps after the first three. Ours are what the trainer logs,
from one step's end to the next's without evaluations; TRL's are the wall time between two ends of a
step. TRL takes all of a rank's rows as one micro-batch, as its settings have it; ours are cut by
tokens, as ours have it. The server is one more process of ours on the same cores.

  mixed   1M parameters, prompts of 200 tokens, completions of 64 to 256, 8 prompts x 8
  short   the same, prompts of 400 tokens, completions of 64
  demo    the demo's model and questions, 16 x 8 completions of 13 tokens; and the accuracy reached

KL_BETA is 0.04 on both sides, one update a rollout, no group left out or replaced, nothing masked.
TRL keeps a copy of the model as its reference and computes in one process; its defaults else, but
for `top_k`, `loss_type` and `use_bias_correction_kl`, which are set to what we do. Its venv is that
of requirements-peers.txt.
"""

import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
HERE = str(Path(__file__).resolve())

CASES = {  # prompts, group size, prompt tokens, completion tokens, learning rate, steps
    "mixed": (8, 8, 200, 256, 1e-6, 8),
    "short": (8, 8, 400, 64, 1e-6, 12),
    "demo": (16, 8, None, 24, 7e-4, 100),
}
RANKS = (1, 2)
SKIP = 3  # first steps, not counted
KL_BETA = 0.04
BATCH_TOKENS = 4096  # of a micro-batch, and of a scoring batch; on a CPU larger ones gain nothing


# --- The task of the counting model --------------------------------------------------
def questions(case, count=512):
    import torch
    from counting import prompt

    draw = torch.Generator().manual_seed(0)
    return [prompt(CASES[case][2], draw) for _ in range(count)]


class Counting:
    """A task for grpo_ref_split.py: a completion is right if it counts to an even number."""

    case = "mixed"

    @classmethod
    def load(cls, split):
        return [{"question": text, "answer": "even"} for text in questions(cls.case)]

    @staticmethod
    def messages(question):
        return [{"role": "user", "content": question}]

    @staticmethod
    def rewards(item, completion):
        return {"correctness": 1.0 if completion.count("<c") % 2 == 0 else -1.0}


# --- Ours -----------------------------------------------------------------------------
def serve(model, port, folder):
    import ref_server

    ref_server.MODEL, ref_server.PORT, ref_server.DTYPE = model, int(port), "float32"
    ref_server.SCORE_BATCH_TOKENS = BATCH_TOKENS
    ref_server.main()


def train(case, model, port, folder, steps):
    import grpo_ref_split as trainer

    prompts, group, prompt_tokens, completion_tokens, rate, _ = CASES[case]
    Counting.case = case
    trainer.MODEL, trainer.RUN_DIR = model, folder
    trainer.REF_SERVER = f"http://127.0.0.1:{port}"
    trainer.PROMPTS_PER_STEP, trainer.GROUP_SIZE = prompts, group
    trainer.SAMPLE_BATCH = prompts * group
    trainer.MAX_COMPLETION_TOKENS, trainer.LEARNING_RATE = completion_tokens, rate
    trainer.STEPS, trainer.WARMUP_STEPS, trainer.KL_BETA = int(steps), 5, KL_BETA
    trainer.SKIP_FLAT_GROUPS = trainer.MASK_TRUNCATED = False
    trainer.GRADIENT_CHECKPOINTING, trainer.MICRO_BATCH_TOKENS = False, BATCH_TOKENS
    trainer.EVAL_STEPS = trainer.SAVE_STEPS = 10**6
    trainer.EVAL_QUESTIONS, trainer.DTYPE = 1, "float32"
    if case == "demo":
        trainer.TASK, trainer.FINAL_LR, trainer.MAX_PROMPT_TOKENS = "arithmetic", 0.0, 64
    else:
        sys.modules["tasks.counting"] = Counting
        trainer.TASK = "counting"
        trainer.REWARD_WEIGHTS, trainer.MAX_PROMPT_TOKENS = {"correctness": 1.0}, prompt_tokens
    trainer.main()


def run_ours(case, model, steps, ranks):
    """-> the median of the steps' seconds, shares of the parts, the run's last checkpoint."""
    from benchmarks.measure import trained
    from demo import free_port

    folder, port = tempfile.mkdtemp(prefix="ours-"), free_port()
    server = [sys.executable, HERE, "serve", model, port, folder]
    trainer = [HERE, "train", case, model, port, f"{folder}/run", str(steps)]
    with trained(f"{folder}-", {"server": server}, trainer, ranks):
        lines = Path(folder, "run/metrics.jsonl").read_text().splitlines()
    records = [r for r in map(json.loads, lines) if "loss" in r]
    parts = {
        name: statistics.mean(r.get(f"seconds_{name}", 0) / r["seconds"] for r in records[SKIP:])
        for name in ("sample", "reward", "wait", "backward", "step", "publish", "other")
    }
    seconds = statistics.median(r["seconds"] for r in records[SKIP:])
    return seconds, parts, max(Path(folder, "run").glob("step_*"))


# --- TRL ------------------------------------------------------------------------------
def trl(case, model, out, steps):
    """Run by the peers' Python: trains, and writes each step's seconds, and versions, to `out`."""
    import torch
    import transformers
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback

    prompts, group, _, completion_tokens, rate, _ = CASES[case]
    ranks = int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(2 // ranks)
    if case == "demo":
        from tasks import arithmetic as task

        rows = [{"prompt": task.messages(i["question"]), "item": i} for i in task.load("train")]

        def reward(completions, item, **_):
            texts = [c[0]["content"] for c in completions]
            parts = [task.rewards(i, text) for i, text in zip(item, texts, strict=True)]
            return [2 * r["correctness"] + r["format"] for r in parts]

    else:
        rows = [{"prompt": text} for text in questions(case)]

        def reward(completions, **_):
            return [Counting.rewards(None, text)["correctness"] for text in completions]

    ends = []

    class Times(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            ends.append(time.perf_counter())

    config = trl.GRPOConfig(
        output_dir=f"{out}.folder",
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        logging_steps=10**6,
        disable_tqdm=True,
        max_steps=int(steps),
        ddp_backend="gloo",
        per_device_train_batch_size=prompts * group // ranks,
        num_generations=group,
        max_completion_length=completion_tokens,
        temperature=1.0,
        top_k=0,
        learning_rate=rate,
        lr_scheduler_type="linear" if case == "demo" else "constant",
        warmup_steps=5,
        adam_beta2=0.99,
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=KL_BETA,
        loss_type="grpo",
        use_bias_correction_kl=False,
        gradient_checkpointing=False,
        seed=0,
    )
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Times()],
    )
    trainer.train()
    if not trainer.accelerator.is_main_process:
        return
    trainer.save_model(f"{out}.model")
    tokenizer.save_pretrained(f"{out}.model")
    seconds = [b - a for a, b in itertools.pairwise(ends)]
    versions = f"TRL {trl.__version__}, transformers {transformers.__version__}"
    Path(out).write_text(json.dumps({"seconds": seconds, "versions": versions}))


def run_trl(python, case, model, steps, ranks):
    """-> the median of the steps' seconds, the model's folder, versions."""
    out = f"{tempfile.mkdtemp(prefix='trl-')}/out.json"
    environment = os.environ | {"OMP_NUM_THREADS": str(2 // ranks), "HF_HUB_OFFLINE": "1"}
    command = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [HERE, "trl", case, model, out, str(steps)]
    with open(f"{out}.log", "w") as log:
        output = {"stdout": log, "stderr": subprocess.STDOUT}
        subprocess.run(command, check=True, env=environment, cwd=ROOT, **output)
    result = json.loads(Path(out).read_text())
    return statistics.median(result["seconds"][SKIP - 1 :]), f"{out}.model", result["versions"]


# --- Both -----------------------------------------------------------------------------
def accuracy(folder):
    """-> the share of the demo's 500 test questions answered right, greedily."""
    from grpo.models import load_tokenizer, prompt_ids
    from grpo.sampling.policy import load_policy
    from grpo.sampling.sampler import sample_groups
    from tasks import arithmetic as task

    policy = load_policy(str(folder), load_tokenizer(str(folder)), "float32")
    items = task.load("test")
    groups = sample_groups(
        policy.model,
        [prompt_ids(policy.tokenizer, task.messages(item["question"])) for item in items],
        group_size=1,
        max_new_tokens=24,
        temperature=0,
        eos_ids=policy.eos_ids,
        vocab_size=policy.vocab_size,
        generator=None,
    )
    right = [
        task.rewards(item, policy.text(c))["correctness"] > 0
        for item, (c,) in zip(items, groups, strict=True)
    ]
    return sum(right) / len(right)


def main(python, cases, out):
    import torch

    torch.set_num_threads(1)
    from counting import make_model

    from benchmarks.measure import facts
    from grpo.tiny_model import warm_start
    from tasks import arithmetic

    folder = Path(tempfile.mkdtemp(prefix="end-to-end-"))
    lines = ["| case | ours, s a step: 1 rank, 2 | TRL: 1 rank, 2 | best / best |"]
    lines[0] += " ours by part | accuracy, ours / TRL |"
    lines += ["|" + "---|" * 6]
    for case in cases:
        model, steps = folder / ("demo" if case == "demo" else "counting"), CASES[case][-1]
        if not model.exists():
            warm_start(str(model), arithmetic, 0, 800) if case == "demo" else make_model(str(model))
        ours = [run_ours(case, str(model), steps, ranks) for ranks in RANKS]
        theirs = [run_trl(python, case, str(model), steps, ranks) for ranks in RANKS]
        (seconds, parts, mine), (their_seconds, their, versions) = (
            min(runs, key=lambda run: run[0]) for runs in (ours, theirs)
        )
        scores = f"{accuracy(mine):.3f} / {accuracy(their):.3f}" if case == "demo" else ""
        shares = ", ".join(f"{name} {share:.0%}" for name, share in parts.items() if share > 0.005)
        times = (", ".join(f"{run[0]:.3f}" for run in runs) for runs in (ours, theirs))
        row = [case, *times, f"{seconds / their_seconds:.2f}", shares, scores]
        lines.append("| " + " | ".join(row) + " |")
        print(lines[-1], flush=True)
    text = "\n".join(
        [facts("torch", "transformers", "deepspeed") + f" {versions}.", "", *lines, ""]
    )
    print(text)
    if out:
        Path(out).write_text(text)
    shutil.rmtree(folder)


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv):
        sys.exit(__doc__)
    match sys.argv[1:]:
        case ["serve", *arguments]:
            serve(*arguments)
        case ["train", *arguments]:
            train(*arguments)
        case ["trl", *arguments]:
            trl(*arguments)
        case [python, *rest]:
            chosen = [name for name in rest if name in CASES] or list(CASES)
            files = [name for name in rest if name not in CASES]
            main(python, chosen, files[0] if files else None)
        case _:
            sys.exit(__doc__)
