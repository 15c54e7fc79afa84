"""From a model and token ids to the states that predict each completion token; prompts run once.

    model = CompletionModel(AutoModelForCausalLM.from_pretrained(...), share_prompts=True)
    hidden, ids = model(prompts, completions)         # lists of id lists -> (N, H), (N,)
    logps = linear_logps(hidden, model.head, ids)     # grpo_loss.py or grpo_loss_triton.py

The G completions of a group have the same prompt, and nearly every trainer runs it G times, forward
and backward. Here it runs once with a key-value cache, the completions run on top of that, each row
reading its prompt's keys and values, and in the backward pass the gradients of all G rows meet in
them. Nothing is approximated: it is the same sum, added in another order.

Trainer and reference server both take their log-probs from here, so they compute the same thing.
Symbols: R rows (sequences), P prompt and T completion tokens, N completion tokens of all rows, one
row after another without padding, H hidden size, V' rows of the LM head.
"""

import functools
import itertools

import torch
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache, DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo.models import accepts, can_cache
from grpo.packing import number_prompts


# --- The model ----------------------------------------------------------------------
class CompletionModel(torch.nn.Module):
    """A causal language model that gives the states before its LM head, of completions only.

    What the model allows is settled here, once. `head` is its LM head (V', H), or None where logits
    are more than a product with a matrix (a bias, Gemma 2's soft-capping, Cohere's scale): then the
    states are the logits. `shares` says whether prompts run once; `notes` are sentences about what
    could not be had. The model stays in eval mode: dropout would make the ratio noise.
    """

    def __init__(self, model, *, share_prompts, gradient_checkpointing=False):
        super().__init__()
        self.model, self.notes = model, []
        if gradient_checkpointing and not checkpoint_layers(model):
            self.notes.append("this model has no layers to checkpoint: it needs more memory")
        self.separable = has_plain_head(model)
        if not self.separable:
            self.notes.append("its logits are more than a matrix product: the loss holds them all")
        self.shares = share_prompts and self._shares_exactly()

    @property
    def head(self):
        return self.model.get_output_embeddings().weight if self.separable else None

    def forward(self, prompts, completions):
        """-> states (N, H) in the model's dtype, and the ids (N,) that they predict."""
        run = self._shared if self.shares else self._separate
        states, first = run(prompts, completions)  # (R, width, H); row i's first token: first[i]
        width, device = states.shape[1], states.device
        index = [
            row * width + start + t
            for row, (start, c) in enumerate(zip(first, completions, strict=True))
            for t in range(len(c))
        ]
        ids = torch.tensor([token for c in completions for token in c], device=device)
        return states.flatten(0, 1)[torch.tensor(index, device=device)], ids

    def _separate(self, prompts, completions):
        """Each row by itself, padded on the right, where causal attention can't see it: no mask."""
        rows = [p + c[:-1] for p, c in zip(prompts, completions, strict=True)]
        first = [len(p) - 1 for p in prompts]  # column t of the states predicts token t + 1
        ids = self._padded(rows)
        states = self._run(ids, ids.shape[1] - min(first), use_cache=False)
        return states, [start - min(first) for start in first]

    def _shared(self, prompts, completions):
        """Each prompt once, padded on the left to end in one column; completions on top of it."""
        numbers = number_prompts(prompts, share=True)
        prompts = [next(run) for _, run in itertools.groupby(prompts)]
        ids, mask = self._padded(prompts, left=True), None
        if len(set(map(len, prompts))) > 1:
            mask = self._padded([[1] * len(p) for p in prompts], left=True)
        record = Cache(layer_class_to_replicate=PromptLayer)
        at = torch.tensor([len(p) for p in prompts], device=ids.device)[:, None]
        positions = torch.arange(-ids.shape[1], 0, device=ids.device) + at  # (prompts, P)
        last = self._run(ids, 1, mask, positions.clamp(min=0), past_key_values=record)

        numbers = torch.tensor(numbers, device=ids.device)
        first = [0] * len(completions)
        states = last[numbers]  # (R, 1, H): the prompt's last state predicts the first token
        if max(map(len, completions)) == 1:
            return states, first
        ids = self._padded([c[:-1] for c in completions])  # what follows the last one is not needed
        if mask is not None:
            mask = torch.cat([mask[numbers], torch.ones_like(ids)], 1)
        # Padding repeats a row's last position: GPT-2's table of them may end there
        last_at = torch.tensor([max(len(c) - 2, 0) for c in completions], device=ids.device)
        steps = torch.arange(ids.shape[1], device=ids.device)
        positions = at[numbers] + torch.minimum(steps, last_at[:, None])
        cache = Cache(layers=[CompletionLayer(layer, numbers) for layer in record.layers])
        rest = self._run(ids, ids.shape[1], mask, positions, past_key_values=cache)
        return torch.cat([states, rest], 1), first

    def _run(self, ids, keep, mask=None, positions=None, **inputs):
        """-> the states of the last `keep` columns."""
        body = self.model.base_model if self.separable else self.model
        if mask is not None:
            inputs["attention_mask"] = mask
        if positions is not None and accepts(body, "position_ids"):
            inputs["position_ids"] = positions
        if self.separable:
            return body(input_ids=ids, **inputs).last_hidden_state[:, -keep:]
        if accepts(body, "logits_to_keep"):
            inputs["logits_to_keep"] = keep
        return body(input_ids=ids, **inputs).logits[:, -keep:]

    def _padded(self, rows, left=False):
        width = max(map(len, rows))
        fill = [[0] * (width - len(row)) for row in rows]
        rows = [f + r if left else r + f for f, r in zip(fill, rows, strict=True)]
        return torch.tensor(rows, device=self.model.device)

    @torch.no_grad()
    def _shares_exactly(self):
        """Whether shared prompts give the same states as separate rows: tried, on three rows."""
        if not can_cache(self.model):
            self.notes.append("this model has no key-value cache: each row runs its own prompt")
            return False
        prompts = [[1, 2, 3], [1, 2, 3], [4, 5, 6, 7, 8]]
        completions = [[3, 2, 1], [2], [5, 4, 3]]
        try:
            shared, _ = self._shared(prompts, completions)
        except torch.OutOfMemoryError:
            raise
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
            self.notes.append(f"prompts can't be shared, each row runs its own: {error!r}")
            return False
        states, first = self._separate(prompts, completions)
        cuts = [(i, at, len(c)) for i, (at, c) in enumerate(zip(first, completions, strict=True))]
        shared = torch.cat([shared[i, :n] for i, _, n in cuts])
        states = torch.cat([states[i, at : at + n] for i, at, n in cuts])
        if not (gap := distance(shared, states)) <= limit_of(states):
            self.notes.append(f"shared prompts differ by {gap:.1g}: each row runs its own")
            return False
        return True


@torch.no_grad()
def has_plain_head(model):
    """Whether logits are just `hidden @ weight.T`, of the base model's output: tried, on 4 ids."""
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
    """Returns the distance that passes for rounding between two ways to the same states. Measured:
    3e-7 at most in float32; without the mask of the padding 0.2 to 0.9."""
    return 1e-3 if states.dtype == torch.float32 else 0.1


# --- Caches that may be asked twice -------------------------------------------------
# Gradient checkpointing runs a layer again in the backward pass, which would append to a cache a
# second time: transformers drops the cache there. These two give the same answer however often.
class PromptLayer(DynamicLayer):
    """Keeps the prompts' keys and values (prompts, heads, P, head size), with their graph."""

    def update(self, keys, values, *_, **__):
        if not self.is_initialized:
            self.keys, self.values, self.is_initialized = keys, values, True
        return keys, values

    def get_seq_length(self):
        return 0


class CompletionLayer(DynamicLayer):
    """Puts each row's prompt before its own keys and values, and keeps nothing.

    Keys of all positions, also where attention slides: transformers' mask sees to the window.
    """

    def __init__(self, prompt_layer, numbers):
        super().__init__()
        self.keys, self.values = prompt_layer.keys, prompt_layer.values
        self.numbers, self.is_initialized = numbers, True

    def update(self, keys, values, *_, **__):
        past = self.keys.index_select(0, self.numbers), self.values.index_select(0, self.numbers)
        return torch.cat([past[0], keys], -2), torch.cat([past[1], values], -2)


def checkpoint_layers(model):
    """Makes the model's layers keep only their inputs for the backward pass; -> how many do."""
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    for layer in layers:
        layer.forward = functools.partial(recompute_later, layer.forward)
    return len(layers)


def recompute_later(forward, *args, **kwargs):
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
