"""A run begins: what it holds is made, new or as its newest checkpoint has it. `c` is the trainer's
constants, as attributes."""

from dataclasses import dataclass, field

import torch.distributed as dist

from grpo.client import RefServer
from grpo.log import say
from grpo.sampling.policy import Policy
from grpo.sampling.recipe import Recipe
from grpo.sampling.rollout import Stream
from grpo.sampling.start import make_policy
from grpo.training.checkpoint import Progress, open_run
from grpo.training.engine import start_engine, training_threads
from grpo.training.exchange import Inbox, ReferenceLogps
from grpo.training.liveness import meet
from grpo.training.metrics import Clock, Page, RunFolder
from grpo.training.publish import Publishing


@dataclass
class Run:
    """What a run holds from its start to its end, on each rank."""

    policy: Policy
    engine: object  # DeepSpeed's, round a CompletionModel of the policy's model
    recipe: Recipe  # what is sampled and how it is rewarded
    stream: Stream  # this rank's prompts
    questions: list  # of the evaluation, as Recipe.prompts
    progress: Progress  # steps made, last evaluation, last checkpoint
    server: RefServer | None  # None: neither a KL penalty nor workers
    inbox: Inbox | None  # rank 0's groups from the server; None on the others
    reference: ReferenceLogps  # the reference's log-probs, as they arrive
    publishing: Publishing  # of the policy
    folder: RunFolder  # RUN_DIR
    clock: Clock  # a step's seconds, by part ...
    laps: list = field(default_factory=list)  # ... and of all steps made
    idle_reason: str = ""  # why the newest step that trained nothing had nothing


def make_engine(c, policy):
    """Collective: returns DeepSpeed's engine round the policy."""
    if policy.model.device.type == "cpu":
        threads = training_threads(c.CPU_THREADS)
        say(f"on a CPU: {threads} threads of each rank for forward and backward")
    return start_engine(
        policy,
        learning_rate=c.LEARNING_RATE,
        adam_betas=c.ADAM_BETAS,
        weight_decay=c.WEIGHT_DECAY,
        max_grad_norm=c.MAX_GRAD_NORM,
        share_prompts=c.SHARE_PROMPTS,
        gradient_checkpointing=c.GRADIENT_CHECKPOINTING,
        offload_optimizer=c.OFFLOAD_OPTIMIZER,
        wait_limit_seconds=c.WAIT_LIMIT_SECONDS,
    )


def make_publishing(c, policy, recipe, inbox):
    """Returns what publishes the policy. What waits for training and is older than MAX_STALENESS
    would be dropped: so many groups, and no more, may wait or be outstanding at workers."""
    rollouts = max(1, (c.MAX_STALENESS - c.PUBLISH_STEPS) // c.UPDATES_PER_ROLLOUT)
    return Publishing(
        policy,
        recipe,
        inbox,
        publish_steps=c.PUBLISH_STEPS,
        refresh_steps=c.REFERENCE_REFRESH_STEPS,
        max_staleness=c.MAX_STALENESS,
        capacity=c.PROMPTS_PER_STEP * rollouts,
        scored=bool(c.KL_BETA),
    )


def start_run(c, tokenizer, recipe, questions, server):
    """Collective: returns the Run, new or resumed, when all ranks may begin to sample."""
    rank, world = dist.get_rank(), dist.get_world_size()
    policy = make_policy(c, tokenizer)
    engine = make_engine(c, policy)
    # Workers take the seed's own order of prompts, so the ranks take another one
    order = f"{c.SEED}/trainer" if c.PUBLISH_STEPS else c.SEED
    stream = Stream(recipe.prompts, order, rank, world)
    progress = open_run(c.RUN_DIR, vars(c), engine, stream, server)
    inbox, clock = None, Clock()
    if server and rank == 0:
        inbox = Inbox(server, progress.run, c.WAIT_LIMIT_SECONDS)
    run = Run(
        policy=policy,
        engine=engine,
        recipe=recipe,
        stream=stream,
        questions=questions,
        progress=progress,
        server=server,
        inbox=inbox,
        reference=ReferenceLogps(inbox, clock),
        publishing=make_publishing(c, policy, recipe, inbox),
        folder=RunFolder(c.RUN_DIR, Page(server, progress.run) if inbox else None),
        clock=clock,
    )
    run.publishing.begin(progress, model=c.MODEL, run_dir=c.RUN_DIR)
    # nobody samples before the server has undone what came after the checkpoint
    meet("the other ranks (rank 0 resumes the run at the server)")
    return run
