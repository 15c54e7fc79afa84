"""The records of a step: a task's Question, what a sampler takes (Prompt), a sampled completion
(Sample), and the G completions of a question (Group).

Each part of a step adds what it knows: the sampler adds ids and their log-probs, the task rewards,
the reference its log-probs, and the trainer what the loss needs. Lists have an entry per token,
unless a comment states otherwise. Between processes groups have another form (grpo/wire.py).
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple


class Question(NamedTuple):
    """An item of a task, as the model is asked."""

    index: int  # in the task's split
    item: dict  # as the task's load() gave it
    ids: list[int]  # of its prompt
    opening: str = ""  # how the prompt begins the answer; rewards see it before a completion


class Prompt(NamedTuple):
    """What sampler.stream_groups takes; for each it yields (key, [Sample] * G)."""

    key: object  # a Question, or the conversations that go on (turns.py)
    ids: list[int]
    limit: int | None = None  # tokens of each completion; None: max_new_tokens


@dataclass
class Sample:
    """One completion of T tokens, from the sampler to the loss."""

    ids: list[int]  # as sampled: text is never tokenized again
    logps: list[float]  # of each id, at the sampling temperature, from float32
    truncated: bool = False  # cut at the limit, and not ended by EOS or a stop string
    is_model_token: list[bool] | None = None  # False: the task added the id (turns); None: all True
    text: str | list[str] | None = None  # as the task sees it, or its turns; None: a worker's
    tool_calls: tuple = (0, 0)  # of TOOLS: made, failed
    group: object = field(default=None, repr=False, compare=False)  # its Group
    environment: object = None  # what its environment returned as its rewards
    rewards: dict | None = None  # floats by name; NaN: does not apply
    total: float = math.nan  # weighted sum of the rewards that apply
    ref_logps: list[float] | None = None  # of the reference; None if KL_BETA is 0
    advantage: float = 0.0
    weight: float = 0.0  # in the step's loss, of each token that the model wrote
    on_policy: bool = False  # whether the policy that sampled it is the one that is updated
    ratio_cap: float = 0.0  # of policy_loss: IS_CAP if old_logps are the sampler's
    # Of the tokens that the model wrote, in the last update (None: on another rank)
    trainer_logps: list[float] | None = None
    old_logps: list[float] | None = None  # the same, in the rollout's first; or the sampler's

    @property
    def length(self):
        """The number of tokens that the model wrote. Only these are trained."""
        return sum(self.is_model_token) if self.is_model_token else len(self.ids)

    def of_model(self, values):
        """Returns those of T values that belong to the model's tokens."""
        if not self.is_model_token:
            return values
        return [x for x, holds in zip(values, self.is_model_token, strict=True) if holds]


@dataclass
class Group:
    """The completions of one prompt."""

    index: int  # of the question in the task's split
    item: dict | None  # the question, as the task's load() gave it
    prompt: list[int]  # ids
    samples: list[Sample]  # G
    id: str = ""  # unique in its run; a step takes its groups in the order of their ids
    sampler: str = "trainer"  # or a worker's name
    version: int = 0  # the number of steps that the policy had made when it sampled
    skipped: bool = False  # left out of the update, because it has zero variance (rollout.is_flat)
    run: str = ""  # a worker's group: the run whose policy sampled it
    outcome: str = ""  # a worker's group: the reward that decides correctness

    def __post_init__(self):
        for sample in self.samples:
            sample.group = self

    @property
    def ids(self):
        """The N ids of all completions, one after another."""
        return [id for sample in self.samples for id in sample.ids]

    def take_ref_logps(self, logps):
        """Gives each sample its part of the reference's log-probs, a tensor (N,)."""
        parts = logps.split([len(sample.ids) for sample in self.samples])
        for sample, part in zip(self.samples, parts, strict=True):
            sample.ref_logps = part.tolist()


def keep_logps(batch, logps):
    """Keeps the trainer's log-probs (N,) of a micro-batch's samples, after its forward pass. Those
    of a rollout's first update are the old ones of the next, unless the sampler's are; after it
    the samples are off-policy."""
    parts = logps.cpu().split([sample.length for sample in batch])
    for sample, part in zip(batch, parts, strict=True):
        sample.trainer_logps, sample.on_policy = part.tolist(), False
        sample.old_logps = sample.old_logps or sample.trainer_logps
