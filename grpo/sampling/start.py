"""What trainer and workers begin with. `c` is the trainer's constants, as attributes."""

import torch

from grpo.client import RefServer
from grpo.log import say
from grpo.models import load_tokenizer
from grpo.sampling.policy import load_policy
from grpo.sampling.preview import preview
from grpo.sampling.recipe import Recipe, load_split, load_task
from grpo.sampling.reward_processes import start_processes


def prepare(c, *, needs_server):
    """Returns (tokenizer, recipe, server): task, prompts, rewards and server are checked before
    anything heavy is loaded. `server` is None if it is not needed."""
    tokenizer, recipe = prepare_task(c, split="train", shown=1)
    server = None
    if needs_server:
        server = RefServer(c.REF_SERVER, c.WAIT_LIMIT_SECONDS)
        server.check(c.MODEL, tokenizer, c.TEMPERATURE)
    if c.REWARD_PROCESSES:
        limits = c.REWARD_PROCESSES, c.REWARD_TIMEOUT_SECONDS
        recipe.reward_processes = start_processes(recipe.task, *limits)
    return tokenizer, recipe, server


def prepare_task(c, *, split, shown):
    """Returns (tokenizer, recipe), once the first `shown` prompts of `split` and their rewards are
    checked, and printed."""
    task, tokenizer = load_task(c.TASK), load_tokenizer(c.MODEL)
    if c.CHAT_TEMPLATE and not tokenizer.chat_template:
        why = f"must be empty: {c.MODEL} has no chat template"
        raise SystemExit(f"CHAT_TEMPLATE = {c.CHAT_TEMPLATE!r} {why}")
    recipe = Recipe(c, task, load_split(c, task, split, tokenizer))
    recipe.resolve()
    preview(c, recipe, tokenizer, shown)
    return tokenizer, recipe


def make_policy(c, tokenizer):
    """Returns the Policy. Raises SystemExit where model and constants do not fit."""
    torch.manual_seed(c.SEED)  # adapters begin with random numbers
    more = c.STOP_TOKENS, c.LORA_RANK, c.STOP_STRINGS
    policy = load_policy(c.MODEL, tokenizer, c.DTYPE, *more)
    policy.check_context(c.MAX_PROMPT_TOKENS, c.MAX_COMPLETION_TOKENS)
    stops = [*tokenizer.convert_ids_to_tokens(sorted(policy.eos_ids)), *map(repr, c.STOP_STRINGS)]
    say(f"{c.MODEL} in {policy.dtype}; completions end at {', '.join(stops)}")
    return policy
