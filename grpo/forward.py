"""From a model and token ids to the states that predict each completion token; prompts run once.

    model = CompletionModel(AutoModelForCausalLM.from_pretrained(...), share_prompts=True)
    hidden, ids = model(prompts, completions)         # lists of id lists -> (N, H), (N,)
    logps = linear_logps(hidden, model.head, ids)     # grpo/loss.py or grpo_loss_triton.py
    for part in score_sequences(model, prompts, completions, ...):    # the same in batches

The G completions of a group share a prompt, which nearly every trainer runs G times, forward and
backward. Here it runs once, with a KV cache: each completion reads its prompt's keys and values
there, and their gradients add up there in the backward pass. It is the same sum in another order.

Trainer and reference server both compute their log-probs by this file.
Symbols: B sequences, P prompt and T completion tokens, N completion tokens of all sequences, one
after another without padding, H hidden size, V' rows of the LM head.
"""

import functools
import gc
import itertools

import torch
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache, DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo.devices import release_memory
from grpo.log import tell
from grpo.models import can_cache, left_padded, padded, supported
from grpo.packing import number_prompts, pack_by_tokens, whole_groups
from grpo_loss_triton import linear_logps


# --- The model ----------------------------------------------------------------------
class CompletionModel(torch.nn.Module):
    """A causal language model that gives the states before its LM head, of completions only.

    `head` is the LM head (V', H), or None where logits are more than a matrix product (a bias,
    Gemma 2's soft-capping, Cohere's scale): then the states are the logits. `shares` says whether
    prompts run once. `notes` are sentences on what the model does not allow.
    """

    def __init__(self, model, *, share_prompts, gradient_checkpointing=False):
        super().__init__()
        self.model, self.notes = model, []
        if gradient_checkpointing and not checkpoint_layers(model):
            self.notes.append("this model has no layers to checkpoint: it needs more memory")
        self.separable = has_plain_head(model)
        if not self.separable:
            self.notes.append("its logits are more than a matrix product: the loss holds them all")
        fault = share_prompts and self._fault_of_sharing()
        if fault:
            self.notes.append(f"prompts can't be shared, each completion runs its own: {fault}")
        self.shares = share_prompts and not fault

    @property
    def head(self):
        return self.model.get_output_embeddings().weight if self.separable else None

    def forward(self, prompts, completions):
        """Returns states (N, H) in the model's dtype, and the ids (N,) that they predict."""
        states = self._states(self._shared if self.shares else self._separate, prompts, completions)
        ids = [token for c in completions for token in c]
        return states, torch.tensor(ids, device=states.device)

    def _states(self, run, prompts, completions):
        """Returns states (N, H) from `run`, which is _shared or _separate."""
        states, first = run(prompts, completions)  # (B, width, H); where each completion begins
        begin = [i * states.shape[1] + column for i, column in enumerate(first)]
        index = [b + t for b, c in zip(begin, completions, strict=True) for t in range(len(c))]
        return states.flatten(0, 1)[torch.tensor(index, device=states.device)]

    def _separate(self, prompts, completions):
        """Each sequence by itself, padded on the right, which causal attention never sees."""
        sequences = [p + c[:-1] for p, c in zip(prompts, completions, strict=True)]
        ids = padded(sequences, self.model.device)
        cut = min(map(len, prompts)) - 1  # column t of the states predicts token t + 1
        states = self._run(ids, ids.shape[1] - cut, use_cache=False)
        return states, [len(p) - 1 - cut for p in prompts]

    def _shared(self, prompts, completions):
        """Each prompt once, padded on the left to end in one column; completions on top of it."""
        device, cache = self.model.device, Cache(layer_class_to_replicate=PromptLayer)
        number = torch.tensor(number_prompts(prompts, share=True), device=device)  # (B,)
        prompts = [prompt for prompt, _ in itertools.groupby(prompts)]
        ids, positions, mask = left_padded(prompts, device)
        last = self._run(ids, 1, mask, positions, past_key_values=cache)

        first = [0] * len(completions)
        states = last[number]  # (B, 1, H): the prompt's last state predicts the first token
        if max(map(len, completions)) == 1:
            return states, first
        ids = padded([c[:-1] for c in completions], device)  # no state after the last is needed
        if mask is not None:
            mask = torch.cat([mask[number], torch.ones_like(ids)], 1)
        # Padding repeats a sequence's last position: GPT-2's table of them may end there
        end = torch.tensor([[max(len(c) - 2, 0)] for c in completions], device=device)
        columns = torch.arange(ids.shape[1], device=device)
        positions = positions[number, -1:] + 1 + torch.minimum(columns, end)
        cache = Cache(layers=[CompletionLayer(layer, number) for layer in cache.layers])
        rest = self._run(ids, ids.shape[1], mask, positions, past_key_values=cache)
        return torch.cat([states, rest], 1), first

    def _run(self, ids, keep, mask=None, positions=None, **cache):
        """Returns the states of the last `keep` columns."""
        body = self.model.base_model if self.separable else self.model
        optional = supported(body, attention_mask=mask, position_ids=positions, logits_to_keep=keep)
        out = body(input_ids=ids, **optional, **cache)
        return (out.last_hidden_state if self.separable else out.logits)[:, -keep:]

    @torch.no_grad()
    def _fault_of_sharing(self):
        """Returns why shared prompts do not give the states of separate ones, or None: tried on
        three sequences."""
        if not can_cache(self.model):
            return "this model has no KV cache, or not only that"
        prompts = [[1, 2, 3], [1, 2, 3], [4, 5, 6, 7, 8]]
        completions = [[3, 2, 1], [2], [5, 4, 3]]
        try:
            shared = self._states(self._shared, prompts, completions)
        except torch.OutOfMemoryError:
            raise
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
            return f"its layers do not take a cache object of ours ({type(error).__name__})"
        states = self._states(self._separate, prompts, completions)
        gap = distance(shared, states)
        return None if gap <= limit_of(states) else f"its states would differ by {gap:.1g}"


@torch.no_grad()
def has_plain_head(model):
    """Returns whether logits are base_model's output @ weight.T, which is tried on 4 ids."""
    head, body, seen = model.get_output_embeddings(), model.base_model, []
    if type(head) is not torch.nn.Linear or head.bias is not None or body is model:
        return False  # also adapters and quantised weights, whose `weight` is not all
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
    """Returns |a - b| / |b|, a float; 0 where both are."""
    return ((a - b).float().norm() / b.float().norm().clamp(min=1e-30)).item()


def limit_of(states):
    """Returns the distance that passes for rounding. Measured: in float32 3e-7 at most; without the
    padding's mask 0.2 to 0.9."""
    return 1e-3 if states.dtype == torch.float32 else 0.1


# --- Caches that may be read twice --------------------------------------------------
# Gradient checkpointing runs a layer again in the backward pass, which would append to a
# cache twice (transformers drops the cache there). These two give the same answer each time.
class PromptLayer(DynamicLayer):
    """Keeps the prompts' keys and values (prompts, heads, P, head size), with their graph."""

    def update(self, keys, values, *_, **__):
        if not self.is_initialized:
            self.keys, self.values, self.is_initialized = keys, values, True
        return keys, values

    def get_seq_length(self):
        return 0


class CompletionLayer(DynamicLayer):
    """Puts each sequence's prompt before its own keys and values, and keeps nothing.

    It has the keys of all positions: where attention slides, transformers' mask applies the window.
    """

    def __init__(self, prompts, number):
        super().__init__()
        self.keys, self.values, self.number = prompts.keys, prompts.values, number
        self.is_initialized = True

    def update(self, keys, values, *_, **__):
        keys = torch.cat([self.keys.index_select(0, self.number), keys], -2)
        return keys, torch.cat([self.values.index_select(0, self.number), values], -2)


def forget_caches():
    """Empties these layers after a forward pass that no backward pass followed. The graph holds
    them through the checkpoints, and they hold the graph: Python's collector does not see that."""
    for layer in gc.get_objects():
        if isinstance(layer, PromptLayer | CompletionLayer):
            layer.keys = layer.values = None


def checkpoint_layers(model):
    """Makes layers keep only their inputs for the backward pass, from now on; returns how many
    there are."""
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    for layer in layers:
        if getattr(layer.forward, "func", None) is not recompute_later:  # not done before
            layer.forward = functools.partial(recompute_later, layer.forward)
    return len(layers)


def recompute_later(forward, *args, **kwargs):
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


# --- Log-probs under a frozen model: all that a KL penalty needs of the reference -------
def score_sequences(model, prompts, completions, *, budget, temperature, vocab_size):
    """Yields {index of a sequence: its log-probs (T,)}, float32 on the CPU, a batch at a time, the
    shortest completions first.

    `model` is a CompletionModel, which runs a prompt once for neighbours that have the same. A
    batch has at most `budget` padded tokens, and is halved while it does not fit the GPU. Raises
    OutOfMemoryError if a single sequence does not fit.
    """
    numbers = number_prompts(prompts, model.shares)
    sizes = [(n, len(p), len(c)) for n, p, c in zip(numbers, prompts, completions, strict=True)]
    batches = pack_by_tokens(sizes, whole_groups(sizes, budget), budget)
    while batches:
        batch = batches.pop()  # the last has the shortest
        p, c = [prompts[i] for i in batch], [completions[i] for i in batch]
        try:
            logps = score_batch(model, p, c, temperature, vocab_size)
        except torch.OutOfMemoryError:
            if len(batch) == 1:
                raise
            logps = None
        if logps:
            yield dict(zip(batch, logps, strict=True))
        else:  # out here, where the error no longer holds the batch's tensors
            release_memory()
            half = len(batch) // 2
            tell(f"out of memory: {len(batch)} sequences are scored in two halves")
            batches += [batch[half:], batch[:half]]


@torch.no_grad()
def score_batch(model, prompts, completions, temperature, vocab_size):
    """Returns the log-probs (T,) of each completion."""
    hidden, ids = model(prompts, completions)
    logps = linear_logps(hidden, model.head, ids, temperature=temperature, vocab_size=vocab_size)
    parts = logps.cpu().split([len(c) for c in completions])
    return [part.clone() for part in parts]  # not views, which would keep the batch alive
