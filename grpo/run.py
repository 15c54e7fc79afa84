"""What a run holds from its start to its end: its parts, its progress, and seconds of a step."""

import contextlib
import time
from collections import Counter
from dataclasses import dataclass, field

from grpo.policy import Policy
from grpo.rollout import Order
from grpo.task import Recipe

PARTS = ("sample", "reward", "score", "wait", "backward", "step", "publish", "other")


@dataclass
class Progress:
    """What a checkpoint keeps in addition to weights and optimizer. None means never (or no
    accuracy, because OUTCOME applied to no question)."""

    name: str  # of the run: its folder's name and a random suffix
    step: int = 0  # steps made
    evaluated: int | None = None  # the step of the last evaluation
    saved: int | None = None  # the step of the last checkpoint
    best: int | None = None  # the step of the best evaluation, from the first update on
    best_accuracy: float | None = None  # its result, or that of step 0 if none was better
    idle: int = 0  # steps in a row that had nothing to train on,
    idle_reason: str = ""  # and why the last of them had nothing
    bad: int = 0  # updates in a row that were not finite
    checked: bool = False  # whether the first update has passed its check
    groups: int = 0  # groups that ranks and workers sampled since step 0
    prompts: int = 0  # of the order, that ranks took; both move with a rollout's first update

    def passed(self, every, before):
        """Returns whether a multiple of `every` lies after step `before`, up to now (0: never)."""
        return bool(every and self.step // every > before // every)

    def take_evaluation(self, accuracy):
        """Records this step's evaluation. Ties go to the earlier checkpoint. An evaluation of step
        0 is of MODEL itself, which needs no checkpoint."""
        self.evaluated = self.step
        least = -1.0 if self.best_accuracy is None else self.best_accuracy
        if accuracy is not None and accuracy > least:
            self.best_accuracy, self.best = accuracy, self.step or None


class Clock:
    """Counts a step's seconds by part (PARTS): "backward" has the forward too, "other" the rest."""

    def __init__(self):
        self.parts, self.started = Counter(), time.perf_counter()
        self.inner = 0.0  # seconds of parts within the part that is running

    @contextlib.contextmanager
    def part(self, name):
        """Counts the block's time; parts within it are counted separately."""
        began, outer, self.inner = time.perf_counter(), self.inner, 0.0
        yield
        seconds = time.perf_counter() - began
        self.parts[name] += seconds - self.inner
        self.inner = outer + seconds

    def lap(self):
        """Returns {"seconds": all, "seconds_sample": ...} since the last lap."""
        now = time.perf_counter()
        total, parts = now - self.started, self.parts
        parts["other"] = total - sum(parts.values())
        self.parts, self.started = Counter(), now
        return {"seconds": total} | {f"seconds_{k}": v for k, v in parts.items()}


@dataclass(frozen=True)
class Run:
    """What a run holds from its start to its end, on each rank."""

    c: object  # the trainer's Constants
    record: dict  # the constants as JSON, with weights and outcome as this run has them
    policy: Policy
    sampler: object  # what samples with its weights: the policy itself, or a VLLMPolicy
    engine: object  # DeepSpeed's, around a CompletionModel of the policy's model
    recipe: Recipe  # what is sampled and how it is rewarded
    greedy: Recipe  # the recipe of an evaluation: one completion, at temperature 0
    order: Order  # all ranks' prompts; Progress.prompts says which come next
    questions: list  # of the evaluation, in the form of Recipe.prompts
    progress: Progress  # steps made, last and best evaluation, last checkpoint
    reference: object  # gives the reference's log-probs of a group: grpo/reference.py
    workers: object  # rank 0's Workers, or None
    folder: object  # report.RunFolder: RUN_DIR
    clock: Clock  # seconds of the current step, by part
    data: str  # resume.data_of: the hash of its prompts
    laps: list = field(default_factory=list)  # the clock's, of all steps made

    def close(self):
        self.sampler.close()
        if self.workers:
            self.workers.close()
        self.folder.close()
