"""Runs a model on packed sequences; returns the states that predict the completions' tokens.

    model = CompletionModel(AutoModelForCausalLM.from_pretrained(...))
    hidden, ids = model(prompts, completions)         # lists of id lists -> (N, H), (N,)
    logps = linear_logps(hidden, model.head, ids)     # grpo/chunked.py

All sequences of a batch form one row of tokens without padding: a prompt, its completions, the next
prompt. The G completions of a group share a prompt, so it runs only once, forward and backward.
Attention (grpo/packing.py) lets each completion see its prompt. The results differ by rounding.

Trainer and reference server both compute their log-probs with this file.
Symbols: B sequences, L tokens of the row, N completion tokens of all sequences, one after another,
H hidden size, V' rows of the LM head.
"""

import contextlib
import functools
import inspect

import torch
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo.devices import is_out_of_memory
from grpo.packing import PACKED, Row, of_like_length


# --- The model ----------------------------------------------------------------------
class CompletionModel(torch.nn.Module):
    """A causal language model that returns the states before its LM head, for completions only.

    `head` is the LM head (V', H). It is None if logits are not a plain matrix product (a bias,
    Gemma 2's soft-capping, Cohere's scale); then the states are the logits. `packs` is whether
    sequences are packed. `notes` are log lines about what this model does not support.
    """

    def __init__(self, model, *, gradient_checkpointing=False):
        super().__init__()
        self.model, self.notes = model, []
        if gradient_checkpointing and not checkpoint_layers(model):
            self.notes.append("this model has no layers to checkpoint, so it needs more memory")
        self.separable = has_plain_head(model)
        self.packs = not (fault := self._fault_of_packing())
        if fault:
            self.notes.append(f"sequences can't be packed, so each repeats its prompt: {fault}")

    @property
    def head(self):
        return self.model.get_output_embeddings().weight if self.separable else None

    def forward(self, prompts, completions):
        """Returns states (N, H) in the model's dtype, and the ids (N,) that they predict."""
        if self.packs:
            states = self._packed(Row(prompts, completions, self.model.device))
        else:
            states = self._plain(prompts, completions)
        return states, torch.tensor([i for c in completions for i in c], device=states.device)

    def _packed(self, row):
        with attention_is(PACKED, self.model.config):
            return self._run(row.ids, row.states, position_ids=row.positions, packed=row)[0]

    def _plain(self, prompts, completions):
        """Runs each sequence with its prompt, in batches of similar length. They are padded on
        the right, which causal attention never sees."""
        sequences = [p + c[:-1] for p, c in zip(prompts, completions, strict=True)]
        states = [None] * len(sequences)
        for batch in of_like_length([(0, len(s)) for s in sequences], slack=0):
            ids = padded([sequences[i] for i in batch], self.model.device)
            cut = min(len(prompts[i]) for i in batch) - 1  # column t of the states predicts t + 1
            found = self._run(ids, torch.arange(cut, ids.shape[1], device=ids.device))
            for i, row in zip(batch, found, strict=True):
                states[i] = row[len(prompts[i]) - 1 - cut :][: len(completions[i])]
        return torch.cat(states)

    def _run(self, ids, columns, **options):
        """Returns the states (any, columns, H) of these columns of `ids`."""
        if self.separable:
            out = self.model.base_model(input_ids=ids, use_cache=False, **options)
            return out.last_hidden_state.index_select(1, columns)
        keep = supported(self.model, logits_to_keep=columns)
        logits = self.model(input_ids=ids, use_cache=False, **keep, **options).logits
        return logits if keep else logits.index_select(1, columns)

    @torch.no_grad()
    def _fault_of_packing(self):
        """Returns why packed sequences give other states than plain ones, or None. Tries three
        sequences."""
        if not can_cache(self.model):  # a recurrent state would continue into the next sequence
            return "this model does not work with a KV cache alone"
        sequences = [[1, 2, 3], [1, 2, 3], [4, 5, 6, 7, 8]], [[3, 2, 1], [2, 6], [5, 4, 3]]
        row = Row(*sequences, self.model.device)
        try:
            packed = self._packed(row)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return f"a packed row fails ({type(error).__name__})"
        layers = DynamicCache(config=self.model.config).layers
        windows = {getattr(x, "sliding_window", None) for x in layers}
        if row.windows != windows:
            return "transformers' attention interface does not get this model's window"
        states = self._plain(*sequences)
        gap = distance(packed, states)
        return None if gap <= limit_of(states) else f"packed states would differ by {gap:.1g}"


@torch.no_grad()
def has_plain_head(model):
    """Returns whether logits are the base model's output @ weight.T. Tries 4 ids."""
    head, body, seen = model.get_output_embeddings(), model.base_model, []
    if type(head) is not torch.nn.Linear or head.bias is not None or body is model:
        return False  # also for adapters and quantised weights, where `weight` is only a part
    ids = torch.tensor([[1, 2, 3, 4]], device=model.device)
    hook = head.register_forward_hook(lambda _, inputs, output: seen.extend([inputs[0], output]))
    try:
        logits = model(input_ids=ids, use_cache=False).logits
    finally:
        hook.remove()
    if len(seen) != 2 or not torch.equal(seen[1], logits):  # of one run: a soft-cap is a small gap
        return False
    product = torch.nn.functional.linear(seen[0], head.weight)
    # Of two runs: a mixture of experts adds up in any order on a GPU
    hidden = body(input_ids=ids, use_cache=False).last_hidden_state
    return distance(product, logits) <= 1e-2 and distance(hidden, seen[0]) <= limit_of(hidden)


def distance(a, b):
    """Returns |a - b| / |b|, a float; 0 if both are 0."""
    return ((a - b).float().norm() / b.float().norm().clamp(min=1e-30)).item()


def limit_of(states):
    """Returns the largest distance that counts as rounding. Measured: in float32 3e-7 at most, with
    a missing mask 0.2 to 0.9."""
    return 1e-3 if states.dtype == torch.float32 else 0.1


@contextlib.contextmanager
def attention_is(name, config):
    """In the block the model of this config uses transformers' attention with this name."""
    before, config._attn_implementation = config._attn_implementation, name
    try:
        yield
    finally:
        config._attn_implementation = before


# --- How families differ ---------------------------------------------------------------
def can_cache(model):
    """Returns whether the model has a KV cache from which sequences can be repeated and dropped.

    Recurrent and linear-attention models (Mamba, RWKV, Qwen3-Next) keep a state instead; some in a
    few layers only, which only their cache shows (LFM2). GPT-1 keeps nothing.
    """
    if getattr(model, "_is_stateful", False) or not supported(model, past_key_values=None):
        return False
    layers = DynamicCache(config=model.config).layers
    return not any(hasattr(layer, "conv_states") for layer in layers)


def supported(model, **arguments):
    """Returns those arguments that the model's forward accepts."""
    names = forward_arguments(type(model))
    return {name: value for name, value in arguments.items() if name in names}


@functools.cache
def forward_arguments(architecture):
    return inspect.signature(architecture.forward).parameters.keys()


def padded(sequences, device):
    """Returns lists of ids as a tensor (B, longest), int64, with zeros on the right."""
    width = max(map(len, sequences))
    return torch.tensor([ids + [0] * (width - len(ids)) for ids in sequences], device=device)


# --- Gradient checkpointing -----------------------------------------------------------
def checkpoint_layers(model):
    """Makes the layers keep only their inputs for the backward pass; returns the number of
    layers."""
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    for layer in layers:
        if getattr(layer.forward, "func", None) is not recompute_later:  # not done before
            layer.forward = functools.partial(recompute_later, layer.forward, model.config)
    return len(layers)


def recompute_later(forward, config, *args, **kwargs):
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    name = config._attn_implementation  # the model no longer has it in the backward pass
    settings = {"use_reentrant": False, "preserve_rng_state": False}
    settings["context_fn"] = lambda: (contextlib.nullcontext(), attention_is(name, config))
    return checkpoint(forward, *args, **settings, **kwargs)
