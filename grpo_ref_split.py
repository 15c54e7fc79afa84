"""GRPO under DeepSpeed ZeRO-2, with the reference model in another process (ref_server.py).

    CUDA_VISIBLE_DEVICES=7 python ref_server.py                           # first, on one GPU
    CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6 deepspeed grpo_ref_split.py        # then, on the others
    deepspeed --num_gpus 1 grpo_ref_split.py                              # one GPU, or a CPU

Edit the constants below. A preset is a Python file that imports this one, sets its constants and
calls main(); demo.py is an example. The file reads in the order in which data flows: sample a group
of completions for each prompt, reward them, upload, fetch with reference log-probs, advantages,
loss, step, evaluate, log, save.

GRPO (DeepSeekMath, arXiv 2402.03300, eq. 3) needs no value network: a completion's advantage is its
reward, centred and scaled within the G completions of its prompt. Where we deviate from the paper:
  - every mean is taken over the whole step, all ranks and micro-batches, never over a micro-batch;
  - the log-probs of the first of UPDATES_PER_ROLLOUT updates serve as the old ones (the ratio is
    exactly 1), as they come for free; the sampler's own travel along and must agree with them;
  - groups without spread in correctness are left out and replaced (DAPO, 2503.14476, sec. 3.2).

Symbols: B sequences of a micro-batch, G completions of a group, P prompt and T completion tokens,
N completion tokens that are trained, V ids of the tokenizer. A `step` is one optimiser update, or
an attempt that found nothing to train.
"""

import importlib
import itertools
import json
import math
import numbers
import os
import random
import shutil
import sys
import time
import uuid
from collections import Counter
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

import grpo_loss
import grpo_loss_triton
from forward import CompletionModel, number_prompts, plan_micro_batches
from grpo_loss import LOSS_TYPES, OBJECTIVES, group_advantages, token_weights
from policy import load_policy, load_tokenizer, prompt_ids
from sampler import sample_groups
from wire import Group, RefServer, pack_group, tokenizer_facts, unpack_group

# --- What to train ------------------------------------------------------------------
MODEL = "Qwen/Qwen2.5-3B"  # any AutoModelForCausalLM: hub name or folder
TASK = "gsm8k"  # tasks/gsm8k.py: data, prompt and rewards; copy it to make your own
RUN_DIR = "runs/gsm8k"  # checkpoints, metrics.jsonl, samples.jsonl; must not hold a run already
REF_SERVER = "http://127.0.0.1:59875"  # on another machine: its address, and GRPO_TOKEN on both

# --- Rollouts -----------------------------------------------------------------------
PROMPTS_PER_STEP = 28  # over all ranks, best a multiple of them; each gives GROUP_SIZE sequences
GROUP_SIZE = 8  # G: completions per prompt; advantages are normalised within the group
MAX_PROMPT_TOKENS = 512  # longer prompts are left out, and counted at the start
MAX_COMPLETION_TOKENS = 512  # longer ones are cut, and their last token is then not EOS
STOP_TOKENS = ["<|im_end|>"]  # end a completion too, beside EOS; unknown ones are ignored
TEMPERATURE = 1.0  # for sampling and for every log-prob; ref_server.py must agree
SAMPLE_BATCH = 64  # completions sampled at once by a rank: more is faster, and holds more KV cache
MASK_TRUNCATED = True  # cut completions count in the baseline, but their tokens are not trained
SKIP_FLAT_GROUPS = True  # leave out groups that are all right or all wrong, and sample others
MAX_REFILLS = 4  # rounds of such sampling in a step; after that the step makes do with fewer groups
OUTCOME = "correctness"  # the reward that says right (> 0) or wrong: accuracy, and what is flat
# At (2, 1) a right answer in the wrong format (+1) beats a wrong one in the right format (-0.75);
# at (1, 1), simple_GRPO's scale, it does not (0 against 0.25).
REWARD_WEIGHTS = {"correctness": 2.0, "format": 1.0}

# --- Loss ---------------------------------------------------------------------------
LOSS_TYPE = "grpo"  # token weights: grpo (mean per sequence), dapo (per token), dr_grpo (constant)
ADVANTAGE_STD = True  # False: centred only, without the bias to easy and hard prompts (Dr. GRPO)
CLIP_LOW = 0.2  # the ratio's gradient stops below 1 - CLIP_LOW ...
CLIP_HIGH = 0.2  # ... and above 1 + CLIP_HIGH; 0.28 leaves rare tokens more room (DAPO)
KL_BETA = 0.04  # weight of the KL to the reference; 0 needs no reference and no server
UNBIASED_KL = False  # the KL's estimate times the ratio, for an unbiased gradient (DeepSeek-V3.2)
OBJECTIVE = "clip"  # or "cispo": clipped tokens keep a gradient, weighted by the clipped ratio
RATIO_LEVEL = "token"  # or "sequence" (GSPO; then CLIP_LOW and CLIP_HIGH are some 1e-4)
IS_CAP = 0.0  # 2: weigh tokens by min(old / sampler probability, 2), for samplers that differ
UPDATES_PER_ROLLOUT = 1  # mu: optimiser updates on each rollout; clipping acts from the second on

# --- Optimisation -------------------------------------------------------------------
STEPS = 500  # optimiser updates
LEARNING_RATE = 1e-6  # LoRA wants some 10 to 20 times as much
LORA_RANK = 0  # 16 or 32: train adapters of that rank, and keep the model itself frozen
WARMUP_STEPS = 10  # linear from 0
FINAL_LR = 1.0  # linear decay to this fraction of LEARNING_RATE at the last step; 1 is constant
ADAM_BETAS = (0.9, 0.99)
WEIGHT_DECAY = 0.0
MAX_GRAD_NORM = 1.0  # gradient clipping by global norm
SEED = 0

# --- Memory: lower these first when out of memory -----------------------------------
MICRO_BATCH_TOKENS = 8_192  # padded tokens per forward/backward; does not change the gradient
FUSED_LOSS = True  # head and loss in chunks (grpo_loss_triton.py); False holds all logits
SHARE_PROMPTS = True  # a group's prompt runs once, and not GROUP_SIZE times; same gradient
GRADIENT_CHECKPOINTING = True  # recomputes activations in the backward: a third slower, far smaller
OFFLOAD_OPTIMIZER = False  # Adam states in CPU memory (DeepSpeedCPUAdam, compiled at first use)
DTYPE = "auto"  # bfloat16 on a GPU (with float32 master weights), float32 on a CPU

# --- Run ----------------------------------------------------------------------------
EVAL_STEPS = 50  # greedy accuracy at step 0, every so many steps, and at the end
EVAL_SPLIT = "test"
EVAL_QUESTIONS = 512  # the first so many of the split
STOP_ACCURACY = (
    1.01  # stop when an evaluation reaches it; then report on questions not in EVAL_SPLIT
)
SAVE_STEPS = 100
KEEP_CHECKPOINTS = 2  # the newest; older ones are deleted
SAMPLES_PER_STEP = 2  # completions of one group written to samples.jsonl each step
WAIT_LIMIT_SECONDS = 600  # for the reference server, after which the run ends with an error

# --- Checks -------------------------------------------------------------------------
# What rounding may do at the first update: mean |log-prob difference| to the sampler, mean k3 to
# the same reference. Measured on a CPU, tiny models: float32 4e-7 and 0, bfloat16 3e-3 and 9e-4.
NOISE = {"float32": (1e-4, 1e-6), "bfloat16": (5e-2, 5e-3)}
IDLE_LIMIT = 10  # steps in a row without anything to train, after which the run ends


def check_config():
    """Raises SystemExit with a sentence for each constant that can't be, before anything heavy."""
    counts = (
        "PROMPTS_PER_STEP GROUP_SIZE MAX_PROMPT_TOKENS MAX_COMPLETION_TOKENS SAMPLE_BATCH STEPS"
        " EVAL_STEPS EVAL_QUESTIONS SAVE_STEPS KEEP_CHECKPOINTS UPDATES_PER_ROLLOUT"
        " MICRO_BATCH_TOKENS WAIT_LIMIT_SECONDS"
    )
    others = "LORA_RANK MAX_REFILLS WARMUP_STEPS SAMPLES_PER_STEP SEED"
    reals = "TEMPERATURE LEARNING_RATE CLIP_LOW CLIP_HIGH KL_BETA IS_CAP WEIGHT_DECAY FINAL_LR"
    reals += " MAX_GRAD_NORM STOP_ACCURACY"
    now = globals()
    rules = [
        *((n, "a whole number from 1 on", whole(now[n]) and now[n] >= 1) for n in counts.split()),
        *((n, "a whole number from 0 on", whole(now[n]) and now[n] >= 0) for n in others.split()),
        *((n, "a number from 0 on", real(now[n]) and now[n] >= 0) for n in reals.split()),
        ("LOSS_TYPE", f"one of {', '.join(LOSS_TYPES)}", LOSS_TYPE in list(LOSS_TYPES)),
        ("OBJECTIVE", f"one of {', '.join(OBJECTIVES)}", OBJECTIVE in OBJECTIVES),
        ("RATIO_LEVEL", "token or sequence", RATIO_LEVEL in ("token", "sequence")),
        ("DTYPE", f"one of auto, {', '.join(NOISE)}", DTYPE in ["auto", *NOISE]),
        ("OUTCOME", "one of the names in REWARD_WEIGHTS", OUTCOME in list(REWARD_WEIGHTS)),
        ("REF_SERVER", "http://host:port", str(REF_SERVER).startswith(("http://", "https://"))),
        (
            "RUN_DIR",
            "a folder that holds no run: choose another, or move that one",
            not holds_run(),
        ),
    ]
    if all(holds for _, _, holds in rules):  # the types are right
        rules = [
            ("GROUP_SIZE", "2 or more, to be compared with each other", GROUP_SIZE >= 2),
            ("TEMPERATURE", "above 0, or all of a group are equal", TEMPERATURE > 0),
            ("CLIP_LOW", "above 0, and 1 at most", 0 < CLIP_LOW <= 1),
            ("CLIP_HIGH", "above 0", CLIP_HIGH > 0),
            ("IS_CAP", "0, which is off, or 1 and more", IS_CAP == 0 or IS_CAP >= 1),
            ("MAX_GRAD_NORM", "above 0; a large one does not clip", MAX_GRAD_NORM > 0),
            ("SAMPLE_BATCH", "GROUP_SIZE or more: groups stay whole", SAMPLE_BATCH >= GROUP_SIZE),
        ]
    broken = [f"{name} = {now[name]!r} must be {what}" for name, what, holds in rules if not holds]
    if broken:
        raise SystemExit("grpo_ref_split.py can't run with these constants:\n" + "\n".join(broken))


def whole(value):
    return type(value) is int


def real(value):
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)  # NumPy's, too
    return number and math.isfinite(value)


def holds_run():
    return Path(RUN_DIR, "metrics.jsonl").exists() or any(Path(RUN_DIR).glob("step_*"))


# --- Data ------------------------------------------------------------------------------
def load_task():
    """-> the module tasks/TASK.py. Raises SystemExit if there is none, or it lacks a function."""
    try:
        task = importlib.import_module(f"tasks.{TASK}")
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"TASK = {TASK!r}: no tasks/{TASK}.py that can be imported ({error})"
        ) from None
    missing = {"load", "messages", "rewards"} - vars(task).keys()
    if missing:
        raise SystemExit(f"tasks/{TASK}.py lacks {', '.join(sorted(missing))}; see tasks/gsm8k.py")
    return task


def load_prompts(task, split, tokenizer):
    """-> [(index, item, prompt_ids)] of the split, without prompts over MAX_PROMPT_TOKENS."""
    try:
        items = task.load(split)
    except (OSError, ValueError) as error:
        raise SystemExit(f"the {split} questions of {TASK} can't be loaded: {error}") from error
    ids = [prompt_ids(tokenizer, task.messages(item["question"])) for item in items]
    prompts = [
        (index, item, prompt)
        for index, (item, prompt) in enumerate(zip(items, ids, strict=True))
        if len(prompt) <= MAX_PROMPT_TOKENS
    ]
    say(f"{TASK}/{split}: {len(items)} questions, {len(items) - len(prompts)} left out as too long")
    if not prompts:
        raise SystemExit(f"no question fits MAX_PROMPT_TOKENS = {MAX_PROMPT_TOKENS}: raise it")
    return prompts


def endless(prompts, rank, world):
    """This rank's prompts: every epoch in a new order, which SEED alone decides."""
    at = 0  # position in the order of all ranks, of which this rank takes every world-th
    for epoch in itertools.count():
        order = list(prompts)
        random.Random(f"{SEED}/{epoch}").shuffle(order)
        for prompt in order:
            if at % world == rank:
                yield prompt
            at += 1


# --- Rollout: sample, reward, upload ------------------------------------------------
def sample_and_reward(policy, task, prompts, group_size, temperature, generator):
    """-> [(prompt, completions, rewards)] for prompts as load_prompts gives them.

    `rewards` holds, for each completion, the task's dict of named rewards. The task sees text; the
    trainer goes on with the sampled ids, as text tokenised again may give other ids.
    """
    groups = sample_groups(
        policy.model,
        [ids for _, _, ids in prompts],
        group_size=group_size,
        max_new_tokens=MAX_COMPLETION_TOKENS,
        temperature=temperature,
        eos_ids=policy.eos_ids,
        vocab_size=policy.vocab_size,
        generator=generator,
    )
    rewarded = []
    for prompt, completions in zip(prompts, groups, strict=True):
        rewards = [task.rewards(prompt[1], policy.text(c)) for c in completions]
        for r in rewards:
            if r.keys() != REWARD_WEIGHTS.keys():
                raise SystemExit(f"{TASK} rewards {sorted(r)}, but REWARD_WEIGHTS has other names")
            if not all(real(value) for value in r.values()):
                raise SystemExit(f"{TASK} rewards {r}, not finite numbers, for {prompt[1]}")
        rewarded.append((prompt, completions, rewards))
    return rewarded


def rollout(policy, task, stream, count, *, share, generator):
    """Yields `share` groups worth training, as soon as each is sampled; counts all in `count`.

    Flat groups (all right, or all wrong) have nothing to compare: judged on OUTCOME, since a group
    that is all wrong would otherwise train its format alone, at full size. They are replaced by
    sampling more, for at most MAX_REFILLS rounds, after which there may be fewer than `share`.
    """
    kept, at_once = 0, SAMPLE_BATCH // GROUP_SIZE
    for _ in range(1 + MAX_REFILLS):
        prompts = list(itertools.islice(stream, share - kept))
        for i in range(0, len(prompts), at_once):
            for group in sample_and_reward(
                policy, task, prompts[i : i + at_once], GROUP_SIZE, TEMPERATURE, generator
            ):
                flat = is_flat([r[OUTCOME] for r in group[2]])
                count.update(tally(group, flat))
                if not (flat and SKIP_FLAT_GROUPS):
                    kept += 1
                    yield group


def is_flat(values):
    """Example: [1, 1, 1] -> True; [1, -1, 1] -> False"""
    return max(values) - min(values) < 1e-6


TALLY = ("groups", "flat", "completions", "tokens", "truncated", "right")


def tally(group, flat):
    """-> sums over the completions of one sampled group, by name; rollout_metrics has the means."""
    _, completions, rewards = group
    return {
        "groups": 1,
        "flat": int(flat),
        "completions": len(completions),
        "tokens": sum(len(c.ids) for c in completions),
        "truncated": sum(c.truncated for c in completions),
        "right": sum(r[OUTCOME] > 0 for r in rewards),
    } | {f"reward_{name}": sum(r[name] for r in rewards) for name in REWARD_WEIGHTS}


def make_group(sampled, *, id, run, step):
    """-> the wire's Group of a sampled one."""
    (index, _, ids), completions, rewards = sampled
    names = list(REWARD_WEIGHTS)
    return Group(
        id=id,
        run=run,
        policy_version=step,
        item=index,
        reward_names=names,
        prompt_ids=torch.tensor(ids, dtype=torch.int32),
        completion_ids=torch.tensor([i for c in completions for i in c.ids], dtype=torch.int32),
        completion_lengths=torch.tensor([len(c.ids) for c in completions], dtype=torch.int32),
        sampler_logps=torch.tensor([p for c in completions for p in c.logps]),
        truncated=torch.tensor([c.truncated for c in completions]),
        rewards=torch.tensor([[float(r[name]) for name in names] for r in rewards]),
    )


# --- Exchange ---------------------------------------------------------------------
def sample_step(policy, task, stream, server, run, step):
    """-> (groups, metrics): the rollout of all ranks that comes after `step` updates.

    While the server scores what was uploaded, the next groups are sampled.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    share = PROMPTS_PER_STEP // world + (rank < PROMPTS_PER_STEP % world)
    generator = torch.Generator(device=policy.model.device)
    generator.manual_seed((SEED * 1_000_003 + step) * 4096 + rank)
    count, mine, started = Counter(), [], time.perf_counter()
    for group in rollout(policy, task, stream, count, share=share, generator=generator):
        id = f"{step:06d}-{rank:04d}-{len(mine):04d}"
        body = pack_group(make_group(group, id=id, run=run, step=step))
        if server:
            server.call("POST", "/upload", data=body)
        mine.append(id if server else body)
    sampled = time.perf_counter()
    groups = exchange(mine, server, run)
    metrics = rollout_metrics(count)
    metrics["seconds_sample"] = sampled - started
    metrics["seconds_wait"] = time.perf_counter() - sampled
    metrics["tokens_per_second"] = metrics["tokens_sampled"] / metrics["seconds_sample"]
    return groups, metrics


def exchange(mine, server, run):
    """-> the groups of all ranks, in the same order on all.

    `mine` are this rank's groups: packed, or only their ids if they went through the server. Rank 0
    then fetches them all and passes them on. As every rank sees the whole step, each can work out
    denominators and everyone's micro-batches by itself, and none can disagree.
    """
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    bodies = [body for part in everyone for body in part]
    if server:
        box = [server.lease(run, bodies) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(box, src=0)
        bodies = box[0]
    return sorted(map(unpack_group, bodies), key=lambda group: group.id)


# --- Rows to train ---------------------------------------------------------
@dataclass
class Row:
    """One sequence to train."""

    prompt: list[int]
    completion: list[int]
    sampler_logps: torch.Tensor  # (T,)
    ref_logps: torch.Tensor | None  # (T,)
    advantage: float
    weight: float = 0.0  # of each token
    old_logps: torch.Tensor | None = None  # (T,), set by the first update on a rollout


def advantages_of(group):
    """-> advantages (G,) of a group's weighted rewards."""
    assert group.reward_names == list(REWARD_WEIGHTS), group.reward_names
    weighted = group.rewards @ torch.tensor(list(REWARD_WEIGHTS.values()))
    return group_advantages(weighted, scale_by_std=ADVANTAGE_STD)


def make_rows(groups):
    """-> the rows of a step's groups, with weights; without the truncated if MASK_TRUNCATED.

    A truncated completion still counts in its group's mean, and in the number of sequences.
    """
    rows = []
    for group in groups:
        advantages = advantages_of(group).tolist()
        ids, logps = (group.completions(x) for x in (group.completion_ids, group.sampler_logps))
        refs = group.completions(group.ref_logps) if KL_BETA else [None] * len(ids)
        for i, truncated in enumerate(group.truncated.tolist()):
            if not (truncated and MASK_TRUNCATED):
                prompt, completion = group.prompt_ids.tolist(), ids[i].tolist()
                rows.append(Row(prompt, completion, logps[i], refs[i], advantages[i]))
    lengths = torch.tensor([len(row.completion) for row in rows])
    weights = token_weights(
        lengths,
        loss_type=LOSS_TYPE,
        sequences=sum(len(group.completion_lengths) for group in groups),
        tokens=int(lengths.sum()),
        max_completion_tokens=MAX_COMPLETION_TOKENS,
    )
    for row, weight in zip(rows, weights.tolist(), strict=True):
        row.weight = weight
    return rows


# --- Loss ---------------------------------------------------------------------------
SUMS = ("loss", "tokens", "ratio", "kl", "clip_low", "clip_high", "mismatch", "entropy")


def micro_batch_loss(model, rows, vocab_size, *, scale):
    """-> (loss, sums, worst): `scale` times the rows' part of the step's loss, sums of SUMS over
    their tokens, and the largest difference to a sampler's log-prob."""
    hidden, ids = model([row.prompt for row in rows], [row.completion for row in rows])
    lengths = torch.tensor([len(row.completion) for row in rows])

    def spread(values):  # one for each row -> one for each of its tokens
        return torch.tensor(values).repeat_interleave(lengths).to(ids.device)

    def joined(parts):
        return torch.cat(parts).to(ids.device)

    # At the first update the old policy is this one: its log-probs are the loss's own, for free
    first, sampler_logps = rows[0].old_logps is None, joined([row.sampler_logps for row in rows])
    loss, stats = (grpo_loss_triton if FUSED_LOSS else grpo_loss).grpo_loss(
        hidden,
        getattr(model, "module", model).head,  # DeepSpeed wraps the model
        ids,
        None if first else joined([row.old_logps for row in rows]),
        joined([row.ref_logps for row in rows]) if KL_BETA else None,
        spread([row.advantage for row in rows]),
        spread([row.weight * scale for row in rows]),
        temperature=TEMPERATURE,
        vocab_size=vocab_size,
        clip_low=CLIP_LOW,
        clip_high=CLIP_HIGH,
        kl_beta=KL_BETA,
        objective=OBJECTIVE,
        unbiased_kl=UNBIASED_KL,
        sampler_logps=sampler_logps,
        is_cap=IS_CAP,
        sequences=spread(list(range(len(rows)))) if RATIO_LEVEL == "sequence" else None,
    )
    if first:
        for row, part in zip(rows, stats["logps"].cpu().split(lengths.tolist()), strict=True):
            row.old_logps = part
    stats["mismatch"] = (stats["logps"] - sampler_logps).abs()
    stats |= {"loss": loss.detach()[None] / scale, "tokens": torch.ones_like(ids)}
    sums = torch.stack([stats[name].sum().double() for name in SUMS])
    return loss, sums, stats["mismatch"].max()


# --- Step ---------------------------------------------------------------------------
def start_engine(policy):
    """-> DeepSpeed's engine, ZeRO-2, round a CompletionModel of the policy, with its optimiser."""
    import deepspeed  # takes seconds; the tests of this file's functions do without

    # DeepSpeed would compile an all-reduce for CPU inference here: a minute, and a compiler which
    # may be missing. Training has no use for it. Another version may compile: say what we wait for.
    getattr(deepspeed.ops, "__compatible_ops__", {})["deepspeed_shm_comm"] = False
    say("starting DeepSpeed; if it compiles an op of its own now, that takes about a minute, once")
    # longer than any rank waits by itself, or the others would end it before it says what for
    deepspeed.init_distributed(timeout=timedelta(seconds=WAIT_LIMIT_SECONDS + 3600))
    model = CompletionModel(
        policy.model, share_prompts=SHARE_PROMPTS, gradient_checkpointing=GRADIENT_CHECKPOINTING
    )
    # What a rank could not have, none has: all must plan the same micro-batches
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (model.shares, model.notes))
    model.shares = all(shares for shares, _ in everyone)
    for note in sorted({note for _, notes in everyone for note in notes}):
        say(note)
    settings = {"lr": LEARNING_RATE, "betas": ADAM_BETAS, "weight_decay": WEIGHT_DECAY}
    trained = [p for p in policy.model.parameters() if p.requires_grad]
    zero = {"stage": 2, "contiguous_gradients": True, "reduce_bucket_size": 50_000_000}
    if OFFLOAD_OPTIMIZER:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer = DeepSpeedCPUAdam(trained, **settings)
        zero["offload_optimizer"] = {"device": "cpu"}
    else:
        fused = policy.model.device.type == "cuda"
        optimizer = torch.optim.AdamW(trained, fused=fused, **settings)
    config = {
        "train_micro_batch_size_per_gpu": 1,  # a formality: accumulate() cuts micro-batches by
        "gradient_accumulation_steps": 1,  # tokens, and says itself where a step ends
        "zero_optimization": zero,
        "gradient_clipping": MAX_GRAD_NORM,
        "bf16": {"enabled": policy.dtype == "bfloat16"},
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def learning_rate(step):
    """-> the rate of update number `step` (from 1): linear warm-up, linear decay to FINAL_LR."""
    warm = min(1.0, step / max(WARMUP_STEPS, 1))
    done = max(0, step - WARMUP_STEPS) / max(1, STEPS - WARMUP_STEPS)
    return LEARNING_RATE * warm * (1 - (1 - FINAL_LR) * done)


def accumulate(engine, rows, vocab_size):
    """Runs this rank's micro-batches forward and backward; -> the step's means over all ranks.

    The weights already divide by the whole step's counts, so parts add up: to a gradient that is
    the same for 1 x 8 micro-batches, 8 x 1 and 2 ranks x 4.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    numbers = number_prompts([row.prompt for row in rows], engine.module.shares)
    sizes = [(n, len(r.prompt), len(r.completion)) for n, r in zip(numbers, rows, strict=True)]
    plan = plan_micro_batches(sizes, world, MICRO_BATCH_TOKENS)[rank]
    shortest = min(rows, key=lambda row: len(row.completion))
    sums = torch.zeros(len(SUMS), dtype=torch.float64, device=engine.device)
    worst = torch.zeros(1, device=engine.device)
    for number, batch in enumerate(plan, 1):
        engine.set_gradient_accumulation_boundary(number == len(plan))
        mine = [rows[i] for i in batch] or [shortest]
        # ZeRO-2 takes the mean over ranks; we want the sum
        loss, parts, mismatch = micro_batch_loss(engine, mine, vocab_size, scale=world)
        if batch:
            sums, worst = sums + parts, torch.maximum(worst, mismatch)
        else:
            loss = loss * 0  # an empty micro-batch only takes part in the communication
        engine.backward(loss)
    dist.all_reduce(sums)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    means = dict(zip(SUMS, sums.tolist(), strict=True))
    loss, tokens = means.pop("loss"), means.pop("tokens")
    if not KL_BETA:
        del means["kl"]  # not 0, but not known
    means = {name: total / tokens for name, total in means.items()}
    return {"loss": loss} | means | {"mismatch_max": worst.item()}


def optimise(engine, rows, vocab_size, step):
    """One optimiser update on the step's rows; -> its metrics. RuntimeError if not finite."""
    for group in engine.optimizer.param_groups:
        group["lr"] = learning_rate(step)
    metrics = accumulate(engine, rows, vocab_size)
    if math.isfinite(metrics["loss"]):
        engine.step()
        metrics["grad_norm"] = float(engine.get_global_grad_norm())
    metrics["learning_rate"] = learning_rate(step)
    # DeepSpeed's norm of a gradient that overflowed may also be -1
    if not (math.isfinite(metrics["loss"]) and 0 <= metrics["grad_norm"] < math.inf):
        path = Path(RUN_DIR, f"bad_step_{step:06d}.json")
        if dist.get_rank() == 0:
            path.write_text(json.dumps([asdict(row) for row in rows], default=torch.Tensor.tolist))
        dist.barrier()  # until it is written: the launcher ends all ranks when one ends
        raise RuntimeError(f"step {step} is not finite: {metrics}; its rows are kept in {path}")
    return metrics


def check_first_update(metrics, policy_dtype, reference):
    """Raises RuntimeError unless the first update is what theory says: ratio 1, KL 0.

    At the first update trainer, sampler and reference hold the same weights. Their log-probs differ
    by rounding alone, for which NOISE is a generous bound. More means that they do not compute the
    same thing (temperature, dropout, attention, wrong weights).
    """
    limit, _ = NOISE[policy_dtype]
    if metrics["mismatch"] > limit:
        raise RuntimeError(
            f"at the first update the trainer's log-probs differ from the sampler's by"
            f" {metrics['mismatch']:.2g} a token on average (limit {limit}): the ratio is not 1"
        )
    if reference is None or reference["model"] != MODEL:
        return  # another model, from which the KL is not 0
    limit = max(NOISE[policy_dtype][1], NOISE[reference["dtype"]][1])
    if metrics["kl"] > limit:
        raise RuntimeError(
            f"at the first update the KL to the reference is {metrics['kl']:.2g} a token (limit"
            f" {limit}) and should be 0: does ref_server.py serve the weights of {MODEL}?"
        )


# --- Evaluate -----------------------------------------------------------------------
def evaluate(policy, task, prompts):
    """-> greedy accuracy (OUTCOME > 0), the positive share of each reward, the truncated share and
    the mean length, over all ranks."""
    count, mine = Counter(), prompts[dist.get_rank() :: dist.get_world_size()]
    for i in range(0, len(mine), SAMPLE_BATCH):
        batch = mine[i : i + SAMPLE_BATCH]
        for _, completions, rewards in sample_and_reward(policy, task, batch, 1, 0, None):
            count["questions"] += 1
            count["truncated"] += completions[0].truncated
            count["completion_tokens"] += len(completions[0].ids)
            count["accuracy"] += rewards[0][OUTCOME] > 0
            count.update({f"positive_{name}": int(r > 0) for name, r in rewards[0].items()})
    names = ["accuracy", *(f"positive_{name}" for name in REWARD_WEIGHTS)]
    names += ["truncated", "completion_tokens"]
    total = add_up(count, ["questions", *names])
    return {f"eval_{name}": total[name] / total["questions"] for name in names}


def add_up(count, names):
    """-> the named counts summed over all ranks."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sums = torch.tensor([float(count[name]) for name in names], dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    return dict(zip(names, sums.tolist(), strict=True))


# --- Log and save (rank 0) ----------------------------------------------------------
def say(text):
    """Prints on rank 0, above the progress bar."""
    if int(os.environ.get("RANK", "0")) == 0:
        tqdm.write(f"{time.strftime('%H:%M:%S')} {text}")
        sys.stdout.flush()


def log(file, record):
    """Appends a record to RUN_DIR/file, one JSON object a line."""
    if dist.get_rank() == 0:
        with open(Path(RUN_DIR, file), "a") as f:
            f.write(json.dumps(record) + "\n")


def rollout_metrics(count):
    """-> means over all that all ranks sampled for a rollout, flat groups included."""
    total = add_up(count, [*TALLY, *(f"reward_{name}" for name in REWARD_WEIGHTS)])
    n = total["completions"]
    names = [f"reward_{name}" for name in REWARD_WEIGHTS]
    rewards = {name: total[name] / n for name in names}
    return {
        "reward": sum(w * rewards[f"reward_{name}"] for name, w in REWARD_WEIGHTS.items()),
        **rewards,
        "accuracy": total["right"] / n,
        "completion_tokens": total["tokens"] / n,
        "truncated": total["truncated"] / n,
        "flat_groups": total["flat"] / total["groups"],
        "groups_sampled": int(total["groups"]),
        "tokens_sampled": int(total["tokens"]),
    }


def show(bar, metrics):
    """Moves the progress bar on, to a step's metrics."""
    bar.set_postfix_str(
        f"reward {metrics['reward']:+.2f} accuracy {metrics['accuracy']:.2f}"
        f" kl {metrics.get('kl', math.nan):.3f} length {metrics['completion_tokens']:.0f}"
        f" tokens/s {metrics['tokens_per_second']:.0f}",
        refresh=False,
    )
    bar.update()


def report(evaluation, step):
    """Logs and says an evaluation; -> its accuracy."""
    log("metrics.jsonl", {"step": step} | evaluation)
    say(f"step {step}: " + ", ".join(f"{k} {v:.3f}" for k, v in evaluation.items()))
    return evaluation["eval_accuracy"]


def log_samples(policy, prompts, groups, step):
    """Writes SAMPLES_PER_STEP completions of one of the step's groups to samples.jsonl."""
    if not groups or dist.get_rank() != 0:
        return
    group = groups[step % len(groups)]
    item = next(item for index, item, _ in prompts if index == group.item)
    completions = group.completions(group.completion_ids)
    advantages = advantages_of(group)
    for i in range(min(SAMPLES_PER_STEP, len(completions))):
        record = {
            "step": step,
            "question": item["question"],
            "answer": item.get("answer"),
            "completion": policy.tokenizer.decode(completions[i]),
            "rewards": dict(zip(group.reward_names, group.rewards[i].tolist(), strict=True)),
            "advantage": advantages[i].item(),
            "truncated": group.truncated[i].item(),
        }
        log("samples.jsonl", record)


def save(policy, step):
    """Saves RUN_DIR/step_N and deletes all but the newest KEEP_CHECKPOINTS; -> step."""
    if dist.get_rank() == 0:
        policy.save(Path(RUN_DIR, f"step_{step:06d}"))
        for old in sorted(Path(RUN_DIR).glob("step_*"))[:-KEEP_CHECKPOINTS]:
            shutil.rmtree(old)
        say(f"saved {RUN_DIR}/step_{step:06d}")
    return step


# --- Main ---------------------------------------------------------------------------
def main():
    check_config()
    task, tokenizer = load_task(), load_tokenizer(MODEL)
    train = load_prompts(task, "train", tokenizer)
    test = load_prompts(task, EVAL_SPLIT, tokenizer)[:EVAL_QUESTIONS]
    server = RefServer(REF_SERVER, WAIT_LIMIT_SECONDS) if KL_BETA else None
    facts = tokenizer_facts(tokenizer) | {"temperature": TEMPERATURE}
    reference = server.check(MODEL, facts) if server else None
    policy = load_policy(MODEL, tokenizer, DTYPE, STOP_TOKENS, LORA_RANK)
    policy.check_context(MAX_PROMPT_TOKENS, MAX_COMPLETION_TOKENS)
    say(f"{MODEL} in {policy.dtype}; completions end at {policy.stops()}")
    engine = start_engine(policy)
    rank, world = dist.get_rank(), dist.get_world_size()
    run = [f"{Path(RUN_DIR).name}-{uuid.uuid4().hex[:8]}"]
    dist.broadcast_object_list(run, src=0)  # rank 0's name for this run
    Path(RUN_DIR).mkdir(parents=True, exist_ok=True)
    stream = endless(train, rank, world)

    say(f"greedy evaluation on {len(test)} {EVAL_SPLIT} questions before training")
    accuracy, step, idle = report(evaluate(policy, task, test), 0), 0, 0
    saved, checked = None, False
    bar = tqdm(total=STEPS, unit="step", disable=rank != 0)
    while step < STEPS and accuracy < STOP_ACCURACY:
        groups, metrics = sample_step(policy, task, stream, server, run[0], step)
        log_samples(policy, train, groups, step + 1)
        rows, before = make_rows(groups), step
        idle = 0 if rows else idle + 1
        if not rows:
            say(f"step {step + 1} trains nothing: all flat or truncated ({idle} in a row)")
        for n in range(min(UPDATES_PER_ROLLOUT, STEPS - step) if rows else 1):
            started, step = time.perf_counter(), step + 1
            update = optimise(engine, rows, policy.vocab_size, step) if rows else {}
            if rows and not checked:
                check_first_update(update, policy.dtype, reference)
                checked = True
            update["seconds_train"] = time.perf_counter() - started
            log("metrics.jsonl", {"step": step} | (metrics if n == 0 else {}) | update)
            show(bar, metrics | update)
        if server and rank == 0:
            server.call("POST", "/ack", json={"run": run[0], "ids": [g.id for g in groups]})
        if step // EVAL_STEPS > before // EVAL_STEPS or step == STEPS:
            accuracy = report(evaluate(policy, task, test), step)
        if step // SAVE_STEPS > before // SAVE_STEPS:
            saved = save(policy, step)
        if idle == IDLE_LIMIT:
            break
    bar.close()
    if saved != step:
        save(policy, step)
    dist.destroy_process_group()
    if idle == IDLE_LIMIT:
        raise SystemExit(f"nothing to train for {idle} steps: is {TASK} too easy, or too hard?")


if __name__ == "__main__":
    main()
