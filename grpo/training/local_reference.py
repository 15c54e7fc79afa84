"""The reference without a server (REF_SERVER = None): MODEL itself, scored by each rank.

With LORA_RANK it is the policy's own model without its adapters, and takes no memory. Else it is a
frozen copy, made before anything is trained; with REFERENCE_ON_CPU it waits in the CPU's memory.
"""

import contextlib
import copy

import torch

from grpo.forward import CompletionModel
from grpo.log import say
from grpo.weights import adapters_off
from grpo_loss_triton import linear_logps


class LocalReference:
    """In the place of exchange.ReferenceLogps, without its collectives. A step's sequences are
    scored before its first update, in the micro-batches of that: without a gradient each takes less
    memory than it does in training."""

    def __init__(self, c, policy, clock):
        """`policy` is MODEL as it was loaded, before a checkpoint is; `c` has the trainer's
        constants as attributes; `clock` gets the time of scoring."""
        self.clock, self.home = clock, policy.model.device
        self.settings = {"temperature": c.TEMPERATURE, "vocab_size": policy.vocab_size}
        model = policy.model if c.LORA_RANK else copy.deepcopy(policy.model).requires_grad_(False)
        self.model = CompletionModel(model, share_prompts=c.SHARE_PROMPTS)
        what = "the policy's model without its adapters" if c.LORA_RANK else "a copy of MODEL"
        self.away = c.REFERENCE_ON_CPU and not c.LORA_RANK and self.home.type != "cpu"
        say(f"the reference is {what}{', in CPU memory between uses' if self.away else ''}")
        if self.away:
            change(model, lambda tensor: tensor.cpu().pin_memory())  # pinned: a faster copy

    def expect(self, ids, *, oldest):
        """Nothing is uploaded, and nothing will arrive."""

    def in_order_of_arrival(self, turns):
        """Yields the turns, once this rank's sequences of all of them are scored."""
        missing = [[s for s in turn.batch if s.ref_logps is None] for turn in turns]
        if any(missing):  # not at the second update on a rollout
            with self.clock.part("wait"), self._at_hand():
                for sequences in filter(None, missing):
                    self._score(sequences)
        return iter(turns)

    def complete(self, turn):
        """The turn's sequences have theirs."""

    @torch.no_grad()
    def _score(self, sequences):
        """Gives sequences, a micro-batch, their reference log-probs, (T,) on the CPU."""
        lengths = [len(s.completion) for s in sequences]
        hidden, ids = self.model([s.prompt for s in sequences], [s.completion for s in sequences])
        logps = linear_logps(hidden, self.model.head, ids, **self.settings).cpu()
        for sequence, part in zip(sequences, logps.split(lengths), strict=True):
            sequence.ref_logps = part

    def _at_hand(self):
        """Returns a context in which the model is MODEL, on the policy's device."""
        model = self.model.model
        return on_device(model, self.home) if self.away else adapters_off(model)


def tensors_of(model):
    """Returns [(dict, name, tensor)]: where a model keeps its parameters and buffers. Tied ones are
    one tensor."""
    kept = [dicts for m in model.modules() for dicts in (m._parameters, m._buffers)]
    return [(d, name, tensor) for d in kept for name, tensor in d.items() if tensor is not None]


def change(model, changed):
    """Puts changed(tensor) in the place of each tensor of a frozen model."""
    places = tensors_of(model)
    new = {tensor: changed(tensor.detach()) for tensor in {tensor for *_, tensor in places}}
    for kept, name, tensor in places:
        kept[name] = new[tensor]


@contextlib.contextmanager
def on_device(model, device):
    """In the block a frozen model is on the device. Nothing is copied back."""
    own = tensors_of(model)
    try:
        change(model, lambda tensor: tensor.to(device, non_blocking=True))
        yield
    finally:
        for kept, name, tensor in own:
            kept[name] = tensor
