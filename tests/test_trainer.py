"""The trainer's parts, without DeepSpeed or a server: what is sampled, kept, weighed, refused."""

import json
import random
import re
from collections import Counter
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import grpo_ref_split as grpo
from forward import CompletionModel
from policy import load_policy, prompt_ids
from sampler import Completion
from wire import Group, RefServer, tokenizer_facts


def a_group(rewards, *, lengths=(3, 1), truncated=(False, False), id="000000-0000-0000"):
    """-> a wire Group with these rewards (G, 2)."""
    tokens = sum(lengths)
    return Group(
        id=id,
        run="test",
        policy_version=0,
        item=0,
        reward_names=["correctness", "format"],
        prompt_ids=torch.tensor([5, 6], dtype=torch.int32),
        completion_ids=torch.arange(10, 10 + tokens, dtype=torch.int32),
        completion_lengths=torch.tensor(lengths, dtype=torch.int32),
        sampler_logps=-torch.arange(1, tokens + 1, dtype=torch.float32),
        truncated=torch.tensor(truncated),
        rewards=torch.tensor(rewards),
        ref_logps=-torch.ones(tokens),
    )


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
        ("GROUP_SIZE", "8"),
        ("CLIP_LOW", None),
        ("LOSS_TYPE", ["grpo"]),
        ("MAX_REFILLS", -1),
        ("LEARNING_RATE", float("nan")),
        ("SAMPLE_BATCH", 4),
        ("REF_SERVER", "127.0.0.1:59875"),
    ],
)
def test_a_bad_constant_is_named_with_its_value(constant, value, monkeypatch, tmp_path):
    monkeypatch.setattr(grpo, "RUN_DIR", str(tmp_path))
    grpo.check_config()
    monkeypatch.setattr(grpo, constant, value)
    with pytest.raises(SystemExit, match=re.escape(f"{constant} = {value!r} must be")):
        grpo.check_config()


def test_a_run_is_not_written_over(monkeypatch, tmp_path):
    monkeypatch.setattr(grpo, "RUN_DIR", str(tmp_path))
    for trace in ("metrics.jsonl", "step_000500"):  # FIELD 5a-21: the next run wrote over it
        (tmp_path / trace).mkdir()
        with pytest.raises(SystemExit, match="holds no run"):
            grpo.check_config()
        (tmp_path / trace).rmdir()


def test_the_default_weights_let_a_right_answer_beat_a_pretty_one():
    w = grpo.REWARD_WEIGHTS
    right_but_plain = w["correctness"] * 1 + w["format"] * -1
    wrong_but_pretty = w["correctness"] * -1 + w["format"] * 1.25
    assert right_but_plain > wrong_but_pretty  # FIELD 5a-18: 0.0 against 0.25


def test_learning_rate_warms_up_and_decays(monkeypatch):
    for name, value in {
        "LEARNING_RATE": 2.0,
        "WARMUP_STEPS": 4,
        "STEPS": 14,
        "FINAL_LR": 0.5,
    }.items():
        monkeypatch.setattr(grpo, name, value)
    assert [grpo.learning_rate(step) for step in (1, 2, 4, 9, 14)] == [0.5, 1.0, 2.0, 1.5, 1.0]
    monkeypatch.setattr(grpo, "WARMUP_STEPS", 0)
    assert grpo.learning_rate(1) <= 2.0


# --- Prompts ------------------------------------------------------------------------
def test_ranks_share_each_epoch_without_overlap():
    prompts = list(range(10))
    ranks = [list(islice(grpo.endless(prompts, rank, 3), 10)) for rank in range(3)]
    order = [prompt for turn in zip(*ranks, strict=True) for prompt in turn]  # of all ranks
    assert sorted(order[:10]) == sorted(order[10:20]) == prompts
    assert order[:10] != order[10:20]  # a new order
    assert ranks[0] == list(islice(grpo.endless(prompts, 0, 3), 10))  # FIELD 5a-22: no seed


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
    monkeypatch.setattr(grpo, "MAX_PROMPT_TOKENS", 40)
    assert [index for index, _, _ in grpo.load_prompts(task, "train", tokenizer)] == [0]
    assert "2 questions, 1 left out" in capsys.readouterr().out  # FIELD 5a-22: in silence
    monkeypatch.setattr(grpo, "MAX_PROMPT_TOKENS", 2)
    with pytest.raises(SystemExit, match="MAX_PROMPT_TOKENS = 2"):
        grpo.load_prompts(task, "train", tokenizer)


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


# --- Rollout ------------------------------------------------------------------------
@pytest.fixture
def fake_sampling(monkeypatch):
    """Replaces sampling; the outcome of a prompt's group is what the prompt says."""
    asked = []

    def sample_and_reward(policy, task, prompts, group_size, temperature, generator):
        asked.append(len(prompts))
        completions = [Completion([7, 2], [-1.0, -2.0], False), Completion([7], [-1.0], True)]
        return [
            (prompt, completions, [{"correctness": c, "format": f} for c, f in prompt[1]])
            for prompt in prompts
        ]

    monkeypatch.setattr(grpo, "sample_and_reward", sample_and_reward)
    monkeypatch.setattr(grpo, "GROUP_SIZE", 2)
    return asked


MIXED = [(1.0, -1.0), (-1.0, -1.0)]
ALL_WRONG = [(-1.0, 1.25), (-1.0, -1.0)]  # differs in format alone


def rolled_out(outcomes, share, **constants):
    stream = iter([(i, outcome, [5]) for i, outcome in enumerate(outcomes)])
    count = Counter()
    kept = list(grpo.rollout(None, None, stream, count, share=share, generator=None))
    return [group[0][0] for group in kept], count


def test_flat_groups_are_judged_on_correctness_replaced_and_counted(fake_sampling):
    kept, count = rolled_out([MIXED, ALL_WRONG, MIXED, ALL_WRONG, MIXED, MIXED], share=4)
    assert kept == [0, 2, 4, 5]  # FIELD 5a-18: a format-only group passed the filter
    assert count["groups"] == 6 and count["flat"] == 2
    assert count["completions"] == 12 and count["truncated"] == 6 and count["tokens"] == 18
    assert count["right"] == 4 and count["reward_format"] == 4 * -2 + 2 * 0.25


def test_refilling_ends(fake_sampling, monkeypatch):
    monkeypatch.setattr(grpo, "MAX_REFILLS", 2)
    kept, count = rolled_out([ALL_WRONG] * 100, share=4)
    assert kept == [] and count["groups"] == 4 * 3


def test_flat_groups_are_kept_when_asked(fake_sampling, monkeypatch):
    monkeypatch.setattr(grpo, "SKIP_FLAT_GROUPS", False)
    kept, _ = rolled_out([ALL_WRONG] * 4, share=4)
    assert kept == [0, 1, 2, 3] and fake_sampling == [4]


def test_sampling_is_in_batches(fake_sampling, monkeypatch):
    monkeypatch.setattr(grpo, "SAMPLE_BATCH", 5)  # 2 groups of 2, not 3
    rolled_out([MIXED] * 5, share=5)
    assert fake_sampling == [2, 2, 1]


def test_what_is_sent_is_what_was_sampled(tiny):
    """FIELD 5a-1: text was tokenised again, so other ids were trained than sampled."""
    prompt = (3, {"question": "?", "answer": "4"}, [5, 6])
    completions = [Completion([7, 2], [-1.0, -2.0], False), Completion([8, 8, 8], [-0.5] * 3, True)]
    rewards = [{"format": -1.0, "correctness": 1.0}, {"correctness": -1, "format": 1.25}]
    group = grpo.make_group((prompt, completions, rewards), id="a", run="r", step=4)
    assert group.completion_ids.tolist() == [7, 2, 8, 8, 8]
    assert group.completion_lengths.tolist() == [2, 3]
    assert group.sampler_logps.tolist() == [-1.0, -2.0, -0.5, -0.5, -0.5]
    assert group.truncated.tolist() == [False, True]
    assert group.rewards.tolist() == [[1.0, -1.0], [-1.0, 1.25]]  # columns by name, not by order
    assert (group.item, group.policy_version) == (3, 4)


def test_rewards_of_other_names_are_refused(tiny):
    policy = load_policy(str(tiny), AutoTokenizer.from_pretrained(tiny), "float32")
    task = SimpleNamespace(rewards=lambda item, text: {"correct": 1.0})
    prompt = (0, {"question": "?", "answer": "4"}, [5, 6])
    with pytest.raises(SystemExit, match="REWARD_WEIGHTS"):
        grpo.sample_and_reward(policy, task, [prompt], 2, 1.0, None)


@pytest.mark.parametrize("value", [None, "1", float("nan"), True, np.float32("inf")])
def test_a_reward_that_is_no_number_is_named_with_its_question(tiny, value):
    policy = load_policy(str(tiny), AutoTokenizer.from_pretrained(tiny), "float32")
    task = SimpleNamespace(rewards=lambda item, text: {"correctness": value, "format": 1.0})
    prompt = (0, {"question": "Why?", "answer": "4"}, [5, 6])
    with pytest.raises(SystemExit, match="not finite numbers, for .*Why"):
        grpo.sample_and_reward(policy, task, [prompt], 2, 1.0, None)


def test_broken_weights_are_said_to_be_broken(tiny):
    policy = load_policy(str(tiny), AutoTokenizer.from_pretrained(tiny), "float32")
    with torch.no_grad():
        next(policy.model.parameters()).fill_(float("nan"))
    with pytest.raises(RuntimeError, match="logits are not finite"):
        grpo.sample_and_reward(policy, None, [(0, {}, [5, 6])], 2, 1.0, None)


def test_a_reward_may_have_any_name(monkeypatch):
    """Names of rewards and of counts must not meet: a reward "accuracy" made eval_accuracy 2."""
    monkeypatch.setattr(grpo, "REWARD_WEIGHTS", {"accuracy": 1.0, "tokens": 1.0})
    monkeypatch.setattr(grpo, "OUTCOME", "accuracy")
    monkeypatch.setattr(grpo.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(grpo.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(grpo.dist, "all_reduce", lambda tensor: None)
    sampled = [
        ((0, {}, [5]), [Completion([7, 2], [-1.0, -1.0], False)], [{"accuracy": 1, "tokens": -1}])
    ]
    monkeypatch.setattr(grpo, "sample_and_reward", lambda *_: sampled)
    result = grpo.evaluate(None, None, [None])
    assert result["eval_accuracy"] == 1 and result["eval_completion_tokens"] == 2
    assert result["eval_positive_accuracy"] == 1 and result["eval_positive_tokens"] == 0


# --- Rows ---------------------------------------------------------------------------
def test_rows_by_hand(monkeypatch):
    monkeypatch.setattr(grpo, "REWARD_WEIGHTS", {"correctness": 2.0, "format": 1.0})
    monkeypatch.setattr(grpo, "ADVANTAGE_STD", False)
    rows = grpo.make_rows([a_group([[1.0, -1.0], [-1.0, -1.0]])])
    assert [row.completion for row in rows] == [[10, 11, 12], [13]]
    assert [row.prompt for row in rows] == [[5, 6]] * 2
    assert [row.advantage for row in rows] == [2.0, -2.0]  # 1 and -3, less their mean -1
    assert rows[0].sampler_logps.tolist() == [-1, -2, -3] and rows[1].sampler_logps.tolist() == [-4]
    assert [row.weight for row in rows] == pytest.approx([1 / 6, 1 / 2])  # 1 / (2 sequences x T)


def test_truncated_rows_count_in_the_mean_and_are_not_trained(monkeypatch):
    group = a_group([[1.0, -1.0], [-1.0, -1.0]], truncated=(True, False))
    monkeypatch.setattr(grpo, "ADVANTAGE_STD", False)
    (row,) = grpo.make_rows([group])
    assert row.completion == [13] and row.advantage == -2.0
    assert row.weight == pytest.approx(1 / 2)  # of 2 sequences, the cut one included (as in TRL)
    monkeypatch.setattr(grpo, "MASK_TRUNCATED", False)
    assert len(grpo.make_rows([group])) == 2


def test_a_step_without_rows_is_possible(monkeypatch):
    assert grpo.make_rows([]) == []
    all_cut = a_group([[1.0, -1.0], [-1.0, -1.0]], truncated=(True, True))
    assert grpo.make_rows([all_cut]) == []  # FIELD 5a-5: 0 / 0


# --- First update -------------------------------------------------------------------
def test_the_run_stops_unless_the_first_update_is_as_theory_says():
    good = {"mismatch": 4e-7, "kl": 1e-9}
    same = {"model": grpo.MODEL, "dtype": "float32"}
    grpo.check_first_update(good, "float32", same)
    with pytest.raises(RuntimeError, match="ratio is not 1"):
        grpo.check_first_update(good | {"mismatch": 1e-3}, "float32", same)
    with pytest.raises(RuntimeError, match="should be 0"):
        grpo.check_first_update(good | {"kl": 9e-4}, "float32", same)
    # a reference in bfloat16 differs by that much; another model, and none, by any amount
    grpo.check_first_update(good | {"kl": 9e-4}, "float32", same | {"dtype": "bfloat16"})
    grpo.check_first_update(good | {"kl": 9e-4}, "float32", same | {"model": "larger"})
    grpo.check_first_update({"mismatch": 4e-7}, "float32", None)


def test_a_sampler_at_another_temperature_stops_the_run(tiny, monkeypatch):
    """FIELD 5a-9: sampled at 0.9, log-probs at 1.0; the ratio looked like 1 and was not."""
    policy = load_policy(str(tiny), AutoTokenizer.from_pretrained(tiny), "float32")
    prompts = [(i, {"answer": "4"}, [5 + i, 6, 7]) for i in range(4)]
    task = SimpleNamespace(
        rewards=lambda item, text: {"correctness": float(len(text) % 3), "format": 1.0}
    )
    monkeypatch.setattr(grpo, "MAX_COMPLETION_TOKENS", 8)
    monkeypatch.setattr(grpo, "MASK_TRUNCATED", False)
    monkeypatch.setattr(grpo, "KL_BETA", 0)
    mismatch = {}
    for temperature in (1.0, 0.9):
        torch.manual_seed(0)
        sampled = grpo.sample_and_reward(policy, task, prompts, 4, temperature, None)
        groups = [grpo.make_group(group, id="g", run="r", step=0) for group in sampled]
        rows = grpo.make_rows(groups)
        model = CompletionModel(policy.model, share_prompts=True)
        _, sums, _ = grpo.micro_batch_loss(model, rows, policy.vocab_size, scale=1)
        sums = dict(zip(grpo.SUMS, sums.tolist(), strict=True))
        mismatch[temperature] = sums["mismatch"] / sums["tokens"]
    assert mismatch[1.0] < 1e-5 < grpo.NOISE["float32"][0] < mismatch[0.9]


def test_old_log_probs_are_those_of_the_first_update_and_get_no_gradient(tiny, monkeypatch):
    policy = load_policy(str(tiny), AutoTokenizer.from_pretrained(tiny), "float32")
    monkeypatch.setattr(grpo, "KL_BETA", 0)
    rows = grpo.make_rows([a_group([[1.0, -1.0], [-1.0, -1.0]])])
    assert all(row.old_logps is None for row in rows)
    model = CompletionModel(policy.model, share_prompts=True)
    loss, sums, _ = grpo.micro_batch_loss(model, rows, policy.vocab_size, scale=1)
    assert abs(loss.item()) < 1e-6  # the advantages sum to 0, and each sequence weighs the same
    gradient = torch.autograd.grad(loss, list(policy.model.parameters()))
    assert sum(g.norm() for g in gradient) > 1e-3  # and yet it learns: exp(logp - detached)
    old = [row.old_logps.clone() for row in rows]
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    _, sums, _ = grpo.micro_batch_loss(model, rows, policy.vocab_size, scale=1)
    assert all(torch.equal(a, row.old_logps) for a, row in zip(old, rows, strict=True))
    assert abs(sums[grpo.SUMS.index("ratio")] / sums[grpo.SUMS.index("tokens")] - 1) > 1e-3


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
    info = facts | {"protocol": 1, "model": "theirs"}
    assert a_client((200, info)).check("ours", facts) == info
    for wrong in ({"tokenizer": "0123"}, {"vocab_size": 9}, {"temperature": 0.9}, {"protocol": 0}):
        with pytest.raises(SystemExit, match=f"does not fit the policy ours.*{next(iter(wrong))}"):
            a_client((200, info | wrong)).check("ours", facts)


def test_a_reference_that_changes_in_mid_run_is_refused(tiny):
    facts = tokenizer_facts(AutoTokenizer.from_pretrained(tiny)) | {"temperature": 1.0}
    client = a_client((200, facts | {"protocol": 1, "model": "theirs", "facts": "a"}), (200, {}))
    client.check("ours", facts)
    with pytest.raises(RuntimeError, match="another reference model or temperature"):
        client.lease("run", ["id"])


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
    """FIELD 5a-14: a bare except made a dead server look like an empty queue, for ever."""
    clock = random.Random(0)
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.sleep", lambda s: now.__setitem__(0, now[0] + 3 + clock.random()))
    client = RefServer("http://127.0.0.1:9", 40)  # a port where nothing listens
    with pytest.raises(RuntimeError, match="waited 40 s for .*ref_server.py"):
        client.call("GET", "/info")
    assert capsys.readouterr().out.count("waiting for http://127.0.0.1:9/info") >= 3
