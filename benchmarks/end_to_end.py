"""The whole trainer against TRL's GRPOTrainer: the same model, questions and settings, in one run.

    python benchmarks/end_to_end.py ../venv-peers/bin/python               # mixed and short
    python benchmarks/end_to_end.py ../venv-peers/bin/python mixed out.md  # one, and a file
    python benchmarks/end_to_end.py ../venv-peers/bin/python sums runs/smollm2_135m out.md [STEPS]

Each case runs our two scripts as they are, and TRL. Both run with one rank of two threads (ours
samples with one, but in sums) and with two ranks of one thread; the faster runs are compared. A
step's seconds are medians over all steps after the first three. Ours are those that the trainer
logs, from the end of a step to the end of the next, without evaluations; TRL's are the wall time
between the ends of two steps. TRL's settings make all sequences of a rank one micro-batch; ours cut
micro-batches by tokens. Our server is one more process on the same cores.

  mixed   1M parameters, prompts of 200 tokens, completions of 64 to 256, 8 prompts x 8
  short   the same, prompts of 400 tokens, completions of 64
  sums    presets/smollm2.py on the model in a folder, 8 x 8 completions of 16 tokens at most

In mixed and short KL_BETA is 0.04 on both sides. There is one update a rollout, no group is left
out or replaced, and nothing is masked. TRL keeps a copy of the model as its reference and computes
in one process. Its other settings are its defaults, except `top_k`, `loss_type` and
`use_bias_correction_kl`, which are set to what we do. requirements-peers.txt describes its venv.

sums has one rank, no KL and no server; TRL's micro-batches are of 32 sequences, as 64 need more
memory, and its model ends at each token with a line break, as STOP_STRINGS does. What each step
rewarded, sampled and took goes to sums_ours.json and sums_trl.json beside the table's file.
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
sys.path.insert(0, str(ROOT))
HERE = str(Path(__file__).resolve())

CASES = {  # prompts, group size, prompt tokens at most, completion tokens, learning rate, steps
    "mixed": (8, 8, 200, 256, 1e-6, 8),
    "short": (8, 8, 400, 64, 1e-6, 12),
    "sums": (8, 8, 128, 16, 1.5e-5, 20),
}
RANKS = (1, 2)
SKIP = 3  # first steps, not counted
KL_BETA = 0.04
BATCH_TOKENS = 4096  # of a micro-batch, and of a scoring batch; on a CPU larger ones gain nothing


# --- Ours -----------------------------------------------------------------------------
def commands(case, model, folder, steps):
    """Returns the commands of server and trainer, which begin with the script."""
    from demo import free_port

    if case == "sums":
        words = "REF_SERVER=None KL_BETA=0 SKIP_FLAT_GROUPS=False EVAL_STEPS=0 PROMPTS_PER_STEP=8"
        words = [f"MODEL={model}", f"RUN_DIR={folder}/run", f"STEPS={steps}", *words.split()]
        return None, [ROOT / "grpo_ref_split.py", ROOT / "presets/smollm2.py", *words]
    prompts, group, prompt_tokens, completion_tokens, rate, _ = CASES[case]
    port = free_port()
    server = {"MODEL": model, "PORT": port, "DTYPE": "float32", "SCORE_BATCH_TOKENS": BATCH_TOKENS}
    trainer = {
        "MODEL": model,
        "TASK": ROOT / "benchmarks/counting.py",
        "RUN_DIR": f"{folder}/run",
        "REF_SERVER": f"http://127.0.0.1:{port}",
        "PROMPTS_PER_STEP": prompts,
        "GROUP_SIZE": group,
        "SAMPLE_BATCH": prompts * group,
        "MAX_PROMPT_TOKENS": prompt_tokens,
        "MAX_COMPLETION_TOKENS": completion_tokens,
        "LEARNING_RATE": rate,
        "FINAL_LR": 1.0,
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
    """-> the median of the steps' seconds, shares of the parts, the steps' records."""
    from benchmarks.measure import trained

    folder = tempfile.mkdtemp(prefix="ours-")
    server, trainer = commands(case, model, folder, steps)
    servers = {"server": [sys.executable, *server]} if server else {}
    threads = 2 if case == "sums" else 1  # with a server on the same cores one is faster
    with trained(f"{folder}-", servers, trainer, ranks, threads):
        lines = Path(folder, "run/metrics.jsonl").read_text().splitlines()
    records = [r for r in map(json.loads, lines) if "loss" in r]
    parts = {
        name: statistics.mean(r.get(f"seconds_{name}", 0) / r["seconds"] for r in records[SKIP:])
        for name in ("sample", "reward", "wait", "backward", "step", "publish", "other")
    }
    seconds = statistics.median(r["seconds"] for r in records[SKIP:])
    return seconds, parts, records


# --- TRL ------------------------------------------------------------------------------
def questions_and_reward(case):
    """Returns the case's questions as TRL takes them, and its reward function."""
    if case != "sums":
        from benchmarks import counting as task

        def even(completions, **_):
            return [task.rewards(None, text)["correctness"] for text in completions]

        return [{"prompt": item["question"]} for item in task.load("train")], even

    from tasks import sums as task

    def right(completions, item, **_):
        texts = [c[0]["content"] for c in completions]
        return [task.rewards(i, t)["correctness"] for i, t in zip(item, texts, strict=True)]

    items = task.load("train")
    return [{"prompt": task.messages(item), "item": item} for item in items], right


def trl_config(case, folder, steps, ranks):
    import trl

    prompts, group, _, completion_tokens, rate, _ = CASES[case]
    kind, batches = {"lr_scheduler_type": "constant", "warmup_steps": 5, "beta": KL_BETA}, ranks
    if case == "sums":
        kind = {"lr_scheduler_type": "cosine_with_min_lr", "warmup_steps": 2, "beta": 0.0}
        kind["lr_scheduler_kwargs"] = {"min_lr_rate": 0.1}
        batches = 2
    return trl.GRPOConfig(
        output_dir=folder,
        **kind,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        max_steps=steps,
        ddp_backend="gloo",
        per_device_train_batch_size=prompts * group // batches,
        gradient_accumulation_steps=batches // ranks,
        num_generations=group,
        max_completion_length=completion_tokens,
        temperature=0.8 if case == "sums" else 1.0,
        top_k=0,
        learning_rate=rate,
        adam_beta2=0.99,
        weight_decay=0.0,
        max_grad_norm=1.0,
        loss_type="grpo",
        use_bias_correction_kl=False,
        gradient_checkpointing=False,
        seed=0,
    )


def trl(case, model, out, steps):
    """Run by the peers' Python: trains, and writes each step's seconds and log, and versions, to
    `out` after every step."""
    import torch
    import transformers
    import trl
    from datasets import Dataset

    ranks, ends, records = int(os.environ["WORLD_SIZE"]), [], []
    torch.set_num_threads(2 // ranks)
    questions, reward = questions_and_reward(case)
    versions = f"TRL {trl.__version__}, transformers {transformers.__version__}"

    class Times(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            ends.append(time.perf_counter())

        def on_log(self, args, state, control, logs=None, **_):
            records.append(logs)
            if state.is_world_process_zero:
                seconds = [b - a for a, b in itertools.pairwise(ends)]
                found = {"seconds": seconds, "versions": versions, "records": records}
                Path(out).write_text(json.dumps(found))

    tokenizer = transformers.AutoTokenizer.from_pretrained(model, padding_side="left")
    policy = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    if case == "sums":
        ends_line = [i for i in range(len(tokenizer)) if "\n" in tokenizer.decode([i])]
        policy.generation_config.eos_token_id = [tokenizer.eos_token_id, *ends_line]
    trainer = trl.GRPOTrainer(
        model=policy,
        reward_funcs=reward,
        args=trl_config(case, f"{out}.folder", int(steps), ranks),
        train_dataset=Dataset.from_list(questions),
        processing_class=tokenizer,
        callbacks=[Times()],
    )
    trainer.train()


def run_trl(python, case, model, steps, ranks):
    """-> the median of the steps' seconds, the steps' logs, versions."""
    out = f"{tempfile.mkdtemp(prefix='trl-')}/out.json"
    environment = os.environ | {"OMP_NUM_THREADS": str(2 // ranks), "HF_HUB_OFFLINE": "1"}
    environment["GOMP_SPINCOUNT"] = "1000"  # as ours: on shared cores it is much faster
    command = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [HERE, "trl", case, model, out, str(steps)]
    with open(f"{out}.log", "w") as log:
        output = {"stdout": log, "stderr": subprocess.STDOUT}
        subprocess.run(command, check=True, env=environment, cwd=ROOT, **output)
    result = json.loads(Path(out).read_text())
    return (statistics.median(result["seconds"][SKIP - 1 :]), result["records"], result["versions"])


# --- Both -----------------------------------------------------------------------------
def row(python, case, model, out):
    """-> (the table's cells of a case, TRL's versions)."""
    os.environ["COUNTING_PROMPT_TOKENS"] = str(CASES[case][2])
    steps, ranks = CASES[case][-1], RANKS[:1] if case == "sums" else RANKS
    ours = [run_ours(case, model, steps, n) for n in ranks]
    theirs = [run_trl(python, case, model, steps, n) for n in ranks]
    if case == "sums":
        for name, ((_, *found),) in {"ours": ours, "trl": theirs}.items():
            Path(out).with_name(f"sums_{name}.json").write_text(json.dumps(found))
    (seconds, parts, _), (their_seconds, _, versions) = (
        min(runs, key=lambda run: run[0]) for runs in (ours, theirs)
    )
    shares = ", ".join(f"{name} {share:.0%}" for name, share in parts.items() if share > 0.005)
    times = (", ".join(f"{run[0]:.3f}" for run in runs) for runs in (ours, theirs))
    return [case, *times, f"{seconds / their_seconds:.2f}", shares], versions


def main(python, cases, model, out):
    import torch

    torch.set_num_threads(1)
    from benchmarks.counting import make_model
    from benchmarks.measure import facts

    lines = ["| case | ours, s a step: 1 rank, 2 | TRL: 1 rank, 2 | best / best |"]
    lines[0] += " ours by part |"
    lines += ["|" + "---|" * 5]
    with tempfile.TemporaryDirectory(prefix="end-to-end-") as folder:
        for case in cases:
            if case != "sums" and not (model := Path(folder, "counting")).exists():
                make_model(str(model))
            cells, versions = row(python, case, str(model), out)
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
        case [python, "sums", model, out, *steps]:
            CASES["sums"] = (*CASES["sums"][:-1], *map(int, steps or [20]))
            main(python, ["sums"], model, out)
        case [_, "sums", *_]:
            sys.exit(__doc__)
        case [python, *rest]:
            chosen = [name for name in rest if name in CASES] or ["mixed", "short"]
            files = [name for name in rest if name not in CASES]
            main(python, chosen, None, files[0] if files else None)
        case _:
            sys.exit(__doc__)
