"""The reference's log-probs of a rank's groups: from a local model, or none (remote.py: a server).

    reference.ask(group)    # as soon as the group is sampled
    reference.fill(groups, budget)    # all that were asked for, in that order: sets ref_logps

A server scores from `ask` on, while the rank samples the next groups. Without a server (REF_SERVER
= None) each rank scores its groups with MODEL itself in `fill`. With LORA_RANK, MODEL is the
policy's model without its adapters, which takes no memory; otherwise it is a frozen copy.

The reference may be another model with the same tokenizer, a teacher (docs/loss.md): REFERENCE
here, or another MODEL at the server.
"""

import contextlib
from pathlib import Path
from types import MappingProxyType

import torch

from grpo.chunked import linear_logps
from grpo.devices import is_out_of_memory, release_memory
from grpo.log import tell
from grpo.packing import pack_by_tokens, sizes_of


def is_teacher(info, model):
    """Returns whether a reference, by its `info`, is another model than the policy's: one that has
    another name, at the hub or as a folder."""
    return info["model"] is not None and Path(info["model"]).name != Path(model).name


class NoReference:
    """KL_BETA = 0 needs no reference."""

    part = "wait"  # of a step's seconds, as which fill() counts
    info = MappingProxyType({"model": None})  # others: the model's name, dtype, hash of weights
    what = "none"

    def ask(self, group):
        pass

    def fill(self, groups, budget):
        pass


class LocalReference:
    """MODEL itself, or REFERENCE, on each rank."""

    part = "score"

    def __init__(self, c, policy, model, what, name=None, context=contextlib.nullcontext):
        """`model` is a CompletionModel, which is the reference within `context()`."""
        self.model, self.what, self.as_reference = model, what, context
        self.info = {"model": name or c.MODEL, "dtype": policy.dtype}
        self.settings = {"temperature": c.TEMPERATURE, "vocab_size": policy.vocab_size}

    def ask(self, group):
        """Does nothing: fill() scores all groups."""

    def fill(self, groups, budget):
        """Scores the groups in batches of `budget` tokens, MICRO_BATCH_TOKENS: without a gradient
        each takes less memory than it does in training."""
        pairs = [([g.prompt] * len(g.samples), [s.ids for s in g.samples]) for g in groups]
        with self.as_reference():
            found = score_groups(self.model, pairs, budget=budget, **self.settings)
        for group, logps in zip(groups, found, strict=True):
            group.take_ref_logps(logps)


# --- Scoring: also ref_server.py's ------------------------------------------------------
def score_groups(model, groups, *, budget, temperature, vocab_size):
    """Returns the log-probs (N,), float32 on the CPU, of each group: a pair of equally many prompts
    and completions. Sequences of all groups are batched together.

    `model` is a CompletionModel, which runs a prompt once for neighbors that share it. A batch has
    at most `budget` tokens and is halved until it fits the GPU. Raises torch's error if a single
    sequence does not fit.
    """
    prompts = [prompt for part, _ in groups for prompt in part]
    completions = [completion for _, part in groups for completion in part]
    batches, found = pack_by_tokens(sizes_of(prompts, completions, model.packs), budget), {}
    while batches:
        batch = batches.pop(0)
        p, c = [prompts[i] for i in batch], [completions[i] for i in batch]
        try:
            logps = score_batch(model, p, c, temperature, vocab_size)
        except (RuntimeError, MemoryError) as error:
            if len(batch) == 1 or not is_out_of_memory(error):
                raise
            logps = None
        if logps:
            found |= zip(batch, logps, strict=True)
        else:  # outside of `except`, where the error no longer keeps tensors alive
            release_memory()
            half = len(batch) // 2
            tell(f"out of memory: scoring {len(batch)} sequences in two halves")
            batches[:0] = batch[:half], batch[half:]
    in_order = iter([found[i] for i in range(len(prompts))])
    answers = [torch.cat([next(in_order) for _ in part]) for part, _ in groups]
    if not all(answer.isfinite().all() for answer in answers):
        raise ValueError("the reference model computes log-probs that are not finite: check DTYPE")
    return answers


@torch.no_grad()
def score_batch(model, prompts, completions, temperature, vocab_size):
    """Returns the log-probs (T,) of each completion."""
    hidden, ids = model(prompts, completions)
    logps = linear_logps(hidden, model.head, ids, temperature=temperature, vocab_size=vocab_size)
    return logps.cpu().split([len(c) for c in completions])
