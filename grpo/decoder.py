"""Chooses the decoder: the fastest that agrees with a simple one on this model.

    decoder = make_decoder(model, max_new_tokens, longest_prompt)
    logits = decoder.admit(prompts, sizes)  # (S, V'): prompt i runs once, for sizes[i] sequences
    logits = decoder.next_logits(tokens)         # (S, V'), after one more token of each sequence
    decoder.keep(indices)                        # drops all sequences but these

PlainDecoder works without a KV cache, CachedDecoder with transformers'. SharedDecoder keeps one
copy of a prompt for its group, and lets prompts join a running batch (`joins`). It relies on a
model's internals, so it is first tried on the model. Dropping sequences copies the cache of the
other ones, which pays when more than 1 / `compaction` of all have ended.

Symbols: B prompts, G sequences of each, S sequences in all, V' the columns of the LM head.
"""

import weakref

import torch

from grpo.cached import CachedDecoder
from grpo.devices import is_nvidia, is_out_of_memory
from grpo.log import say
from grpo.models import can_cache, smallest_window
from grpo.shared_prompt import SharedDecoder

# The largest relative difference of logits that counts as rounding. Measured in float32: 8e-6 over
# 14 families and a trained SmolLM2-135M, 1.7e-4 for a trained Qwen2.5-0.5B (in float64 0). A wrong
# mask or position gives 0.1 and more, a forgotten soft-cap 5e-4.
TRIAL_LIMIT = {torch.float32: 3e-4, torch.bfloat16: 0.05, torch.float16: 0.02}

fastest = weakref.WeakKeyDictionary()  # model -> the kind of decoder that passed, or None


def make_decoder(model, max_new_tokens, longest_prompt):
    """Returns a decoder for one batch; a shared one only if no attention window can hide a part of
    a prompt."""
    if not can_cache(model):
        from grpo.options.sampling.plain_decoder import PlainDecoder

        return PlainDecoder(model)
    window = smallest_window(model)
    if window and longest_prompt + max_new_tokens > window:
        return CachedDecoder(model)
    if model not in fastest:
        fastest[model] = SharedDecoder if is_right(SharedDecoder, model) else None
    kind = fastest[model]
    return kind(model, max_new_tokens) if kind else CachedDecoder(model)


def is_right(kind, model):
    """Returns whether a decoder passes the trial on the model; if it does not, logs why."""
    limit = TRIAL_LIMIT.get(model.dtype, 1e-4)
    try:
        for found, expected, sizes in trial(kind, model):
            lengths = expected.float().norm(dim=1).clamp(min=1e-30)
            gaps = ((found.float() - expected).norm(dim=1) / lengths).split(sizes)
            gap = torch.stack([x.max() if limit < 1e-3 else x.median() for x in gaps]).max().item()
            if not gap <= limit:
                raise ValueError(f"its logits differ by {gap:.1g}")
    except Exception as error:
        if is_out_of_memory(error):
            raise
        why = f"which is slower: {error!r:.200}"
        say(f"this model is sampled without {kind.feature}, {why}")
        return False
    return True


@torch.no_grad()
def trial(kind, model):
    """Yields (logits, CachedDecoder's logits, number of sequences of each prompt) while sequences
    leave and a prompt joins. On a GPU a prompt beside a much shorter one fills several tiles of the
    attention kernel, some all masked. The ids are ordinary ones: special tokens amplify rounding.
    In bfloat16 some others do, too (one sequence of eight differed by 1.7), but a wrong mask or
    position shows in all sequences of a prompt, so their median counts."""
    config, most = model.config.get_text_config(), 160 if is_nvidia(model.device) else 40
    limits = most, smallest_window(model), getattr(config, "max_position_embeddings", None)
    ids = config.vocab_size // 2 + torch.arange(8, device=model.device)
    a, b, c, *others = ids.tolist()
    long = [a, b, c] * max(1, (min(filter(None, limits)) - 10) // 3)
    prompts, joining = [long, others[:1]], [others[1:]]
    shared, cached, late = kind(model, 8), CachedDecoder(model), CachedDecoder(model)
    yield shared.admit(prompts, [4, 4]), cached.admit(prompts, [4, 4]), [4, 4]
    tokens = [ids + i for i in range(3)]  # the second of them may be recorded
    for ids in tokens:
        yield shared.next_logits(ids), cached.next_logits(ids), [4, 4]
    kept = torch.tensor([1, 2, 3, 5, 6], device=model.device)
    shared.keep(kept)
    cached.keep(kept)
    shared.admit(joining, [3])
    late.admit(joining, [3])
    for ids in tokens:
        both = cached.next_logits(ids[:5]), late.next_logits(ids[5:])
        yield shared.next_logits(ids), torch.cat(both), [3, 2, 3]
