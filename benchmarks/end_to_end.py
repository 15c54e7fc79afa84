"""The whole trainer against TRL's GRPOTrainer: the same model, questions and settings, in one run.

    python benchmarks/end_to_end.py ../venv-peers/bin/python               # all cases
    python benchmarks/end_to_end.py ../venv-peers/bin/python mixed out.md  # one, and a file

Each case runs our two scripts as they are, and TRL. Both run with one rank of two threads (ours
uses two in forward and backward only) and with two ranks of one thread; the faster runs are
compared. A step's seconds are medians over all steps after the first three. Ours are those that the
trainer logs, from the end of a step to the end of the next, without evaluations; TRL's are the wall
time between the ends of two steps. TRL's settings make all sequences of a rank one micro-batch;
ours cut micro-batches by tokens. Our server is one more process on the same cores.

  mixed   1M parameters, prompts of 200 tokens, completions of 64 to 256, 8 prompts x 8
  short   the same, prompts of 400 tokens, completions of 64
  demo    the demo's model and questions, 16 x 8 completions of 13 tokens; and the accuracy reached

KL_BETA is 0.04 on both sides. There is one update a rollout, no group is left out or replaced, and
nothing is masked. TRL keeps a copy of the model as its reference and computes in one process. Its
other settings are its defaults, except `top_k`, `loss_type` and `use_bias_correction_kl`, which are
set to what we do. requirements-peers.txt describes its venv.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
HERE = str(Path(__file__).resolve())

CASES = {  # prompts, group size, prompt tokens at most, completion tokens, learning rate, steps
    "mixed": (8, 8, 200, 256, 1e-6, 8),
    "short": (8, 8, 400, 64, 1e-6, 12),
    "demo": (16, 8, 64, 24, 7e-4, 100),
}
RANKS = (1, 2)
SKIP = 3  # first steps, not counted
KL_BETA = 0.04
BATCH_TOKENS = 4096  # of a micro-batch, and of a scoring batch; on a CPU larger ones gain nothing


# --- Ours -----------------------------------------------------------------------------
def commands(case, model, folder, steps):
    """Returns the commands of server and trainer, which begin with the script."""
    from demo import free_port

    prompts, group, prompt_tokens, completion_tokens, rate, _ = CASES[case]
    port = free_port()
    server = {"MODEL": model, "PORT": port, "DTYPE": "float32", "SCORE_BATCH_TOKENS": BATCH_TOKENS}
    trainer = {
        "MODEL": model,
        "TASK": "arithmetic" if case == "demo" else ROOT / "tests/counting.py",
        "RUN_DIR": f"{folder}/run",
        "REF_SERVER": f"http://127.0.0.1:{port}",
        "PROMPTS_PER_STEP": prompts,
        "GROUP_SIZE": group,
        "SAMPLE_BATCH": prompts * group,
        "MAX_PROMPT_TOKENS": prompt_tokens,
        "MAX_COMPLETION_TOKENS": completion_tokens,
        "LEARNING_RATE": rate,
        "FINAL_LR": 0.0 if case == "demo" else 1.0,
        "STEPS": steps,
        "WARMUP_STEPS": 5,
        "KL_BETA": KL_BETA,
        "SKIP_FLAT_GROUPS": False,
        "MASK_TRUNCATED": False,
        "GRADIENT_CHECKPOINTING": False,
        "MICRO_BATCH_TOKENS": BATCH_TOKENS,
        "EVAL_STEPS": 10**6,
        "SAVE_STEPS": 10**6,
        "EVAL_QUESTIONS": 1,
        "DTYPE": "float32",
    }
    scripts = {"ref_server.py": server, "grpo_ref_split.py": trainer}
    return [[ROOT / file, *words_of(constants)] for file, constants in scripts.items()]


def words_of(constants):
    return [f"{name}={value}" for name, value in constants.items()]


def run_ours(case, model, steps, ranks):
    """-> the median of the steps' seconds, shares of the parts, the run's last checkpoint."""
    from benchmarks.measure import trained

    folder = tempfile.mkdtemp(prefix="ours-")
    server, trainer = commands(case, model, folder, steps)
    with trained(f"{folder}-", {"server": [sys.executable, *server]}, trainer, ranks):
        lines = Path(folder, "run/metrics.jsonl").read_text().splitlines()
    records = [r for r in map(json.loads, lines) if "loss" in r]
    parts = {
        name: statistics.mean(r.get(f"seconds_{name}", 0) / r["seconds"] for r in records[SKIP:])
        for name in ("sample", "reward", "wait", "backward", "step", "publish", "other")
    }
    seconds = statistics.median(r["seconds"] for r in records[SKIP:])
    return seconds, parts, max(Path(folder, "run").glob("step_*"))


# --- TRL ------------------------------------------------------------------------------
def questions_and_reward(case):
    """Returns the case's questions as TRL takes them, and its reward function."""
    if case != "demo":
        import counting as task

        def even(completions, **_):
            return [task.rewards(None, text)["correctness"] for text in completions]

        return [{"prompt": item["question"]} for item in task.load("train")], even

    from tasks import arithmetic as task

    def both(completions, item, **_):
        texts = [c[0]["content"] for c in completions]
        parts = [task.rewards(i, text) for i, text in zip(item, texts, strict=True)]
        return [2 * r["correctness"] + r["format"] for r in parts]

    items = task.load("train")
    return [{"prompt": task.messages(item), "item": item} for item in items], both


def trl_config(case, folder, steps, ranks):
    import trl

    prompts, group, _, completion_tokens, rate, _ = CASES[case]
    return trl.GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        logging_steps=10**6,
        disable_tqdm=True,
        max_steps=steps,
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


def trl(case, model, out, steps):
    """Run by the peers' Python: trains, and writes each step's seconds, and versions, to `out`."""
    import torch
    import transformers
    import trl
    from datasets import Dataset

    ranks, ends = int(os.environ["WORLD_SIZE"]), []
    torch.set_num_threads(2 // ranks)
    questions, reward = questions_and_reward(case)

    class Times(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            ends.append(time.perf_counter())

    tokenizer = transformers.AutoTokenizer.from_pretrained(model, padding_side="left")
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=trl_config(case, f"{out}.folder", int(steps), ranks),
        train_dataset=Dataset.from_list(questions),
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
        [prompt_ids(policy.tokenizer, task.messages(item)) for item in items],
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


def row(python, case, model):
    """-> (the table's cells of a case, TRL's versions)."""
    os.environ["COUNTING_PROMPT_TOKENS"] = str(CASES[case][2])
    steps = CASES[case][-1]
    ours = [run_ours(case, model, steps, ranks) for ranks in RANKS]
    theirs = [run_trl(python, case, model, steps, ranks) for ranks in RANKS]
    (seconds, parts, mine), (their_seconds, their, versions) = (
        min(runs, key=lambda run: run[0]) for runs in (ours, theirs)
    )
    scores = f"{accuracy(mine):.3f} / {accuracy(their):.3f}" if case == "demo" else ""
    shares = ", ".join(f"{name} {share:.0%}" for name, share in parts.items() if share > 0.005)
    times = (", ".join(f"{run[0]:.3f}" for run in runs) for runs in (ours, theirs))
    return [case, *times, f"{seconds / their_seconds:.2f}", shares, scores], versions


def main(python, cases, out):
    import torch

    torch.set_num_threads(1)
    from counting import make_model

    from benchmarks.measure import facts
    from grpo.tiny_model import warm_start
    from tasks import arithmetic

    lines = ["| case | ours, s a step: 1 rank, 2 | TRL: 1 rank, 2 | best / best |"]
    lines[0] += " ours by part | accuracy, ours / TRL |"
    lines += ["|" + "---|" * 6]
    with tempfile.TemporaryDirectory(prefix="end-to-end-") as folder:
        for case in cases:
            model = Path(folder, "demo" if case == "demo" else "counting")
            if case == "demo":
                warm_start(str(model), arithmetic, 0, 800)
            elif not model.exists():
                make_model(str(model))
            cells, versions = row(python, case, str(model))
            lines.append("| " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
    text = "\n".join(
        [facts("torch", "transformers", "deepspeed") + f" {versions}.", "", *lines, ""]
    )
    print(text)
    if out:
        Path(out).write_text(text)


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv):
        sys.exit(__doc__)
    match sys.argv[1:]:
        case ["trl", *arguments]:
            trl(*arguments)
        case [python, *rest]:
            chosen = [name for name in rest if name in CASES] or list(CASES)
            files = [name for name in rest if name not in CASES]
            main(python, chosen, files[0] if files else None)
        case _:
            sys.exit(__doc__)
