"""GRPO under DeepSpeed ZeRO-2, with the reference model in another process (ref_server.py).

    CUDA_VISIBLE_DEVICES=7 python ref_server.py                           # first, on one GPU
    CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6 deepspeed grpo_ref_split.py        # then, on the others
    python grpo_ref_split.py                                              # one GPU, or a CPU
    python grpo_ref_split.py worker        # anywhere else: samples for the trainer (PUBLISH_STEPS)

Edit the constants below. A preset is a Python file that imports this one, sets its constants and
calls main(); demo.py is an example. The file reads in the order in which data flows: a rollout
(sampling, rewards: rollout.py), upload, fetch with reference log-probs, advantages, loss, step;
report.py evaluates and logs, checkpoint.py saves.

GRPO (DeepSeekMath, arXiv 2402.03300, eq. 3) needs no value network: a completion's advantage is its
reward, centred and scaled within the G completions of its prompt. Where we deviate from the paper:
  - every mean is taken over the whole step, all ranks and micro-batches, never over a micro-batch;
  - the log-probs of the first of UPDATES_PER_ROLLOUT updates serve as the old ones (the ratio is
    exactly 1), as they come for free; the sampler's own travel along and must agree with them. What
    workers sampled is older, or computed otherwise: there the old log-probs are the sampler's;
  - groups without spread in correctness are left out and replaced (DAPO, 2503.14476, sec. 3.2).

Symbols: B sequences of a micro-batch, G completions of a group, P prompt and T completion tokens,
N completion tokens that are trained, V ids of the tokenizer. A `step` is one optimiser update, or
an attempt that found nothing to train.
"""

import math
import os
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace

# Before torch: on a CPU its threads else spin for long when they wait. Where another process wants
# the core, a step then takes ten times as long (benchmarks/results/wait_policy.md)
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
import torch.distributed as dist
from tqdm import tqdm

import grpo_loss_triton
from grpo import loss as grpo_loss
from grpo.client import RefServer
from grpo.constants import arguments, check_names, usage
from grpo.log import say
from grpo.loss import group_advantages, token_weights
from grpo.models import load_tokenizer
from grpo.proof import check_first_update, tilt_of
from grpo.sampling.policy import load_policy
from grpo.sampling.recipe import Recipe, check_rewards, load_prompts, load_task
from grpo.sampling.rollout import Stream, make_group, rollout, tally_of
from grpo.sampling.upload import Uploader
from grpo.stop import stop
from grpo.training import checkpoint
from grpo.training.checkpoint import check_run_dir, leads, lock_run, open_run
from grpo.training.checks import check_constants, constants_of
from grpo.training.engine import join_ranks, start_engine, take_step, training_threads
from grpo.training.exchange import Exchange, all_ranks_groups, micro_batches
from grpo.training.liveness import Heartbeats, meet, watch_launcher
from grpo.training.metrics import (
    Clock,
    Page,
    RunFolder,
    any_rank,
    evaluate,
    rollout_metrics,
    say_parts,
    show,
    why_idle,
)
from grpo.training.publish import Followers
from grpo.wire import tokenizer_facts

# --- What to train ------------------------------------------------------------------
MODEL = "Qwen/Qwen2.5-3B"  # any AutoModelForCausalLM: hub name or folder
TASK = "gsm8k"  # tasks/gsm8k.py: data, prompt and rewards; copy it to make your own
RUN_DIR = "runs/gsm8k"  # checkpoints, metrics.jsonl, samples.jsonl; a run there goes on (RESUME)
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
IS_CAP = 2.0  # bounds what a token's probability may have grown by since it was sampled; 0: off
UPDATES_PER_ROLLOUT = 1  # mu: optimiser updates on each rollout; clipping acts from the second on

# --- Workers, and a reference that follows: 0 is off --------------------------------
PUBLISH_STEPS = 0  # 1: publish the policy every so many steps, for workers on other machines
TRAINER_SAMPLES = True  # the ranks sample what workers have not; False: workers alone sample
MAX_STALENESS = 4  # groups sampled by a policy more updates ago than this are dropped
RECOMPUTE_OLD_LOGPS = False  # of workers' groups: as of the first update, and weighed up to IS_CAP
REFERENCE_REFRESH_STEPS = 0  # make the policy the reference every so many steps (iterative GRPO)

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
OFFLOAD_OPTIMIZER = False  # master weights, Adam states and its step in CPU memory
CPU_THREADS = 0  # of forward and backward on a CPU; 0: the ranks' share of its cores, or one less
DTYPE = "auto"  # bfloat16 on a GPU (with float32 master weights), float32 on a CPU

# --- Run ----------------------------------------------------------------------------
EVAL_STEPS = 50  # greedy accuracy at step 0, every so many steps, and at the end
EVAL_SPLIT = "test"
EVAL_QUESTIONS = 512  # the first so many of the split
STOP_ACCURACY = (
    1.01  # stop when an evaluation reaches it; then report on questions not in EVAL_SPLIT
)
SAVE_STEPS = 100  # a checkpoint is the model, and 12 bytes a trained parameter to go on from it
KEEP_CHECKPOINTS = 2  # the newest; older ones are deleted
RESUME = True  # go on from RUN_DIR's newest checkpoint; False: RUN_DIR must not hold a run
SAMPLES_PER_STEP = 2  # completions of one group written to samples.jsonl each step
WAIT_LIMIT_SECONDS = 600  # without a sign of the server or another rank: then the run ends
REWARD_TIMEOUT_SECONDS = 60  # for the rewards of a group, after which the run ends with an error
MAX_BAD_STEPS = 5  # steps in a row with a gradient that is not finite: skipped, then the run ends
IDLE_LIMIT = 10  # steps in a row without anything to train, after which the run ends


# --- What is sampled ----------------------------------------------------------------
def load_split(task, split, tokenizer):
    """-> [(index, item, prompt_ids)] of the task's questions."""
    return load_prompts(TASK, task, split, tokenizer, MAX_PROMPT_TOKENS)


def make_recipe(task, prompts):
    """-> what is sampled and how it is rewarded, for this process and to compare with others'."""
    return Recipe(
        task_name=TASK,
        task=task,
        prompts=prompts,
        group_size=GROUP_SIZE,
        sample_batch=SAMPLE_BATCH,
        max_prompt_tokens=MAX_PROMPT_TOKENS,
        max_completion_tokens=MAX_COMPLETION_TOKENS,
        temperature=TEMPERATURE,
        reward_weights=REWARD_WEIGHTS,
        outcome=OUTCOME,
        skip_flat_groups=SKIP_FLAT_GROUPS,
        max_refills=MAX_REFILLS,
        seed=SEED,
        stop_tokens=STOP_TOKENS,
        reward_timeout_seconds=REWARD_TIMEOUT_SECONDS,
    )


# --- Rollout and exchange -----------------------------------------------------------
def rollout_step(policy, recipe, stream, exchange, run, step, clock):
    """-> (groups, metrics, flat): what all ranks will train after `step` updates; `flat` is [one]
    of the groups that this rank sampled and left out, to be looked at, or [].

    What workers have ready comes first; the ranks sample the rest, and upload it while they sample
    on. Their own groups come back without the reference's log-probs: those arrive in accumulate().
    """
    rank, world, server = dist.get_rank(), dist.get_world_size(), exchange and exchange.server
    theirs, mine, left_out, count, oldest = [], [], [], Counter(), step - MAX_STALENESS
    if PUBLISH_STEPS:
        with clock.part("wait"):
            wait = not TRAINER_SAMPLES
            theirs = exchange.workers_groups(PROMPTS_PER_STEP, step=step, oldest=oldest, wait=wait)
    missing = PROMPTS_PER_STEP - len(theirs) if TRAINER_SAMPLES else 0
    share = missing // world + (rank < missing % world)
    pools = bool(server and server.regroups)
    uploader = Uploader(server.twin()) if KL_BETA or pools else None
    seed, began = (SEED * 1_000_003 + step) * 4096 + rank, time.perf_counter()
    groups_of_rank = rollout(policy, recipe, stream, count, share=share, seed=seed)
    for number, (sampled, flat) in enumerate(groups_of_rank):
        names = {"id": f"{step:06d}-{rank:04d}-{number:04d}", "run": run, "version": step}
        names |= {"sampler": "trainer", "outcome": OUTCOME, "skipped": {}}  # flat: counted here
        group, of_use = make_group(sampled, **names), not (flat and SKIP_FLAT_GROUPS)
        if of_use:
            mine.append(group)
        else:
            left_out = [group]
        if pools if not of_use else KL_BETA:
            uploader.put(group, pool=not of_use, oldest=oldest)
    sampling = time.perf_counter() - began - count["seconds_reward"]
    clock.parts += Counter(sample=sampling, reward=count["seconds_reward"])
    with clock.part("wait"):
        ours = all_ranks_groups(mine, uploader, exchange, step=step, oldest=oldest, scored=KL_BETA)
    if rank == 0:  # the ranks have the same groups: counted once, with the flat ones left out
        for group in theirs:
            count.update(tally_of(recipe, group))
    groups = sorted(theirs + ours, key=lambda group: group.id)
    metrics = rollout_metrics(count, recipe)
    seconds = clock.parts["sample"] if share else clock.parts["wait"]  # waiting for workers
    metrics["tokens_per_second"] = metrics["tokens_sampled"] / max(seconds, 1e-9)
    if PUBLISH_STEPS:
        metrics |= exchange.staleness(groups, step)
    return groups, metrics, left_out


# --- Rows to train ---------------------------------------------------------
@dataclass
class Row:
    """One sequence to train."""

    group: str  # the id of its group
    number: int  # which of the group's completions it is
    prompt: list[int]
    completion: list[int]
    sampler_logps: torch.Tensor  # (T,)
    ref_logps: torch.Tensor | None  # (T,); None: not here yet, or there is no reference
    advantage: float
    weight: float = 0.0  # of each token
    old_logps: torch.Tensor | None = None  # (T,); None: those of the first update on the rollout


def advantages_of(group):
    """-> advantages (G,) of a group's weighted rewards."""
    assert group.reward_names == list(REWARD_WEIGHTS), group.reward_names
    weighted = group.rewards @ torch.tensor(list(REWARD_WEIGHTS.values()))
    return group_advantages(weighted, scale_by_std=ADVANTAGE_STD)


def make_rows(groups, step):
    """-> the rows of a step's groups, with weights; without the truncated if MASK_TRUNCATED.

    A truncated completion still counts in its group's mean, and in the number of sequences. If any
    group is older than `step`, or a worker's, the sampler's log-probs are the old ones for all.
    """
    rows = []
    ours = all(g.sampler == "trainer" and g.policy_version == step for g in groups)
    old_are_sampled = not (ours or RECOMPUTE_OLD_LOGPS)
    for group in groups:
        advantages = advantages_of(group).tolist()
        ids, logps = (group.completions(x) for x in (group.completion_ids, group.sampler_logps))
        there = KL_BETA and group.ref_logps is not None
        refs = group.completions(group.ref_logps) if there else [None] * len(ids)
        for i, truncated in enumerate(group.truncated.tolist()):
            if not (truncated and MASK_TRUNCATED):
                prompt, completion = group.prompt_ids.tolist(), ids[i].tolist()
                row = Row(group.id, i, prompt, completion, logps[i], refs[i], advantages[i])
                row.old_logps = logps[i] if old_are_sampled else None
                rows.append(row)
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
sum_names = ("loss", "tokens", "ratio", "kl", "clip_low", "clip_high", "mismatch", "entropy")
sum_names += ("sampler_ratio", "sampler_k3", "tilt", "surprise")


def micro_batch_loss(model, rows, vocab_size, *, scale, score=lambda: None):
    """-> (loss, sums, worst): `scale` times the rows' part of the step's loss; sums over their
    tokens, by sum_names; the largest difference to a sampler's log-prob, and ratio to its
    probability. `score` is called when the rows need the reference's log-probs: after the forward.
    """
    hidden, ids = model([row.prompt for row in rows], [row.completion for row in rows])
    score()
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
        # if the old log-probs are the sampler's that weight is 1, and the ratio itself is bounded
        ratio_cap=IS_CAP if rows[0].old_logps is rows[0].sampler_logps else 0.0,
        sequences=spread(list(range(len(rows)))) if RATIO_LEVEL == "sequence" else None,
    )
    if first:
        for row, part in zip(rows, stats["logps"].cpu().split(lengths.tolist()), strict=True):
            row.old_logps = part
    gap = stats["logps"] - sampler_logps
    stats |= {"mismatch": gap.abs(), "sampler_ratio": gap.exp(), "sampler_k3": gap.expm1() - gap}
    # A sampler at (1 + x) times the temperature finds log-probs that are x (logp + entropy) off, to
    # first order: x is the slope of the gap on that, from which noise, however large, averages out
    surprise = stats["logps"] + stats["entropy"]
    stats |= {"tilt": gap * surprise, "surprise": surprise**2}
    stats |= {"loss": loss.detach()[None] / scale, "tokens": torch.ones_like(ids)}
    sums = torch.stack([stats[name].sum().double() for name in sum_names])
    return loss, sums, torch.stack([stats["mismatch"].max(), stats["sampler_ratio"].max()])


# --- Step ---------------------------------------------------------------------------
def make_engine(policy):
    """-> DeepSpeed's engine round the policy; see engine.py."""
    if policy.model.device.type == "cpu":
        threads = training_threads(CPU_THREADS)
        say(f"on a CPU: {threads} threads of each rank for forward and backward")
    return start_engine(
        policy,
        learning_rate=LEARNING_RATE,
        adam_betas=ADAM_BETAS,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=MAX_GRAD_NORM,
        share_prompts=SHARE_PROMPTS,
        gradient_checkpointing=GRADIENT_CHECKPOINTING,
        offload_optimizer=OFFLOAD_OPTIMIZER,
        wait_limit_seconds=WAIT_LIMIT_SECONDS,
    )


def learning_rate(step):
    """-> the rate of update number `step` (from 1): linear warm-up, linear decay to FINAL_LR."""
    warm = min(1.0, step / max(WARMUP_STEPS, 1))
    done = max(0, step - WARMUP_STEPS) / max(1, STEPS - WARMUP_STEPS)
    return LEARNING_RATE * warm * (1 - (1 - FINAL_LR) * done)


def accumulate(engine, rows, vocab_size, exchange=None, clock=None):
    """Runs this rank's micro-batches forward and backward; -> the step's means over all ranks.

    The weights already divide by the whole step's counts, so parts add up: to a gradient that is
    the same for 1 x 8 micro-batches, 8 x 1 and 2 ranks x 4, in any order.
    """
    shortest = min(rows, key=lambda row: len(row.completion))
    filler = [replace(shortest, ref_logps=shortest.sampler_logps)]
    sums = torch.zeros(len(sum_names), dtype=torch.float64, device=engine.device)
    worst, before = torch.zeros(2, device=engine.device), torch.get_num_threads()
    cut = {"budget": MICRO_BATCH_TOKENS, "threads": training_threads(CPU_THREADS)}
    cut["own_cores"] = bool(CPU_THREADS)
    for mine, last, score in micro_batches(rows, engine, exchange, clock or Clock(), **cut):
        engine.set_gradient_accumulation_boundary(last)
        # ZeRO-2 takes the mean over ranks; we want the sum
        settings = {"scale": dist.get_world_size(), "score": score}
        loss, parts, mismatch = micro_batch_loss(engine, mine or filler, vocab_size, **settings)
        # A loss that is not finite must not train by a gradient that happens to be: DeepSpeed
        # skips the step, on all ranks, if any part of the gradient is not
        loss = loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan)
        if mine:
            sums, worst = sums + parts, torch.maximum(worst, mismatch)
        else:
            loss = loss * 0  # an empty micro-batch only takes part in the communication
        engine.backward(loss)
    torch.set_num_threads(before)
    dist.all_reduce(sums)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return means_of(sums.tolist(), worst.tolist())


def means_of(sums, worst):
    """Returns metrics, means over the step's tokens, from what micro_batch_loss returns."""
    means = dict(zip(sum_names, sums, strict=True))
    loss, tokens = means.pop("loss"), means.pop("tokens")
    tilt = tilt_of(means.pop("tilt"), means.pop("surprise"))
    if not KL_BETA:
        del means["kl"]  # not 0, but not known
    means = {name: total / tokens for name, total in means.items()}
    worst = dict(zip(("mismatch_max", "sampler_ratio_max"), worst, strict=True))
    return {"loss": loss} | means | tilt | worst


def optimise(engine, rows, vocab_size, step, exchange, clock):
    """One optimiser update on the step's rows; -> its metrics, `skipped` among them."""
    for group in engine.optimizer.param_groups:
        group["lr"] = learning_rate(step)
    with clock.part("backward"):
        metrics = accumulate(engine, rows, vocab_size, exchange, clock)
    with clock.part("step"):
        metrics["grad_norm"] = take_step(engine)
    metrics["learning_rate"] = learning_rate(step)
    # DeepSpeed's norm of a gradient that overflowed may also be -1
    finite = math.isfinite(metrics["loss"]) and 0 <= metrics["grad_norm"] < math.inf
    return metrics | {"skipped": int(not finite)}


def check_update(update, policy, rows, groups, before, exchange, folder, progress):
    """Ends the run where too many updates in a row were not finite, or where the first one, on
    groups sampled after `before` updates, is not what theory says."""
    if update["skipped"]:
        folder.bad_step(progress, rows, update, limit=MAX_BAD_STEPS)
        return
    progress.bad = 0
    # not where groups of a history that is no more are trained again
    if not progress.checked and all(group.policy_version <= before for group in groups):
        reference = exchange and exchange.server.info
        said = check_first_update(update, policy.dtype, reference, model=MODEL)
        say(f"the first update is as it should be: {said}")
    progress.checked = True


# --- Main ---------------------------------------------------------------------------
constants = frozenset(filter(str.isupper, globals()))  # a preset that sets another has misspelt it


def prepare(worker=False):
    """-> (tokenizer, recipe, server): what trainer and workers begin with; `server` may be None for
    a trainer."""
    check_names(globals(), constants)
    check_constants(globals())
    task, tokenizer = load_task(TASK), load_tokenizer(MODEL)
    recipe = make_recipe(task, load_split(task, "train", tokenizer))
    check_rewards(recipe)
    needed = KL_BETA or PUBLISH_STEPS or worker
    server = RefServer(REF_SERVER, WAIT_LIMIT_SECONDS) if needed else None
    if server:
        server.check(MODEL, tokenizer_facts(tokenizer) | {"temperature": TEMPERATURE})
    return tokenizer, recipe, server


def make_policy(tokenizer):
    """-> the Policy. SystemExit where model and constants do not fit."""
    torch.manual_seed(SEED)  # adapters begin with random numbers
    policy = load_policy(MODEL, tokenizer, DTYPE, STOP_TOKENS, LORA_RANK)
    policy.check_context(MAX_PROMPT_TOKENS, MAX_COMPLETION_TOKENS)
    say(f"{MODEL} in {policy.dtype}; completions end at {policy.stops()}")
    return policy


def make_followers(policy, recipe, exchange):
    """-> what hands the policy on, to workers and as the reference; see policy_sync.py."""
    # Groups that wait or are being sampled: when they are trained, so many updates have been made
    rollouts = max(1, (MAX_STALENESS - PUBLISH_STEPS) // UPDATES_PER_ROLLOUT)
    fixed = {"capacity": PROMPTS_PER_STEP * rollouts, "scored": bool(KL_BETA)}
    steps = {"publish_steps": PUBLISH_STEPS, "refresh_steps": REFERENCE_REFRESH_STEPS}
    return Followers(policy, recipe, exchange, max_staleness=MAX_STALENESS, **steps, **fixed)


def main():
    check_run_dir(RUN_DIR, RESUME)
    watch_launcher()
    tokenizer, recipe, server = prepare()
    test = load_split(recipe.task, EVAL_SPLIT, tokenizer)[:EVAL_QUESTIONS]
    join_ranks(WAIT_LIMIT_SECONDS)
    rank, world = dist.get_rank(), dist.get_world_size()
    heartbeats = Heartbeats(rank, world, WAIT_LIMIT_SECONDS)
    lock = lock_run(RUN_DIR) if leads(RUN_DIR) else None  # until it is closed, at the end
    policy = make_policy(tokenizer)
    engine = make_engine(policy)
    # Workers begin with the seed's order too: the ranks go through another
    stream = Stream(recipe.prompts, f"{SEED}/trainer" if PUBLISH_STEPS else SEED, rank, world)
    progress = open_run(RUN_DIR, globals(), engine, stream, server)
    exchange = Exchange(server, progress.run, WAIT_LIMIT_SECONDS) if server else None
    followers = make_followers(policy, recipe, exchange)
    followers.begin(progress, model=MODEL, run_dir=RUN_DIR)
    # nobody samples before the server has undone what came after the checkpoint
    meet("the other ranks (rank 0 resumes the run at the server)")
    with stop.listening():
        asked, why = train(policy, engine, recipe, test, stream, exchange, followers, progress)
    # Not where it failed or was stopped: it may go on, and its workers and groups wait for that
    if server and rank == 0 and not asked:
        server.end(progress.run)  # its workers need not wait for it
    meet("the other ranks (rank 0 ends the run at the server)")
    heartbeats.stop()
    dist.barrier()  # rank 0 keeps the store by which they meet: it leaves when all have left that
    dist.destroy_process_group()
    if lock:
        lock.close()
    if asked:
        raise SystemExit(
            f"ended by {stop.asked or 'a signal'} after step {progress.step}, which is saved:"
            " started again the run goes on"
        )
    if progress.idle >= IDLE_LIMIT:
        raise SystemExit(
            f"nothing to train for {progress.idle} steps, in the last one {why}. Read"
            f" {RUN_DIR}/samples.jsonl: is TASK = {TASK!r} too easy, too hard, or judged wrongly?"
        )


def train(policy, engine, recipe, test, stream, exchange, followers, progress):
    """The run: rollouts, updates, evaluations, checkpoints, until its steps are made. -> whether
    it ends before that, as a rank was asked to; why its newest step with nothing to train had so.
    """
    page = Page(exchange.server, progress.run) if exchange and dist.get_rank() == 0 else None
    folder, laps, clock, p = RunFolder(RUN_DIR, page), [], Clock(), progress
    bar = tqdm(total=STEPS, initial=p.step, unit="step", disable=dist.get_rank() != 0)
    half_full, why = False, ""
    while True:
        due = p.passed(EVAL_STEPS, p.evaluated) or p.step >= STEPS and p.evaluated < p.step
        asked = any_rank(stop.asked)
        if due and not asked:
            say(f"greedy evaluation on {len(test)} {EVAL_SPLIT} questions after step {p.step}")
            evaluation = evaluate(policy, recipe, test)
            asked = any_rank(stop.asked)  # then it is not whole, and due when the run goes on
            if not asked:
                p.accuracy = folder.log_evaluation(evaluation, p.step)
                p.evaluated, p.best = p.step, max(p.best, p.accuracy)
        done = p.step >= STEPS or p.accuracy >= STOP_ACCURACY or p.idle >= IDLE_LIMIT
        ends = done or asked
        if p.saved < p.step and (ends or half_full or p.passed(SAVE_STEPS, max(p.saved, 0))):
            save(p, policy, engine, stream, exchange)
        if ends:
            break
        clock.lap()  # evaluations and checkpoints are no part of a step
        groups, metrics, flat = rollout_step(policy, recipe, stream, exchange, p.run, p.step, clock)
        rows, before, shown = make_rows(groups, p.step), p.step, groups or flat
        folder.log_samples(policy, recipe, shown, advantages_of, p.step + 1, SAMPLES_PER_STEP)
        p.idle = 0 if rows else p.idle + 1
        if not rows:
            why = why_idle(metrics, groups, recipe)
            say(f"step {p.step + 1} trains nothing ({p.idle} in a row): {why}")
        updates = min(UPDATES_PER_ROLLOUT, STEPS - p.step) if rows else 1
        for n in range(updates):
            p.step, update = p.step + 1, {}
            if rows:
                update = optimise(engine, rows, policy.vocab_size, p.step, exchange, clock)
                check_update(update, policy, rows, groups, before, exchange, folder, p)
            if n + 1 == updates:
                half_full = exchange and exchange.trained(groups, before, clock)
                followers.hand_on(p, before, clock)
            laps.append(clock.lap())
            first = metrics if n == 0 else {}
            folder.log("metrics.jsonl", {"step": p.step} | first | update | laps[-1])
            show(bar, metrics | update)
        followers.follow(p, before, save=lambda: save(p, policy, engine, stream, exchange))
    bar.close()
    if laps:
        say_parts(laps)
    elif not asked:
        say(f"the run in {RUN_DIR} has ended, at step {p.step}: for another choose another RUN_DIR")
    followers.finish()
    return asked, why


def save(progress, policy, engine, stream, exchange):
    """Saves a checkpoint; the server may then forget what it covers."""
    progress.saved = progress.step
    state = {"step": progress.step, "progress": asdict(progress)}
    state["constants"] = constants_of(globals())
    checkpoint.save(RUN_DIR, policy, engine, stream, state, KEEP_CHECKPOINTS)
    if exchange and dist.get_rank() == 0:
        exchange.server.checkpoint(progress.run, progress.step)


def worker():
    """Samples for the trainer, until there is no run any more."""
    from grpo.sampling.worker import run_worker

    tokenizer, recipe, server = prepare(worker=True)
    run_worker(make_policy(tokenizer), server, recipe)


if __name__ == "__main__":
    match arguments():
        case []:
            main()
        case ["worker"]:
            worker()
        case _:
            sys.exit(usage(__doc__))
