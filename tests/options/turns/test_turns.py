"""Completions of several turns: whose ids they are, what the task is asked, what ends a run."""

import asyncio
import itertools
import json
import math
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fakes import a_recipe, a_run, one_reward, sampled, tiny_policy

import evaluate
import grpo_ref_split as trainer
from grpo import metrics, report
from grpo.chunked import linear_logps
from grpo.faults import TaskError
from grpo.forward import CompletionModel
from grpo.models import prompt_ids
from grpo.options.stop_strings import StopStrings
from grpo.options.turns.replies import bridge
from grpo.options.turns.turns import play, show_turns
from grpo.sample import Question, Sample
from plot import show_samples
from tasks import calculator, guess
from tasks.__main__ import with_replies

USER = {"role": "user", "content": "How many?"}


def message(text, role="user"):
    return {"role": role, "content": text}


@pytest.fixture(scope="module")
def policy(tiny):
    return tiny_policy(tiny)


def prompts(tokenizer, *secrets):
    ids = prompt_ids(tokenizer, [USER])
    return [Question(i, {"secret": secret}, ids) for i, secret in enumerate(secrets)]


class Actor:
    """In place of a model: its turns are the texts of `lines(item number)` in order, each
    ended by EOS, or by a stop string in it. Notes what it is asked for."""

    def __init__(self, tokenizer, *lines):
        self.tokenizer, self.lines, self.asked = tokenizer, lines, []
        self.eos = tokenizer.eos_token_id
        self.eos_ids = {self.eos}

    def stream(self, prompts, *, group_size, max_sequences, max_new_tokens, **settings):
        for key, ids, limit in prompts:
            self.asked.append((ids, group_size, limit))
            said, most = self.line(key[0]), limit or max_new_tokens
            new = self.tokenizer(said)["input_ids"]
            new += [] if "</think>" in said else [self.eos]
            one = lambda: Sample(new[:most], [-1.0] * len(new[:most]), len(new) > most)  # noqa: B023
            yield key, [one() for _ in range(group_size)]

    def line(self, conversation):
        lines = self.lines[conversation.question.index % len(self.lines)]
        return lines[len(conversation.turns) // 2]

    def text(self, completion):
        ids = completion.ids[:-1] if completion.ids[-1] == self.eos else completion.ids
        return self.tokenizer.decode(ids)


def talks(actor, reply, *secrets, rewards=lambda item, turns: len(turns), **constants):
    """-> sampled_and_rewarded's groups of prompts with these secrets."""
    task = SimpleNamespace(reply=reply, rewards=rewards)
    recipe = one_reward(task, **constants)
    return sampled(actor, recipe, iter(prompts(actor.tokenizer, *secrets)))


# --- What is appended -------------------------------------------------------------------
def test_after_eos_a_reply_is_a_user_turn_as_the_template_writes_the_whole_chat(tokenizer):
    actor = Actor(tokenizer, ["Three?", "Two, then."])
    (group,) = talks(actor, calls(None, "less"), 2)
    talk, other = group.samples
    said = [("assistant", "Three?"), ("user", "less"), ("assistant", "Two, then.")]
    chat = [USER, *({"role": role, "content": text} for role, text in said)]
    whole = tokenizer.apply_chat_template(chat, tokenize=False).rstrip("\n")
    assert group.prompt + talk.ids == tokenizer(whole)["input_ids"]
    assert tokenizer.decode([i for i, own in zip(talk.ids, talk.is_model_token) if own]) == (
        "Three?<|im_end|>Two, then.<|im_end|>"
    )
    assert all((p == 0) != own for p, own in zip(talk.logps, talk.is_model_token, strict=True))
    assert talk.text == other.text == ["Three?", "less", "Two, then."]
    assert not talk.truncated and [s.rewards["reward"] for s in group.samples] == [3, 3]
    # The prompt began both; a later turn has what is left of the limit
    assert [number for _, number, _ in actor.asked] == [2, 1, 1]
    last = talk.is_model_token[::-1].index(False)  # the length of the last turn
    assert [limit for *_, limit in actor.asked][:2] == [None, 200 - len(talk.ids) + last]


def calls(*replies):
    """-> a reply() that gives these, by the number of turns: 1, 3, ... the last one first. It can't
    change what was said."""
    return lambda item, turns: (replies[-1 - len(turns) // 2], turns.clear())[0]


class Sender:
    """Its first reply has the role and text of the item, the second is None."""

    def __init__(self, item):
        self.answers = [item["reply"], None]

    def reply(self, turn):
        return self.answers.pop(0)


@pytest.mark.parametrize("reply, role", [
    (message("less", "tool"), "tool"), (message("less", "user"), "user"), ("less", "user"),
    (message("less", "system"), "system"), (message("", "tool"), "tool"), ("", "user"),
])  # fmt: skip
@pytest.mark.parametrize("short", [False, True])
def test_a_replys_role_is_the_same_in_training_in_the_preview_and_in_what_out_teaches(
    tiny, tokenizer, capsys, reply, role, short
):
    """With an Environment, and with reply()."""
    item, said = {"reply": reply}, ["Three?", "Two, then."]
    way = {"reply": lambda item, turns: (item["reply"], None)[len(turns) // 2]}
    task = SimpleNamespace(rewards=lambda *_: 1, **way if short else {"Environment": Sender})
    recipe = one_reward(task, MODEL=str(tiny))
    ids = prompt_ids(tokenizer, [USER])
    (group,) = sampled(Actor(tokenizer, said), recipe, iter([(0, item, ids)]))
    trained = tokenizer.decode(group.samples[0].ids)
    text = reply["content"] if isinstance(reply, dict) else reply
    told = f"\n<|im_start|>{role}\n{text}<|im_end|>\n<|im_start|>assistant\n"
    assert trained == f"Three?<|im_end|>{told}Two, then.<|im_end|>"
    assert with_replies(recipe, item, said) + "<|im_end|>" == trained
    turns, _, roles = play(recipe, item, said)
    show_turns(recipe, tokenizer, turns, roles)
    assert f"reply() as a {role} turn: {told!r}" in capsys.readouterr().out


def test_after_a_stop_string_a_reply_stands_inside_the_turn(tokenizer):
    actor = Actor(tokenizer, ["<think>40+2</think>", "<answer>42</answer>"])
    (group,) = talks(actor, calculator.reply, 2)
    talk = group.samples[0]
    text = "<think>40+2</think>42<answer>42</answer><|im_end|>"
    assert tokenizer.decode(talk.ids) == text
    added = [i for i, of_model in zip(talk.ids, talk.is_model_token) if not of_model]
    assert [tokenizer.decode([i]) for i in added] == ["4", "2"]
    assert talk.text == ["<think>40+2</think>", "42", "<answer>42</answer>"]
    assert talk.length == len(talk.ids) - 2


@pytest.mark.parametrize("room, truncated, turns", [
    (-25, True, 1), (0, True, 1), (1, True, 3), (9, False, 3)
])  # fmt: skip
def test_all_turns_together_have_max_completion_tokens(tokenizer, room, truncated, turns):
    """A conversation is cut in a turn, or before the first for which a reply leaves no token."""
    said, then = "Three?", "Two"
    eos, then_ids = tokenizer.eos_token_id, len(tokenizer(then)["input_ids"]) + 1
    assert 1 < then_ids < 9
    between = bridge(tokenizer, {eos}, eos, message("less"), {})
    limit = len(tokenizer(said)["input_ids"]) + 1 + len(between) + room
    actor = Actor(tokenizer, [said, then])
    (group,) = talks(actor, calls(None, "less"), 2, MAX_COMPLETION_TOKENS=limit)
    for talk in group.samples:
        assert len(talk.ids) <= limit and talk.is_model_token[-1]
        assert (talk.truncated, len(talk.text)) == (truncated, turns)


def test_a_reply_that_the_template_writes_as_json_is_no_lost_reply(tokenizer):
    """Llama 3 writes a tool's result so, even a text. The template's options reach it."""
    write = "{% for m in messages %}{{ m.content | tojson if m.role == 'tool' else m.content }}"
    tokenizer.chat_template = write + "{% endfor %}{{ '' if think else '<think></think>' }}"
    eos, reply = tokenizer.eos_token_id, message('say "é"\ntwice', "tool")
    for options, end in (({}, "<think></think>"), ({"think": True}, "")):
        ids = bridge(tokenizer, {eos}, eos, reply, options)
        assert tokenizer.decode(ids) == r'"say \"é\"\ntwice"' + end


@pytest.mark.parametrize("template", [
    "{% for m in messages if m.role != 'user' or loop.first %}{{ m.content }}{% endfor %}",
    "{{ messages[-1].content }}",  # no turn of the model's
    "{{ raise_exception('only one user') }}",
])  # fmt: skip
def test_a_template_that_loses_a_reply_is_refused_with_a_sentence(tokenizer, template):
    tokenizer.chat_template, eos = template, tokenizer.eos_token_id
    with pytest.raises(SystemExit, match="MODEL = .*'less'.*STOP_STRINGS"):
        bridge(tokenizer, {eos}, eos, message("less"), {})
    assert bridge(tokenizer, {eos}, 5, message("less"), {}) == tokenizer("less")["input_ids"]


# --- What the task is asked -------------------------------------------------------------
def test_a_reply_that_fails_ends_the_run_with_a_sentence(tokenizer):
    said = "tasks/mine.py: reply.*failed with ZeroDivisionError.*: it must return"
    with pytest.raises(TaskError, match=said):
        talks(Actor(tokenizer, ["Three?"]), lambda item, turns: 1 / 0, 2)


def hangs(item, turns):
    return "go on" if item["secret"] == 1 and len(turns) == 1 else time.sleep(9)


async def hangs_async(item, turns):
    return "go on" if item["secret"] == 1 and len(turns) == 1 else await asyncio.sleep(9)


@pytest.mark.parametrize("reply", [hangs, hangs_async])
def test_a_reply_that_hangs_ends_its_conversation_as_none_does(tokenizer, capsys, reply):
    groups = talks(Actor(tokenizer, ["One", "two"]), reply, 1, 2, REWARD_TIMEOUT_SECONDS=0.2)
    found = {group.item["secret"]: [len(talk.text) for talk in group.samples] for group in groups}
    assert found == {1: [3, 3], 2: [1, 1]}
    assert (
        "reply() of tasks/mine.py took more than REWARD_TIMEOUT_SECONDS" in capsys.readouterr().out
    )


def test_a_round_samples_all_that_live_and_a_batch_is_as_large_as_sample_batch(tokenizer):
    actor = Actor(tokenizer, ["One", "two"], ["One", "two", "three"])
    reply = lambda item, turns: None if len(turns) > item["secret"] else ""
    groups = talks(actor, reply, 1, 3, 1, SAMPLE_BATCH=5)  # two groups of two
    assert [group.item["secret"] for group in groups] == [1, 3, 1]
    assert [number for _, number, _ in actor.asked] == [2, 2, *[1] * 6, 2, 1, 1]


# --- A real model -----------------------------------------------------------------------
def test_own_log_probs_are_those_of_a_plain_forward_of_the_whole_talk(policy, monkeypatch):
    """Of one to three turns, in waves that sequences leave at different times."""
    policy.eos_ids = set(range(0, policy.vocab_size, 9))
    policy.stop_strings = StopStrings(policy.tokenizer, ["e"])
    reply = lambda item, turns: None if len(turns) > item["secret"] else "less"
    groups, again = (
        talks(policy, reply, 1, 3, 5, 5, GROUP_SIZE=4, SAMPLE_BATCH=8) for _ in range(2)
    )
    assert [group.ids for group in groups] == [group.ids for group in again]
    assert len({tuple(s.ids[:3]) for group in groups for s in group.samples}) > 8  # seeds differ
    model = CompletionModel(policy.model)
    found = [talk for group in groups for talk in group.samples]
    assert len({len(talk.text) for talk in found}) == 3
    for group in [group.samples for group in groups]:
        with torch.no_grad():
            hidden, ids = model([talk.group.prompt for talk in group], [talk.ids for talk in group])
            logps = linear_logps(hidden, model.head, ids, vocab_size=policy.vocab_size)
        own = torch.tensor([of_model for talk in group for of_model in talk.is_model_token])
        gap = logps - torch.tensor([p for talk in group for p in talk.logps])
        assert gap[own].abs().max() < 1e-4  # measured: 8e-6
    policy.stop_strings, policy.eos_ids = None, {policy.tokenizer.eos_token_id}


# --- Training ---------------------------------------------------------------------------
@pytest.fixture
def group(tokenizer):
    """A Group of two conversations, of which one has a turn more."""
    actor = Actor(tokenizer, ["<think>40+2</think>", "<answer>42</answer>"])
    numbers = itertools.count()
    rewards = lambda item, turns: next(numbers)
    (group,) = talks(actor, calculator.reply, 2, rewards=rewards)
    group.samples[1].ids, group.samples[1].logps = [9, 9, 2], [-1.0] * 3
    group.samples[1].is_model_token = None
    return group


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_the_tasks_tokens_are_not_trained_and_count_nowhere(group, policy, loss_type, alone):
    """The gradient is that of a sum by hand over the model's tokens; so are the means."""
    constants = {"LOSS_TYPE": loss_type, "KL_BETA": 0.1, "IS_CAP": 0.0}
    recipe = a_recipe(REWARD_WEIGHTS={"reward": 1.0}, **constants)
    talk = group.samples[0]
    pairs = zip(talk.logps, talk.is_model_token, strict=True)
    talk.logps = [p if of_model else math.nan for p, of_model in pairs]  # must not matter
    group.take_ref_logps(torch.full((len(group.ids),), -2.0))
    trainer.set_advantages(recipe.c, [group])
    rows = trainer.samples_to_train(recipe.c, [group], 0)
    counts = [sample.length for sample in group.samples]
    tokens = {"grpo": [2 * n for n in counts], "dapo": [sum(counts)] * 2}[loss_type]
    assert [1 / row.weight for row in rows] == pytest.approx(tokens)
    model = CompletionModel(policy.model)
    parts = [row.group.prompt for row in rows], [row.ids for row in rows]

    hidden, ids = model(*parts)
    loss, stats = trainer.batch_loss(recipe.c, hidden, model.head, ids, rows, policy.vocab_size)
    found = torch.autograd.grad(loss, list(policy.model.parameters()))
    hidden, ids = model(*parts)
    logps = linear_logps(hidden, model.head, ids, vocab_size=policy.vocab_size)
    exact = 0
    for row, part in zip(rows, logps.split([len(row.ids) for row in rows]), strict=True):
        part = part[torch.tensor(row.is_model_token or [True] * len(part))]
        kl = torch.expm1(-2.0 - part) - (-2.0 - part)
        exact -= row.weight * (part * row.advantage - 0.1 * kl).sum()
    expected = torch.autograd.grad(exact, list(policy.model.parameters()))
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() < 1e-5 * other.norm()  # measured: 7e-7

    means = metrics.TokenStats("cpu")
    means.add(loss, stats)
    shown = means.over_ranks()
    gap = logps.detach() - torch.tensor([p for row in rows for p in row.logps])
    gap = gap[~gap.isnan()]
    assert shown["sampling/sampling_logp_difference/mean"] == pytest.approx(gap.abs().mean().item())
    assert shown["sampler_ratio"] == pytest.approx(gap.exp().mean().item(), rel=1e-4)
    assert shown["ratio"] == pytest.approx(1)
    entropy = stats["entropy"].mean().item()
    assert shown["entropy"] == pytest.approx(entropy)


def test_lengths_and_turns_that_are_logged(group, alone, tmp_path):
    recipe = one_reward(calculator)
    found = metrics.rollout_metrics(a_run(recipe), [group], 0)
    own, heard = [sample.length for sample in group.samples], 2
    assert found["completions/mean_length"] == sum(own) / 2 and found["tokens_sampled"] == sum(own)
    assert found["num_turns/mean"] == 1.5 and found["num_turns/max"] == 2
    assert found["tools/call_share"] == 0.5 and found["environment_tokens"] == heard / 2
    recipe = replace(recipe, turns=None)
    found = metrics.rollout_metrics(a_run(recipe), [group], 0)
    assert not any("turns" in name for name in found)


def test_samples_tell_turns_apart(group, alone, tmp_path, capsys, tokenizer):
    recipe = a_recipe(
        [(0, {"question": "?"}, [5])], REWARD_WEIGHTS={"reward": 1.0}, OUTCOME="reward"
    )
    run = a_run(recipe, policy=SimpleNamespace(tokenizer=tokenizer))
    trainer.set_advantages(recipe.c, [group])
    report.RunFolder(tmp_path).log_samples(run, [group])
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    best, worst = sorted(map(json.loads, lines), key=lambda line: "42" in line["completion"])
    assert worst["turns"] == ["<think>40+2</think>", "42", "<answer>42</answer><|im_end|>"]
    assert "turns" not in best or len(best["turns"]) == 1
    show_samples(tmp_path)
    assert "--- the task ---\n  42\n--- the model goes on ---\n" in capsys.readouterr().out


def test_an_evaluation_counts_the_models_tokens_and_turns(tokenizer, alone):
    actor = Actor(tokenizer, ["<think>40+2</think>", "<answer>42</answer>"])
    actor.follow = lambda step: trainer.stop.listening()
    item = {"question": "?", "answer": "42"}
    prompt = [Question(0, item, prompt_ids(tokenizer, [USER]))]
    constants = {"REWARD_WEIGHTS": {"correctness": 1.0}, "MAX_COMPLETION_TOKENS": 60}
    recipe = a_recipe(prompt, task=calculator, **constants)
    recipe = recipe.others(GROUP_SIZE=1, TEMPERATURE=0)
    found = metrics.evaluate(actor, 0, recipe, prompt)
    assert found["eval_accuracy"] == 1 and found["eval_num_turns"] == 2
    assert found["eval_completion_tokens"] < len(
        tokenizer("<think>40+2</think>42<answer>42</answer>")["input_ids"]
    )
    ((_, (answer,)),) = evaluate.answered(actor, recipe, prompt, seed=0)
    assert answer["text"] == ["<think>40+2</think>", "42", "<answer>42</answer>"]
    assert answer["tokens"] == found["eval_completion_tokens"]
    assert answer["rewards"] == {"correctness": 1.0}


# --- Tasks ------------------------------------------------------------------------------
ITEM = {"answer": "85", "work": "47+38", "question": "?"}
FIRST = ["<answer>4</answer>", "more"]


@pytest.mark.parametrize("turns, reply, right", [
    (["<think>47+38</think>"], "85", False),
    (["<think>47*38</think>"], None, False),
    (["<think>47+38</think>", "85", "<answer>85</answer>"], None, True),
    (["<think>47+38</think>", "85", "<think>1+1</think>"], None, False),
    (["<answer>85</answer>"], None, True),
    (["<answer>84</answer><answer>85</answer>"], None, False), ([""], None, False),
])  # fmt: skip
def test_the_calculator(turns, reply, right):
    assert calculator.reply(ITEM, turns) == reply
    assert calculator.rewards(ITEM, turns) == {"correctness": right}


@pytest.mark.parametrize("turns, reply, right", [
    (["<answer>4</answer>"], "more", False),
    (["<answer>5</answer>"], None, True),
    (["<answer>4</answer><answer>5</answer>"], None, False), (["5"], None, False),
    ([*FIRST, "<answer>6</answer>", "less", "<answer>7</answer>"], None, False),
    ([*FIRST, "<answer>6</answer>", "less", "<answer>5</answer>"], None, True), ([""], None, False),
])  # fmt: skip
def test_the_game(turns, reply, right):
    item = {"secret": 5}
    assert guess.reply(item, turns) == reply
    assert guess.rewards(item, turns) == {"correctness": right}
    items = guess.load("test")
    assert [item["secret"] for item in items] == [1, 2, 3, 4, 5, 6, 7]
    assert all(guess.messages(item) == guess.messages(items[0]) for item in items)
