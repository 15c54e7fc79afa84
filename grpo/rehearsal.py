"""The rehearsal: the largest batches of a run, once, on every device, before it begins or resumes.

What does not fit ends there, not hours later, with the constant to lower. The rehearsal holds what
the run will hold at most: a wave of SAMPLE_BATCH of the longest prompts with the keys and values of
full-length completions, and the largest micro-batches that the trainer may cut.
"""

import torch
import torch.distributed as dist

from grpo.devices import out_of_memory_names, release_memory
from grpo.engine import cpu_threads
from grpo.log import announced
from grpo.packing import pack_by_tokens, sizes_of
from grpo.ranks import all_or_none
from grpo.sample import Group, Sample
from grpo.sampler import draw


def rehearse(run, batch_loss):
    """Collective: raises SystemExit on all ranks if a batch does not fit one of them, unless the
    run has made all STEPS. `batch_loss` is the trainer's function. Leaves no gradient."""
    c, policy, engine, questions = run.c, run.policy, run.engine, run.questions
    if run.progress.step >= c.STEPS:
        return
    longest = max(len(question.ids) for question in [*run.recipe.prompts, *questions])
    share = lambda number: -(-number // dist.get_world_size())  # of a rank
    rows = max(share(c.PROMPTS_PER_STEP) * c.GROUP_SIZE, share(len(questions)))
    # In the place of Adam's two averages, which DeepSpeed makes in its first step
    there = c.OFFLOAD_OPTIMIZER or engine.optimizer.state
    sizes = [] if there else map(int, engine.optimizer.partition_size)
    _block = torch.empty(2 * sum(sizes), dtype=torch.float32, device=engine.device)
    with announced("the rehearsal of the largest batches"):
        if c.SAMPLER == "torch":
            with all_or_none(), out_of_memory_names("SAMPLE_BATCH", c.SAMPLE_BATCH):  # collective
                sample_longest(c, policy, min(c.SAMPLE_BATCH, rows), longest, run.recipe.turns)
            release_memory()
        with cpu_threads(), out_of_memory_names("MICRO_BATCH_TOKENS", c.MICRO_BATCH_TOKENS):
            train_longest(c, policy, engine, batch_loss, longest)  # collective
    release_memory()


@torch.no_grad()
def sample_longest(c, policy, rows, prompt, turns):
    """Runs the prompts of a wave of `rows` completions, gives the cache the rest of the
    completions, and samples a last token. A late turn's prompt has all earlier turns, nearly all
    tokens, and is its own; an evaluation's completions share no prompt either."""
    group_size = 1 if c.EVAL_STEPS or turns else c.GROUP_SIZE
    number, more = rows // group_size, c.MAX_COMPLETION_TOKENS - 1
    if turns:
        prompt, more = prompt + more, 0
    # prompts of two lengths, as padding needs a mask
    prompts = [[1] * max(1, prompt - n % 2) for n in range(number)]
    with policy.as_sampler():
        decoder = policy.decoder(policy.model)
        logits = decoder.begin(prompts, group_size)
        decoder.fill(more)
        logits = decoder.next_logits(logits.argmax(-1))
        draw(logits[:, : policy.vocab_size], c.TEMPERATURE, policy.generator(seed=0))


def train_longest(c, policy, engine, batch_loss, prompt):
    """Collective: runs the largest micro-batches forward and backward, their loss times 0, as that
    of a filler; before them one sample, after which DeepSpeed holds its sums of gradients."""
    optimizer, model, before = engine.optimizer, engine.module, engine.optimizer.micro_step_id
    engine.set_gradient_accumulation_boundary(False)
    batches = [largest_batch(c, prompt, model.packs, length) for length in completion_lengths(c)]
    for batch in (batches[0][:1], *batches):
        hidden, ids = engine([s.group.prompt for s in batch], [s.ids for s in batch])
        loss, _ = batch_loss(c, hidden, model.head, ids, batch, policy.vocab_size)
        engine.backward(0 * loss)  # collective
    optimizer.micro_step_id = before  # else offload adds to what this has left in RAM
    for sums in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
        sums.update(dict.fromkeys(sums))


def completion_lengths(c):
    """Returns the completion lengths to try: with long ones a batch trains the most tokens, with
    the shortest it gathers the most keys and values of prompts."""
    return c.MAX_COMPLETION_TOKENS, min(2, c.MAX_COMPLETION_TOKENS)


def largest_batch(c, prompt, packs, completion):
    """Returns the Samples of the largest micro-batch that the trainer cuts from groups with
    `prompt` tokens in each prompt and `completion` in each completion."""
    groups = min(c.PROMPTS_PER_STEP, c.MICRO_BATCH_TOKENS // prompt + 1)
    prompts = [[n % 2] * prompt for n in range(groups) for _ in range(c.GROUP_SIZE)]
    sizes = sizes_of(prompts, [[1] * completion] * len(prompts), packs)
    number = len(pack_by_tokens(sizes, c.MICRO_BATCH_TOKENS)[0])
    logps = [-1.0] * completion
    others = {"ref_logps": logps, "old_logps": logps, "advantage": 1.0, "weight": 1e-3}
    one = lambda: Sample([1] * completion, logps, **others)
    return [Group(-1, None, prompt, [one()]).samples[0] for prompt in prompts[:number]]
