"""The rehearsal: the largest batches of a run, once, on every device, before it begins or resumes.

What does not fit ends there, not hours later, with the constant to lower. The rehearsal holds what
the run will hold at most: a wave of SAMPLE_BATCH of the longest prompts with the keys and values of
full-length completions, and the largest micro-batches that the trainer may cut.
"""

import torch

from grpo.decoder import make_decoder
from grpo.devices import out_of_memory_names, release_memory
from grpo.engine import cpu_threads
from grpo.packing import pack_by_tokens, sizes_of
from grpo.ranks import all_or_none
from grpo.sample import Sample
from grpo.sampler import draw


def rehearse(c, policy, engine, batch_loss, prompt, turns):
    """Collective: raises SystemExit on all ranks if a batch does not fit one of them. `batch_loss`
    is the trainer's function, `prompt` the longest prompt's length in tokens; `turns` is whether a
    completion may have several."""
    if c.SAMPLER == "torch":
        with all_or_none(), out_of_memory_names("SAMPLE_BATCH", c.SAMPLE_BATCH):  # collective
            sample_longest(c, policy, prompt, turns)
        release_memory()
    with cpu_threads(), out_of_memory_names("MICRO_BATCH_TOKENS", c.MICRO_BATCH_TOKENS):
        train_longest(c, policy, engine, batch_loss, prompt)  # collective
    release_memory()


@torch.no_grad()
def sample_longest(c, policy, prompt, turns):
    """Runs the prompts of a wave, gives the cache the rest of the completions, and samples a last
    token. A late turn's prompt has all earlier turns, nearly all tokens, and is its own."""
    group_size = 1 if c.EVAL_STEPS or turns else c.GROUP_SIZE  # an evaluation's share no prompt
    number, more = c.SAMPLE_BATCH // group_size, c.MAX_COMPLETION_TOKENS - 1
    if turns:
        prompt, more = prompt + more, 0
    # prompts of two lengths, as padding needs a mask
    prompts = [[1] * max(1, prompt - n % 2) for n in range(number)]
    with policy.as_sampler():
        decoder = make_decoder(policy.model)
        logits = decoder.begin(prompts, [group_size] * number)
        decoder.fill(more)
        logits = decoder.next_logits(logits.argmax(-1))
        draw(logits[:, : policy.vocab_size], c.TEMPERATURE, policy.generator(seed=0))


def train_longest(c, policy, engine, batch_loss, prompt):
    """Collective: runs the largest micro-batches forward and backward, their loss times 0, as that
    of a filler. Leaves no gradient. A block takes the place of Adam's two averages, which DeepSpeed
    makes in its first step."""
    optimizer, model = engine.optimizer, engine.module
    sizes = [] if c.OFFLOAD_OPTIMIZER else map(int, optimizer.partition_size)
    _block = torch.empty(2 * sum(sizes), dtype=torch.float32, device=engine.device)
    engine.set_gradient_accumulation_boundary(False)
    for completion in completion_lengths(c):
        batch = largest_batch(c, prompt, model.packs, completion)
        hidden, ids = engine([s.prompt for s in batch], [s.ids for s in batch])
        loss, _ = batch_loss(c, hidden, model.head, ids, batch, policy.vocab_size, old="kept")
        engine.backward(0 * loss)  # collective
    for sums in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
        sums.update(dict.fromkeys(sums))


def completion_lengths(c):
    """Returns the completion lengths to try: with long ones a batch trains the most tokens, with
    short ones it holds the most keys and values of prompts."""
    return c.MAX_COMPLETION_TOKENS, -(-c.MAX_COMPLETION_TOKENS // 8)


def largest_batch(c, prompt, packs, completion):
    """Returns the Samples of the largest micro-batch that the trainer cuts from groups with
    `prompt` tokens in each prompt and `completion` in each completion."""
    groups = min(c.PROMPTS_PER_STEP, c.MICRO_BATCH_TOKENS // prompt + 1)
    prompts = [[n % 2] * prompt for n in range(groups) for _ in range(c.GROUP_SIZE)]
    sizes = sizes_of(prompts, [[1] * completion] * len(prompts), packs)
    number = len(pack_by_tokens(sizes, c.MICRO_BATCH_TOKENS)[0])
    logps = [-1.0] * completion
    others = {"ref_logps": logps, "old_logps": logps, "advantage": 1.0, "weight": 1e-3}
    ids = [1] * completion
    return [Sample(ids, logps, prompt=prompt, **others) for prompt in prompts[:number]]
