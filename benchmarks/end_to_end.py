"""Seconds of a step of SmolLM2-135M: ours, ours with one option each, and TRL's GRPOTrainer.

    python benchmarks/end_to_end.py runs/smollm2_135m .venv-peers/bin/python out.md [STEPS]
    python benchmarks/end_to_end.py accuracy runs/smollm2_135m .venv-peers/bin/python out.md [STEPS]

All train presets/smollm2.py's model and task with 8 x 8 completions of 16 tokens at most, without a
KL, a server or evaluations; no group is left out or replaced, and nothing is masked. On a CPU each
has one process with two threads. An option's row changes only the constants that it names. Seconds
are medians over the steps after the first: ours are those that the trainer logs, from the end of a
step to the end of the next, TRL's the wall time between the ends of two steps. TRL's micro-batches
are of 32 sequences, as 64 need more memory, and its model ends at each token with a line break, as
STOP_STRINGS does. TRL's other settings are its defaults, except `top_k`, `loss_type` and
`use_bias_correction_kl`, which are set to what we do. Its default is bf16=True. Where the CPU can't
multiply bfloat16, both run in float32 only. requirements-peers.txt describes its venv.

"accuracy": seconds of training, without evaluations, until 0.70 of the 500 test questions are
answered right, greedily, which is tried after every second step; 20 STEPS are planned. TRL ends
there, and its model answers by `generate`, in float32. Its schedule is transformers' with our end
and length of the warm-up, which begins at a rate of 0.
"""

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

PROMPTS, GROUP, TOKENS, RATE, TEMPERATURE, SKIP = 8, 8, 16, 1.5e-5, 0.8, 1
OPTIONS = {
    "ours": "",
    "a KL to a copy of MODEL": "KL_BETA=0.01",
    "LoRA of rank 16": "LORA_RANK=16",
    "activations recomputed": "GRADIENT_CHECKPOINTING=True",
}
IN_BFLOAT16 = {"bfloat16": "DTYPE=bfloat16"}
PARTS = ("sample", "reward", "score", "wait", "backward", "step", "other")
TARGET, QUESTIONS, EVERY = 0.7, 500, 2


def run_ours(model, steps, constants):
    """-> the records of steps and evaluations, the trainer's peak memory in GB."""
    from benchmarks.measure import trained

    with tempfile.TemporaryDirectory(prefix="ours-") as folder:
        words = f"REF_SERVER=None KL_BETA=0 SKIP_FLAT_GROUPS=False EVAL_QUESTIONS={QUESTIONS}"
        words += f" MODEL={model} RUN_DIR={folder}/run STEPS={steps} PROMPTS_PER_STEP={PROMPTS}"
        words = [*words.split(), *constants.split()]
        trainer = [ROOT / "grpo_ref_split.py", ROOT / "presets/smollm2.py", *words]
        with trained(f"{folder}/", {}, trainer, threads=2) as peak:
            lines = Path(folder, "run/metrics.jsonl").read_text().splitlines()
    return [*map(json.loads, lines)], peak / 1e9


# --- TRL: run by the peers' Python ------------------------------------------------------
def trl(model, out, steps, bf16, every):
    """Trains; writes the steps' seconds, accuracies by step, and versions, to `out` after every
    step."""
    import torch
    import transformers
    import trl
    from datasets import Dataset

    from tasks import sums as task

    torch.set_num_threads(2)
    versions = f"TRL {trl.__version__}, transformers {transformers.__version__}"
    found = {"seconds": [], "accuracies": {}, "versions": versions}
    begin = time.perf_counter()

    class Times(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            nonlocal begin
            found["seconds"].append(time.perf_counter() - begin)
            if int(every) and state.global_step % int(every) == 0:
                found["accuracies"][state.global_step] = accuracy = answered(policy, tokenizer)
                control.should_training_stop = accuracy >= TARGET
            Path(out).write_text(json.dumps(found))
            begin = time.perf_counter()

    def right(completions, item, **_):
        texts = [c[0]["content"] for c in completions]
        return [task.rewards(i, t)["correctness"] for i, t in zip(item, texts, strict=True)]

    tokenizer = transformers.AutoTokenizer.from_pretrained(model, padding_side="left")
    policy = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    ends_line = [i for i in range(len(tokenizer)) if "\n" in tokenizer.decode([i])]
    policy.generation_config.eos_token_id = [tokenizer.eos_token_id, *ends_line]
    items = [{"prompt": task.messages(item), "item": item} for item in task.load("train")]
    trainer = trl.GRPOTrainer(
        model=policy,
        reward_funcs=right,
        args=trl_config(f"{out}.folder", int(steps), bool(bf16)),
        train_dataset=Dataset.from_list(items),
        processing_class=tokenizer,
        callbacks=[Times()],
    )
    trainer.train()


def answered(policy, tokenizer):
    """-> greedy accuracy on the test split."""
    from tasks import sums as task

    options = {"add_generation_prompt": True, "padding": True, "return_tensors": "pt"}
    items, size, correct = task.load("test"), PROMPTS * GROUP, 0
    for part in (items[start : start + size] for start in range(0, len(items), size)):
        chats = [task.messages(item) for item in part]
        prompts = tokenizer.apply_chat_template(chats, return_dict=True, **options)
        ids = policy.generate(**prompts, do_sample=False, max_new_tokens=TOKENS)
        new = ids[:, prompts["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(new, skip_special_tokens=True)
        correct += sum(map(lambda i, t: task.rewards(i, t)["correctness"], part, texts))
    return correct / QUESTIONS


def trl_config(folder, steps, bf16):
    import trl

    return trl.GRPOConfig(
        output_dir=folder,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=2,
        beta=0.0,
        use_cpu=True,
        bf16=bf16,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        max_steps=steps,
        per_device_train_batch_size=PROMPTS * GROUP // 2,
        gradient_accumulation_steps=2,
        num_generations=GROUP,
        max_completion_length=TOKENS,
        temperature=TEMPERATURE,
        top_k=0,
        learning_rate=RATE,
        adam_beta2=0.99,
        weight_decay=0.0,
        max_grad_norm=1.0,
        loss_type="grpo",
        use_bias_correction_kl=False,
        gradient_checkpointing=False,
        seed=0,
    )


def run_trl(python, model, steps, bf16, every=0):
    """-> {"seconds": the steps', "accuracies": {"2": ...}, "versions": of TRL and transformers}."""
    with tempfile.TemporaryDirectory(prefix="trl-") as folder:
        out = f"{folder}/out.json"
        environment = os.environ | {"OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"}
        environment["GOMP_SPINCOUNT"] = "1000"  # as ours: on shared cores it is much faster
        command = [python, HERE, "trl", model, out, str(steps), "yes" * bf16, str(every)]
        with open(f"{out}.log", "w") as log:
            output = {"stdout": log, "stderr": subprocess.STDOUT}
            if subprocess.run(command, check=False, env=environment, cwd=ROOT, **output).returncode:
                raise SystemExit(f"TRL failed: {Path(log.name).read_text()[-2000:]}")
        return json.loads(Path(out).read_text())


# --- Both -----------------------------------------------------------------------------
def bar(records):
    """-> where a step's seconds go, a text: a block for each 5 %."""
    total = sum(r["seconds"] for r in records)
    shares = {name: sum(r.get(f"seconds_{name}", 0) for r in records) / total for name in PARTS}
    kept = {name: share for name, share in shares.items() if share >= 0.01}
    return ", ".join(f"{name} {'█' * round(20 * s)} {s:.0%}" for name, s in kept.items())


def native():
    """-> whether the device multiplies bfloat16."""
    import torch

    from benchmarks.measure import DEVICE

    return DEVICE != "cpu" or torch.cpu._is_avx512_bf16_supported()


def write(out, lines):
    from benchmarks.measure import facts

    text = "\n".join([facts("torch", "transformers", "deepspeed"), "", *lines, ""])
    print(text)
    Path(out).write_text(text)


def to_accuracy(model, python, out, steps="20"):
    lines = ["| | constants | accuracy after each second step | step | seconds to it |"]
    lines.append("|---|---|---|---|---|")
    for name, constants in ({"ours": "DTYPE=float32"} | (IN_BFLOAT16 if native() else {})).items():
        records, _ = run_ours(model, int(steps), f"{constants} EVAL_STEPS={EVERY}")
        accuracies = {r["step"]: r["eval_accuracy"] for r in records if "eval_accuracy" in r}
        seconds = [r["seconds"] for r in records if "seconds" in r]
        lines.append(row_to_accuracy(name, constants, accuracies, seconds))
    for bf16 in (True, False) if native() else (False,):
        theirs = run_trl(python, model, int(steps), bf16, EVERY)
        accuracies = {int(step): found for step, found in theirs["accuracies"].items()}
        arguments = theirs["versions"], f"bf16={bf16}", accuracies, theirs["seconds"]
        lines.append(row_to_accuracy(*arguments))
    write(out, lines)


def row_to_accuracy(name, constants, accuracies, seconds):
    accuracies.pop(0, None)
    step = next((step for step, found in accuracies.items() if found >= TARGET), None)
    cells = [name, f"`{constants}`", ", ".join(f"{found:.3f}" for found in accuracies.values())]
    cells += [str(step), f"{sum(seconds[:step]):.0f}"] if step else ["not reached", ""]
    print(cells, flush=True)
    return f"| {' | '.join(cells)} |"


def main(model, python, out, steps="3"):
    lines = ["| | constants | s a step | to ours | GB | where the seconds go |"]
    lines.append("|---|---|---|---|---|---|")
    base = None
    for name, constants in (OPTIONS | (IN_BFLOAT16 if native() else {})).items():
        records, peak = run_ours(model, int(steps), f"{constants} EVAL_STEPS=0")
        counted = [r for r in records if "seconds" in r][SKIP:]
        seconds = statistics.median(r["seconds"] for r in counted)
        base = base or seconds
        cells = [name, f"`{constants}`" * bool(constants)]
        cells += [f"{seconds:.1f}", f"{seconds / base:.2f}", f"{peak:.1f}", bar(counted)]
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    for bf16 in (True, False) if native() else (False,):
        theirs = run_trl(python, model, int(steps), bf16)
        seconds = statistics.median(theirs["seconds"][SKIP:])
        cells = f"{theirs['versions']} | `bf16={bf16}` | {seconds:.1f} | {seconds / base:.2f}"
        lines.append(f"| {cells} | | |")
    write(out, lines)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["trl", *arguments]:
            trl(*arguments)
        case ["accuracy", _, _, _, *_]:
            to_accuracy(*sys.argv[2:])
        case [_, _, _] | [_, _, _, _]:
            main(*sys.argv[1:])
        case _:
            sys.exit(__doc__)
