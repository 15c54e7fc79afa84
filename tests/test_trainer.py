"""The trainer's parts, without DeepSpeed or a server: what is sampled, kept, weighed, refused."""

import functools
import json
import os
import pickle
import random
import re
import textwrap
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from test_server import FakeReference, InProcess
from transformers import AutoTokenizer

import grpo_ref_split as trainer
import ref_server
from grpo import models as policy_module
from grpo.client import RefServer
from grpo.forward import CompletionModel
from grpo.models import prompt_ids
from grpo.proof import TILT, check_first_update
from grpo.sampling import rollout, upload
from grpo.sampling import start as start_module
from grpo.sampling.policy import load_policy
from grpo.sampling.recipe import Recipe
from grpo.sampling.rollout import Stream, make_group, sampled_and_rewarded
from grpo.sampling.sampler import Completion
from grpo.serving.policies import Policies
from grpo.serving.store import Store
from grpo.training import exchange as exchange_module
from grpo.training import liveness as watch
from grpo.training import metrics as report
from grpo.training import publish as policy_sync
from grpo.training.checkpoint import Progress, constants_of
from grpo.training.checks import check_constants
from grpo.training.engine import stand_alone, training_threads
from grpo.training.exchange import (
    Inbox,
    ReferenceLogps,
    take_regrouped,
    take_workers_groups,
)
from grpo.training.metrics import Clock
from grpo.training.publish import Publishing, reference_at_start
from grpo.training.token_stats import TokenStats
from grpo.wire import PROTOCOL, Group, pack_group, tokenizer_facts, unpack_group
from ref_server import make_app


def a_group(rewards, *, lengths=(3, 1), truncated=(False, False), **changes):
    """-> a wire Group with these rewards (G, 2)."""
    tokens = sum(lengths)
    fields = dict(  # noqa: C408
        id="000000-0000-0000",
        run="test",
        policy_version=0,
        item=0,
        sampler="trainer",
        outcome="correctness",
        skipped={},
        reward_names=["correctness", "format"],
        prompt_ids=torch.tensor([5, 6], dtype=torch.int32),
        completion_ids=torch.arange(10, 10 + tokens, dtype=torch.int32),
        completion_lengths=torch.tensor(lengths, dtype=torch.int32),
        sampler_logps=-torch.arange(1, tokens + 1, dtype=torch.float32),
        truncated=torch.tensor(truncated),
        rewards=torch.tensor(rewards),
        ref_logps=-torch.ones(tokens),
    )
    return Group(**fields | changes)


# --- Constants ----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("constant", "value"),
    [
        ("GROUP_SIZE", 1),
        ("TEMPERATURE", 0.0),
        ("LOSS_TYPE", "ppo"),
        ("CLIP_LOW", 1.5),
        ("CLIP_HIGH", 0),
        ("KL_BETA", -0.1),
        ("OUTCOME", "correct"),
        ("DTYPE", "float16"),
        ("STEPS", 0),
        ("EVAL_STEPS", 2.5),
        ("MICRO_BATCH_TOKENS", 0),
        ("UPDATES_PER_ROLLOUT", True),
        ("CLIP_LOW", True),
        ("GROUP_SIZE", "8"),
        ("CLIP_LOW", None),
        ("LOSS_TYPE", ["grpo"]),
        ("MAX_REFILLS", -1),
        ("LEARNING_RATE", float("nan")),
        ("SAMPLE_BATCH", 4),
        ("OBJECTIVE", "ppo"),
        ("RATIO_LEVEL", "word"),
        ("IS_CAP", 0.5),
        ("PUBLISH_STEPS", -1),
        ("PUBLISH_STEPS", 9),  # older than MAX_STALENESS before it is sampled
        ("TRAINER_SAMPLES", False),  # and nobody else may
        ("REFERENCE_REFRESH_STEPS", 0.5),
        ("REF_SERVER", "127.0.0.1:59875"),
    ],
)
def test_a_bad_constant_is_named_with_its_value(constant, value, monkeypatch, tmp_path):
    monkeypatch.setattr(trainer, "RUN_DIR", str(tmp_path))
    check_constants(vars(trainer))
    monkeypatch.setattr(trainer, constant, value)
    if value == 9:
        constant, value = "MAX_STALENESS", trainer.MAX_STALENESS
    with pytest.raises(SystemExit, match=re.escape(f"{constant} = {value!r} must be")):
        check_constants(vars(trainer))


def test_every_constant_of_the_trainer_is_checked(monkeypatch):
    for constant in constants_of(vars(trainer)):
        with monkeypatch.context() as patch:
            patch.setattr(trainer, constant, None)
            with pytest.raises(SystemExit, match=f"{constant} = None must be"):
                check_constants(vars(trainer))


@pytest.mark.parametrize(
    ("script", "start", "wrong", "right"),
    [
        (trainer, trainer.main, "LERNING_RATE", "LEARNING_RATE"),
        (trainer, trainer.worker, "PROMPTS_STEP", "PROMPTS_PER_STEP"),
        (ref_server, ref_server.main, "SCORE_TOKENS", "SCORE_BATCH_TOKENS"),
    ],
)
def test_a_constant_that_a_preset_misspells_is_refused(
    script, start, wrong, right, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script, "MODEL", str(tmp_path / "none"))  # where the old ones went on to
    monkeypatch.setattr(script, wrong, 1, raising=False)
    with pytest.raises(SystemExit, match=f"there is no constant {wrong}: is {right} meant"):
        start()


def test_a_reference_that_follows_needs_a_reference(monkeypatch, tmp_path):
    for name, value in {"RUN_DIR": str(tmp_path), "REFERENCE_REFRESH_STEPS": 5}.items():
        monkeypatch.setattr(trainer, name, value)
    check_constants(vars(trainer))
    monkeypatch.setattr(trainer, "KL_BETA", 0)
    with pytest.raises(SystemExit, match="REFERENCE_REFRESH_STEPS = 5 must be 0 where there is no"):
        check_constants(vars(trainer))


def test_a_run_is_not_written_over(monkeypatch, tmp_path):
    monkeypatch.setattr(trainer, "RUN_DIR", str(tmp_path))
    # the next run would write over it; without run.json there is no going on
    for trace, resumes in [("metrics.jsonl", 1), ("step_000500", 1), ("run.json", 0)]:
        monkeypatch.setattr(trainer, "RESUME", bool(resumes))
        (tmp_path / trace).mkdir()
        with pytest.raises(SystemExit, match="holds no run"):
            trainer.checkpoint.check_run_dir(str(tmp_path), trainer.RESUME)
        check_constants(vars(trainer))  # a worker's RUN_DIR may hold what it likes
        (tmp_path / trace).rmdir()
        trainer.checkpoint.check_run_dir(str(tmp_path), trainer.RESUME)
    monkeypatch.setattr(trainer, "RESUME", True)
    (tmp_path / "run.json").touch()
    trainer.checkpoint.check_run_dir(str(tmp_path), trainer.RESUME)  # that one goes on


def test_the_default_weights_let_a_right_answer_beat_a_pretty_one():
    w = trainer.REWARD_WEIGHTS
    right_but_plain = w["correctness"] * 1 + w["format"] * -1
    wrong_but_pretty = w["correctness"] * -1 + w["format"] * 1.25
    assert right_but_plain > wrong_but_pretty  # 1.0 > -0.75; at (1, 1) it would be 0.0 against 0.25


def test_learning_rate_warms_up_and_decays(monkeypatch):
    for name, value in {
        "LEARNING_RATE": 2.0,
        "WARMUP_STEPS": 4,
        "STEPS": 14,
        "FINAL_LR": 0.5,
    }.items():
        monkeypatch.setattr(trainer, name, value)
    assert [trainer.learning_rate(step) for step in (1, 2, 4, 9, 14)] == [0.5, 1.0, 2.0, 1.5, 1.0]
    monkeypatch.setattr(trainer, "WARMUP_STEPS", 0)
    assert trainer.learning_rate(1) <= 2.0


# --- Prompts ------------------------------------------------------------------------
def test_ranks_share_each_epoch_without_overlap():
    prompts = list(range(10))
    ranks = [list(islice(Stream(prompts, 0, rank, 3), 10)) for rank in range(3)]
    order = [prompt for turn in zip(*ranks, strict=True) for prompt in turn]  # of all ranks
    assert sorted(order[:10]) == sorted(order[10:20]) == prompts
    assert order[:10] != order[10:20]  # a new order
    assert ranks[0] == list(islice(Stream(prompts, 0, 0, 3), 10))  # the seed's
    assert ranks[0] != list(islice(Stream(prompts, 1, 0, 3), 10))


def test_a_chat_is_templated_once_and_a_role_it_does_not_know_is_folded_in(tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    text = tokenizer.decode(prompt_ids(tokenizer, chat))
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + 2?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    tokenizer.chat_template = (  # as Gemma's
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        + tokenizer.chat_template
    )
    text = tokenizer.decode(prompt_ids(tokenizer, chat))
    assert text.startswith("<|im_start|>user\nBe brief.\n\n2 + 2?<|im_end|>")
    tokenizer.chat_template = None  # as GPT-2's
    assert tokenizer.decode(prompt_ids(tokenizer, chat)) == "Be brief.\n\n2 + 2?\n"


def test_long_prompts_are_left_out_and_counted(tiny, monkeypatch, capsys):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    items = [{"question": "2 + 2?", "answer": "4"}, {"question": "how many " * 50, "answer": "1"}]
    task = SimpleNamespace(
        load=lambda split: items, messages=lambda q: [{"role": "user", "content": q}]
    )
    monkeypatch.setattr(trainer, "MAX_PROMPT_TOKENS", 40)
    assert [
        index
        for index, _, _ in start_module.load_split(trainer.constants(), task, "train", tokenizer)
    ] == [0]
    assert "2 questions, 1 left out" in capsys.readouterr().out  # not in silence
    monkeypatch.setattr(trainer, "MAX_PROMPT_TOKENS", 2)
    with pytest.raises(SystemExit, match="MAX_PROMPT_TOKENS = 2"):
        start_module.load_split(trainer.constants(), task, "train", tokenizer)


def test_every_eos_of_model_and_tokenizer_ends_a_completion(tiny, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    policy = load_policy(str(tiny), tokenizer, "float32")
    assert tokenizer.eos_token_id in policy.eos_ids
    assert policy.vocab_size < policy.model.get_input_embeddings().weight.shape[0]
    ended = Completion([40, 41, tokenizer.eos_token_id], [-1.0] * 3, truncated=False)
    cut = Completion([40, 41], [-1.0] * 2, truncated=True)
    assert policy.text(ended) == policy.text(cut) == tokenizer.decode([40, 41])
    with pytest.raises(SystemExit, match="context of 256"):
        policy.check_context(200, 100)
    tokenizer.add_tokens([f"new{i}" for i in range(50)])
    with pytest.raises(SystemExit, match="wrong pair"):
        load_policy(str(tiny), tokenizer, "float32")


@pytest.mark.parametrize("task_type", ["CAUSAL_LM", None])  # None: as older versions saved it
def test_an_adapter_is_merged_by_the_recipe_that_is_printed(tiny, tmp_path, monkeypatch, task_type):
    monkeypatch.chdir(tmp_path)
    tokenizer, adapter = AutoTokenizer.from_pretrained(tiny), tmp_path / "adapter"
    policy = load_policy(str(tiny), tokenizer, "float32", lora_rank=2)
    with torch.no_grad():  # B starts as 0
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    policy.save(adapter)
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["task_type"] == "CAUSAL_LM"
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"task_type": task_type}))
    with pytest.raises(SystemExit, match="is a LoRA adapter. Merge it first") as refused:
        load_policy(str(adapter), tokenizer, "float32")
    _, _, recipe = str(refused.value).partition("\n")
    exec(textwrap.dedent(recipe), {})  # noqa: S102
    merged = load_policy("merged", AutoTokenizer.from_pretrained("merged"), "float32")
    logps = [model.logps([5, 6, 7], [8, 9, 10]) for model in (merged, policy)]
    assert logps[0] == pytest.approx(logps[1], abs=1e-4)
    plain = load_policy(str(tiny), tokenizer, "float32").logps([5, 6, 7], [8, 9, 10])
    assert logps[0] != pytest.approx(plain, abs=1e-2)


def test_a_model_folder_that_is_not_there_is_named_at_once(tmp_path, monkeypatch):
    """The hub is not asked: without a network that takes a minute."""
    monkeypatch.setattr(policy_module.AutoTokenizer, "from_pretrained", lambda name: name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/empty").mkdir(parents=True)
    for name in ("./m", "/no/m", "~/m", "runs/g/step_000100", "a/b/c", "runs/m", "runs/empty"):
        with pytest.raises(SystemExit, match=f"MODEL = '{name}' is not a folder with a model"):
            policy_module.load_tokenizer(name)
    for name in ("Qwen/Qwen2.5-3B", "gpt2"):  # the hub's
        assert policy_module.load_tokenizer(name) == name
    for config in ("config.json", "adapter_config.json"):
        (tmp_path / "runs/empty" / config).touch()
        assert policy_module.load_tokenizer("runs/empty") == "runs/empty"
        assert policy_module.load_tokenizer(tmp_path / "runs/empty")
        (tmp_path / "runs/empty" / config).unlink()


# --- Rollout ------------------------------------------------------------------------
NAMES = {"correctness": 2.0, "format": 1.0}
NAMED = {"id": "a", "run": "r", "version": 0, "sampler": "trainer"}  # of make_group
NAMED |= {"outcome": "correctness", "skipped": {}}
GSIZE = 2  # of the groups of a FakeEngine
MIXED = [(1.0, -1.0), (-1.0, -1.0)]
ALL_WRONG = [(-1.0, 1.25), (-1.0, -1.0)]  # differs in format alone
ALL_RIGHT = [(1.0, 1.25), (1.0, -1.0)]


def a_recipe(prompts=(), **changes):
    """-> a Recipe whose task rewards a FakeEngine's completions as the prompt's item says."""
    task = SimpleNamespace(rewards=lambda item, text: dict(zip(NAMES, item[text], strict=True)))
    fields = dict(  # noqa: C408
        task_name="fake",
        task=task,
        prompts=list(prompts),
        group_size=GSIZE,
        sample_batch=64,
        max_prompt_tokens=20,
        max_completion_tokens=8,
        temperature=1.0,
        reward_weights=NAMES,
        outcome="correctness",
        skip_flat_groups=True,
        max_refills=4,
        seed=0,
        stop_tokens=[],
        reward_timeout_seconds=60,
    )
    return Recipe(**fields | changes)


def prompts_of(outcomes):
    """-> prompts whose groups come out as told: (correctness, format) for each completion."""
    items = [{"first": one, "second": two, "question": "?"} for one, two in outcomes]
    return [(i, item, [5, 6]) for i, item in enumerate(items)]


class FakeEngine:
    """In place of sampling: two completions for each prompt, one of which is cut."""

    def __init__(self):
        self.asked, self.settings, self.most = [], None, 0

    def stream(self, take, *, group_size, max_rows, **settings):
        self.settings, running = settings | {"max_rows": max_rows}, []
        while True:
            room = max_rows // group_size - len(running)
            new = take(room) if room else []
            self.asked.append(len(new))
            running += new
            self.most = max(self.most, len(running))
            if not running:
                return
            whole, cut = Completion([7, 2], [-1.0, -2.0], False), Completion([7], [-1.0], True)
            yield running.pop(0)[0], [whole, cut][:group_size]

    def text(self, completion):
        return "second" if completion.truncated else "first"


def rolled_out(outcomes, share, engine=None, **changes):
    """-> (numbers of the prompts whose groups are worth training, those of flat ones, counts)."""
    recipe, count = a_recipe(**changes), Counter()
    stream, engine = iter(prompts_of(outcomes)), engine or FakeEngine()
    both = [], []
    for sampled, flat in rollout.rollout(engine, recipe, stream, count, share=share, seed=3):
        both[flat].append(sampled[0][0])
    return *both, count


def test_flat_groups_are_judged_on_correctness_replaced_and_counted():
    outcomes = [MIXED, ALL_WRONG, MIXED, ALL_RIGHT, MIXED, MIXED, MIXED, MIXED]
    kept, flat, count = rolled_out(outcomes, share=4)
    assert kept == [0, 2, 4, 5]  # format alone is no spread: 1 and 3 are flat
    assert flat == [1, 3]
    assert count["groups"] == 6 and count["flat"] == 2
    assert count["completions"] == 12 and count["truncated"] == 6 and count["tokens"] == 18
    assert count["right"] == 4 + 2 and count["reward_format"] == 4 * -2 + 2 * 0.25


def test_a_flat_group_is_replaced_as_soon_as_it_is_found():
    """Not after the others have ended: the batch stays full."""
    engine = FakeEngine()
    rolled_out([ALL_WRONG, MIXED, MIXED, MIXED], 3, engine)
    assert engine.asked == [3, 1, 0, 0, 0]


def test_refilling_ends():
    kept, flat, count = rolled_out([ALL_WRONG] * 100, share=4, max_refills=2)
    assert kept == [] and len(flat) == count["groups"] == 4 * 3
    assert rolled_out([MIXED] * 9, share=0) == ([], [], {})


def test_flat_groups_are_kept_when_asked():
    engine = FakeEngine()
    _, flat, _ = rolled_out([ALL_WRONG] * 9, 4, engine, skip_flat_groups=False)
    assert flat == [0, 1, 2, 3] and engine.asked == [4, 0, 0, 0, 0]


def test_sampling_is_bounded_and_as_the_recipe_says():
    engine = FakeEngine()
    rolled_out([MIXED] * 9, 5, engine, sample_batch=5, temperature=0.7)
    assert engine.most == 2  # groups of 2, not 3
    assert engine.settings == {
        "max_rows": 5,
        "longest_prompt": 20,
        "max_new_tokens": 8,
        "temperature": 0.7,
        "seed": 3,
    }


def test_what_is_sent_is_what_was_sampled():
    """The ids themselves: those of a text that is tokenised again may be others."""
    prompt = (3, {"question": "?", "answer": "4"}, [5, 6])
    completions = [Completion([7, 2], [-1.0, -2.0], False), Completion([8, 8, 8], [-0.5] * 3, True)]
    rewards = [{"format": -1.0, "correctness": 1.0}, {"correctness": -1, "format": 1.25}]
    names = NAMED | {"version": 4, "sampler": "me", "skipped": {"groups": 1}}
    group = make_group((prompt, completions, rewards), **names)
    assert group.prompt_ids.tolist() == [5, 6]
    assert group.completion_ids.tolist() == [7, 2, 8, 8, 8]
    assert group.completion_lengths.tolist() == [2, 3]
    assert group.sampler_logps.tolist() == [-1.0, -2.0, -0.5, -0.5, -0.5]
    assert group.truncated.tolist() == [False, True]
    columns = dict(zip(group.reward_names, group.rewards.T.tolist(), strict=True))
    assert columns == {"correctness": [1.0, -1.0], "format": [-1.0, 1.25]}  # by name, not order
    assert (group.id, group.run, group.item, group.policy_version) == ("a", "r", 3, 4)
    assert (group.sampler, group.outcome, group.flat) == ("me", "correctness", False)
    assert group.skipped == {"groups": 1}
    assert unpack_group(pack_group(group)).rewards.equal(group.rewards)


def test_rewards_that_a_task_names_in_another_order_are_trained_all_the_same():
    """The names are those of REWARD_WEIGHTS, which is all that was asked of a task."""
    task = SimpleNamespace(rewards=lambda item, text: {"format": 0.5, "correctness": 1.0})
    (one,) = sampled(FakeEngine(), a_recipe(task=task), [PROMPT])
    group = make_group(one, **NAMED)
    assert group.reward_names == list(trainer.REWARD_WEIGHTS)
    assert group.rewards[0].tolist() == [1, 0.5]


PROMPT = 0, {"question": "Why?"}, [5, 6]


def sampled(engine, recipe, prompts, **changes):
    waiting = list(prompts)[::-1]

    def take(number):
        return [waiting.pop() for _ in range(min(number, len(waiting)))]

    settings = {"group_size": recipe.group_size, "temperature": 1.0, "seed": 0, "count": Counter()}
    return list(sampled_and_rewarded(engine, recipe, take, **settings | changes))


def test_broken_weights_are_said_to_be_broken(tiny):
    policy = load_policy(str(tiny), AutoTokenizer.from_pretrained(tiny), "float32")
    with torch.no_grad():
        next(policy.model.parameters()).fill_(float("nan"))
    with pytest.raises(RuntimeError, match="logits are not finite"):
        sampled(policy, a_recipe(), [(0, {}, [5, 6])])


def test_a_policy_streams_text_and_ids(tiny):
    """The engine that trainer and worker share: the seed decides, rewards are of the ids' text."""
    policy = load_policy(str(tiny), AutoTokenizer.from_pretrained(tiny), "float32")
    texts = []
    task = SimpleNamespace(rewards=lambda item, text: texts.append(text) or {"a": 1.0})
    recipe = a_recipe(task=task, reward_weights={"a": 1.0}, group_size=3)
    prompts, count = [(9, {}, [5, 6, 7]), (4, {}, [8])], Counter()
    first = sampled(policy, recipe, prompts, count=count)
    assert sorted(prompt[0] for prompt, _, _ in first) == [4, 9]
    assert texts == [policy.text(c) for _, completions, _ in first for c in completions]
    assert count["seconds_reward"] > 0
    assert first == sampled(policy, recipe, prompts) != sampled(policy, recipe, prompts, seed=1)


# --- A rollout of all ranks ---------------------------------------------------------
@pytest.fixture
def alone(monkeypatch):
    """One rank, and constants of a small run."""
    gather = {"all_gather_object": lambda everyone, mine: everyone.__setitem__(0, mine)}
    dist = {"get_rank": lambda: 0, "get_world_size": lambda: 1, "all_reduce": lambda *_, **__: None}
    monkeypatch.setattr(exchange_module, "meet", lambda what: None)
    monkeypatch.setattr(watch, "meet", lambda what: None)
    for name, function in {
        **dist,
        **gather,
        "broadcast_object_list": lambda box, src: None,
    }.items():
        monkeypatch.setattr(trainer.dist, name, function)
    constants = {"PROMPTS_PER_STEP": 3, "GROUP_SIZE": GSIZE, "WAIT_LIMIT_SECONDS": 1}
    for name, value in constants.items():
        monkeypatch.setattr(trainer, name, value)


def take_step(server, outcomes, *, step=0, engine=None, clock=None, **recipe):
    """-> rollout_step's (groups, metrics) of prompts whose groups come out as told."""
    return take_whole_step(server, outcomes, step=step, engine=engine, clock=clock, **recipe)[:2]


def take_whole_step(server, outcomes, *, step=0, engine=None, clock=None, **recipe):
    """-> the same, and a flat group."""
    stream, engine = iter(prompts_of(outcomes)), engine or FakeEngine()
    recipe, clock = a_recipe(**recipe), clock or report.Clock()
    run = SimpleNamespace(policy=engine, recipe=recipe, stream=stream, server=server, clock=clock)
    run.progress, run.inbox = Progress("run", step), server and server.inbox
    run.reference = server.reference if server else ReferenceLogps(None, clock)
    return trainer.sample_and_exchange(run)


def test_a_rollout_without_a_server(alone, monkeypatch):
    monkeypatch.setattr(trainer, "KL_BETA", 0)
    groups, metrics = take_step(None, [MIXED, ALL_WRONG, MIXED, MIXED, MIXED], step=4)
    assert [g.item for g in groups] == [0, 2, 3]
    assert {(g.policy_version, g.sampler, g.run) for g in groups} == {(4, "trainer", "run")}
    assert metrics["groups_sampled"] == 4 and metrics["flat_groups"] == 1 / 4
    assert metrics["accuracy"] == 3 / 8 and metrics["truncated"] == 1 / 2
    assert metrics["completion_tokens"] == 1.5 and metrics["tokens_sampled"] == 12
    formats = (3 * -2 + 0.25) / 8
    assert metrics["reward_format"] == pytest.approx(formats)
    assert metrics["reward"] == pytest.approx(2 * (3 - 5) / 8 + formats)
    assert "staleness" not in metrics


def test_ranks_share_the_prompts_of_a_step(alone, monkeypatch):
    """10 prompts on 4 ranks: 3, 3, 2 and 2; each rank draws with a seed of its own."""
    monkeypatch.setattr(trainer, "PROMPTS_PER_STEP", 10)
    monkeypatch.setattr(trainer, "KL_BETA", 0)
    monkeypatch.setattr(trainer.dist, "get_world_size", lambda: 4)
    counts, seeds, ids = [], set(), set()
    for rank, step in [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1)]:

        def gather(everyone, mine):
            everyone[:] = [mine, [], [], []]

        monkeypatch.setattr(trainer.dist, "get_rank", lambda rank=rank: rank)
        monkeypatch.setattr(trainer.dist, "all_gather_object", gather)
        engine = FakeEngine()
        groups, _ = take_step(None, [MIXED] * 10, step=step, engine=engine)
        counts.append(len(groups))
        seeds.add(engine.settings["seed"])
        ids |= {g.id for g in groups}
    assert counts == [3, 3, 2, 2, 3] and len(seeds) == 5 and len(ids) == sum(counts)


@pytest.fixture
def server(tmp_path):
    """-> a client of the real store and routes; every upload is scored at once."""
    store = Store(tmp_path / "store.sqlite", 10**6)
    hub = Policies(store, tmp_path / "policies", 10**6)
    settings = {"token": None, "max_body_bytes": 10**6, "lease_seconds": 60, "lease_wait": 0}
    app = make_app(store, hub, FakeReference(), regroup=True, **settings)

    def score():
        for seq, body in store.waiting(99, 0):
            group = unpack_group(body)
            group.ref_logps = -torch.ones(len(group.completion_ids))
            store.scored({seq: pack_group(group)})

    client = InProcess(app, limit=1, after=score)
    client.store, client.hub, client.regroups = store, hub, True
    client.inbox = Inbox(client, "run", 1)
    client.reference = ReferenceLogps(client.inbox, report.Clock())
    yield client
    store.db.close()


def publish(server, **changes):
    """Makes `run` a run with workers, with a policy of no weights."""
    record = {"run": "run", "version": 0, "capacity": 9, "oldest": 0, "scored": True}
    record |= {"settings": {}, "proof": {}} | changes
    path = server.hub.folder.parent / "policy"
    path.write_bytes(b"weights")
    server.publish(path, record)


def test_a_rollout_goes_through_the_server_and_comes_back_scored(alone, server):
    groups, metrics = take_step(server, [MIXED, ALL_WRONG, MIXED, MIXED])
    assert [g.item for g in groups] == [0, 2, 3]
    ids = [g.id for g in groups]
    assert ids == sorted(ids)  # the same order on every rank
    turn = SimpleNamespace(groups=set(ids))
    assert list(server.reference.in_order_of_arrival([turn])) == [turn]
    server.reference.wait_for(set(ids))
    logps = server.reference.arrived
    assert {id: [len(x) for x in logps[id]] for id in ids} == {id: [2, 1] for id in ids}
    assert server.store.stats()["pooled"] == 1  # the flat one waits for another of its prompt
    assert metrics["groups_sampled"] == 4


def test_two_flat_groups_of_a_prompt_are_trained_together(alone, server):
    groups, _ = take_step(server, [ALL_WRONG, MIXED, MIXED, MIXED], step=0)
    server.ack("run", [g.id for g in groups], 0)
    groups, metrics = take_step(server, [ALL_RIGHT, MIXED, MIXED, MIXED], step=1)
    joined = [g for g in groups if g.sampler == "regrouped"]
    assert len(groups) == 5 and len(joined) == 2 and metrics["groups_sampled"] == 4
    assert all(not g.flat and g.item == 0 and g.policy_version == 0 for g in joined)
    assert all(len(g.completion_lengths) == GSIZE for g in joined)
    assert trainer.is_off_policy(groups, 1)  # so the sampler's log-probs are the old ones


@pytest.mark.parametrize("publishes", [0, 1])
def test_what_is_too_old_is_not_joined_either(alone, server, monkeypatch, publishes):
    """MAX_STALENESS is of all that is trained, whether there are workers or not."""
    monkeypatch.setattr(trainer, "MAX_STALENESS", 4)
    monkeypatch.setattr(trainer, "PUBLISH_STEPS", publishes)
    for step in range(6):
        if publishes:
            publish(server, version=step, oldest=step - 4)
        first = {0: ALL_WRONG, 5: ALL_RIGHT}.get(step, MIXED)
        groups, _ = take_step(server, [first, MIXED, MIXED, MIXED], step=step)
        server.ack("run", [g.id for g in groups], 0)
    assert len([g for g in groups if g.sampler == "trainer"]) == 3
    assert max(5 - g.policy_version for g in groups) <= 4


def test_flat_groups_stay_at_home_where_the_server_does_not_regroup(alone, server):
    server.regroups = False
    groups, _ = take_step(server, [ALL_WRONG, MIXED, MIXED, MIXED])
    assert len(groups) == 3 and server.store.stats()["pooled"] == 0


def test_all_flat_is_a_step_without_groups_but_with_one_to_look_at(alone, server, tmp_path):
    groups, metrics, flat = take_whole_step(server, [ALL_WRONG] * 99)
    assert groups == [] and metrics["flat_groups"] == 1 and metrics["groups_sampled"] == 15
    assert trainer.make_sequences(groups, off_policy=False) == []
    policy = SimpleNamespace(tokenizer=SimpleNamespace(decode=str))
    recipe, folder = a_recipe(prompts_of([ALL_WRONG] * 99)), report.RunFolder(tmp_path)
    folder.log_samples(policy, recipe, flat, trainer.advantages_of, 1, 9)
    (first, _) = map(json.loads, (tmp_path / "samples.jsonl").read_text().splitlines())
    assert first["question"] == "?" and first["rewards"] == {"correctness": -1.0, "format": 1.25}


@pytest.mark.parametrize(
    ("changes", "groups", "sentence"),
    [
        ({"accuracy": 0.0}, 0, "all wrong by OUTCOME = 'correctness' (accuracy 0.00), 30% trunc"),
        ({"accuracy": 1.0}, 0, "all right by OUTCOME = 'correctness' (accuracy 1.00), 30% trunc"),
        ({"accuracy": 0.4}, 0, "each all right or all wrong by OUTCOME = 'correctness' (accuracy"),
        ({}, 0, "(accuracy 0.00), 30% truncated at MAX_COMPLETION_TOKENS = 8, are left out (SK"),
        ({"truncated": 1.0}, 0, "all truncated at MAX_COMPLETION_TOKENS = 8, are left out (SKIP_"),
        ({"accuracy": 0.4}, 3, "the 3 groups that are not left out are all truncated (MASK_TRUNC"),
    ],
)
def test_what_has_nothing_to_train_is_said_to_be_right_wrong_or_truncated(
    changes, groups, sentence
):
    metrics = {"accuracy": 0.0, "truncated": 0.3, "groups_sampled": 15} | changes
    assert sentence in report.why_idle(metrics, [None] * groups, a_recipe())


FLAT = (None, [Completion([7, 7, 7, 2], [-1.0] * 4, False)], [{"correctness": 1, "format": 0.5}])


def a_workers(server, number, *, version=0):
    """Uploads groups as a worker would."""
    for i in range(number):
        ids = {"id": f"worker-{version}-{i}", "policy_version": version, "sampler": "worker"}
        ids["skipped"] = rollout.tally(a_recipe(), FLAT) if i == 0 else {}
        group = a_group([[1.0, -1.0], [-1.0, -1.0]], run="run", item=90 + i, **ids)
        group.ref_logps = None
        server.call("POST", "/upload", data=pack_group(group))


def test_what_workers_sampled_comes_first_and_the_ranks_sample_the_rest(alone, server, monkeypatch):
    monkeypatch.setattr(trainer, "PUBLISH_STEPS", 1)
    publish(server)
    a_workers(server, 2, version=1)
    engine = FakeEngine()
    groups, metrics = take_step(server, [MIXED] * 9, step=3, engine=engine)
    assert sorted(g.item for g in groups) == [0, 90, 91] and engine.asked == [1, 0]
    # and the flat group that the worker left out counts too
    assert metrics["groups_sampled"] == 4 and metrics["flat_groups"] == 1 / 4
    assert metrics["completion_tokens"] == (3 + 4 + 4 + 4) / 7
    assert (metrics["staleness"], metrics["staleness_max"]) == (4 / 3, 2)
    assert trainer.is_off_policy(groups, 3)


def test_workers_alone_may_sample(alone, server, monkeypatch):
    monkeypatch.setattr(trainer, "PUBLISH_STEPS", 1)
    monkeypatch.setattr(trainer, "TRAINER_SAMPLES", False)
    publish(server)
    a_workers(server, 3)
    a_workers(server, 2, version=1)
    engine = FakeEngine()
    groups, metrics = take_step(server, [MIXED] * 9, step=1, engine=engine)
    assert len(groups) == 3 and engine.asked == [0] and metrics["groups_dropped"] == 0
    assert server.store.stats()["scored"] == 2  # for the next step
    with pytest.raises(RuntimeError, match="waited 1 s for groups of run.*: 1 missing; no worker"):
        take_step(server, [MIXED] * 9, step=1)


def test_groups_that_are_too_old_are_dropped_and_counted(alone, server, monkeypatch):
    monkeypatch.setattr(trainer, "PUBLISH_STEPS", 1)
    monkeypatch.setattr(trainer, "MAX_STALENESS", 2)
    publish(server)
    a_workers(server, 2)
    a_workers(server, 1, version=3)
    groups, metrics = take_step(server, [MIXED] * 9, step=5)
    assert sorted(g.item for g in groups) == [0, 1, 90]
    assert metrics["groups_dropped"] == 2 and metrics["staleness_max"] == 2


def test_a_reward_may_have_any_name(alone):
    """Names of rewards and of counts must not meet: a reward "accuracy" made eval_accuracy 2."""
    weights = {"accuracy": 1.0, "tokens": 1.0}
    task = SimpleNamespace(rewards=lambda item, text: {"accuracy": 1, "tokens": -1})
    recipe = a_recipe(task=task, reward_weights=weights, outcome="accuracy")
    engine = FakeEngine()
    result = report.evaluate(engine, recipe, prompts_of([MIXED]))
    assert result["eval_accuracy"] == 1 and result["eval_completion_tokens"] == 2
    assert result["eval_positive_accuracy"] == 1 and result["eval_positive_tokens"] == 0
    assert engine.settings["temperature"] == 0 and engine.settings["max_rows"] == 64
    count = Counter(rollout.tally(recipe, sampled(engine, recipe, prompts_of([MIXED]))[0]))
    metrics = report.rollout_metrics(count, recipe)
    assert metrics["accuracy"] == 1 and metrics["reward_accuracy"] == 1
    assert metrics["completion_tokens"] == 1.5 and metrics["reward_tokens"] == -1


def test_an_evaluation_begins_no_more_questions_once_the_run_is_to_stop(alone, monkeypatch):
    """Or deepspeed would kill the run before it has saved: 30 s after the signal."""
    engine, recipe = FakeEngine(), a_recipe()
    questions = prompts_of([MIXED] * 100)
    assert report.evaluate(engine, recipe, questions)["eval_truncated"] == 0
    monkeypatch.setattr(watch.stop, "asked", "SIGTERM")
    engine.settings = None
    assert report.evaluate(engine, recipe, questions)["eval_completion_tokens"] == 0


def test_a_group_counts_the_same_before_and_after_the_wire():
    recipe = a_recipe()
    for outcome in (MIXED, ALL_WRONG, ALL_RIGHT):
        (group,) = sampled(FakeEngine(), recipe, prompts_of([outcome]))
        before = rollout.tally(recipe, group)
        assert rollout.tally_of(recipe, make_group(group, **NAMED)) == before
        twice = {name: 2 * value for name, value in before.items()}
        skipped = make_group(group, **NAMED | {"skipped": before})
        assert rollout.tally_of(recipe, skipped) == twice
        regrouped = make_group(group, **NAMED | {"sampler": "regrouped"})
        assert rollout.tally_of(recipe, regrouped) == {}  # it was counted when it was sampled


# --- Exchange between ranks ----------------------------------------------------------
class Ranks:
    """Two ranks as threads. Where they do not call the same, both end with an error."""

    def __init__(self, monkeypatch):
        self.local, self.barrier = threading.local(), threading.Barrier(2)
        self.called = [None, None]
        monkeypatch.setattr(trainer.dist, "get_rank", lambda: self.local.rank)
        monkeypatch.setattr(trainer.dist, "get_world_size", lambda: 2)
        monkeypatch.setattr(trainer.dist, "broadcast_object_list", self.broadcast)
        monkeypatch.setattr(trainer.dist, "all_gather_object", self.gather)
        self.values = [None, None]
        monkeypatch.setattr(exchange_module, "meet", self.meet)
        monkeypatch.setattr(watch, "meet", self.meet)

    def meet(self, what):
        """Both ranks must call the same; so a backward pass does under ZeRO-2."""
        self.called[self.local.rank] = what
        self.barrier.wait(2)
        assert self.called[0] == self.called[1], self.called
        self.barrier.wait(2)

    def broadcast(self, box, src):
        if self.local.rank == src:
            self.value = pickle.dumps(box[0])
        self.meet("broadcast")
        box[0] = pickle.loads(self.value)
        self.meet("broadcast's end")

    def gather(self, everyone, mine):
        self.values[self.local.rank] = mine
        self.meet("gather")
        everyone[:] = self.values
        self.meet("gather's end")

    def run(self, function):
        """-> what function(rank) returns on both."""

        def of_rank(rank):
            self.local.rank = rank
            return function(rank)

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(of_rank, range(2)))


class Leases:
    """A server that hands out groups with these ids, a list of them for each lease."""

    url = "http://leases"

    def __init__(self, *leases):
        self.leases, self.dropped, self.asked = list(leases), 0, []

    def lease(self, run, limit, *, oldest, step, patience):
        self.asked.append((limit, oldest, patience))
        ids = self.leases.pop(0) if self.leases else []
        assert len(ids) <= limit
        return {id: pack_group(a_group([[1.0, -1.0], [-1.0, -1.0]], id=id)) for id in ids}

    def stats(self):
        return {"waiting": 9}


def an_inbox(*leases):
    return Inbox(Leases(*leases), "run", 0.3)


def references(*leases):
    """-> the ReferenceLogps of two ranks; only that of rank 0 may call the server."""
    return [ReferenceLogps(inbox, report.Clock()) for inbox in (an_inbox(*leases), None)]


def test_micro_batches_are_trained_in_the_order_in_which_they_are_scored(monkeypatch):
    ranks, both = Ranks(monkeypatch), references(["c"], ["a", "d"], ["b"])
    needed = [{"a", "b"}, {"c"}, {"d", "worker's"}, {"another worker's"}]
    turns = [SimpleNamespace(groups=groups) for groups in needed]

    def steps(rank):
        both[rank].expect("abcd", step=0, oldest=0)
        order = []
        for turn in both[rank].in_order_of_arrival(turns):
            ranks.meet("forward")
            both[rank].wait_for(turn.groups)
            order.append("".join(sorted(turn.groups)))
        return order, both[rank].arrived

    (order, scores), (other, others) = ranks.run(steps)
    assert order == other == ["another worker's", "c", "dworker's", "ab"]
    assert scores.keys() == others.keys() == set("abcd")
    for id in "abcd":
        assert [x.tolist() for x in others[id]] == [[-1, -1, -1], [-1]]


def test_ranks_agree_though_one_of_their_groups_came_with_regrouped_ones(monkeypatch):
    """Rank 0 knows more than the others then, and must not act on it alone: they would hang."""
    ranks, both = Ranks(monkeypatch), references(["a", "x+0"], ["x+1"], ["b"])
    turns = [SimpleNamespace(groups={id}) for id in "ab"]

    def steps(rank):
        both[rank].expect("ab", step=0, oldest=0)
        joined = take_regrouped(both[rank].inbox, [["x+0"], ["x+1"]][rank])
        order = []
        for turn in both[rank].in_order_of_arrival(turns):
            both[rank].wait_for(turn.groups)
            order += turn.groups
            ranks.meet("backward")
        return [g.id for g in joined], order

    first, second = ranks.run(steps)
    assert first == second == (["x+0", "x+1"], ["a", "b"])


def test_a_lease_that_ran_out_gives_no_group_twice(monkeypatch):
    ranks = Ranks(monkeypatch)
    both = an_inbox(["a"], ["a"], ["b"], ["b", "c"], ["a"], ["d"]), None

    def steps(rank):
        settings = {"step": 0, "oldest": 0, "wait": True}
        return [[g.id for g in take_workers_groups(both[rank], n, **settings)] for n in (1, 1, 2)]

    assert ranks.run(steps) == [[["a"], ["b"], ["c", "d"]]] * 2


@pytest.mark.parametrize("what", ["workers' groups", "regrouped", "log-probs"])
def test_a_wait_for_groups_that_do_not_come_ends_with_a_sentence(alone, what):
    inbox = an_inbox(["a"])
    reference = ReferenceLogps(inbox, report.Clock())
    reference.expect(["b"], step=0, oldest=0)
    with pytest.raises(RuntimeError, match="waited 0.3 s for .*http://leases: 1 missing; "):
        if what == "workers' groups":
            take_workers_groups(inbox, 2, step=0, oldest=0, wait=True)
        elif what == "regrouped":
            take_regrouped(inbox, ["a", "b"])
        else:
            reference.wait_for({"b"})


def test_what_comes_again_is_no_progress(alone):
    """Leases run out and are handed out again: for ever, if that counted."""
    inbox = an_inbox(*[["a"]] * 10_000)
    inbox.server.lease = functools.partial(slowly, inbox.server.lease)
    with pytest.raises(RuntimeError, match="waited 0.3 s for"):
        take_workers_groups(inbox, 2, step=0, oldest=0, wait=True)


def slowly(function, *args, **kwargs):
    time.sleep(0.02)
    return function(*args, **kwargs)


def test_a_wait_for_workers_names_them_or_says_how_to_start_one():
    quiet = {"a": {"held": 3, "seen_s": 99.0}}
    stats = {"workers": quiet, "waiting": 2, "done": 9}
    text = exchange_module.workers_state(SimpleNamespace(stats=lambda: stats))
    assert text == (
        "no worker was heard of for a minute: is `python grpo_ref_split.py worker` running?"
        " Groups at the server: 2 waiting"
    )
    stats = {"workers": quiet | {"b": {"held": 1, "seen_s": 2.0}}, "scored": 0}
    text = exchange_module.workers_state(SimpleNamespace(stats=lambda: stats))
    assert text == "b has 1 outstanding; groups at the server: none"


# --- Uploads ------------------------------------------------------------------------
def test_an_upload_that_fails_is_raised_where_the_groups_come_from():
    """If its thread died in silence, the trainer would wait for ever."""
    refusal = RuntimeError("refused (400): rewards must be finite")

    def call(*_, **__):
        raise refusal

    uploader = upload.Uploader(SimpleNamespace(call=call))
    group = a_group([[1.0, -1.0], [-1.0, -1.0]])
    uploader.put(group, pool=False)
    with pytest.raises(RuntimeError, match="must be finite"):
        uploader.finish()
    with pytest.raises(RuntimeError, match="must be finite"):
        uploader.put(group, pool=False)


def test_uploads_say_whether_they_are_flat_and_are_answered_in_order(server):
    uploader = upload.Uploader(server)
    uploader.put(a_group([[1.0, -1.0], [-1.0, -1.0]], id="a"), pool=False)
    for id, outcome in (("b", ALL_WRONG), ("c", ALL_RIGHT)):
        uploader.put(a_group(outcome, id=id), pool=True)
    assert uploader.finish() == [
        {"stored": True},
        {"stored": True, "joined": []},
        {"stored": True, "joined": ["c+0", "c+1"]},
    ]


def test_groups_that_end_together_go_in_one_request(server, monkeypatch):
    """A flat one is asked about otherwise, and a large one might not fit with others."""
    monkeypatch.setattr(upload, "TOGETHER_SECONDS", 5)  # all that is put before finish()
    requests, call = [], server.call

    def counted(method, path, **request):
        requests.append(request["params"])
        return call(method, path, **request)

    server.call, answered = counted, []
    uploader = upload.Uploader(server, lambda: answered.append(len(requests)))
    groups = [a_group([[1.0, -1.0], [-1.0, -1.0]], id=f"{i}") for i in range(5)]
    for group in groups[:3]:
        uploader.put(group, pool=False)
    uploader.put(a_group(ALL_WRONG, id="flat"), pool=True, oldest=2)
    for group in groups[3:]:
        uploader.put(group, pool=False)
    assert [reply["stored"] for reply in uploader.finish()] == 6 * [True]
    assert requests == [
        {"pool": 0, "oldest": 0, "several": 1},
        {"pool": 1, "oldest": 2},
    ]
    assert answered == [1, 1, 1, 1, 1, 2]  # what a worker has in hand
    monkeypatch.setattr(upload, "UPLOAD_BYTES", 10)
    alone = upload.Uploader(server)
    for i in range(2):
        alone.put(a_group([[1.0, -1.0], [-1.0, -1.0]], id=f"large {i}"), pool=False)
    assert len(alone.finish()) == 2 and requests[2:] == 2 * [{"pool": 0, "oldest": 0}]


# --- Rows ---------------------------------------------------------------------------
def test_rows_by_hand(monkeypatch):
    monkeypatch.setattr(trainer, "REWARD_WEIGHTS", {"correctness": 2.0, "format": 1.0})
    monkeypatch.setattr(trainer, "ADVANTAGE_STD", False)
    rows = trainer.make_sequences([a_group([[1.0, -1.0], [-1.0, -1.0]])], off_policy=False)
    assert [row.completion for row in rows] == [[10, 11, 12], [13]]
    assert [row.prompt for row in rows] == [[5, 6]] * 2
    assert [row.advantage for row in rows] == [2.0, -2.0]  # 1 and -3, less their mean -1
    assert rows[0].sampler_logps.tolist() == [-1, -2, -3] and rows[1].sampler_logps.tolist() == [-4]
    assert [row.weight for row in rows] == pytest.approx([1 / 6, 1 / 2])  # 1 / (2 sequences x T)


def test_truncated_rows_count_in_the_mean_and_are_not_trained(monkeypatch):
    group = a_group([[1.0, -1.0], [-1.0, -1.0]], truncated=(True, False))
    monkeypatch.setattr(trainer, "ADVANTAGE_STD", False)
    (row,) = trainer.make_sequences([group], off_policy=False)
    assert row.completion == [13] and row.advantage == -2.0
    assert row.weight == pytest.approx(1 / 2)  # of 2 sequences, the cut one included (as in TRL)
    monkeypatch.setattr(trainer, "MASK_TRUNCATED", False)
    assert len(trainer.make_sequences([group], off_policy=False)) == 2


def test_a_step_without_rows_is_possible(monkeypatch):
    assert trainer.make_sequences([], off_policy=False) == []
    all_cut = a_group([[1.0, -1.0], [-1.0, -1.0]], truncated=(True, True))
    assert trainer.make_sequences([all_cut], off_policy=False) == []  # no mean of nothing: 0 / 0


def test_whose_log_probs_are_the_old_ones(monkeypatch):
    """On-policy the first update's own, which come for free; of another policy the sampler's."""
    mixed = [[1.0, -1.0], [-1.0, -1.0]]
    ours, old = a_group(mixed, policy_version=5), a_group(mixed, policy_version=4)
    theirs = a_group(mixed, policy_version=5, sampler="worker")
    joined = a_group(mixed, policy_version=5, sampler="regrouped")

    def sampled_are_old(*groups):
        off_policy = trainer.is_off_policy(groups, 5)
        for row in trainer.make_sequences(groups, off_policy):
            assert row.old_logps is (row.sampler_logps if off_policy else None)
        return off_policy

    assert not sampled_are_old(ours, ours)
    for other in (old, theirs, joined):
        assert sampled_are_old(ours, other) and sampled_are_old(other, ours)
    monkeypatch.setattr(trainer, "RECOMPUTE_OLD_LOGPS", True)
    assert not sampled_are_old(old, theirs)


# --- First update -------------------------------------------------------------------
def test_the_run_stops_unless_the_first_update_is_as_theory_says():
    good = {"sampler_k3": 1e-13, "mismatch": 4e-7, "sampler_tilt": 1e-6, "kl": 1e-9}
    same = {"model": "ours", "dtype": "float32"}
    said = check_first_update(good, "float32", same, model="ours")
    assert "differ by 1e-13 in mean k3 (limit 1e-06), trainer and reference by 1e-09" in said
    for k3 in (1e-5, float("nan")):
        with pytest.raises(RuntimeError, match="ratio is not 1"):
            check_first_update(good | {"sampler_k3": k3}, "float32", same, model="ours")
    with pytest.raises(RuntimeError, match="at 0.950 times the trainer's temperature"):
        check_first_update(good | {"sampler_tilt": -0.05}, "bfloat16", same, model="ours")
    with pytest.raises(RuntimeError, match="should be 0: .* the weights of ours"):
        check_first_update(good | {"kl": 9e-4}, "float32", same, model="ours")
    # a reference in bfloat16 differs by that much; another model, and none, by any amount
    check_first_update(good | {"kl": 9e-4}, "float32", same | {"dtype": "bfloat16"}, model="ours")
    check_first_update(good | {"kl": 9e-4}, "float32", same, model="smaller")
    few = {"sampler_k3": 1e-13, "mismatch": 4e-7}  # too few tokens for a tilt
    check_first_update(few, "float32", None, model="ours")
    # KL_BETA 0 and PUBLISH_STEPS 1: there is a server, for the workers, but no "kl"
    check_first_update(few, "float32", same, model="ours")
    loud = {"sampler_k3": 3.5e-3, "mismatch": 0.067}
    assert "by 0.067 a token: much" in check_first_update(loud, "bfloat16", None, model="ours")


def test_bad_steps_are_counted_kept_and_end_the_run_when_they_follow_each_other(
    alone, monkeypatch, tmp_path, capsys
):
    folder = report.RunFolder(tmp_path)
    monkeypatch.setattr(trainer.dist, "barrier", lambda: None)
    rows = trainer.make_sequences([a_group([[1.0, -1.0], [-1.0, 1.0]])], off_policy=False)
    progress, metrics = Progress("run"), {"loss": float("nan"), "grad_norm": float("inf")}
    for progress.step in range(1, 5):
        if progress.step == 3:
            progress.bad = 0  # a good one between
        folder.bad_step(progress, rows, metrics, limit=3)
    progress.step = 5
    with pytest.raises(
        RuntimeError, match="3 steps in a row were not finite; see .*bad_step_000005"
    ):
        folder.bad_step(progress, rows, metrics, limit=3)
    assert (
        "step 2 is skipped: loss nan, norm of the gradient inf; 2 in a row"
        in capsys.readouterr().out
    )
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["bad_step_000003.json", "bad_step_000004.json", "bad_step_000005.json"]
    (first, _) = json.loads((tmp_path / names[0]).read_text())
    assert first["completion"] == rows[0].completion and first["advantage"] == rows[0].advantage


def first_update(policy, sampler, *, temperature=1.0, noise=0.0):
    """-> the metrics of an update of `policy` on what `sampler` has sampled, with noise of that sd
    in its log-probs."""
    task = SimpleNamespace(
        rewards=lambda item, text: {"correctness": float(len(text) % 3), "format": 1.0}
    )
    prompts = [(i, {"answer": "4"}, [5 + i, 6, 7]) for i in range(32)]
    recipe, torch_seed = a_recipe(task=task, group_size=4), torch.manual_seed(0)
    groups = [
        make_group(group, **NAMED)
        for group in sampled(sampler, recipe, prompts, temperature=temperature)
    ]
    for group in groups:
        group.sampler_logps += noise * torch.randn(len(group.sampler_logps), generator=torch_seed)
    loss, stats = loss_of(policy, trainer.make_sequences(groups, off_policy=False))
    metrics = means_of(loss, stats)
    del metrics["kl"]  # KL_BETA is 0
    return metrics


def loss_of(policy, rows, off_policy=False):
    model = CompletionModel(policy.model, share_prompts=True)
    hidden, ids = model([row.prompt for row in rows], [row.completion for row in rows])
    return trainer.batch_loss(
        model.head, hidden, ids, rows, policy.vocab_size, scale=1, off_policy=off_policy
    )


def means_of(loss, stats):
    """-> the metrics of one rank's only micro-batch."""
    totals = TokenStats("cpu")
    totals.add(loss, stats)
    return totals.means()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_first_update_tells_noise_from_a_wrong_sampler(dtype, tiny, alone, monkeypatch):
    """Sampled at 0.9 with log-probs at 1.0, a ratio looked like 1 and was not. At 1.05 the gap is
    smaller than bfloat16's noise, and shows in the slope alone."""
    policy, stale = (
        load_policy(str(tiny), AutoTokenizer.from_pretrained(tiny), dtype) for _ in range(2)
    )
    monkeypatch.setattr(trainer, "MASK_TRUNCATED", False)
    monkeypatch.setattr(trainer, "KL_BETA", 0)
    check = functools.partial(check_first_update, policy_dtype=dtype, reference=None, model="ours")
    check(first_update(policy, policy))
    noises = [0.055, 0.084] if dtype == "bfloat16" else []  # published: see policy_sync.NOISE
    for noise in noises:
        metrics = first_update(policy, policy, noise=noise)
        assert metrics["sampler_k3"] > 1e-3 and abs(metrics["sampler_tilt"]) < TILT / 2
        check(metrics)
    for temperature in (0.9, 0.95, 1.05):
        for noise in [0.0, *noises]:
            metrics = first_update(policy, policy, temperature=temperature, noise=noise)
            assert metrics["sampler_tilt"] == pytest.approx(temperature - 1, abs=0.015)
            with pytest.raises(RuntimeError, match="ratio is not 1|trainer's temperature"):
                check(metrics)
    with torch.no_grad():
        for parameter in stale.model.model.layers[1].parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    with pytest.raises(RuntimeError, match="ratio is not 1"):
        check(first_update(policy, stale))


def test_old_log_probs_are_those_of_the_first_update_and_get_no_gradient(tiny, alone, monkeypatch):
    policy = load_policy(str(tiny), AutoTokenizer.from_pretrained(tiny), "float32")
    monkeypatch.setattr(trainer, "KL_BETA", 0)
    monkeypatch.setattr(trainer, "IS_CAP", 0)  # the group's log-probs are made up
    rows = trainer.make_sequences([a_group([[1.0, -1.0], [-1.0, -1.0]])], off_policy=False)
    assert all(row.old_logps is None for row in rows)
    loss, _ = loss_of(policy, rows)
    assert abs(loss.item()) < 1e-6  # the advantages sum to 0, and each sequence weighs the same
    gradient = torch.autograd.grad(loss, list(policy.model.parameters()))
    assert sum(g.norm() for g in gradient) > 1e-3  # and yet it learns: exp(logp - detached)
    old = [row.old_logps.clone() for row in rows]
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    loss, stats = loss_of(policy, rows)
    assert all(torch.equal(a, row.old_logps) for a, row in zip(old, rows, strict=True))
    assert abs(means_of(loss, stats)["ratio"] - 1) > 1e-3


def test_a_workers_tokens_are_bounded_where_their_probability_grew_too_much(
    tiny, alone, monkeypatch
):
    """A sampler that found its tokens far less likely than the trainer does: IS_CAP."""
    policy = load_policy(str(tiny), AutoTokenizer.from_pretrained(tiny), "float32")
    monkeypatch.setattr(trainer, "KL_BETA", 0)
    group = a_group([[1.0, -1.0], [-1.0, -1.0]], sampler="worker")
    group.sampler_logps -= 20  # ratios of e^10 and more

    def step(recompute):
        monkeypatch.setattr(trainer, "RECOMPUTE_OLD_LOGPS", recompute)
        off_policy = trainer.is_off_policy([group], 0)
        rows = trainer.make_sequences([group], off_policy)
        loss, stats = loss_of(policy, rows, off_policy)
        assert means_of(loss, stats)["sampler_ratio_max"] > 1e4
        advantages = [row.advantage for row in rows]
        gradient = torch.autograd.grad(loss, list(policy.model.parameters()))
        return advantages, loss.item(), sum(g.norm() for g in gradient).item()

    # Their log-probs as the old ones: the ratio is cut at 1.2 for A > 0, at IS_CAP for A < 0, and
    # neither has a gradient; each sequence weighs a half
    (right, wrong), loss, slope = step(recompute=False)
    expected = -(1 + trainer.CLIP_HIGH) * right / 2 - trainer.IS_CAP * wrong / 2
    assert loss == pytest.approx(expected, rel=1e-5) and slope == 0
    # Recomputed: the ratio is 1, and the weight IS_CAP, so that the two cancel but still learn
    _, loss, slope = step(recompute=True)
    assert loss == pytest.approx(-trainer.IS_CAP * (right + wrong) / 2, abs=1e-5) and slope > 1e-3


# --- Publishing ---------------------------------------------------------------------
ARRIVED = ("finish",)
FIRST = [("publish", 0, -4), ARRIVED]  # before anything is sampled
BEGINNING = {"model": "ours", "run_dir": "runs/a"}


class Record(list):
    """Notes what is called: [(name, arguments)]."""

    def __bool__(self):
        return True

    def __getattr__(self, name):
        return lambda *arguments, **named: self.append((name, *arguments, *named.values()))


def refer(step):
    return "set_reference", "run", step


def a_publishing(monkeypatch, *, publish, refresh, there="", rank=0):
    """-> Publishing every so many steps, at a server whose reference is `there`; and a Record of
    what it calls of that, and of a Publisher."""
    calls = Record()
    calls.info, calls.url = {"weights": there, "model": "ours"}, "http://server"
    monkeypatch.setattr(policy_sync, "Publisher", lambda *_, **__: calls)
    steps = {"publish_steps": publish, "refresh_steps": refresh, "max_staleness": 4}
    inbox = None if rank else Inbox(calls, "run", 1)
    publishing = Publishing(None, None, inbox, **steps, capacity=9, scored=True)
    calls.clear()
    return publishing, calls


@pytest.mark.parametrize(
    ("publish", "refresh", "expected"),
    [
        (1, 0, [*FIRST, ("publish", 2, -2), ("publish", 4, 0), ("publish", 6, 2)]),
        (3, 0, [*FIRST, ("publish", 4, 0), ("publish", 6, 2)]),
        # at the start they are the same anyway, but may be of different shape
        (0, 4, [*FIRST, refer(0), ("save", 4), ("publish", 4, 0), ARRIVED, refer(4)]),
        (4, 4, [*FIRST, ARRIVED, refer(0), ("publish", 4, 0), ("save", 4), ARRIVED, refer(4)]),
    ],
)
def test_the_policy_is_published_when_its_steps_are_passed(
    monkeypatch, alone, publish, refresh, expected
):
    """With two updates on each rollout a step may be jumped over, and is made up for."""
    publishing, calls = a_publishing(monkeypatch, publish=publish, refresh=refresh)
    progress, clock, inbox = Progress("run"), Clock(), publishing.inbox
    publishing.begin(progress, **BEGINNING)
    for before, progress.step in [(0, 2), (2, 4), (4, 6)]:
        inbox.groups, inbox.seen = {"waits": None}, {"waits", "trained"}
        publishing.publish_if_due(progress, before, clock)
        publishing.refresh_if_due(progress, before, lambda: calls.append(("save", progress.step)))
        # what waits here is scored again by a new reference, and handed out again
        waits = set() if calls[-1] == refer(progress.step) else {"waits"}
        assert inbox.seen == waits | {"trained"} and {*inbox.groups} == waits
    assert calls == expected and progress.reference == refresh


def test_other_ranks_publish_nothing_and_save_with_the_first(monkeypatch, alone):
    publishing, calls = a_publishing(monkeypatch, publish=1, refresh=1, rank=1)
    publishing.begin(Progress("run"), **BEGINNING)
    publishing.publish_if_due(Progress("run", 1), 0, Clock())
    publishing.refresh_if_due(Progress("run", 1), 0, lambda: calls.append("save"))
    publishing.finish()
    assert calls == ["save"]


@pytest.mark.parametrize(
    ("there", "reference", "expected"),
    [
        ("run@4", 4, []),  # as it was left
        ("run@4", 6, [("publish", 6, 2), ARRIVED, refer(6)]),
        ("run@4", 0, [refer(-1)]),  # the server's own model
        ("", 4, SystemExit),  # the server's files are gone, and the run's checkpoint has no step 4
    ],
)
def test_a_run_that_goes_on_has_the_reference_it_had(
    monkeypatch, alone, there, reference, expected
):
    publishing, calls = a_publishing(monkeypatch, publish=0, refresh=2, there=there)
    progress = Progress("run", 6, reference=reference)
    if expected is SystemExit:
        with pytest.raises(SystemExit, match="policy of step 4; the server at http://server no"):
            publishing.begin(progress, **BEGINNING)
    else:
        publishing.begin(progress, **BEGINNING)
        assert calls == expected


@pytest.mark.parametrize(
    ("reference", "refreshes", "serves", "own_model", "expected"),
    [
        (0, False, "", False, "keep"),
        (0, False, "another@3", True, "own model"),  # another run's policy is the reference
        (4, True, "run@4", False, "keep"),
        (6, True, "run@4", False, "publish"),  # the newest step's, which the trainer has
        (0, True, "run@4", True, "own model"),  # the run's first policy is the server's own model
        (0, True, "run@4", False, "lost"),
        (4, True, "", True, "lost"),
    ],
)
def test_what_becomes_of_the_reference_at_the_start(
    reference, refreshes, serves, own_model, expected
):
    progress = Progress("run", 6, reference=reference)
    settings = {"refreshes": refreshes, "serves": serves, "own_model": own_model}
    assert reference_at_start(progress, **settings) == expected


# --- Client -------------------------------------------------------------------------
class FakeSession:
    def __init__(self, *replies):
        self.replies, self.headers = list(replies), {}

    def request(self, method, url, **_):
        status, body = self.replies.pop(0)
        return SimpleNamespace(
            status_code=status,
            ok=status < 400,
            text=json.dumps(body),
            json=lambda: body,
            headers={},
        )


def a_client(*replies, limit=60):
    client = RefServer("http://127.0.0.1:9", limit)
    client.session = FakeSession(*replies)
    return client


def test_a_reference_that_does_not_fit_is_refused_in_a_sentence(tiny):
    facts = tokenizer_facts(AutoTokenizer.from_pretrained(tiny)) | {"temperature": 1.0}
    info = facts | {"protocol": PROTOCOL, "model": "theirs"}
    assert a_client((200, info)).check("ours", facts) == info
    for wrong in ({"tokenizer": "0123"}, {"vocab_size": 9}, {"temperature": 0.9}, {"protocol": 0}):
        with pytest.raises(SystemExit, match=f"does not fit the policy ours.*{next(iter(wrong))}"):
            a_client((200, info | wrong)).check("ours", facts)


def test_a_reference_that_changes_in_mid_run_is_refused(tiny):
    facts = tokenizer_facts(AutoTokenizer.from_pretrained(tiny)) | {"temperature": 1.0}
    client = a_client(
        (200, facts | {"protocol": PROTOCOL, "model": "theirs", "facts": "a"}), (200, {})
    )
    client.check("ours", facts)
    with pytest.raises(RuntimeError, match="another reference model or temperature"):
        client.lease("run", 1)


@pytest.mark.parametrize("answer", [[], "<html>"])
def test_an_address_where_something_else_answers_is_said(answer):
    with pytest.raises(SystemExit, match="no ref_server.py"):
        a_client((200, answer)).check("ours", {})
    with pytest.raises(SystemExit, match="no ref_server.py"):
        RefServer("nonsense://x", 60).check("ours", {})


def test_a_full_store_is_waited_for_and_a_refusal_is_raised(monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    assert a_client((503, {"error": "full"}), (200, {})).call("POST", "/upload").ok
    with pytest.raises(RuntimeError, match=r"refused \(400\).*rewards must be finite"):
        a_client((400, {"error": "rewards must be finite"})).call("POST", "/upload")


def test_no_server_is_an_error_that_says_what_to_start(monkeypatch, capsys):
    """A dead server must not look like an empty queue, and be waited for, for ever."""
    clock = random.Random(0)
    now = [0.0]
    fake = {"monotonic": lambda: now[0]}  # of waits alone: other threads sleep, too
    fake["sleep"] = lambda s: now.__setitem__(0, now[0] + 3 + clock.random())
    monkeypatch.setattr("grpo.stop.time", SimpleNamespace(**fake))
    client = RefServer("http://127.0.0.1:9", 40)  # a port where nothing listens
    with pytest.raises(RuntimeError, match="waited 40 s for .*ref_server.py"):
        client.call("GET", "/info")
    assert capsys.readouterr().err.count("waiting for http://127.0.0.1:9/info") >= 3


# --- Threads ---------------------------------------------------------------------------
@pytest.mark.parametrize("environment, mine, launchers, threads", [
    ({}, 4, 4, 4),
    ({"LOCAL_SIZE": "2"}, 4, 4, 2),  # deepspeed
    ({"LOCAL_WORLD_SIZE": "2"}, 4, 4, 2),  # torchrun
    ({"LOCAL_SIZE": "8"}, 4, 4, 1),
    ({"LOCAL_SIZE": "4"}, 2, 8, 2),  # deepspeed --bind_cores_to_rank
])  # fmt: skip
def test_ranks_share_the_cores(environment, mine, launchers, threads, monkeypatch):
    for name in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    cores = {0: range(mine), os.getppid(): range(launchers)}
    monkeypatch.setattr(os, "sched_getaffinity", cores.get)
    assert training_threads(0) == threads
    assert training_threads(3) == 3


@pytest.mark.parametrize(
    "launched",
    [
        {"RANK": "1"},
        {"OMPI_COMM_WORLD_SIZE": "2"},
        {"PMI_SIZE": "2"},
        {"SLURM_STEP_NUM_TASKS": "4"},
    ],
)
def test_only_a_process_that_nobody_launched_takes_itself_for_the_only_rank(monkeypatch, launched):
    for environment in (dict(launched), {"SLURM_STEP_NUM_TASKS": "1"}):
        monkeypatch.setattr(os, "environ", environment)
        stand_alone()
        assert environment == launched or environment["RANK"] == "0"
