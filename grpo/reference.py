"""The reference's log-probs of a group: from a local model, from ref_server.py, or none.

    answer = reference.logps(group)     # returns a future at once
    group.take_ref_logps(answer.result())   # (N,) float32; None without a KL penalty

A server scores a rank's groups while the rank samples the next ones. Without a server (REF_SERVER =
None) each rank scores its groups with MODEL itself, all at once when the first is needed. With
LORA_RANK, MODEL is the policy's model without its adapters, which takes no memory; otherwise it is
a frozen copy, which REFERENCE_ON_CPU keeps in CPU memory while it is not used.

The reference may be another model with the same tokenizer, a teacher (docs/teacher.md): REFERENCE
here, or another MODEL at the server.
"""

import contextlib
import copy
import queue
from concurrent.futures import Future, wait

import torch

from grpo.forward import CompletionModel
from grpo.log import in_background, say
from grpo.models import check_context, load_tokenizer
from grpo.policy import load_policy
from grpo.scoring import score_groups
from grpo.stop import Wait
from grpo.weights import adapters_off, load_weights, swapped, trained_weights
from grpo.wire import check_facts, facts_of

REQUEST_TOKENS = 1 << 16  # about the tokens of one request; a larger group is sent alone


def make_reference(c, policy, server):
    """Returns the run's reference. `policy` is MODEL as it was loaded, before a checkpoint is; `c`
    has the constants as attributes; `server` is a ReferenceClient, or None."""
    if not c.KL_BETA:
        return NoReference()
    reference = RemoteReference(server) if server else LocalReference(c, policy)
    if is_teacher(reference.info, c.MODEL):
        say(
            f"the reference is a teacher, not MODEL: {reference.info['model']}. The"
            " first update can't check the teacher's weights; teacher_kl is the KL to the teacher"
        )
    return reference


def is_teacher(info, model):
    """Returns whether a reference, by its `info`, is another model than the policy's."""
    return info["model"] not in (None, model)


class NoReference:
    """KL_BETA = 0 needs no reference."""

    def __init__(self):
        self.info = {"model": None}  # other references: the model's name, and its dtype

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


# --- At a server ----------------------------------------------------------------------
class RemoteReference:
    """ref_server.py's model. A thread sends one request at a time: groups that are sampled
    meanwhile go together in the next one. If the server dies, the thread repeats its request."""

    def __init__(self, server):
        self.server, self.info = server, server.info
        self.asked = queue.SimpleQueue()
        in_background(self._ask)

    def logps(self, group):
        answer = Answer(self._wait)
        self.asked.put((group, answer))
        return answer

    def _ask(self):
        while True:
            request, tokens = [], 0
            while not request or not self.asked.empty() and tokens < REQUEST_TOKENS:
                request.append(self.asked.get())
                tokens += len(request[-1][0].prompt) + len(request[-1][0].ids)
            groups, answers = zip(*request, strict=True)
            try:
                for answer, logps in zip(answers, self.server.score(groups), strict=True):
                    answer.set_result(logps)
            except Exception as error:  # noqa: BLE001 (raised in the main thread, by result)
                for answer in answers:
                    answer.set_exception(error)

    def _wait(self, answer):
        waiting = Wait(f"the reference's log-probs from {self.server.url}")
        while not wait([answer], timeout=1).done:
            waiting.sleep("it has not scored them yet", pause=0)


# --- Local ----------------------------------------------------------------------------
class LocalReference:
    """MODEL itself, or REFERENCE, on each rank. It scores batches of MICRO_BATCH_TOKENS: without a
    gradient each takes less memory than it does in training."""

    def __init__(self, c, policy):
        self.c, self.policy, self.home = c, policy, policy.model.device
        self.info = {"model": c.REFERENCE or c.MODEL, "dtype": policy.dtype}
        self.waiting = []  # [(group, its Answer)]
        self.budget = c.MICRO_BATCH_TOKENS  # of a batch; "auto" until start_run knows what fits
        self.adapters = None  # with LORA_RANK: those of the refreshed reference
        self.adapted = c.LORA_RANK and not c.REFERENCE  # the policy's model, adapters off
        if c.REFERENCE:
            what, model = f"REFERENCE = {c.REFERENCE!r}", load_teacher(c, policy)
        else:
            what = "the policy's model without its adapters" if self.adapted else "a copy of MODEL"
            model = policy.model
        self.away = c.REFERENCE_ON_CPU and not self.adapted and self.home.type != "cpu"
        say(f"the reference is {what}{', in CPU memory between uses' if self.away else ''}")
        self.model = CompletionModel(model)  # asks what the policy's device can do
        if self.away:  # straight to pinned memory, from which copies are faster
            self.model = moved(self.model, lambda tensor: tensor.cpu().pin_memory())
        elif model is policy.model and not self.adapted:
            self.model = moved(self.model, torch.clone)
        # The bytes that are on the GPU only while it scores
        self.visiting = self.away * sum(tensor.nbytes for tensor in model.parameters())

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
        with self._as_reference():
            model = self.model
            if self.away:  # the copy is dropped after it has scored
                model = moved(model, lambda tensor: tensor.to(self.home, non_blocking=True))
            found = score_groups(model, groups, budget=self.budget, **settings)
        for (_, answer), logps in zip(asked, found, strict=True):
            answer.set_result(logps)

    def _as_reference(self):
        """Returns a context in which self.model is the reference."""
        model = self.model.model
        if self.adapters:
            return swapped(model, self.adapters)
        if self.adapted:
            return adapters_off(model)
        return contextlib.nullcontext()

    # --- REFERENCE_REFRESH_STEPS --------------------------------------------------------
    def refresh(self):
        """Makes the policy, as it is now, the reference (algorithm 1, lines 2 and 3)."""
        self.load(trained_weights(self.policy.model))

    def weights(self):
        """Returns what load() takes, {name: CPU tensor}, of a reference that was refreshed."""
        if self.adapters:
            return {name: tensor.cpu() for name, tensor in self.adapters.items()}
        return {name: tensor.cpu() for name, tensor in self.model.model.named_parameters()}

    def load(self, tensors):
        if self.c.LORA_RANK:
            self.adapters = {name: tensor.to(self.home) for name, tensor in tensors.items()}
        else:
            load_weights(self.model.model, tensors)


def load_teacher(c, policy):
    """Returns the model REFERENCE, frozen. SystemExit if its tokenizer or context does not fit."""
    teacher = load_tokenizer(c.REFERENCE, "REFERENCE")
    facts, mine = (facts_of(t, c.TEMPERATURE) for t in (teacher, policy.tokenizer))
    check_facts(facts, mine, f"REFERENCE = {c.REFERENCE!r}", c.MODEL)
    loaded = load_policy(c.REFERENCE, teacher, c.DTYPE)
    check_context(c, loaded.model.config, "REFERENCE")
    return loaded.model.requires_grad_(False)


def moved(model, move):
    """Returns a copy of a frozen model with each parameter moved. Buffers stay where they are."""
    own = {p: torch.nn.Parameter(move(p.detach()), requires_grad=False) for p in model.parameters()}
    return copy.deepcopy(model, {id(p): there for p, there in own.items()})
