"""The start of a run, new or resumed. `c` has the trainer's constants as attributes."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import torch.distributed as dist

from grpo.client import RefServer
from grpo.sampling.policy import Policy
from grpo.sampling.recipe import Recipe
from grpo.sampling.rollout import Stream
from grpo.sampling.start import make_policy
from grpo.training.checkpoint import Progress, open_run
from grpo.training.engine import make_engine
from grpo.training.exchange import Inbox, ReferenceLogps
from grpo.training.liveness import meet
from grpo.training.local_reference import LocalReference
from grpo.training.memory import fill_card
from grpo.training.metrics import Clock, Page, RunFolder
from grpo.training.publish import Publishing
from grpo.training.report import open_reporters


@dataclass
class Run:
    """What a run holds from its start to its end, on each rank."""

    constants: SimpleNamespace  # the trainer's
    policy: Policy
    engine: object  # DeepSpeed's, around a CompletionModel of the policy's model
    recipe: Recipe  # what is sampled and how it is rewarded
    stream: Stream  # this rank's prompts
    questions: list  # of the evaluation, as Recipe.prompts
    progress: Progress  # steps made, last and best evaluation, last checkpoint
    server: RefServer | None  # None: REF_SERVER is, or neither a KL penalty nor workers
    inbox: Inbox | None  # rank 0's groups from the server; None on the others
    reference: ReferenceLogps | LocalReference  # the reference's log-probs, as they arrive
    publishing: Publishing  # of the policy
    folder: RunFolder  # RUN_DIR
    clock: Clock  # seconds of the current step, by part ...
    laps: list = field(default_factory=list)  # ... and of all steps made
    idle_reason: str = ""  # why the newest step that trained nothing had nothing


def start_run(c, tokenizer, recipe, questions, server, page):
    """Collective: returns the Run, new or resumed, once all ranks may begin to sample. `page` shows
    what rank 0 logs where no server does; None on the others."""
    rank = dist.get_rank()
    policy = make_policy(c, tokenizer)
    recipe = fill_card(c, policy, recipe)  # collective
    clock = Clock()
    local = LocalReference(c, policy, clock) if c.KL_BETA and not server else None
    engine = make_engine(c, policy)
    # Workers take the seed's own order of prompts, so the ranks take another one
    order = f"{c.SEED}/trainer" if c.PUBLISH_STEPS else c.SEED
    stream = Stream(recipe.prompts, order, rank, dist.get_world_size())
    progress = open_run(c.RUN_DIR, vars(c), engine, stream, server)
    inbox = Inbox(server, progress.run, c.WAIT_LIMIT_SECONDS) if server and rank == 0 else None
    page = page or (server if rank == 0 else None)
    run = Run(
        constants=c,
        policy=policy,
        engine=engine,
        recipe=recipe,
        stream=stream,
        questions=questions,
        progress=progress,
        server=server,
        inbox=inbox,
        reference=local or ReferenceLogps(inbox, clock),
        publishing=Publishing(c, policy, recipe, inbox),
        folder=RunFolder(
            c.RUN_DIR,
            page=Page(page, progress.run, c.STEPS) if page else None,
            reporters=open_reporters(c, progress) if rank == 0 else (),
        ),
        clock=clock,
    )
    run.publishing.begin(progress)
    # Nobody samples before the server has undone what came after the checkpoint
    meet("the other ranks (rank 0 resumes the run at the server)")
    return run
