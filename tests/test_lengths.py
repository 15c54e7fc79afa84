"""A worker's groups: what is trained is as long as what is sampled. The model counts (counting.py):
lengths are uniform from 64 to 256 tokens, whatever the rewards are."""

import contextlib
import random
import statistics
import threading
from types import SimpleNamespace

import pytest
import torch
from counting import HIGH, LOW, SHAPE, build, make_tokenizer, prompt
from fakes import a_recipe
from trainer_side import change, end
from transformers import AutoTokenizer

from grpo.options.worker import run_worker
from grpo.options.workers import Workers
from grpo.policy import load_policy
from grpo.waits import TooLong

MEAN, DEVIATION = (LOW + HIGH) / 2, ((HIGH - LOW + 1) ** 2 / 12) ** 0.5  # 160 and 56 tokens
GROUP, PROMPT_TOKENS = 8, 12
STEPS = 14  # of 4 groups: 448 completions
CONSTANTS = {
    "TASK": "counting",
    "PROMPTS_PER_STEP": 4,
    "GROUP_SIZE": GROUP,
    "MAX_PROMPT_TOKENS": PROMPT_TOKENS,
    "MAX_COMPLETION_TOKENS": HIGH,
    "REWARD_WEIGHTS": {"correct": 1.0},
    "OUTCOME": "correct",
    "MAX_STALENESS": 4,
    "TRAINER": "http://127.0.0.1:0",
    "TRAINER_SAMPLES": False,
    "WAIT_LIMIT_SECONDS": 120,
}


def make_recipe(tokenizer, folder):
    draw, coin = torch.Generator().manual_seed(1), random.Random(0)
    texts = [prompt(PROMPT_TOKENS, draw) for _ in range(50)]
    task = SimpleNamespace(rewards=lambda item, text: {"correct": coin.choice([-1.0, 1.0])})
    prompts = [(i, {"question": t}, tokenizer(t)["input_ids"]) for i, t in enumerate(texts)]
    own = CONSTANTS | {"SAMPLE_BATCH": 64, "RUN_DIR": f"{folder}/run"}
    return a_recipe(prompts, task=task, **own)


@pytest.mark.long
def test_a_worker_does_not_favour_short_completions(tmp_path):
    """A trainer takes a worker's groups as soon as they come and publishes after each step. Groups
    that end first must not crowd out those that take longer, and grow too old: what is sampled, and
    what is trained, is as long as the model's completions are, within 4 standard errors."""
    folder, tokenizer = str(tmp_path), make_tokenizer()
    build(SHAPE | {"num_hidden_layers": 1}).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    policy = load_policy(folder, tokenizer, "float32")
    recipe, sampled, trained, ages = make_recipe(tokenizer, folder), [], [], []
    stream = policy.stream

    def note(take, **settings):
        for key, completions in stream(take, **settings):
            sampled.extend(len(one.ids) for one in completions)
            yield key, completions

    policy.stream = note
    trainer = load_policy(folder, tokenizer, "float32")
    workers = Workers(recipe.c, recipe, trainer, "run")
    change(workers, TRAINER=f"http://127.0.0.1:{workers.server.effective_port}")
    own = recipe.others(WAIT_LIMIT_SECONDS=1)  # once the trainer is gone
    worker = threading.Thread(target=run, args=(policy, own), daemon=True)
    workers.publish(0)
    worker.start()
    for step in range(STEPS):
        groups = workers.take(step)
        trained += [len(sample.ids) for group in groups for sample in group.samples]
        ages += [step - group.version for group in groups]
        workers.publish(step + 1)
    end(workers)
    worker.join(30)
    found = (
        f"trained {statistics.mean(trained):.1f} of {len(trained)}, sampled"
        f" {statistics.mean(sampled):.1f} of {len(sampled)}; ages {statistics.mean(ages):.2f}, up"
        f" to {max(ages)}, {workers.dropped} groups too old"
    )
    assert len(trained) == STEPS * recipe.c.PROMPTS_PER_STEP * GROUP == 448
    for lengths in (trained, sampled):
        error = DEVIATION / len(lengths) ** 0.5
        assert abs(statistics.mean(lengths) - MEAN) < 4 * error, found
    assert statistics.mean(ages) < 2 and not workers.dropped, found


def run(policy, recipe):
    with contextlib.suppress(TooLong):
        run_worker(policy, recipe, "me")
