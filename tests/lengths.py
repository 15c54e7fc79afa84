"""How long what a worker samples is, and what a trainer gets of it. The model counts
(benchmarks/counting.py): lengths are uniform from 64 to 256 tokens, whatever the rewards are."""

import random
import statistics
import threading
from types import SimpleNamespace

import torch
from transformers import AutoTokenizer

from benchmarks.counting import HIGH, LOW, SHAPE, build, make_tokenizer, prompt
from grpo.sampling.policy import load_policy
from grpo.sampling.recipe import Recipe
from grpo.sampling.worker import run_worker
from grpo.training.exchange import Inbox, take_workers_groups
from grpo.training.publish import PolicySender

MEAN, DEVIATION = (LOW + HIGH) / 2, ((HIGH - LOW + 1) ** 2 / 12) ** 0.5  # 160 and 56 tokens
GROUP, PROMPT_TOKENS = 8, 12
PROMPTS_PER_STEP, MAX_STALENESS, STEPS = 4, 4, 20  # 640 completions


def save_model(folder):
    build(SHAPE | {"num_hidden_layers": 1}).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def make_recipe(tokenizer, *, rows):
    draw, coin = torch.Generator().manual_seed(1), random.Random(0)
    texts = [prompt(PROMPT_TOKENS, draw) for _ in range(50)]
    task = SimpleNamespace(rewards=lambda item, text: {"correct": coin.choice([-1.0, 1.0])})
    return Recipe(
        task_name="counting",
        task=task,
        prompts=[(i, {"question": t}, tokenizer(t)["input_ids"]) for i, t in enumerate(texts)],
        group_size=GROUP,
        sample_batch=rows,
        max_prompt_tokens=PROMPT_TOKENS,
        max_completion_tokens=HIGH,
        temperature=1.0,
        reward_weights={"correct": 1.0},
        outcome="correct",
        skip_flat_groups=True,
        seed=0,
        stop_tokens=[],
        stop_strings=[],
        reward_timeout_seconds=60,
    )


def check_lengths(policy, server, folder, *, rows):
    """A worker with this policy, and a trainer that takes its groups as soon as they come and
    publishes after each step: fails if what is sampled, or trained, is not as long as the model's
    completions are, within 4 standard errors."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    recipe, sampled, trained = make_recipe(tokenizer, rows=rows), [], []
    stream = policy.stream

    def note(take, **settings):
        for key, completions in stream(take, **settings):
            sampled.extend(len(one.ids) for one in completions)
            yield key, completions

    policy.stream = note
    trainer = load_policy(folder, tokenizer, "float32")
    capacity = PROMPTS_PER_STEP * (MAX_STALENESS - 1)  # as grpo.training.publish has it
    fixed = {"capacity": capacity, "scored": False}
    sender = PolicySender(server.copy(), "run", recipe, trainer, **fixed)
    sender.send(0, oldest=-MAX_STALENESS)
    sender.finish()
    worker = threading.Thread(target=run, args=(policy, server.copy(), recipe), daemon=True)
    worker.start()
    inbox, ages = Inbox(server.copy(), "run", 120), []
    for step in range(STEPS):
        oldest = step - MAX_STALENESS
        groups = take_workers_groups(inbox, PROMPTS_PER_STEP, oldest=oldest, wait=True)
        trained += [n for group in groups for n in group.completion_lengths.tolist()]
        ages += [step - group.policy_version for group in groups]
        inbox.server.ack("run", [group.id for group in groups], step)
        sender.send(step + 1, oldest=oldest + 1)
    sender.finish()
    server.end("run")
    worker.join()
    found = (
        f"trained {statistics.mean(trained):.1f} of {len(trained)}, sampled"
        f" {statistics.mean(sampled):.1f} of {len(sampled)}; ages up to {max(ages)},"
        f" {inbox.server.dropped} groups too old"
    )
    print(found)
    assert len(trained) == STEPS * PROMPTS_PER_STEP * GROUP == 640
    for lengths in (trained, sampled):
        error = DEVIATION / len(lengths) ** 0.5
        assert abs(statistics.mean(lengths) - MEAN) < 4 * error, found


def run(policy, server, recipe):
    server.limit = 2
    try:
        run_worker(policy, server, recipe, "me")
    except RuntimeError as error:  # the run has ended
        assert "no run has published a policy" in str(error), error
