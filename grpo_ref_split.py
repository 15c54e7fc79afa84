"""Trains a language model with GRPO under DeepSpeed ZeRO-2, on the rewards of a task.

    CUDA_VISIBLE_DEVICES=7 python ref_server.py                           # first, on one GPU
    CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6 deepspeed grpo_ref_split.py        # then, on the others
    python grpo_ref_split.py REF_SERVER=None     # on a single GPU or a CPU, without a server
    python grpo_ref_split.py worker              # on other machines: samples for the trainer

Set constants below, in the command (STEPS=50), in a preset file (presets/), or by main(STEPS=50).
A run reads them once, into an object `c` that can't be changed: trainer.STEPS = 50 has no effect.
A function marked "collective" must be called by every rank; if one rank skips it, the others hang.

GRPO (DeepSeekMath, arXiv 2402.03300, eq. 3) needs no value network: a completion's advantage is its
reward, centered and scaled within the G completions of its prompt. The code follows the paper's
algorithm 1 and names its lines (docs/loss.md); the paper's step is a rollout here. Deviations:
  - Every mean is taken over the whole step, all ranks and micro-batches, never over a micro-batch.
  - We do not copy the old policy (line 6). The first update on a rollout uses its own log-probs as
    old log-probs, so the ratio is exactly 1. If a worker sampled any group, it uses the sampler's.
  - Groups whose total rewards are all equal ("flat") are skipped (SKIP_FLAT_GROUPS; DAPO,
    2503.14476, sec. 3.2): their advantages are 0.

Symbols: G completions per prompt, P prompt tokens, T completion tokens, B sequences (a prompt and
one completion each) per micro-batch, N their completion tokens, V ids of the tokenizer, V' rows of
the LM head, H hidden size. A `step` is an optimizer update, or an attempt with nothing to train on.
"""

import contextlib
import math

from grpo import checks
from grpo.constants import before_torch, command_line, defaults_in

# --- What to train ------------------------------------------------------------------
MODEL = "Qwen/Qwen2.5-3B"  # hub name or folder of a causal model (model_name_or_path, model_path)
TASK = "gsm8k"  # in tasks/, or a path: "my/task.py" (train_dataset, dataset_name, reward_funcs)
RUN_DIR = "runs/gsm8k"  # folder of checkpoints, metrics and samples; a run resumes (output_dir)
# Address of ref_server.py. If it runs on another machine, set the environment variable GRPO_TOKEN
# to the same secret on both. None keeps the reference model in this process.
REF_SERVER = "http://127.0.0.1:59875"

# --- Rollouts (in brackets, also above and below: TRL's and simple_GRPO's names) ------
# Prompts per rollout over all ranks, ideally a multiple of the number of ranks. More prompts make
# gradients less noisy and rollouts slower (gradient_accumulation_steps, generation_batch_size).
PROMPTS_PER_STEP = 28
GROUP_SIZE = 8  # G, completions per prompt; more cost more (num_generations, num_pre_Q)
MAX_PROMPT_TOKENS = 512  # longer prompts are left out; the log says how many (max_prompt_length)
MAX_COMPLETION_TOKENS = 512  # cut here (max_completion_length, max_new_tokens, max_tokens)
STOP_TOKENS = ["<|im_end|>"]  # tokens that end a completion, besides EOS; unknown ones are ignored
STOP_STRINGS = []  # texts that end a completion, such as "</answer>"; they are trained on, too
TEMPERATURE = 1.0  # of sampling and of all log-probs; higher is more random
SAMPLE_BATCH = 64  # completions a rank samples at once; more need memory (Q_batch_size)
SAMPLER = "torch"  # or "vllm" (use_vllm): pip install -e .[vllm]; see docs/performance.md
VLLM_CACHE_GB = 10.0  # of vLLM's KV cache; more samples more at once (vllm_gpu_memory_utilization)
MASK_TRUNCATED = False  # True: truncated ones only count in means (mask_truncated_completions)
SKIP_FLAT_GROUPS = True  # True: groups whose total rewards are all equal are left out
CHAT_TEMPLATE = {}  # of the template, such as {"enable_thinking": False} (chat_template_kwargs)
OUTCOME = None  # name of the reward that decides correctness: above 0 is correct; None: the task's
REWARD_WEIGHTS = None  # {reward: weight} (reward_weights); None: the task's; {}: only the KL counts

# --- Loss ---------------------------------------------------------------------------
# A token's loss is divided by the completion's length ("grpo"), by the number of tokens of the step
# ("dapo"), or by a constant ("dr_grpo").
LOSS_TYPE = "grpo"
# True: divides advantages by the group's std. False: only centers them, so that very easy and very
# hard prompts get no extra weight (Dr. GRPO) (scale_rewards).
ADVANTAGE_STD = True
# A token's ratio is its new probability over its old one. A token with a negative advantage has no
# gradient below the ratio 1 - CLIP_LOW, one with a positive advantage none above 1 + CLIP_HIGH.
CLIP_LOW = 0.2  # higher clips less, and the policy may move far on a rollout (epsilon, clip_param)
CLIP_HIGH = 0.2  # higher, such as 0.28, lets rare tokens become likely faster (epsilon_high)
KL_BETA = 0.04  # weight of the KL penalty; higher stays nearer; 0 needs no reference (beta)
UNBIASED_KL = False  # True: times the ratio, so its gradient is right (use_bias_correction_kl)
OBJECTIVE = "clip"  # or "cispo": clipped tokens keep a gradient, weighted by the clipped ratio
RATIO_LEVEL = "token"  # or "sequence": GSPO, CLIP_LOW 3e-4, _HIGH 4e-4 (importance_sampling_level)
# Truncated importance sampling corrects for a sampler whose log-probs differ from the trainer's: a
# token's objective is multiplied by p_trainer / p_sampler, by IS_CAP at most.
IS_CAP = 2.0  # 0: off (vllm_importance_sampling_clip_max)
# Optimizer updates on each rollout, mu (num_iterations). More reuse the samples, off-policy. With 1
# only groups of workers, which may be older, can be clipped.
UPDATES_PER_ROLLOUT = 1

# --- Workers, and another reference ------------------------------------------------------
PUBLISH_STEPS = 0  # workers get a new policy every N steps; 0: no workers (gen_update_steps)
TRAINER = "http://127.0.0.1:59876"  # where rank 0 serves workers; other machines need GRPO_TOKEN
MAX_STALENESS = 4  # groups sampled more than N updates ago are dropped; more keeps older groups
REFERENCE = None  # without a server: a reference model that has MODEL's tokenizer; None: MODEL

# --- Optimization -------------------------------------------------------------------
STEPS = 500  # updates, and attempts with nothing to train on (max_steps, all_steps)
LEARNING_RATE = 1e-6  # higher learns faster until it diverges; LoRA needs ten times as much (lr)
LORA_RANK = 0  # 16 or 32: adapters of that rank on a frozen model; 0: full (peft_config, lora_r)
BASE_BITS = 16  # 4: LoRA's frozen model has 4 bits a weight (quantization_config, load_in_4bit)
WARMUP_STEPS = 10  # the learning rate rises linearly from 0 in this many steps
FINAL_LR = 1.0  # share of LEARNING_RATE left at the end; 1: constant (lr_scheduler_type)
WEIGHT_DECAY = 0.0  # of AdamW; higher pulls the weights harder to 0
MAX_GRAD_NORM = 1.0  # a gradient with a larger global norm is scaled down to it
SEED = 0  # random seed of the order of questions and of sampling

# --- Memory: the largest batches run once at the start, and what does not fit ends the run -------
MICRO_BATCH_TOKENS = 8_192  # at once; same gradient (per_device_train_batch_size, train_batch_size)
FUSED_LOSS = False  # True: log-probs by kernels in Triton (grpo_loss_triton.py); NVIDIA only
GRADIENT_CHECKPOINTING = True  # True: recomputes activations; slower, far less memory
OFFLOAD_OPTIMIZER = False  # True: master weights, Adam states and the update are in CPU memory
DTYPE = "auto"  # bfloat16 (float32 masters) on a GPU that has it, else float32 (bf16, torch_dtype)

# --- Run ----------------------------------------------------------------------------
EVAL_STEPS = 50  # steps between greedy evaluations (also at the start and the end); 0: never
EVAL_SPLIT = "test"  # the task's split for evaluations
EVAL_QUESTIONS = 512  # uses N of the split's, evenly chosen; more are more precise and slower
SAVE_STEPS = 100  # steps between checkpoints, besides the last step's; 0: never, not even that
KEEP_CHECKPOINTS = 2  # the newest N, and RUN_DIR/best, of the best, are kept (save_total_limit)
REPORT_TO = []  # "tensorboard" or "wandb", which get each step's metrics, too
WAIT_LIMIT_SECONDS = 600  # the run ends after this long without the server
REWARD_TIMEOUT_SECONDS = 60  # a reward, of a group that takes longer, or a reply() counts as None
# The run ends after N steps in a row with nothing to train on, or with a gradient not finite.
IDLE_LIMIT = 10

DEFAULTS = defaults_in(globals())
before_torch()
if __name__ == "__main__":  # reports a mistake before torch is imported
    role, given = command_line(DEFAULTS, __doc__, roles=["worker"])
    checks.trainer_constants(DEFAULTS, given)

import torch
import torch.distributed as dist

from grpo import checkpoint, chunked, ranks, rehearsal, resume, rollout
from grpo import loss as plain_loss
from grpo.devices import out_of_memory_names
from grpo.engine import cpu_threads, learning_rate, take_step
from grpo.log import say
from grpo.logp_checks import check_logps
from grpo.metrics import TokenStats, evaluate, rollout_metrics, with_kl
from grpo.packing import plan_rounds
from grpo.prepare import prepare
from grpo.report import Bar, give_hints, report_end
from grpo.sample import keep_logps
from grpo.start import start_run
from grpo.stop import stop
from grpo.task import load_questions


# --- Sample: algorithm 1, lines 5, 7, 8, 9 ---------------------------------------------
def sample_rollout(run):
    """Collective: samples a rollout, and returns
    groups: what all ranks train on next, with the reference's log-probs;
    metrics: {name: mean over the sampled groups};
    sampled: every group, including those that are left out;
    taken: how many prompts all ranks have taken from run.order, from Progress.prompts on.

    Workers' groups are taken first; ranks sample what is missing. Each group that was started is
    finished and used: to stop when enough are complete would favor short completions.
    """
    c, p, clock = run.c, run.progress, run.clock
    with clock.part("wait"), ranks.all_or_none():  # collective
        from_workers = run.workers.take(p.step) if run.workers else []
    theirs = ranks.gather_groups(from_workers)  # collective
    mine = theirs[dist.get_rank() :: dist.get_world_size()]  # each rank's reference scores a share
    for group in to_train(mine):
        run.reference.ask(group)
    taken = max(0, c.PROMPTS_PER_STEP - len(to_train(theirs)))  # what workers have not sent
    if taken:
        waits = ranks.all_or_none(clock.part("wait"))  # collective; follow: new weights for vLLM
        with waits, clock.part("sample"), run.sampler.follow(p.step):
            for group in sample_share(run, taken):
                mine.append(group)
                if not group.skipped:
                    run.reference.ask(group)  # a server scores it meanwhile
    with ranks.all_or_none(clock.part("wait")):  # collective
        set_advantages(c, mine)  # line 9
        with clock.part(run.reference.part):
            run.reference.fill(to_train(mine), c.MICRO_BATCH_TOKENS)
    with clock.part("wait"):
        sampled = ranks.gather_groups(mine)  # collective
    metrics = rollout_metrics(run, sampled, clock.parts["sample"])
    return to_train(sampled), metrics, sampled, taken


def to_train(groups):
    return [group for group in groups if not group.skipped]


def sample_share(run, number):
    """Yields this rank's share of the next `number` groups, each as soon as it is finished."""
    rank, step, first = dist.get_rank(), run.progress.step, run.progress.prompts
    mine = range(first + rank, first + number, dist.get_world_size())
    prompts = (run.order[n] for n in mine)  # line 5
    seed = rollout.seed_of(run.c.SEED, step, 0, rank)  # the 0 keeps the seeds of earlier versions
    timed = lambda: run.clock.part("reward")
    groups = rollout.sampled_and_rewarded(run.sampler, run.recipe, prompts, seed=seed, timed=timed)
    for done, group in enumerate(groups, start=1):  # lines 7, 8
        group.id, group.version = f"{step:06d}-{rank:04d}-{done:04d}", step
        rollout.skip_if_flat(run.c, group)
        yield group


def set_advantages(c, groups):
    """Sets the advantage of each sample, by the total rewards of its group (line 9)."""
    for group in groups:
        totals = torch.tensor([sample.total for sample in group.samples], dtype=torch.float64)
        found = plain_loss.group_advantages(totals, scale_by_std=c.ADVANTAGE_STD)
        for sample, advantage in zip(group.samples, found.tolist(), strict=True):
            sample.advantage = advantage


# --- Samples to train: line 6 ----------------------------------------------------------
def samples_to_train(c, groups, step):
    """Returns the groups' samples, with their weights and old log-probs. `step` counts the policy's
    updates. Truncated samples are left out with MASK_TRUNCATED; they still count in their group's
    mean and as sequences. Line 6: if a worker sampled any group, all samples use the sampler's
    log-probs, because a micro-batch mixes groups; else those of the first update."""
    by_trainer = all(group.sampler == "trainer" for group in groups)
    samples = [s for g in groups for s in g.samples if not (c.MASK_TRUNCATED and s.truncated)]
    lengths = torch.tensor([sample.length for sample in samples])
    weights = plain_loss.token_weights(
        lengths,
        loss_type=c.LOSS_TYPE,
        sequences=sum(len(group.samples) for group in groups),
        tokens=int(lengths.sum()),
        max_completion_tokens=c.MAX_COMPLETION_TOKENS,
    )
    for sample, weight in zip(samples, weights.tolist(), strict=True):
        sample.weight, sample.on_policy = weight, sample.group.version == step
        sample.old_logps = None if by_trainer else sample.of_model(sample.logps)
        sample.ratio_cap = 0.0 if by_trainer else c.IS_CAP
    return samples


# --- Loss and gradient: line 11 --------------------------------------------------------
def batch_loss(c, hidden, head, ids, batch, vocab_size):
    """Returns (loss, stats) of a micro-batch's B samples: their part of the step's loss, a scalar,
    and tensors (N,) with a value per token, by name (grpo/loss.py). N counts the model's tokens,
    which alone are trained.

    `hidden` are the states that predict the completions' `ids`, a row per token; `head` is (V', H).
    """
    if any(s.is_model_token for s in batch):  # the task's tokens pass neither head nor loss
        masks = [torch.tensor(s.is_model_token or [True] * len(s.ids)) for s in batch]
        index = torch.cat(masks).nonzero().squeeze(1).to(ids.device)
        hidden, ids = hidden[index], ids[index]

    def per_token(parts):  # B numbers, or B lists with a number per token of the model -> (N,)
        pairs = zip(parts, batch, strict=True)
        parts = [part if isinstance(part, list) else [part] * s.length for part, s in pairs]
        return torch.tensor([x for part in parts for x in part], device=ids.device)

    linear_logps = chunked.linear_logps
    if c.FUSED_LOSS:
        from grpo_loss_triton import linear_logps
    settings = {"temperature": c.TEMPERATURE, "vocab_size": vocab_size, "entropy": True}
    logps, entropy = linear_logps(hidden, head, ids, **settings)
    sampler_logps = per_token([s.of_model(s.logps) for s in batch])
    loss, stats = plain_loss.policy_loss(
        logps,
        None if batch[0].old_logps is None else per_token([s.old_logps for s in batch]),
        per_token([s.of_model(s.ref_logps) for s in batch]) if c.KL_BETA else None,
        per_token([s.advantage for s in batch]),
        per_token([s.weight for s in batch]),
        clip_low=c.CLIP_LOW,
        clip_high=c.CLIP_HIGH,
        kl_beta=c.KL_BETA,
        objective=c.OBJECTIVE,
        unbiased_kl=c.UNBIASED_KL,
        sampler_logps=sampler_logps,
        is_cap=c.IS_CAP,  # no effect if old and sampler's log-probs are equal; ratio_cap acts then
        ratio_cap=batch[0].ratio_cap,
        sequences=per_token(range(len(batch))) if c.RATIO_LEVEL == "sequence" else None,
    )
    stats |= {"logps": logps.detach(), "entropy": entropy, "sampler_logps": sampler_logps}
    return loss, stats | {"on_policy": per_token([float(s.on_policy) for s in batch])}


def accumulate(run, samples):
    """Collective: accumulates the gradient of a step's samples, in micro-batches of at most
    MICRO_BATCH_TOKENS tokens; returns means over the step's tokens.

    The token weights already divide by the whole step's counts, and the ranks' gradients are
    summed, not averaged (engine_config). So 1 x 8 micro-batches, 8 x 1 and 2 ranks x 4 give the
    same gradient.
    """
    engine, vocab, means = run.engine, run.policy.vocab_size, TokenStats(run.engine.device)
    rank, world = dist.get_rank(), dist.get_world_size()
    rounds = plan_rounds(samples, engine.module.packs, rank, world, run.c.MICRO_BATCH_TOKENS)
    for done, (batch, is_filler) in enumerate(rounds, start=1):
        engine.set_gradient_accumulation_boundary(done == len(rounds))
        hidden, ids = engine([s.group.prompt for s in batch], [s.ids for s in batch])
        loss, stats = batch_loss(run.c, hidden, engine.module.head, ids, batch, vocab)
        if is_filler:
            engine.backward(0 * loss)  # collective
            continue
        means.add(loss, stats)
        keep_logps(batch, stats["logps"])  # line 6
        # A loss that is not finite may have a finite gradient: NaN makes all ranks skip the step
        scale = torch.where(loss.detach().isfinite(), 1.0, torch.nan)
        engine.backward(scale * loss)  # collective
    return means.over_ranks()  # collective


# --- Update: line 11 -------------------------------------------------------------------
def update(run, samples, step):
    """Collective: makes the update of step `step` (from 1) on the samples (line 11); returns
    metrics. If the gradient is not finite, no weight changes ("skipped")."""
    c, rate = run.c, learning_rate(run.c, step)
    limit = out_of_memory_names("MICRO_BATCH_TOKENS", c.MICRO_BATCH_TOKENS)
    with run.clock.part("backward"), cpu_threads(), limit:
        metrics = accumulate(run, samples)  # collective
    metrics = with_kl(metrics, run.reference.info, c.MODEL)  # KL only if it was computed
    check_logps(run, step, samples, metrics)  # collective
    with run.clock.part("step"), cpu_threads():
        taken = take_step(run.engine, rate, c.SEED)  # collective
    # DeepSpeed's norm of a gradient that overflowed may also be -1
    finite = math.isfinite(metrics["loss"]) and 0 <= taken["grad_norm"] < math.inf
    run.progress.checked |= finite
    return metrics | taken | {"learning_rate": rate, "skipped": int(not finite)}


# --- The loop: lines 4, 10 -------------------------------------------------------------
def train(run):
    """Collective: trains for all steps; returns whether a signal stopped it earlier."""
    c, p, bar = run.c, run.progress, Bar(run.progress.step, run.c.STEPS)
    while True:  # line 4
        evaluate_if_due(run)  # collective
        asked = ranks.any_rank(stop.asked)  # collective
        ends = asked or p.step >= c.STEPS or p.idle >= c.IDLE_LIMIT
        if ends or p.best == p.step or p.passed(c.SAVE_STEPS, p.saved or 0):
            checkpoint.save_run(run)  # collective
        if ends:
            bar.close()
            done = p.saved == p.step >= c.STEPS and not asked
            checkpoint.point(c.RUN_DIR, "final", p.saved if done else None)
            return asked
        run.clock.lap()  # evaluations and checkpoints are not part of a step
        train_on(run, bar, *sample_rollout(run))  # collective; lines 5 to 11


def train_on(run, bar, groups, metrics, sampled, taken):
    """Collective: makes the updates of a rollout, which sample_rollout has returned. Until the
    first of them is made, its prompts do not count as taken: if it fails, they come next."""
    c, p, before = run.c, run.progress, run.progress.step
    with ranks.all_or_none():  # collective
        samples = samples_to_train(c, groups, before)  # line 6
        run.folder.log_samples(run, sampled)
    p.idle = 0 if samples else p.idle + 1
    updates = min(c.UPDATES_PER_ROLLOUT, c.STEPS - before) if samples else 1
    for number in range(1, updates + 1):  # line 10
        trained = update(run, samples, p.step + 1) if samples else {}  # collective
        p.step += 1  # after line 11: a checkpoint has the number of steps that were made
        if number == 1:
            p.prompts, p.groups = p.prompts + taken, p.groups + metrics["groups_sampled"]
        with ranks.all_or_none():  # collective
            if run.workers and number == updates and p.passed(c.PUBLISH_STEPS, before):
                with run.clock.part("publish"):
                    run.workers.publish(p.step)
            run.laps.append(run.clock.lap())
            once = metrics if number == 1 else {}  # the rollout's metrics are logged once
            run.folder.log("metrics.jsonl", {"step": p.step} | once | trained | run.laps[-1])
            bar.show(p.step, metrics | trained | run.laps[-1])
            if samples and len(run.laps) == 1:
                give_hints(trained | run.laps[0])
        if not samples or trained.get("skipped"):
            from grpo.bad_step import log_bad_step

            log_bad_step(run, groups, samples, metrics | trained)  # collective
        else:
            p.bad = 0


def evaluate_if_due(run):
    """Collective: evaluates at the start, every EVAL_STEPS and at the end. If a stop is requested,
    the evaluation is skipped and happens when the run resumes."""
    c, p = run.c, run.progress
    due = p.evaluated is None or p.passed(c.EVAL_STEPS, p.evaluated)
    due = due or p.step >= c.STEPS and p.evaluated < p.step
    if not (c.EVAL_STEPS and due) or ranks.any_rank(stop.asked):  # collective
        return
    say(f"greedy evaluation on {len(run.questions)} {c.EVAL_SPLIT} questions after step {p.step}")
    result = evaluate(run.sampler, p.step, run.greedy, run.questions)  # collective
    if not ranks.any_rank(stop.asked):  # collective
        run.folder.log("metrics.jsonl", {"step": p.step} | result)
        say(f"step {p.step}: " + ", ".join(f"{name} {x:.3f}" for name, x in result.items()))
        p.take_evaluation(result.get("eval_accuracy"))


# --- Main ---------------------------------------------------------------------------
@ranks.explained()
def main(**given):
    """Trains with the constants above, except for those that are given."""
    c = checks.trainer_constants(DEFAULTS, given)
    resume.check_run_dir(c.RUN_DIR)
    tokenizer, recipe, server = prepare(c, needs_server=bool(c.REF_SERVER and c.KL_BETA))
    questions = load_questions(recipe, tokenizer)
    ranks.join_ranks(c.WAIT_LIMIT_SECONDS)  # collective
    resume.check_shared(c.RUN_DIR)  # collective
    with resume.lock_run(c.RUN_DIR) if dist.get_rank() == 0 else contextlib.nullcontext():
        run = start_run(c, tokenizer, recipe, questions, server)  # collective
        with stop.listening(), contextlib.closing(run):
            try:
                rehearsal.rehearse(run, batch_loss)  # collective
                asked = train(run)  # collective
            except ranks.RunFailed:
                checkpoint.save_failed(run)  # collective
                raise
    dist.barrier()  # rank 0 holds the store that connects the ranks, and ends last
    report_end(run, asked)


@stop.listening(at_once=True)
def worker(**given):
    """Samples for the trainer at TRAINER until the trainer is gone."""
    from grpo.options.workers.worker import run_worker, worker_policy

    c = checks.trainer_constants(DEFAULTS, given)
    tokenizer, recipe, _ = prepare(c)
    run_worker(worker_policy(c, tokenizer), recipe)


if __name__ == "__main__":
    (worker if role else main)(**given)
