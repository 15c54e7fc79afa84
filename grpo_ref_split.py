"""GRPO under DeepSpeed ZeRO-2, with the reference model in another process (ref_server.py).

    CUDA_VISIBLE_DEVICES=7 python ref_server.py                           # first, on one GPU
    CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6 deepspeed grpo_ref_split.py        # then, on the others
    deepspeed --num_gpus 1 grpo_ref_split.py                              # one GPU, or a CPU

Edit the constants below. A preset is a Python file that imports this one, sets its constants and calls
main(); demo.py is an example. The file reads in the order in which data flows: sample a group of
completions for each prompt, reward them, upload, fetch with reference log-probs, advantages, loss,
step, evaluate, log, save.

GRPO (DeepSeekMath, arXiv 2402.03300, eq. 3) needs no value network: a completion's advantage is its
reward, centred and scaled within the G completions of its prompt. Where we deviate from the paper:
  - every mean is taken over the whole step, all ranks and micro-batches, never over a micro-batch;
  - the log-probs of the first of UPDATES_PER_ROLLOUT updates serve as the old ones (ratio exactly 1),
    as they come for free; the sampler's own travel along and must agree with them;
  - groups without spread in correctness are left out and replaced (DAPO, arXiv 2503.14476, sec. 3.2).

Symbols: B sequences of a micro-batch, G completions of a group, P prompt tokens, T completion tokens,
N unmasked completion tokens, V ids of the tokenizer. A `step` is one optimiser update.
"""

import importlib
import itertools
import json
import math
import os
import random
import shutil
import sys
import time
import uuid
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ref_server import completion_logits, pack_by_tokens, token_logps
from sampler import sample_groups
from wire import Group, RefServer, pack_group, tokenizer_facts, unpack_group

# --- What to train ------------------------------------------------------------------
MODEL = "Qwen/Qwen2.5-3B"  # any AutoModelForCausalLM: hub name or folder
TASK = "gsm8k"  # tasks/gsm8k.py: data, prompt and rewards; copy it to make your own
RUN_DIR = "runs/gsm8k"  # checkpoints, metrics.jsonl, samples.jsonl; must not hold a run already
REF_SERVER = "http://127.0.0.1:59875"  # on another machine: its address, and GRPO_TOKEN on both

# --- Rollouts -----------------------------------------------------------------------
PROMPTS_PER_STEP = 16  # over all ranks; a step trains PROMPTS_PER_STEP x GROUP_SIZE sequences
GROUP_SIZE = 8  # G: completions per prompt; advantages are normalised within the group
MAX_PROMPT_TOKENS = 512  # longer prompts are left out, and counted at the start
MAX_COMPLETION_TOKENS = 512  # longer ones are cut, and their last token is then not EOS
TEMPERATURE = 1.0  # for sampling and for every log-prob; ref_server.py must agree
SAMPLE_BATCH = 64  # completions sampled at once by a rank: more is faster, and holds more KV cache
MASK_TRUNCATED = True  # cut completions count in the baseline, but their tokens are not trained
SKIP_FLAT_GROUPS = True  # leave out groups that are all right or all wrong, and sample others
MAX_REFILLS = 4  # rounds of such sampling in a step; after that the step makes do with fewer groups
REWARD_WEIGHTS = {
    "correctness": 2.0,
    "format": 1.0,
}  # a right answer in the wrong format (+1) beats
# a wrong one in the right format (-0.75); at simple_GRPO's scale (1, 1) it does not (0 < 0.25)
OUTCOME = "correctness"  # the reward that says right (> 0) or wrong: accuracy, and what is flat

# --- Loss ---------------------------------------------------------------------------
LOSS_TYPE = "grpo"  # token weights: grpo (mean per sequence), dapo (per token), dr_grpo (constant)
ADVANTAGE_STD = (
    True  # False: centre only (Dr. GRPO, arXiv 2503.20783), no bias to easy/hard prompts
)
CLIP_LOW = 0.2  # the ratio's gradient stops below 1 - CLIP_LOW ...
CLIP_HIGH = 0.2  # ... and above 1 + CLIP_HIGH; 0.28 leaves rare tokens more room (DAPO)
KL_BETA = 0.04  # weight of the KL to the reference; 0 needs no reference and no server
UPDATES_PER_ROLLOUT = 1  # mu: optimiser updates on each rollout; clipping acts from the second on

# --- Optimisation -------------------------------------------------------------------
STEPS = 500
LEARNING_RATE = 1e-6
WARMUP_STEPS = 10  # linear from 0
FINAL_LR = 1.0  # linear decay to this fraction of LEARNING_RATE at the last step; 1 is constant
ADAM_BETAS = (0.9, 0.99)
WEIGHT_DECAY = 0.0
MAX_GRAD_NORM = 1.0  # gradient clipping by global norm
SEED = 0

# --- Memory: lower these first when out of memory -----------------------------------
MICRO_BATCH_TOKENS = 8_192  # padded tokens per forward/backward; does not change the gradient
GRADIENT_CHECKPOINTING = True  # recomputes activations in the backward: a third slower, far smaller
OFFLOAD_OPTIMIZER = False  # Adam states in CPU memory (DeepSpeedCPUAdam, compiled at first use)
DTYPE = "auto"  # "bfloat16" on GPUs (float32 master weights), "float32" on CPUs

# --- Run ----------------------------------------------------------------------------
EVAL_STEPS = 50  # greedy accuracy at step 0, every so many steps, and at the end
EVAL_SPLIT = "test"
EVAL_QUESTIONS = 512  # the first so many of the split
STOP_ACCURACY = 1.01  # stop when an evaluation reaches this; above 1 means never
SAVE_STEPS = 100
KEEP_CHECKPOINTS = 2  # the newest; older ones are deleted
SAMPLES_PER_STEP = 2  # completions of one group written to samples.jsonl each step
WAIT_LIMIT_SECONDS = 600  # for the reference server, after which the run ends with an error


def check_config():
    """Raises SystemExit with a sentence for each constant that can't be, before anything heavy."""
    rules = [
        (GROUP_SIZE >= 2, f"GROUP_SIZE = {GROUP_SIZE}: a group needs 2 or more to be compared"),
        (PROMPTS_PER_STEP >= 1, f"PROMPTS_PER_STEP = {PROMPTS_PER_STEP}: 1 or more"),
        (SAMPLE_BATCH >= 1, f"SAMPLE_BATCH = {SAMPLE_BATCH}: 1 or more"),
        (TEMPERATURE > 0, f"TEMPERATURE = {TEMPERATURE}: above 0, greedy groups are all equal"),
        (LOSS_TYPE in LOSS_TYPES, f"LOSS_TYPE = {LOSS_TYPE!r}: one of {', '.join(LOSS_TYPES)}"),
        (0 < CLIP_LOW < 1 and CLIP_HIGH > 0, "CLIP_LOW must lie in (0, 1), CLIP_HIGH above 0"),
        (KL_BETA >= 0, f"KL_BETA = {KL_BETA}: 0 (no reference) or more"),
        (UPDATES_PER_ROLLOUT >= 1, f"UPDATES_PER_ROLLOUT = {UPDATES_PER_ROLLOUT}: 1 or more"),
        (MAX_PROMPT_TOKENS >= 1, f"MAX_PROMPT_TOKENS = {MAX_PROMPT_TOKENS}: 1 or more"),
        (MAX_COMPLETION_TOKENS >= 1, f"MAX_COMPLETION_TOKENS = {MAX_COMPLETION_TOKENS}: >= 1"),
        (MICRO_BATCH_TOKENS >= 1, f"MICRO_BATCH_TOKENS = {MICRO_BATCH_TOKENS}: 1 or more"),
        (STEPS >= 1 and SAVE_STEPS >= 1, "STEPS and SAVE_STEPS must be 1 or more"),
        (
            EVAL_STEPS >= 1,
            f"EVAL_STEPS = {EVAL_STEPS}: 1 or more; above STEPS: only first and last",
        ),
        (KEEP_CHECKPOINTS >= 1, f"KEEP_CHECKPOINTS = {KEEP_CHECKPOINTS}: 1 or more"),
        (OUTCOME in REWARD_WEIGHTS, f"OUTCOME = {OUTCOME!r} is not a name in REWARD_WEIGHTS"),
        (DTYPE in ("auto", "bfloat16", "float32"), f"DTYPE = {DTYPE!r}: auto, bfloat16 or float32"),
        (
            not Path(RUN_DIR, "metrics.jsonl").exists(),
            f"RUN_DIR = {RUN_DIR!r} holds a run: choose another, or move that one away",
        ),
    ]
    broken = [sentence for holds, sentence in rules if not holds]
    if broken:
        raise SystemExit("\n".join(broken))


# --- Policy and data ----------------------------------------------------------------
@dataclass
class Policy:
    """What it takes to sample from the model that is being trained."""

    model: torch.nn.Module
    tokenizer: object
    eos_ids: set[int]
    vocab_size: int  # ids of the tokenizer; the embedding may be padded beyond them


def load_policy(tokenizer):
    """-> (engine, policy): DeepSpeed's engine round the model, and the means to sample from it."""
    import deepspeed  # takes seconds; the tests of this file's functions do without

    # DeepSpeed would compile an all-reduce for CPU inference here, for a minute, with a compiler that
    # may not be there. Training has no use for it. Other versions may compile: say what the wait is.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    say("starting DeepSpeed; if it compiles an op of its own now, that takes about a minute, once")
    deepspeed.init_distributed()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dtype = {True: "bfloat16", False: "float32"}[cuda] if DTYPE == "auto" else DTYPE

    say(f"loading the policy {MODEL} in {dtype}")
    config = AutoConfig.from_pretrained(MODEL)
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)  # GPT-2 ships 0.1: the ratio would be noise
    model = AutoModelForCausalLM.from_pretrained(MODEL, config=config, dtype=getattr(torch, dtype))
    model = model.to("cuda" if cuda else "cpu")
    stops = [tokenizer.eos_token_id, model.generation_config.eos_token_id]
    eos_ids = {i for ids in stops for i in (ids if isinstance(ids, list) else [ids])} - {None}
    policy = Policy(model, tokenizer, eos_ids, tokenizer_facts(tokenizer)["vocab_size"])
    check_model(policy)

    if GRADIENT_CHECKPOINTING:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    settings = {"lr": LEARNING_RATE, "betas": ADAM_BETAS, "weight_decay": WEIGHT_DECAY}
    if OFFLOAD_OPTIMIZER:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer = DeepSpeedCPUAdam(model.parameters(), **settings)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), fused=cuda, **settings)
    config = deepspeed_config(dtype)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine, policy


def deepspeed_config(dtype):
    """The ZeRO-2 settings; accumulate() says itself where a step's accumulation ends."""
    zero = {"stage": 2, "contiguous_gradients": True, "reduce_bucket_size": 50_000_000}
    if OFFLOAD_OPTIMIZER:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,  # a formality: micro-batches are made by tokens
        "gradient_accumulation_steps": 1,
        "zero_optimization": zero,
        "gradient_clipping": MAX_GRAD_NORM,
        "bf16": {"enabled": dtype == "bfloat16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "wall_clock_breakdown": False,
        "steps_per_print": 10**9,
    }


def check_model(policy):
    """Raises SystemExit when the model can't do what the constants ask of it."""
    if not policy.eos_ids:
        raise SystemExit(f"{MODEL} names no EOS token: its completions would never end")
    rows = policy.model.get_input_embeddings().weight.shape[0]
    if rows < policy.vocab_size:
        raise SystemExit(
            f"{MODEL} embeds {rows} ids and its tokenizer has {policy.vocab_size}: a wrong pair"
        )
    longest = MAX_PROMPT_TOKENS + MAX_COMPLETION_TOKENS
    context = getattr(policy.model.config, "max_position_embeddings", None)
    if context is not None and longest > context:
        raise SystemExit(
            f"MAX_PROMPT_TOKENS + MAX_COMPLETION_TOKENS = {longest} exceeds the context of {context}"
            f" tokens of {MODEL}: lower one of them"
        )


def load_prompts(task, split, tokenizer):
    """-> [(index, item, prompt_ids)] of the split, without prompts over MAX_PROMPT_TOKENS."""
    items, prompts = task.load(split), []
    for index, item in enumerate(items):
        messages = task.messages(item["question"])
        if tokenizer.chat_template:
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]  # they are in the template
        else:
            ids = tokenizer("\n\n".join(m["content"] for m in messages) + "\n")["input_ids"]
        if len(ids) <= MAX_PROMPT_TOKENS:
            prompts.append((index, item, ids))
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
def sample_and_reward(policy, task, prompts, *, group_size, temperature, generator):
    """-> [(prompt, completions, rewards)] for prompts as load_prompts gives them.

    `rewards` holds, for each completion, the task's dict of named rewards. The task sees text; the
    trainer goes on with the sampled ids, as text tokenised again may give other ids than the sampled.
    """
    policy.model.eval()  # gradient checkpointing would do without the cache
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
        rewards = [task.rewards(prompt[1], completion_text(policy, c)) for c in completions]
        for r in rewards:
            if r.keys() != REWARD_WEIGHTS.keys():
                raise SystemExit(f"{TASK} rewards {sorted(r)}, but REWARD_WEIGHTS has other names")
        rewarded.append((prompt, completions, rewards))
    return rewarded


def completion_text(policy, completion):
    """-> the completion's text, without the EOS that ended it."""
    ids = completion.ids if completion.truncated else completion.ids[:-1]
    return policy.tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def rollout(policy, task, stream, hand_on, *, share, generator):
    """Samples until `share` groups worth training were given to `hand_on`; -> counts of all sampled.

    Flat groups (all right, or all wrong) have nothing to compare: judged on OUTCOME, since a group
    that is all wrong would otherwise train its format alone, at full size. They are replaced by
    sampling more, for at most MAX_REFILLS rounds.
    """
    count, kept = Counter(), 0
    for _ in range(1 + MAX_REFILLS):
        missing, at_once = share - kept, max(1, SAMPLE_BATCH // GROUP_SIZE)
        for size in [at_once] * (missing // at_once) + [missing % at_once]:
            prompts = list(itertools.islice(stream, size))
            groups = (
                sample_and_reward(
                    policy,
                    task,
                    prompts,
                    group_size=GROUP_SIZE,
                    temperature=TEMPERATURE,
                    generator=generator,
                )
                if prompts
                else []
            )
            for group in groups:
                flat = is_flat([r[OUTCOME] for r in group[2]])
                count.update(tally(group, flat))
                if not (flat and SKIP_FLAT_GROUPS):
                    hand_on(group, kept)
                    kept += 1
    return count


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


def make_group(group, *, id, run, step):
    """-> the wire's Group of a sampled one."""
    (item, _, prompt_ids), completions, rewards = group
    names = list(REWARD_WEIGHTS)
    return Group(
        id=id,
        run=run,
        policy_version=step,
        item=item,
        reward_names=names,
        prompt_ids=torch.tensor(prompt_ids, dtype=torch.int32),
        completion_ids=torch.tensor([i for c in completions for i in c.ids], dtype=torch.int32),
        completion_lengths=torch.tensor([len(c.ids) for c in completions], dtype=torch.int32),
        sampler_logps=torch.tensor([p for c in completions for p in c.logps]),
        truncated=torch.tensor([c.truncated for c in completions]),
        rewards=torch.tensor([[float(r[name]) for name in names] for r in rewards]),
    )


# --- Exchange ---------------------------------------------------------------------
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


# --- Advantages and weights ---------------------------------------------------------
def group_advantages(rewards):
    """-> advantages (G,) of one group's weighted rewards (G,): centred, and scaled by their std.

    DeepSeekMath sec. 4.1.2; without the std it is Dr. GRPO's. The 1e-4 only keeps an all-equal group
    finite (its advantages are 0). Example: [1, 0, 0, 1] -> [0.866, -0.866, -0.866, 0.866]
    """
    centred = rewards - rewards.mean()
    return centred / (rewards.std() + 1e-4) if ADVANTAGE_STD else centred


def token_weights(lengths, *, loss_type, sequences, tokens, max_completion_tokens):
    """-> for each sequence, the weight of each of its tokens in the loss, float32 (B,).

    `lengths` (B,) are the trained tokens of each; `sequences` counts all of the step, also the masked,
    `tokens` the trained tokens of the step: over all ranks and micro-batches, so that the gradient
    does not depend on how the step is cut up. Each loss type is a row of LOSS_TYPES.
    """
    weights = LOSS_TYPES[loss_type](lengths.float(), sequences, tokens, max_completion_tokens)
    return torch.as_tensor(weights, dtype=torch.float32).expand(len(lengths))


LOSS_TYPES = {
    # the mean over sequences of the mean over tokens (DeepSeekMath eq. 3): favours short answers
    "grpo": lambda lengths, sequences, tokens, longest: 1 / (sequences * lengths.clamp(min=1)),
    # the mean over all tokens of the step (DAPO eq. 8): a token counts the same in any sequence
    "dapo": lambda lengths, sequences, tokens, longest: 1 / max(tokens, 1),
    # a constant (Dr. GRPO): no length in it at all
    "dr_grpo": lambda lengths, sequences, tokens, longest: 1 / (sequences * longest),
}


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


def make_rows(groups):
    """-> the rows of a step's groups, with their weights; truncated ones left out if MASK_TRUNCATED.

    A truncated completion still counts in its group's mean, and in the number of sequences.
    """
    rows, scale = [], torch.tensor(list(REWARD_WEIGHTS.values()))
    for group in groups:
        advantages = group_advantages(group.rewards @ scale).tolist()
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


def plan_micro_batches(lengths, world, budget):
    """-> for each rank a list of micro-batches (lists of row numbers), equally many for each rank.

    Rows are dealt out by length, so ranks get about the same work. ZeRO-2 communicates in every
    backward: a rank with fewer micro-batches would hang the others, so it gets empty ones on top.
    Example: [5, 9, 7], 2 ranks, budget 9 -> [[[1], [0]], [[2], []]]
    """
    longest_first = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    plans = []
    for rank in range(world):
        mine = longest_first[rank::world]
        batches = pack_by_tokens([lengths[row] for row in mine], budget)
        plans.append([[mine[i] for i in batch] for batch in batches])
    most = max(map(len, plans))
    return [plan + [[]] * (most - len(plan)) for plan in plans]


# --- Loss ---------------------------------------------------------------------------
def grpo_loss(logps, old_logps, ref_logps, advantages, weights, *, clip_low, clip_high, kl_beta):
    """-> (loss, stats): minus the weighted sum of the GRPO objective over N tokens.

    For a token with ratio r = exp(logp - old_logp), advantage A and weight w it is
    w * (min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) - kl_beta * k3), with
    k3 = exp(ref - logp) - (ref - logp) - 1, an estimate of KL(policy || reference) that is never
    negative (DeepSeekMath eq. 3 and 4). All tensors are float32 (N,); `ref_logps` may be None if
    kl_beta is 0. Gradients flow through `logps` alone. `stats` has detached (N,) tensors.
    """
    ratio = torch.exp(logps - old_logps)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    # The smaller of the two: a step that already went too far gets no more gradient (clipped), a step
    # that went the wrong way keeps its full gradient.
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    kl = torch.zeros_like(logps)
    if kl_beta:
        difference = ref_logps - logps
        kl = torch.exp(difference) - difference - 1
        objective = objective - kl_beta * kl
    stats = {
        "ratio": ratio.detach(),
        "kl": kl.detach(),
        "clip_low": (ratio.detach() < 1 - clip_low) & (advantages < 0),
        "clip_high": (ratio.detach() > 1 + clip_high) & (advantages > 0),
    }
    return -(weights * objective).sum(), stats


FIRST_UPDATE_NOISE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}  # mean |log-prob| difference
SUMS = ("loss", "tokens", "ratio", "kl", "clip_low", "clip_high", "mismatch", "entropy")


def micro_batch_loss(model, rows, vocab_size):
    """-> (loss, sums): the rows' part of the step's loss, and sums of SUMS over their tokens."""
    logits, targets = completion_logits(
        model, [row.prompt for row in rows], [row.completion for row in rows]
    )
    logps = token_logps(logits, targets, temperature=TEMPERATURE, vocab_size=vocab_size)  # (N,)
    lengths = torch.tensor([len(row.completion) for row in rows])

    def spread(values):  # one for each row -> one for each of its tokens
        return torch.tensor(values).repeat_interleave(lengths).to(logps.device)

    def joined(parts):
        return torch.cat(parts).to(logps.device)

    if rows[0].old_logps is None:  # the first update: the old policy is this one, no second forward
        old_logps = logps.detach()
        for row, part in zip(rows, old_logps.cpu().split(lengths.tolist()), strict=True):
            row.old_logps = part
    else:
        old_logps = joined([row.old_logps for row in rows])
    loss, stats = grpo_loss(
        logps,
        old_logps,
        joined([row.ref_logps for row in rows]) if KL_BETA else None,
        spread([row.advantage for row in rows]),
        spread([row.weight for row in rows]),
        clip_low=CLIP_LOW,
        clip_high=CLIP_HIGH,
        kl_beta=KL_BETA,
    )
    stats["mismatch"] = (logps.detach() - joined([row.sampler_logps for row in rows])).abs()
    stats["entropy"] = token_entropy(logits.detach(), vocab_size)
    stats |= {"loss": loss.detach()[None], "tokens": torch.ones_like(targets)}
    sums = torch.stack([stats[name].sum().double() for name in SUMS])
    return loss, sums, stats["mismatch"].max()


@torch.no_grad()
def token_entropy(logits, vocab_size):
    """-> entropy in nats of the sampling distribution at each token, (N,)."""
    entropies = []
    for slab in logits[:, :vocab_size].split(1024):  # float32 copies of a slab at a time
        log_probs = torch.log_softmax(slab.float() / TEMPERATURE, dim=-1)
        entropies.append(-(log_probs.exp() * log_probs).sum(-1))
    return torch.cat(entropies)


# --- Step ---------------------------------------------------------------------------
def learning_rate(step):
    """-> the rate of update number `step` (from 1): linear warm-up, then linear decay to FINAL_LR."""
    warm = min(1.0, step / max(WARMUP_STEPS, 1))
    done = max(0, step - WARMUP_STEPS) / max(1, STEPS - WARMUP_STEPS)
    return LEARNING_RATE * warm * (1 - (1 - FINAL_LR) * done)


def accumulate(engine, rows, vocab_size):
    """Runs this rank's micro-batches forward and backward; -> the step's means over all ranks.

    The weights already divide by the whole step's counts, so parts add up: to gradients that are the
    same for 1 x 8 micro-batches, 8 x 1 and 2 ranks x 4.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    lengths = [len(row.prompt) + len(row.completion) for row in rows]
    plan = plan_micro_batches(lengths, world, MICRO_BATCH_TOKENS)[rank]
    sums = torch.zeros(len(SUMS), dtype=torch.float64, device=engine.device)
    worst = torch.zeros(1, device=engine.device)
    engine.train()  # for gradient checkpointing; there is no dropout
    for number, batch in enumerate(plan, 1):
        engine.set_gradient_accumulation_boundary(number == len(plan))
        loss, parts, mismatch = micro_batch_loss(
            engine, [rows[i] for i in batch or [0]], vocab_size
        )
        if batch:
            sums, worst = sums + parts, torch.maximum(worst, mismatch)
        else:
            loss = loss * 0  # an empty micro-batch: only takes part in the communication
        engine.backward(loss * world)  # ZeRO-2 takes the mean over ranks; we want the sum
    dist.all_reduce(sums)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    means = dict(zip(SUMS, sums.tolist(), strict=True))
    loss, tokens = means.pop("loss"), means.pop("tokens")
    return (
        {"loss": loss} | {k: v / tokens for k, v in means.items()} | {"mismatch_max": worst.item()}
    )


def optimise(engine, rows, vocab_size, step):
    """One optimiser update on the step's rows; -> its metrics. Raises RuntimeError if not finite."""
    for group in engine.optimizer.param_groups:
        group["lr"] = learning_rate(step)
    metrics = accumulate(engine, rows, vocab_size)
    if math.isfinite(metrics["loss"]):
        engine.step()
        metrics["grad_norm"] = float(engine.get_global_grad_norm())
    metrics["learning_rate"] = learning_rate(step)
    if not math.isfinite(metrics["loss"]) or not math.isfinite(metrics["grad_norm"]):
        path = Path(RUN_DIR, f"bad_step_{step:06d}.pt")
        if dist.get_rank() == 0:
            torch.save([asdict(row) for row in rows], path)
        raise RuntimeError(f"step {step} is not finite: {metrics}; its rows are kept in {path}")
    return metrics


def check_first_update(metrics, dtype, same_reference):
    """Raises RuntimeError unless the first update is what theory says: ratio 1, KL 0.

    At the first update trainer, sampler and reference hold the same weights. Their log-probs differ
    by rounding alone: FIRST_UPDATE_NOISE, a generous multiple of what was measured. More means that
    they do not compute the same thing (temperature, dropout, attention, wrong weights).
    """
    limit = FIRST_UPDATE_NOISE[dtype]
    if metrics["mismatch"] > limit:
        raise RuntimeError(
            f"at the first update the trainer's log-probs differ from the sampler's by"
            f" {metrics['mismatch']:.2g} a token on average (limit {limit}): the ratio is not 1"
        )
    if same_reference and metrics["kl"] > limit:
        raise RuntimeError(
            f"at the first update the KL to the reference is {metrics['kl']:.2g} a token (limit"
            f" {limit}) and should be 0: does ref_server.py serve the weights of {MODEL}?"
        )


# --- Evaluate -----------------------------------------------------------------------
def evaluate(policy, task, prompts):
    """-> greedy accuracy (OUTCOME > 0), and the positive share of each reward, over all ranks.

    The rewards find the answer without asking for the format, so accuracy does not rise by tags alone.
    """
    count, mine = Counter(), prompts[dist.get_rank() :: dist.get_world_size()]
    for i in range(0, len(mine), SAMPLE_BATCH):
        for _, completions, rewards in sample_and_reward(
            policy, task, mine[i : i + SAMPLE_BATCH], group_size=1, temperature=0, generator=None
        ):
            count["questions"] += 1
            count["truncated"] += completions[0].truncated
            count["tokens"] += len(completions[0].ids)
            count["accuracy"] += rewards[0][OUTCOME] > 0
            count.update({name: int(value > 0) for name, value in rewards[0].items()})
    names = ["accuracy", *REWARD_WEIGHTS, "truncated", "tokens"]
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


def show(bar, metrics, seconds):
    """Logs a step's metrics, and moves the progress bar on."""
    metrics |= {"seconds": seconds, "tokens_per_second": metrics["tokens_sampled"] / seconds}
    log("metrics.jsonl", metrics)
    bar.set_postfix_str(
        f"reward {metrics['reward']:+.2f} accuracy {metrics['accuracy']:.2f}"
        f" kl {metrics.get('kl', 0):.3f} length {metrics['completion_tokens']:.0f}"
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
    advantages = group_advantages(group.rewards @ torch.tensor(list(REWARD_WEIGHTS.values())))
    for i in range(min(SAMPLES_PER_STEP, len(completions))):
        record = {
            "step": step,
            "question": item["question"],
            "answer": item["answer"],
            "completion": policy.tokenizer.decode(completions[i]),
            "rewards": dict(zip(group.reward_names, group.rewards[i].tolist(), strict=True)),
            "advantage": advantages[i].item(),
            "truncated": group.truncated[i].item(),
        }
        log("samples.jsonl", record)


def save(policy, step):
    """Writes RUN_DIR/step_N in Hugging Face format, whole or not at all; deletes the oldest."""
    if dist.get_rank() != 0:
        return
    final, draft = Path(RUN_DIR, f"step_{step:06d}"), Path(RUN_DIR, ".unfinished")
    shutil.rmtree(draft, ignore_errors=True)
    policy.model.save_pretrained(draft)
    policy.tokenizer.save_pretrained(draft)
    draft.rename(final)
    for old in sorted(Path(RUN_DIR).glob("step_*"))[:-KEEP_CHECKPOINTS]:
        shutil.rmtree(old)
    say(f"saved {final}")


# --- Main ---------------------------------------------------------------------------
def main():
    check_config()
    task = importlib.import_module(f"tasks.{TASK}")
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    train = load_prompts(task, "train", tokenizer)
    test = load_prompts(task, EVAL_SPLIT, tokenizer)[:EVAL_QUESTIONS]
    server = RefServer(REF_SERVER, WAIT_LIMIT_SECONDS) if KL_BETA else None
    facts = tokenizer_facts(tokenizer) | {"temperature": TEMPERATURE}
    same_reference = server and server.check(MODEL, facts)["model"] == MODEL
    engine, policy = load_policy(tokenizer)
    rank, world = dist.get_rank(), dist.get_world_size()
    run = [f"{Path(RUN_DIR).name}-{uuid.uuid4().hex[:8]}"]
    dist.broadcast_object_list(run, src=0)  # rank 0's name for this run
    Path(RUN_DIR).mkdir(parents=True, exist_ok=True)

    stream = endless(train, rank, world)
    share = PROMPTS_PER_STEP // world + (rank < PROMPTS_PER_STEP % world)
    generator = torch.Generator(device=policy.model.device)
    say(f"greedy evaluation on {len(test)} {EVAL_SPLIT} questions before training")
    accuracy, step, saved, checked = report(evaluate(policy, task, test), 0), 0, 0, False
    bar = tqdm(total=STEPS, unit="step", disable=rank != 0)
    while step < STEPS and accuracy < STOP_ACCURACY:
        mine, start = [], time.perf_counter()

        def hand_on(group, number, step=step, mine=mine):
            id = f"{step:06d}-{rank:04d}-{number:04d}"
            body = pack_group(make_group(group, id=id, run=run[0], step=step))
            if server:
                server.call("POST", "/upload", data=body)
            mine.append(id if server else body)

        generator.manual_seed((SEED * 1_000_003 + step) * 4096 + rank)  # of the step, for reruns
        count = rollout(policy, task, stream, hand_on, share=share, generator=generator)
        sampled = time.perf_counter()
        groups = exchange(mine, server, run[0])
        metrics = rollout_metrics(count)
        metrics["seconds_sample"] = sampled - start
        metrics["seconds_wait"] = time.perf_counter() - sampled
        log_samples(policy, train, groups, step + 1)
        rows = make_rows(groups)
        for _ in range(UPDATES_PER_ROLLOUT):
            step, updated = step + 1, time.perf_counter()
            update = optimise(engine, rows, policy.vocab_size, step) if rows else {}
            if rows and not checked:
                check_first_update(update, policy.model.dtype, same_reference)
                checked = True
            update["seconds_train"] = time.perf_counter() - updated
            show(bar, {"step": step} | metrics | update, time.perf_counter() - start)
            if step % EVAL_STEPS == 0 or step == STEPS:
                accuracy = report(evaluate(policy, task, test), step)
            if step % SAVE_STEPS == 0:
                save(policy, step)
                saved = step
        if server and rank == 0:
            server.call("POST", "/ack", json={"run": run[0], "ids": [g.id for g in groups]})
    if saved != step:
        save(policy, step)
    bar.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
