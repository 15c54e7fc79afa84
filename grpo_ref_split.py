"""GRPO under DeepSpeed ZeRO-2; the reference model is in another process (ref_server.py), or here.

    CUDA_VISIBLE_DEVICES=7 python ref_server.py                           # first, on one GPU
    CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6 deepspeed grpo_ref_split.py        # then, on the others
    python grpo_ref_split.py               # one GPU, or a CPU: REF_SERVER = None needs no server
    python grpo_ref_split.py worker        # anywhere else: samples for the trainer (PUBLISH_STEPS)

Edit the constants below; or set them in the command, STEPS=50, or by a preset, a file of them
(presets/); or import this file and call main(STEPS=50), as demo.py does. A "collective" function is
called by all ranks together, or they hang; each such call is marked.

GRPO (DeepSeekMath, arXiv 2402.03300, eq. 3) needs no value network: a completion's advantage is its
reward, centred and scaled within the G completions of its prompt. The file reads in the order of
the paper's algorithm 1, whose lines are named where they are done (all twelve: docs/loss.md); what
it calls a step is a rollout here. Where we deviate from the paper:
  - every mean is taken over the whole step, all ranks and micro-batches, never over a micro-batch;
  - line 6 copies no policy: a rollout's first update takes its own log-probs as the old ones, and
    its ratio is exactly 1. Off-policy (workers' groups, of an older policy) they are the sampler's;
  - flat groups, whose completions all earn the same OUTCOME (or total reward: SKIP_FLAT_GROUPS),
    say nothing about it: they are skipped, others sampled instead (DAPO, 2503.14476, sec. 3.2).

A completion's token has four log-probs: logp, the policy's, which alone has a gradient; old_logp,
of the ratio r = exp(logp - old_logp), which is clipped; ref_logp, the frozen reference's, for the
KL penalty; sampler_logp, of whoever drew it, to check the sampler and correct for it (IS_CAP).

Symbols: G completions of a group, P prompt and T completion tokens, B sequences (a prompt and one
completion) of a micro-batch, N their completion tokens, V ids of the tokenizer, V' rows of the LM
head, H hidden size. A `step` is one optimiser update, or an attempt that found nothing to train.
"""

import itertools
import math
import os
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace

# Before torch. Threads that spin while they wait make a step ten times as long where cores are
# shared (benchmarks/results/wait_policy.md); blocks of a GPU's memory that do not grow leave gaps
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
allocator = os.environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", allocator)

from grpo.constants import command_line, settle

if __name__ == "__main__":  # here, so that a mistake is told before torch is imported
    role, given = command_line("grpo_ref_split.py", __doc__, roles=["worker"])

import torch
import torch.distributed as dist

import grpo_loss_triton
from grpo import loss as plain_loss
from grpo.log import lasting_output, progress_bar, say
from grpo.packing import plan_turns
from grpo.sampling import rollout
from grpo.sampling.memory import fit_worker
from grpo.sampling.recipe import load_questions, total
from grpo.sampling.start import make_policy, prepare
from grpo.sampling.upload import Uploader
from grpo.sampling.worker import run_worker
from grpo.serving.local import serve_page
from grpo.stop import stop
from grpo.training import checkpoint, checks, exchange
from grpo.training.engine import cpu_threads, join_ranks, learning_rate, take_step
from grpo.training.liveness import Heartbeats, explained, meet, watch_launcher
from grpo.training.metrics import any_rank, evaluate, rollout_metrics, say_end, say_idle, show
from grpo.training.report import check_reporters, close_reporters
from grpo.training.start import start_run
from grpo.training.token_stats import TokenStats
from grpo.wire import check_group

# --- What to train ------------------------------------------------------------------
MODEL = "Qwen/Qwen2.5-3B"  # any AutoModelForCausalLM: hub name or folder
TASK = "gsm8k"  # tasks/gsm8k.py: data, prompt and rewards; or a path, "my/task.py"
RUN_DIR = "runs/gsm8k"  # checkpoints, metrics.jsonl, samples.jsonl; a run there resumes (RESUME)
REF_SERVER = "http://127.0.0.1:59875"  # elsewhere: its address, GRPO_TOKEN on both; None: no server

# --- Rollouts (in brackets: TRL's names) ---------------------------------------------
PROMPTS_PER_STEP = 28  # over all ranks, best a multiple of them; each gives GROUP_SIZE sequences
GROUP_SIZE = 8  # G: completions per prompt, compared with each other (num_generations)
MAX_PROMPT_TOKENS = 512  # longer prompts are left out, and counted at the start
MAX_COMPLETION_TOKENS = 512  # longer ones are cut: truncated (max_completion_length)
STOP_TOKENS = ["<|im_end|>"]  # end a completion too, beside EOS; unknown ones are ignored
STOP_STRINGS = []  # texts that end one too, such as "</answer>"; their last token is trained
TEMPERATURE = 1.0  # for sampling and for every log-prob; ref_server.py must agree
SAMPLE_BATCH = "auto"  # completions sampled at once by a rank: more is faster, see "Memory"
MASK_TRUNCATED = True  # truncated completions count in the group's mean, but are not trained
SKIP_FLAT_GROUPS = "outcome"  # skip groups of equal OUTCOME; "reward": of equal totals; or False
MAX_REFILLS = 4  # at most so many times PROMPTS_PER_STEP; after that the step has fewer groups
CHAT_TEMPLATE = {}  # options of the model's chat template, such as {"enable_thinking": False}
OUTCOME = None  # the reward that says right (> 0) or wrong: accuracy, flat groups; None: the task's
REWARD_WEIGHTS = None  # a dict of weights by reward (reward_weights); None: the task's

# --- Loss ---------------------------------------------------------------------------
LOSS_TYPE = "grpo"  # a token weighs 1 over: length (grpo), all tokens (dapo), constant (dr_grpo)
ADVANTAGE_STD = True  # False: centred only, without the bias to easy and hard prompts (Dr. GRPO)
CLIP_LOW = 0.2  # A < 0: no gradient where the ratio is below 1 - CLIP_LOW (epsilon)
CLIP_HIGH = 0.2  # A > 0: none above 1 + CLIP_HIGH; 0.28: more room for rare tokens (epsilon_high)
KL_BETA = 0.04  # weight of the KL to the reference; 0 needs no reference and no server (beta)
UNBIASED_KL = False  # the KL's estimate times the ratio, for an unbiased gradient (DeepSeek-V3.2)
OBJECTIVE = "clip"  # or "cispo": clipped tokens keep a gradient, weighted by the clipped ratio
RATIO_LEVEL = "token"  # or "sequence" (GSPO; CLIP_LOW and CLIP_HIGH are 3e-4 and 4e-4 there)
IS_CAP = 2.0  # truncated importance sampling: cap on p_trainer / p_sampler; 0: off
UPDATES_PER_ROLLOUT = 1  # on each rollout: mu; clips act from 2, or with workers (num_iterations)

# --- Workers, and a reference that is refreshed: 0 is off ------------------------------
PUBLISH_STEPS = 0  # 1: publish the policy every so many steps, for workers on other machines
TRAINER_SAMPLES = True  # the ranks sample what workers have not; False: workers alone sample
MAX_STALENESS = 4  # groups sampled by a policy more updates ago than this are dropped
RECOMPUTE_OLD_LOGPS = False  # for workers' groups too, by the first update; IS_CAP then applies
REFERENCE_REFRESH_STEPS = 0  # make the policy the reference every so many steps (iterative GRPO)

# --- Optimisation -------------------------------------------------------------------
STEPS = 500  # optimiser updates (max_steps)
LEARNING_RATE = 1e-6  # LoRA wants some 10 to 20 times as much
LORA_RANK = 0  # 16 or 32: train adapters of that rank, and keep the model itself frozen
WARMUP_STEPS = 10  # linear from 0
FINAL_LR = 1.0  # decay to this fraction of LEARNING_RATE at the last step; 1 is constant
LR_SCHEDULE = "linear"  # the decay; or "cosine" (lr_scheduler_type)
ADAM_BETAS = (0.9, 0.99)
WEIGHT_DECAY = 0.0
MAX_GRAD_NORM = 1.0  # gradient clipping by global norm
SEED = 0

# --- Memory: "auto" fills the GPU, and says how; numbers, and lower ones, when it is too much ---
MICRO_BATCH_TOKENS = "auto"  # padded tokens per forward/backward; does not change the gradient
FUSED_LOSS = True  # LM head and loss in chunks (grpo_loss_triton.py); False holds all logits
SHARE_PROMPTS = True  # a group's prompt runs once, and not GROUP_SIZE times; same gradient
GRADIENT_CHECKPOINTING = "auto"  # True recomputes activations: a third slower, far smaller
OFFLOAD_OPTIMIZER = False  # master weights, Adam states and the update in CPU memory
REFERENCE_ON_CPU = False  # where REF_SERVER is None: its copy waits there, and comes once a step
CPU_THREADS = 0  # of forward and backward on a CPU; 0: the cores over the ranks
DTYPE = "auto"  # bfloat16 on a GPU (with float32 master weights), float32 on a CPU

# --- Run ----------------------------------------------------------------------------
EVAL_STEPS = 50  # greedy accuracy at step 0, every so many steps, and at the end; 0: never
EVAL_SPLIT = "test"
EVAL_QUESTIONS = 512  # the first so many of the split
STOP_ACCURACY = 1.01  # stop when an evaluation reaches it; report on another split than EVAL_SPLIT
SAVE_STEPS = 100  # a checkpoint is the model, and 12 bytes a trained parameter to resume from it
KEEP_CHECKPOINTS = 2  # the newest; older ones are deleted
KEEP_BEST = True  # save and keep the best evaluation's too: RUN_DIR/best
RESUME = True  # resume from RUN_DIR's newest checkpoint; False: RUN_DIR must not hold a run
SAMPLES_PER_STEP = 2  # completions of one group written to samples.jsonl each step
REPORT_TO = []  # "tensorboard", "wandb": metrics in RUN_DIR, and sent; functions get each record
PAGE_PORT = 59875  # of the live page where no server has it, for this machine alone; 0: no page
WAIT_LIMIT_SECONDS = 600  # without a sign of the server or another rank: then the run ends
REWARD_TIMEOUT_SECONDS = 60  # of a group (in a process: of a completion); then the run ends
REWARD_PROCESSES = 0  # of each rank and worker, beside the sampling, for slow rewards; 0: in place
MAX_BAD_STEPS = 5  # steps in a row with a gradient that is not finite: skipped, then the run ends
IDLE_LIMIT = 10  # steps in a row without anything to train, after which the run ends


# --- Sample and exchange: algorithm 1, lines 5, 7, 8 -----------------------------------
def sample_and_exchange(run):
    """Collective: returns (groups, metrics, sampled): what all ranks train next; means over what
    was sampled, by name; the groups that this rank or workers sampled, flat ones too.

    Workers' groups come first; the ranks sample what is missing, and upload it while they sample.
    Their own groups come without the reference's log-probs: accumulate() gets those.
    """
    step = run.progress.step
    oldest = step - MAX_STALENESS
    theirs = []
    if PUBLISH_STEPS:
        with run.clock.part("wait"):
            theirs = exchange.take_workers_groups(  # collective
                run.inbox, PROMPTS_PER_STEP, oldest=oldest, wait=not TRAINER_SAMPLES
            )
    missing = PROMPTS_PER_STEP - len(theirs) if TRAINER_SAMPLES else 0
    ours, own, counts = sample_missing(run, missing)  # collective
    run.reference.expect([g.id for g in ours] if KL_BETA else [], oldest=oldest)
    groups = sorted(theirs + ours, key=lambda group: group.id)
    metrics = rollout_metrics(run, counts, own, theirs)  # collective
    if PUBLISH_STEPS:
        metrics |= exchange.staleness(run.inbox, groups, step)
    return groups, metrics, own + theirs


def sample_missing(run, missing):
    """Collective: samples until the ranks have `missing` usable groups, or (1 + MAX_REFILLS) times
    as many in all. Returns (all ranks' usable groups, all groups of this one, its counts).

    Each round begins as many groups as are expected to be needed, by the share that was flat in the
    last steps: so batches are full. What has begun is finished, and trained if it is usable, even
    if the step gets more than PROMPTS_PER_STEP: the first to end would be the short completions.
    """
    p, clock = run.progress, run.clock
    begun, most = 0, missing * (1 + MAX_REFILLS)
    ours, own, counts = [], [], Counter()
    uploader = Uploader(run.server.copy()) if KL_BETA and run.server else None
    p.begin_rollout()
    while number := rollout.groups_to_begin(missing - len(ours), p.flat_share, most - begun):
        with clock.part("sample"):
            mine, all_groups = sample_share(run, number, begun, counts, uploader)
        with clock.part("wait"):
            usable = exchange.gather_groups(mine)  # collective
        p.count_round(groups=number, usable=len(usable))
        begun += number
        ours += usable
        own += all_groups
    with clock.part("wait"):
        exchange.finish_uploads(uploader)
    return ours, own, counts


def sample_share(run, number, begun, counts, uploader):
    """Samples this rank's share of the next `number` groups, and uploads what the server is to
    score, meanwhile. Returns (usable groups, all groups); `counts` gets the tally of all."""
    rank, world, step = dist.get_rank(), dist.get_world_size(), run.progress.step
    prompts = itertools.islice(run.stream, number // world + (rank < number % world))  # line 5
    usable, all_groups = [], []
    for sampled in rollout.sampled_and_rewarded(  # lines 7, 8
        run.policy,
        run.recipe,
        take=lambda room: list(itertools.islice(prompts, room)),
        seed=rollout.seed_of(SEED, step, begun, rank),
        timed=lambda: run.clock.part("reward"),
    ):
        tally = rollout.tally(run.recipe, sampled)
        counts.update(tally)  # flat groups too
        group = rollout.make_group(
            sampled,
            id=f"{step:06d}-{rank:04d}-{counts['groups']:04d}",
            run=run.progress.run,
            version=step,
            sampler="trainer",
            outcome=run.recipe.outcome,
            skipped={},
        )
        all_groups.append(group)
        if tally["flat"] and SKIP_FLAT_GROUPS:
            continue
        usable.append(group)
        if uploader:
            uploader.put(group)  # the server checks it
        else:
            check_group(group)
    return usable, all_groups


# --- Sequences to train: lines 6, 9 ----------------------------------------------------
@dataclass
class Sequence:
    """A prompt and one of its completions, with all that the loss needs of it."""

    group: str  # the id of its group
    number: int  # which of the group's completions it is
    prompt: list[int]
    completion: list[int]
    sampler_logps: torch.Tensor  # (T,)
    old_logps: torch.Tensor | None  # (T,); None: the first update on the rollout sets them
    ref_logps: torch.Tensor | None  # (T,); None: not here yet, or KL_BETA is 0
    advantage: float
    weight: float = 0.0  # of each token, in the step's loss
    old_from_sampler: bool = False  # whether the old log-probs are the sampler's


def takes_old_from_sampler(groups, step):
    """Returns whether the old log-probs of all groups (a micro-batch mixes them) are the sampler's:
    where a worker, or a policy other than the one after `step` updates, sampled any of them."""
    fresh = all(g.sampler == "trainer" and g.policy_version == step for g in groups)
    return not (fresh or RECOMPUTE_OLD_LOGPS)


def advantages_of(group, weights):
    """Returns the advantages (G,) of a group's weighted rewards (line 9)."""
    assert group.reward_names == list(weights), group.reward_names
    totals = [total(rewards, weights) for rewards in rollout.rewards_of(group)]
    return plain_loss.group_advantages(torch.tensor(totals), scale_by_std=ADVANTAGE_STD)


def make_sequences(groups, reward_weights, old_from_sampler):
    """Returns the sequences of a step's groups; without the truncated if MASK_TRUNCATED: those
    still count in their group's mean, and in the number of sequences."""
    sequences = []
    for group in groups:
        ids = group.completions(group.completion_ids)
        logps = group.completions(group.sampler_logps)
        here = KL_BETA and group.ref_logps is not None
        refs = group.completions(group.ref_logps) if here else [None] * len(ids)
        for i, advantage in enumerate(advantages_of(group, reward_weights).tolist()):
            if MASK_TRUNCATED and group.truncated[i]:
                continue
            prompt, completion = group.prompt_ids.tolist(), ids[i].tolist()
            old = logps[i] if old_from_sampler else None
            sequence = group.id, i, prompt, completion, logps[i], old, refs[i], advantage
            sequences.append(Sequence(*sequence, old_from_sampler=old_from_sampler))
    lengths = torch.tensor([len(sequence.completion) for sequence in sequences])
    weights = plain_loss.token_weights(
        lengths,
        loss_type=LOSS_TYPE,
        sequences=sum(len(group.completion_lengths) for group in groups),
        tokens=int(lengths.sum()),
        max_completion_tokens=MAX_COMPLETION_TOKENS,
    )
    for sequence, weight in zip(sequences, weights.tolist(), strict=True):
        sequence.weight = weight
    return sequences


# --- Loss and gradient: line 11 --------------------------------------------------------
def batch_loss(hidden, head, ids, batch, vocab_size):
    """Returns (loss, stats) of a micro-batch's B sequences: their part of the step's loss, a
    scalar, and tensors (N,) of their tokens, by name (grpo/loss.py). Sets the sequences' old
    log-probs where they have none.

    `hidden` (N, H) are the states that predict the completions' `ids` (N,); `head` is (V', H).
    """
    lengths = [len(s.completion) for s in batch]

    def per_token(values):  # (B,) -> (N,)
        return torch.tensor(values).repeat_interleave(torch.tensor(lengths)).to(ids.device)

    def joined(parts):  # B tensors (T,) -> (N,)
        return torch.cat(parts).to(ids.device)

    first_update = batch[0].old_logps is None
    sampler_logps = joined([s.sampler_logps for s in batch])
    loss, stats = (grpo_loss_triton if FUSED_LOSS else plain_loss).grpo_loss(
        hidden,
        head,
        ids,
        None if first_update else joined([s.old_logps for s in batch]),  # None: the loss's own
        joined([s.ref_logps for s in batch]) if KL_BETA else None,
        per_token([s.advantage for s in batch]),
        per_token([s.weight for s in batch]),
        temperature=TEMPERATURE,
        vocab_size=vocab_size,
        clip_low=CLIP_LOW,
        clip_high=CLIP_HIGH,
        kl_beta=KL_BETA,
        objective=OBJECTIVE,
        unbiased_kl=UNBIASED_KL,
        sampler_logps=sampler_logps,
        is_cap=IS_CAP,
        # Where old and sampler's log-probs are the same, is_cap acts on nothing
        ratio_cap=IS_CAP if batch[0].old_from_sampler else 0.0,
        sequences=per_token(list(range(len(batch)))) if RATIO_LEVEL == "sequence" else None,
    )
    if first_update:  # line 6, for the next update: its plan gives this rank the same sequences
        for sequence, logps in zip(batch, stats["logps"].cpu().split(lengths), strict=True):
            sequence.old_logps = logps
    return loss, stats | {"sampler_logps": sampler_logps}


def accumulate(run, sequences):
    """Collective: accumulates the gradient of a step's sequences, in micro-batches of at most
    MICRO_BATCH_TOKENS padded tokens; returns means over its tokens.

    The weights already divide by the whole step's counts, and the ranks' gradients are summed, not
    averaged (engine_config). So parts add up, in any order: to the same gradient for 1 x 8
    micro-batches, 8 x 1 and 2 ranks x 4.
    """
    engine, means = run.engine, TokenStats(run.engine.device)
    rank, world = dist.get_rank(), dist.get_world_size()
    budget = run.constants.MICRO_BATCH_TOKENS  # the number that "auto" has become
    turns = plan_turns(sequences, engine.module.shares, rank, world, budget)
    # Scored ones first: we train while a server still scores the others (without: no collective)
    for done, turn in enumerate(run.reference.in_order_of_arrival(turns), start=1):  # collective
        engine.set_gradient_accumulation_boundary(done == len(turns))
        batch = turn.batch
        hidden, ids = engine([s.prompt for s in batch], [s.completion for s in batch])
        run.reference.complete(turn)  # collective; only now: the forward needs no reference
        loss, stats = batch_loss(hidden, engine.module.head, ids, batch, run.policy.vocab_size)
        if not turn.is_filler:
            means.add(loss, stats)
        # A loss that is not finite can have a finite gradient: it becomes NaN, so that DeepSpeed
        # skips the step, on all ranks
        loss = loss * torch.where(loss.detach().isfinite(), float(not turn.is_filler), torch.nan)
        engine.backward(loss)  # collective
    return means.over_ranks()  # collective


# --- Update: line 11 -------------------------------------------------------------------
def update(run, sequences):
    """Collective: one optimiser update on the sequences (line 11); returns its metrics. A gradient
    that is not finite leaves the weights as they are ("skipped")."""
    engine, rate = run.engine, learning_rate(run.constants, run.progress.step)
    for group in engine.optimizer.param_groups:
        group["lr"] = rate
    with run.clock.part("backward"), cpu_threads(CPU_THREADS):
        metrics = accumulate(run, sequences)  # collective
    with run.clock.part("step"):
        norm = take_step(engine)  # collective
    if not KL_BETA:
        del metrics["kl"]  # it was not computed: 0 would be wrong
    # DeepSpeed's norm of a gradient that overflowed may also be -1
    finite = math.isfinite(metrics["loss"]) and 0 <= norm < math.inf
    return metrics | {"grad_norm": norm, "learning_rate": rate, "skipped": int(not finite)}


# --- The loop: lines 2, 3, 4, 10 -------------------------------------------------------
def train(run):
    """Collective: rollouts, updates, evaluations and checkpoints, until the run's steps are made.
    Returns whether it ends before that, as a signal asked a rank to."""
    p, store_is_full = run.progress, False
    bar = progress_bar(p.step, STEPS)
    while True:  # line 4
        asked = evaluate_if_due(run)  # collective
        ends = asked or p.step >= STEPS or p.accuracy >= STOP_ACCURACY or p.idle >= IDLE_LIMIT
        due = ends or store_is_full or p.best == p.step or p.passed(SAVE_STEPS, max(p.saved, 0))
        if due and p.saved < p.step:
            checkpoint.save_run(run)  # collective
        elif p.best == p.step:  # it was saved before it was evaluated
            checkpoint.point(RUN_DIR, "best", p.step)
        if ends:
            bar.close()
            run.publishing.finish()
            checkpoint.point_final(run, asked)
            return asked
        run.clock.lap()  # evaluations and checkpoints are not part of a step
        before = p.step
        groups, metrics, sampled = sample_and_exchange(run)  # collective; lines 5, 7, 8
        old_from_sampler = takes_old_from_sampler(groups, before)  # line 6
        sequences = make_sequences(groups, run.recipe.reward_weights, old_from_sampler)  # line 9
        run.folder.log_samples(run, sampled, advantages_of)
        p.idle = 0 if sequences else p.idle + 1
        if not sequences:
            say_idle(run, metrics, groups)
        updates = min(UPDATES_PER_ROLLOUT, STEPS - before) if sequences else 1
        for number in range(1, updates + 1):  # line 10
            p.step, trained = p.step + 1, {}
            if sequences:
                trained = update(run, sequences)  # collective; line 11
                checks.check_update(run, trained, sequences, groups, before)  # collective
            if number == updates:
                store_is_full = exchange.acknowledge(run, groups, before)  # collective
                run.publishing.publish_if_due(p, before, run.clock)
            run.laps.append(run.clock.lap())
            of_rollout = metrics if number == 1 else {}  # once, for all updates on it
            run.folder.log("metrics.jsonl", {"step": p.step} | of_rollout | trained | run.laps[-1])
            show(bar, p.step, metrics | trained | run.laps[-1])
        # Lines 2, 3: every REFERENCE_REFRESH_STEPS the policy becomes the reference
        run.publishing.refresh_if_due(p, before, lambda: checkpoint.save_run(run))  # collective


def evaluate_if_due(run):
    """Collective: evaluates at the beginning, every EVAL_STEPS and at the end. Returns whether any
    rank was asked to end: then the evaluation is left out, and due when the run resumes."""
    p = run.progress
    asked = any_rank(stop.asked)  # collective
    due = p.passed(EVAL_STEPS, p.evaluated) or p.step >= STEPS and p.evaluated < p.step
    if asked or not due or not EVAL_STEPS:
        return asked
    say(f"greedy evaluation on {len(run.questions)} {EVAL_SPLIT} questions after step {p.step}")
    result = evaluate(run.policy, run.recipe, run.questions)  # collective
    if any_rank(stop.asked):  # collective
        return True
    p.take_evaluation(run.folder.log_evaluation(result, p.step), KEEP_BEST)
    return False


# --- Main ---------------------------------------------------------------------------
known = frozenset(filter(str.isupper, globals()))  # a preset that sets another has misspelt it


def constants(**preset):
    """Returns the constants, with `preset` set, as attributes. SystemExit says which can't be."""
    now = settle(globals(), known, preset)
    checks.check_constants(now)
    return SimpleNamespace(**now)


def main(**preset):
    c = constants(**preset)
    checkpoint.check_run_dir(RUN_DIR, RESUME)
    check_reporters(REPORT_TO)
    watch_launcher()
    needs_server = REF_SERVER is not None and bool(KL_BETA or PUBLISH_STEPS)
    tokenizer, recipe, server = prepare(c, needs_server=needs_server)
    questions = load_questions(c, recipe.task, tokenizer)
    join_ranks(WAIT_LIMIT_SECONDS)  # collective
    heartbeats = Heartbeats(dist.get_rank(), dist.get_world_size(), WAIT_LIMIT_SECONDS)
    _lock = checkpoint.leads(RUN_DIR) and checkpoint.lock_run(RUN_DIR)  # collective; to the end
    page = None if server or dist.get_rank() else serve_page(c)
    run = start_run(c, tokenizer, recipe, questions, server, page)  # collective
    with stop.listening(), explained(), lasting_output():
        asked = train(run)  # collective
    if run.inbox and not asked:  # a run that was stopped, or failed, may resume: its workers wait
        server.end(run.progress.run)
    meet("the other ranks (rank 0 ends the run at the server)")  # collective
    close_reporters(run.folder.reporters)
    heartbeats.stop()
    dist.barrier()  # collective: rank 0 keeps the store by which they meet, and leaves last
    dist.destroy_process_group()
    say_end(run, asked)


def worker(**preset):
    """Samples for the trainer, until all runs have ended."""
    c = constants(**preset)
    tokenizer, recipe, server = prepare(c, needs_server=True)
    policy = make_policy(c, tokenizer)
    run_worker(policy, server, fit_worker(c, policy, recipe))


if __name__ == "__main__":
    (worker if role else main)(**given)
