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
import sys
from collections import Counter

from grpo.constants import before_torch, command_line, settle
from grpo.training.checks import check_command

before_torch()
if __name__ == "__main__":  # here, so that a mistake is told before torch is imported
    role, given = command_line("grpo_ref_split.py", __doc__, roles=["worker"])
    check_command(given)

import torch
import torch.distributed as dist

import grpo_loss_triton
from grpo import loss as plain_loss
from grpo.devices import out_of_memory_names
from grpo.log import progress_bar, say
from grpo.packing import Sequence, plan_rounds
from grpo.proof import check_sampler
from grpo.sampling import rollout
from grpo.sampling.policy import worker_policy
from grpo.sampling.task import load_questions, prepare
from grpo.sampling.worker import run_worker
from grpo.stop import TooLong, stop
from grpo.training import checkpoint, checks, ranks
from grpo.training.engine import cpu_threads, learning_rate, take_step
from grpo.training.metrics import TokenStats, check_update, evaluate, rollout_metrics, with_kl
from grpo.training.report import check_reporters, log_idle, report_end, show
from grpo.training.start import start_run
from grpo.training.workers import staleness
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
SAMPLER = "torch"  # or "vllm", in the same processes (pip install -e .[vllm]; docs/performance.md)
VLLM_CACHE_GB = 10.0  # vLLM's memory for keys and values, beside its own copy of the weights
VLLM_SLEEP = False  # True: vLLM gives its GPU memory back while there is nothing to sample
TENSOR_PARALLEL = 1  # of a worker with vLLM: GPUs that share a model too large for one
MASK_TRUNCATED = True  # truncated completions count in the group's mean, but are not trained
OVERLONG_TOKENS = 0  # the last so many below the limit cost up to 1 of the reward (DAPO); 0: off
SKIP_FLAT_GROUPS = "outcome"  # skip groups of equal OUTCOME; "reward": of equal totals; or False
MAX_REFILLS = 4  # at most so many times PROMPTS_PER_STEP; after that the step has fewer groups
CHAT_TEMPLATE = {}  # options of the model's chat template, such as {"enable_thinking": False}
OUTCOME = None  # the reward that says right (> 0) or wrong: accuracy, flat groups; None: the task's
REWARD_WEIGHTS = None  # a dict by reward (reward_weights); None: the task's; {}: a teacher alone

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
IS_MASK = False  # True: tokens beyond IS_CAP, or below 1 / IS_CAP, weigh 0 (token_mask)
UPDATES_PER_ROLLOUT = 1  # on each rollout: mu; clips act from 2, or with workers (num_iterations)

# --- Workers, and a reference that is refreshed: 0 is off ------------------------------
PUBLISH_STEPS = 0  # 1: publish the policy every so many steps, for workers on other machines
TRAINER = "http://127.0.0.1:59876"  # rank 0 serves workers here; elsewhere: GRPO_TOKEN on both
TRAINER_SAMPLES = True  # the ranks sample what workers have not; False: workers alone sample
MAX_STALENESS = 4  # groups sampled by a policy more updates ago than this are dropped
REFERENCE = None  # a local teacher, another model with MODEL's tokenizer; None: MODEL
REFERENCE_REFRESH_STEPS = 0  # copy the policy into a local reference every so many steps

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

# --- Memory: "auto" is tried on a GPU at the start; out of memory later, set a lower number ------
MICRO_BATCH_TOKENS = "auto"  # tokens per forward/backward, a prompt counts once; same gradient
FUSED_LOSS = True  # LM head and loss in chunks (grpo_loss_triton.py); False holds all logits
GRADIENT_CHECKPOINTING = "auto"  # True recomputes activations: a third slower, far smaller
OFFLOAD_OPTIMIZER = False  # master weights, Adam states and the update in CPU memory
REFERENCE_ON_CPU = False  # where REF_SERVER is None: its copy waits there, and comes once a step
CPU_THREADS = 0  # of forward and backward on a CPU; 0: the cores over the ranks
DTYPE = "auto"  # bfloat16 on a GPU (with float32 master weights), float32 on a CPU

# --- Run ----------------------------------------------------------------------------
EVAL_STEPS = 50  # greedy accuracy at step 0, every so many steps, and at the end; 0: never
EVAL_SPLIT = "test"
EVAL_QUESTIONS = 512  # the first so many of the split
EVAL_BATCH = "auto"  # questions that a rank answers at once, see "Memory"
STOP_ACCURACY = 1.01  # stop when an evaluation reaches it; report on another split than EVAL_SPLIT
SAVE_STEPS = 100  # a checkpoint is the model, and 12 bytes a trained parameter to resume from it
KEEP_CHECKPOINTS = 2  # the newest; older ones are deleted
KEEP_BEST = True  # save and keep the best evaluation's too: RUN_DIR/best
RESUME = True  # resume from RUN_DIR's newest checkpoint; False: RUN_DIR must not hold a run
SAMPLES_PER_STEP = 2  # completions of one group written to samples.jsonl each step
REPORT_TO = []  # "tensorboard", "wandb": metrics in RUN_DIR, and sent; functions get each record
WAIT_LIMIT_SECONDS = 600  # without an answer of the server, or groups of workers: the run ends
REWARD_TIMEOUT_SECONDS = 60  # of a group (in a process: of a completion); then the run ends
REWARD_PROCESSES = 0  # of each rank and worker, beside the sampling, for slow rewards; 0: in place
MAX_BAD_STEPS = 5  # steps in a row with a gradient that is not finite: skipped, then the run ends
IDLE_LIMIT = 10  # steps in a row without anything to train, after which the run ends


# --- Sample: algorithm 1, lines 5, 7, 8 ------------------------------------------------
def sample_step(run):
    """Collective: returns (groups, metrics, sampled): what all ranks train next, with the
    reference's log-probs; means over what was sampled, by name; the groups that this rank sampled
    or has taken from workers, flat ones too.

    Workers' groups come first, and the ranks sample what is missing. Each round begins as many
    groups as are expected to be needed, by the share that was flat in the last steps: so batches
    are full. What has begun is finished, and trained if it is usable, even if the step gets more
    than PROMPTS_PER_STEP: the first to end would be the short completions.
    """
    p, clock, counts, sampled = run.progress, run.clock, Counter(), []
    with clock.part("wait"), ranks.all_or_none("workers' groups"):  # collective
        theirs = run.workers.take(p.step) if run.workers else []
        mine = [(group, run.reference.logps(group)) for group in theirs]
    taken = ranks.sum_over_ranks(len(theirs))  # collective
    missing = PROMPTS_PER_STEP - taken if TRAINER_SAMPLES else 0
    begun, most = 0, max(0, missing) * (1 + MAX_REFILLS)
    p.begin_rollout()
    while number := rollout.groups_to_begin(missing, p.flat_share, most - begun):
        before = len(mine)
        with clock.part("wait"), ranks.all_or_none("sampling"):  # collective
            share = sample_share(run, number, begun, counts)
            with clock.part("sample"), run.sampler.follow(p.step):
                for group, is_flat in share:
                    sampled.append(group)
                    if not (is_flat and SKIP_FLAT_GROUPS):
                        mine.append((group, run.reference.logps(group)))  # it is scored meanwhile
        usable = ranks.sum_over_ranks(len(mine) - before)  # collective
        p.count_round(groups=number, usable=usable)
        begun, missing = begun + number, missing - usable
    with clock.part("wait"):
        with ranks.all_or_none("the reference's log-probs"):  # collective
            for group, answer in mine:
                group.ref_logps = answer.result()
        groups = ranks.gather_groups([group for group, _ in mine])  # collective
    metrics = rollout_metrics(run, counts, theirs, sampled)  # collective
    if PUBLISH_STEPS:
        metrics |= staleness(groups, p.step, run.workers)
    return groups, metrics, sampled + theirs


def sample_share(run, number, begun, counts):
    """Yields (group, whether it is flat) of this rank's share of the next `number` groups, each
    when its last completion has ended; `counts` gets their tally."""
    rank, world, step = dist.get_rank(), dist.get_world_size(), run.progress.step
    prompts = itertools.islice(run.stream, number // world + (rank < number % world))  # line 5
    settings = {"seed": rollout.seed_of(SEED, step, begun, rank)}
    settings |= {"timed": lambda: run.clock.part("reward")}
    groups = rollout.sampled_and_rewarded(run.sampler, run.recipe, prompts, **settings)
    for sampled in groups:  # lines 7, 8
        tally = rollout.tally(run.recipe, sampled)
        counts.update(tally)  # flat groups too
        group = rollout.make_group(
            sampled,
            id=f"{step:06d}-{rank:04d}-{counts['groups']:04d}",
            run=run.progress.name,
            version=step,
            sampler="trainer",
            outcome=OUTCOME,
        )
        check_group(group)
        yield group, tally["flat"]


# --- Sequences to train: lines 6, 9 ----------------------------------------------------
def advantages_of(group, reward_weights):
    """Returns the advantages (G,) of a group's total rewards (line 9)."""
    assert group.reward_names == list(reward_weights), group.reward_names
    rewards, lengths = rollout.rewards_of(group), group.completion_lengths.tolist()
    sizes = {"limit": MAX_COMPLETION_TOKENS, "overlong": OVERLONG_TOKENS}
    totals = rollout.totals_of(rewards, lengths, reward_weights, **sizes)
    return plain_loss.group_advantages(torch.tensor(totals), scale_by_std=ADVANTAGE_STD)


def make_sequences(groups, reward_weights, step):
    """Returns the sequences of the groups, to train the policy after `step` updates; without the
    truncated if MASK_TRUNCATED: those still count in their group's mean, and in the number of
    sequences. Line 6: if a worker, or another policy, has sampled any of the groups, the old
    log-probs of all (a micro-batch mixes them) are the sampler's."""
    own = all(g.sampler == "trainer" and g.policy_version == step for g in groups)
    sequences = []
    for group in groups:
        ids = group.completions(group.completion_ids)
        logps = group.completions(group.sampler_logps)
        refs = group.completions(group.ref_logps) if KL_BETA else [None] * len(ids)
        for i, advantage in enumerate(advantages_of(group, reward_weights).tolist()):
            if MASK_TRUNCATED and group.truncated[i]:
                continue
            prompt, completion = group.prompt_ids.tolist(), ids[i].tolist()
            parts = logps[i], None, refs[i], advantage, group.owns()[i]
            sequence = Sequence(prompt, completion, *parts)
            sequence.old_logps = None if own else logps[i]
            sequence.fresh = group.policy_version == step
            sequences.append(sequence)
    lengths = torch.tensor([int(sequence.own.sum()) for sequence in sequences])
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
    own = joined([s.own for s in batch])
    sampler_logps = joined([s.sampler_logps for s in batch])
    loss, stats = (grpo_loss_triton if FUSED_LOSS else plain_loss).grpo_loss(
        hidden,
        head,
        ids,
        None if first_update else joined([s.old_logps for s in batch]),  # None: the loss's own
        joined([s.ref_logps for s in batch]) if KL_BETA else None,
        per_token([s.advantage for s in batch]),
        per_token([s.weight for s in batch]) * own,
        temperature=TEMPERATURE,
        vocab_size=vocab_size,
        clip_low=CLIP_LOW,
        clip_high=CLIP_HIGH,
        kl_beta=KL_BETA,
        objective=OBJECTIVE,
        unbiased_kl=UNBIASED_KL,
        sampler_logps=sampler_logps,
        is_cap=IS_CAP,
        is_mask=IS_MASK,
        # Where old and sampler's log-probs are the same, is_cap acts on nothing
        ratio_cap=IS_CAP if batch[0].old_logps is batch[0].sampler_logps else 0.0,
        sequences=per_token(list(range(len(batch)))) if RATIO_LEVEL == "sequence" else None,
    )
    if first_update:  # line 6, for the next update: its plan gives this rank the same sequences
        for sequence, logps in zip(batch, stats["logps"].cpu().split(lengths), strict=True):
            sequence.old_logps = logps
    fresh = per_token([float(s.fresh) for s in batch])
    for sequence in batch:  # the next update has other weights
        sequence.fresh = False
    return loss, stats | {"sampler_logps": sampler_logps, "fresh": fresh, "own": own}


def accumulate(run, sequences):
    """Collective: accumulates the gradient of a step's sequences, in micro-batches of at most
    MICRO_BATCH_TOKENS tokens; returns means over its tokens.

    The weights already divide by the whole step's counts, and the ranks' gradients are summed, not
    averaged (engine_config). So parts add up, in any order: to the same gradient for 1 x 8
    micro-batches, 8 x 1 and 2 ranks x 4.
    """
    engine, means = run.engine, TokenStats(run.engine.device)
    rank, world = dist.get_rank(), dist.get_world_size()
    rounds = plan_rounds(sequences, engine.module.packs, rank, world, MICRO_BATCH_TOKENS)
    for done, (batch, is_filler) in enumerate(rounds, start=1):
        engine.set_gradient_accumulation_boundary(done == len(rounds))
        hidden, ids = engine([s.prompt for s in batch], [s.completion for s in batch])
        loss, stats = batch_loss(hidden, engine.module.head, ids, batch, run.policy.vocab_size)
        if not is_filler:
            means.add(loss, stats)
        # A loss that is not finite can have a finite gradient: it becomes NaN, so that DeepSpeed
        # skips the step, on all ranks
        loss = loss * torch.where(loss.detach().isfinite(), float(not is_filler), torch.nan)
        ranks.note(f"backward {done} of {len(rounds)}")
        engine.backward(loss)  # collective
    return means.over_ranks()  # collective


# --- Update: line 11 -------------------------------------------------------------------
def update(run, sequences):
    """Collective: one optimiser update on the sequences (line 11); returns its metrics. A gradient
    that is not finite leaves the weights as they are ("skipped")."""
    engine, rate = run.engine, learning_rate(run.c, run.progress.step)
    for group in engine.optimizer.param_groups:
        group["lr"] = rate
    limit = out_of_memory_names("MICRO_BATCH_TOKENS", MICRO_BATCH_TOKENS)
    with run.clock.part("backward"), cpu_threads(CPU_THREADS), limit:
        metrics = accumulate(run, sequences)  # collective
    with ranks.all_or_none("checking the sampler"):  # collective
        check_sampler(metrics, run.policy.dtype)
    with run.clock.part("step"):
        norm = take_step(engine)  # collective
    metrics = with_kl(metrics, run.reference.info, MODEL)  # without what was not computed
    # DeepSpeed's norm of a gradient that overflowed may also be -1
    finite = math.isfinite(metrics["loss"]) and 0 <= norm < math.inf
    return metrics | {"grad_norm": norm, "learning_rate": rate, "skipped": int(not finite)}


# --- The loop: lines 2, 3, 4, 10 -------------------------------------------------------
def train(run):
    """Collective: trains until all steps are made; returns whether a signal has ended it before."""
    p, bar = run.progress, progress_bar(run.progress.step, STEPS)
    while True:  # line 4
        evaluate_if_due(run)  # collective
        asked = ranks.any_rank(stop.asked)  # collective
        ends = asked or p.step >= STEPS or p.accuracy >= STOP_ACCURACY or p.idle >= IDLE_LIMIT
        if ends or p.best == p.step or p.passed(SAVE_STEPS, max(p.saved, 0)):
            checkpoint.save_run(run)  # collective
        if ends:
            bar.close()
            checkpoint.point(RUN_DIR, "final", -1 if asked else p.saved)  # -1: not yet
            return asked
        run.clock.lap()  # evaluations and checkpoints are not part of a step
        before = p.step
        with checkpoint.undone_if_failed(run):
            groups, metrics, sampled = sample_step(run)  # collective; lines 5, 7, 8
        with ranks.all_or_none("preparing the update"):  # collective
            sequences = make_sequences(groups, REWARD_WEIGHTS, before)  # lines 6, 9
            run.folder.log_samples(run, sampled, advantages_of)
        p.idle = 0 if sequences else p.idle + 1
        if not sequences:
            log_idle(run, metrics, groups)
        updates = min(UPDATES_PER_ROLLOUT, STEPS - before) if sequences else 1
        for number in range(1, updates + 1):  # line 10
            p.step += 1
            trained = update(run, sequences) if sequences else {}  # collective; line 11
            with ranks.all_or_none("the end of the update"):  # collective
                if number == updates:
                    end_rollout(run, before)
                run.laps.append(run.clock.lap())
                own = metrics if number == 1 else {}  # the rollout's, once for all updates on it
                run.folder.log("metrics.jsonl", {"step": p.step} | own | trained | run.laps[-1])
                show(bar, p.step, metrics | trained | run.laps[-1])
                if sequences:
                    check_update(run, trained, sequences)


def end_rollout(run, before):
    """Publishes the policy and makes it the reference (lines 2, 3), if due since step `before`."""
    p = run.progress
    if run.workers and p.passed(PUBLISH_STEPS, before):
        with run.clock.part("publish"):
            run.workers.publish(p.step)
    if KL_BETA and p.passed(REFERENCE_REFRESH_STEPS, before):
        run.reference.refresh()
        p.reference = p.step
        say(f"the policy of step {p.step} is now the reference")


def evaluate_if_due(run):
    """Collective: evaluates at the beginning, every EVAL_STEPS and at the end. If any rank is asked
    to stop, the evaluation is left out, and due when the run resumes."""
    p = run.progress
    due = p.passed(EVAL_STEPS, p.evaluated) or p.step >= STEPS and p.evaluated < p.step
    if not (EVAL_STEPS and due) or ranks.any_rank(stop.asked):  # collective
        return
    say(f"greedy evaluation on {len(run.questions)} {EVAL_SPLIT} questions after step {p.step}")
    result = evaluate(run.sampler, p.step, run.recipe, run.questions)  # collective
    if not ranks.any_rank(stop.asked):  # collective
        run.folder.log_evaluation(result, p.step)
        p.take_evaluation(result.get("eval_accuracy", -1.0), KEEP_BEST)


# --- Main ---------------------------------------------------------------------------
known = frozenset(filter(str.isupper, globals()))  # a preset that sets another has misspelt it


def constants(**preset):
    """Sets those of `preset`, until the next call. Returns this module: its attributes are the
    constants, and have no other home. SystemExit says which can't be."""
    checks.check_constants(settle(globals(), known, preset))
    return sys.modules[__name__]


@ranks.explained()
def main(**preset):
    c = constants(**preset)
    checkpoint.check_run_dir(RUN_DIR, RESUME)
    check_reporters(REPORT_TO)
    tokenizer, recipe, server = prepare(c, needs_server=bool(REF_SERVER and KL_BETA))
    questions = load_questions(c, recipe.task, tokenizer)
    ranks.join_ranks(WAIT_LIMIT_SECONDS)  # collective
    _lock = checkpoint.leads(RUN_DIR) and checkpoint.lock_run(RUN_DIR)  # collective; to the end
    run = start_run(c, tokenizer, recipe, questions, server)  # collective
    with stop.listening():
        try:
            asked = train(run)  # collective
        except ranks.RunFailed:
            checkpoint.save_failed(run)  # collective
            raise
        finally:
            run.close()
    ranks.leave_at_exit()  # collective
    report_end(run, asked)


def worker(**preset):
    """Samples for the trainer at TRAINER, until that is gone."""
    c = constants(**preset)
    tokenizer, recipe, _ = prepare(c, needs_server=False)
    run_worker(worker_policy(c, tokenizer), recipe)


if __name__ == "__main__":
    try:
        (worker if role else main)(**given)
    except TooLong as error:
        sys.exit(str(error))
