"""The start of a run, new or resumed. `c` has the trainer's constants as attributes."""

import copy
import functools
from pathlib import Path

import torch
import torch.distributed as dist

from grpo.checkpoint import check_disk, try_save
from grpo.constants import STOPPED
from grpo.devices import out_of_memory_names
from grpo.engine import make_engine, training_threads
from grpo.forward import CompletionModel
from grpo.log import announced, say
from grpo.prepare import make_policy
from grpo.ranks import all_or_none
from grpo.reference import LocalReference, NoReference, is_teacher
from grpo.report import RunFolder, as_json
from grpo.resume import data_of, open_run
from grpo.rollout import Order
from grpo.run import Clock, Run


def make_reference(c, policy, server):
    """Returns the run's reference. `policy` is still MODEL: no checkpoint has been loaded into it.
    `c` has the constants as attributes; `server` is a ReferenceClient, or None."""
    if not c.KL_BETA:
        return NoReference()
    if server:
        from grpo.remote import RemoteReference

        reference = RemoteReference(server, c, policy)
    elif c.REFERENCE:
        from grpo.options.teacher import load_teacher

        reference = LocalReference(c, policy, *load_teacher(c, policy))
    elif c.LORA_RANK:
        from grpo.options.lora import adapters_off

        off = functools.partial(adapters_off, policy.model)
        what = "the policy's model without its adapters"
        reference = LocalReference(c, policy, CompletionModel(policy.model), what, context=off)
    else:
        model = copy.deepcopy(CompletionModel(policy.model)).requires_grad_(False)
        reference = LocalReference(c, policy, model, "a copy of MODEL")
    if is_teacher(reference.info, c.MODEL):
        say(f"the reference is a teacher, not MODEL: {reference.info['model']} (see teacher_kl)")
    return reference


def make_sampler(c, policy):
    """Collective: returns this rank's sampler (SAMPLER): the policy itself, or vLLM."""
    if c.SAMPLER == "torch":
        return policy
    from grpo.options.vllm_policy import VLLMPolicy

    with announced("vLLM to start"):
        return VLLMPolicy(c, policy.tokenizer, policy.model)


def uses_of(c, policy, sampler, engine, reference):
    """Returns {name: what the run uses for it}."""
    model, weight = engine.module, next(policy.model.parameters())
    device = torch.cuda.get_device_name() if weight.is_cuda else weight.device.type
    chunks = "in chunks, by Triton" if c.FUSED_LOSS else "in chunks, by torch"
    lora = f", LoRA of rank {c.LORA_RANK}" + " on weights of 4 bits" * (c.BASE_BITS == 4)
    return {
        "ranks": dist.get_world_size(),
        "device": f"{device}, {training_threads()} CPU threads a rank",
        "dtype": policy.dtype + lora * bool(c.LORA_RANK),
        "sampler": sampler.describe(),
        "attention": "packed, in buckets" if model.packs else "each completion with its prompt",
        "loss": chunks if model.separable else "all logits at once",
        "reference": reference.what,
    }


def serve_workers(c, recipe, policy, progress):
    """Collective: returns rank 0's Workers, which have its policy, or None."""
    workers = None
    with all_or_none():  # collective
        if c.PUBLISH_STEPS and dist.get_rank() == 0:
            from grpo.options.workers.policy_proof import SharedPolicy
            from grpo.options.workers.rank_0 import Workers

            workers = Workers(c, recipe, SharedPolicy(**vars(policy)), progress.name)
            workers.publish(progress.step)
    return workers


def make_reporters(c, record, progress):
    """Returns rank 0's reporters (REPORT_TO)."""
    if not c.REPORT_TO or dist.get_rank():
        return []
    from grpo.options.reporters import REPORTERS

    return [REPORTERS[name](record, progress) for name in c.REPORT_TO]


def start_run(c, tokenizer, recipe, questions, server):
    """Collective: returns the Run, new or resumed. `server` is a ReferenceClient, or None."""
    rank = dist.get_rank()
    say(f"curves and samples while it runs: python plot.py live {Path(c.RUN_DIR).parent}")
    policy = make_policy(c, tokenizer)
    with all_or_none():  # collective
        if rank == 0 and c.SAVE_STEPS:
            try_save(c, policy)
    with out_of_memory_names("MODEL", c.MODEL):
        reference = make_reference(c, policy, server)  # by MODEL, before a checkpoint is loaded
    sampler = make_sampler(c, policy)  # collective
    resolved = {"REWARD_WEIGHTS": recipe.weights, "OUTCOME": recipe.outcome}
    record = as_json(vars(c) | resolved)
    with out_of_memory_names("MODEL", c.MODEL):
        engine = make_engine(c, policy)  # collective
    data = data_of(recipe)  # collective
    uses = uses_of(c, policy, sampler, engine, reference)
    say("; ".join(f"{name}: {what}" for name, what in uses.items()))
    progress = open_run(c, record, engine, data, uses)  # collective
    check_disk(c, policy.model)
    workers = serve_workers(c, recipe, policy, progress)  # collective
    Path(c.RUN_DIR, STOPPED).unlink(missing_ok=True)  # of a run that resumes
    return Run(
        c=c,
        record=record,
        policy=policy,
        sampler=sampler,
        engine=engine,
        recipe=recipe,
        greedy=recipe.others(GROUP_SIZE=1, TEMPERATURE=0),
        order=Order(recipe.prompts, c.SEED),
        questions=questions,
        progress=progress,
        reference=reference,
        workers=workers,
        folder=RunFolder(c.RUN_DIR, make_reporters(c, record, progress)),
        clock=Clock(),
        data=data,
    )
