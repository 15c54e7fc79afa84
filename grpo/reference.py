"""The reference's log-probs of a group: from a local model, or none (remote.py: a server).

    answer = reference.logps(group)     # returns a future at once
    group.take_ref_logps(answer.result())   # (N,) float32; None without a KL penalty

A server scores a rank's groups while the rank samples the next ones. Without a server (REF_SERVER =
None) each rank scores its groups with MODEL itself, all at once when the first is needed. With
LORA_RANK, MODEL is the policy's model without its adapters, which takes no memory; otherwise it is
a frozen copy.

The reference may be another model with the same tokenizer, a teacher (docs/teacher.md): REFERENCE
here, or another MODEL at the server.
"""

import contextlib
import copy
from concurrent.futures import Future

import torch

from grpo.forward import CompletionModel
from grpo.scoring import score_groups


def is_teacher(info, model):
    """Returns whether a reference, by its `info`, is another model than the policy's."""
    return info["model"] not in (None, model)


class NoReference:
    """KL_BETA = 0 needs no reference."""

    def __init__(self):
        self.info = {"model": None}  # other references: the model's name, and its dtype
        self.what = "none"
        self.budget = 0  # of a LocalReference

    def logps(self, group):
        answer = Future()
        answer.set_result(None)
        return answer


class Answer(Future):
    """A group's log-probs. If they are needed and not computed yet, it calls `complete`."""

    def __init__(self, complete):
        super().__init__()
        self.complete = complete

    def result(self, timeout=None):
        if not self.done():
            self.complete(self)
        return super().result(timeout)


# --- Local ----------------------------------------------------------------------------
class LocalReference:
    """MODEL itself, or REFERENCE, on each rank. It scores batches of MICRO_BATCH_TOKENS: without a
    gradient each takes less memory than it does in training."""

    def __init__(self, c, policy):
        self.c, self.policy = c, policy
        self.info = {"model": c.REFERENCE or c.MODEL, "dtype": policy.dtype}
        self.waiting = []  # [(group, its Answer)]
        self.budget = c.MICRO_BATCH_TOKENS  # of a batch; "auto" until start_run knows what fits
        self.adapters, self.what, model = None, "a copy of MODEL", policy.model
        if c.REFERENCE:
            from grpo.options.training.teacher import load_teacher

            self.what, model, self.info["model"] = load_teacher(c, policy)
        elif c.LORA_RANK:
            from grpo.options.training.lora import ReferenceAdapters

            self.what = "the policy's model without its adapters"
            self.adapters = ReferenceAdapters(model)
        self.model = CompletionModel(model)
        if model is policy.model and not self.adapters:
            self.model = copied(self.model)

    def logps(self, group):
        answer = Answer(self._score_waiting)
        self.waiting.append((group, answer))
        return answer

    def _score_waiting(self, _):
        """Scores all groups that wait, and completes their Answers."""
        asked, self.waiting = self.waiting, []
        samples = [group.samples for group, _ in asked]
        groups = [([s.prompt for s in group], [s.ids for s in group]) for group in samples]
        settings = {"temperature": self.c.TEMPERATURE, "vocab_size": self.policy.vocab_size}
        with self.adapters.as_reference() if self.adapters else contextlib.nullcontext():
            found = score_groups(self.model, groups, budget=self.budget, **settings)
        for (_, answer), logps in zip(asked, found, strict=True):
            answer.set_result(logps)


def copied(model):
    """Returns a frozen copy of a model."""
    own = {id(p): torch.nn.Parameter(p.detach().clone(), False) for p in model.parameters()}
    return copy.deepcopy(model, own)
