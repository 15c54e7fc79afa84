"""Which decoder a model gets: the fastest that computes what the simple one does."""

import weakref

import torch

from grpo.models import can_cache, smallest_window
from grpo.sampling.decoders import llama as llama_step
from grpo.sampling.decoders.cached import CachedDecoder, PlainDecoder
from grpo.sampling.decoders.shared_prompt import LlamaDecoder, SharedDecoder

# Largest relative difference of logits that the trial takes for rounding. Measured over 14 families
# in float32: 1e-6; a wrong mask or position gives 0.1 and more, a forgotten soft-cap 5e-4.
TRIAL_LIMIT = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.02}


def make_decoder(model, max_new_tokens, longest_prompt=None):
    """-> the fastest decoder that is right for the model; the choice is made once for a model."""
    if not can_cache(model):
        return PlainDecoder(model)
    window = smallest_window(model)
    if window and (longest_prompt is None or longest_prompt + max_new_tokens > window):
        return CachedDecoder(model)
    if model not in fastest:
        kinds = ([LlamaDecoder] if llama_step.knows(model) else []) + [SharedDecoder]
        if model.device.type == "cuda" and llama_step.knows(model):
            from grpo.sampling.decoders.cuda_graph import GraphedDecoder, can_record

            kinds = [GraphedDecoder] * can_record(model) + kinds
        fastest[model] = next((kind for kind in kinds if is_right(kind, model)), None)
    kind = fastest[model]
    return kind(model, max_new_tokens) if kind else CachedDecoder(model)


fastest = weakref.WeakKeyDictionary()  # model -> the decoder that shares prompts, or None


def is_right(kind, model):
    """Tries a decoder that shares prompts, and says so where it will not do."""
    limit = TRIAL_LIMIT.get(model.dtype, 1e-4)
    try:
        for found, expected in trial(kind, model):
            gap, size = (found.float() - expected).norm().item(), expected.float().norm().item()
            if not gap <= limit * size:
                raise ArithmeticError(f"its logits differ by {gap / size:.1g}")
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 (whatever it is, the other decoder does without)
        print(f"sampling by a slower way than {kind.__name__}: {error!r}", flush=True)
        return False
    return True


@torch.no_grad()
def trial(kind, model):
    """Yields logits and those of a CachedDecoder: steps, rows that leave, a prompt that joins."""
    prompts, joining = [[7, 3, 5], [4]], [[6, 2, 1, 8]]
    ids, vocab = torch.arange(1, 9, device=model.device), model.config.get_text_config().vocab_size
    shared, cached, late = kind(model, 8), CachedDecoder(model), CachedDecoder(model)
    yield shared.admit(prompts, 4), cached.admit(prompts, 4)
    turns = [(ids + i) % vocab for i in range(3)]  # the second of them may be recorded
    for ids in turns:
        yield shared.step(ids), cached.step(ids)
    kept = torch.tensor([1, 2, 3, 6], device=model.device)
    shared.keep(kept)
    cached.keep(kept)
    shared.admit(joining, 4)
    late.admit(joining, 4)
    for ids in turns:
        yield shared.step(ids), torch.cat([cached.step(ids[:4]), late.step(ids[4:])])
