"""What of vLLM's policy needs no vLLM: its constants, weights, sleep, and what it asks of vLLM."""

import contextlib
import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch
from fakes import PROMPTS, move, tiny_policy
from transformers import AutoTokenizer

import grpo_ref_split as trainer
from grpo.checks import trainer_constants
from grpo.logp_checks import check_sampler
from grpo.options import vllm_policy
from grpo.options.vllm_policy import VLLMPolicy
from grpo.options.worker_weights import load_weights
from grpo.prepare import load_policy
from grpo.sample import Prompt, Sample

CONSTANTS = {"MODEL": "tiny", "GROUP_SIZE": 4, "SEED": 3, "STOP_TOKENS": [], "STOP_STRINGS": []}
CONSTANTS |= {"SAMPLE_BATCH": 256, "DTYPE": "float32"}
CONSTANTS |= {"MAX_PROMPT_TOKENS": 60, "MAX_COMPLETION_TOKENS": 40}
CONSTANTS |= {"VLLM_CACHE_GB": 0.5}


def test_vllm_must_be_installed(monkeypatch):
    for found in (None, "a spec"):
        monkeypatch.setattr(importlib.util, "find_spec", {"vllm": found}.get)
        with contextlib.nullcontext() if found else pytest.raises(SystemExit, match="pip install"):
            trainer_constants(trainer.DEFAULTS, {"SAMPLER": "vllm"})


@pytest.mark.parametrize("device, has_bf16, k3, stops", [
    ("cuda:0", True, 5e-5, False),  # TF32
    ("cuda:0", True, 2e-4, True),
    ("cuda:0", False, 5e-5, True),  # T4
    ("cpu", False, 5e-5, True),
])  # fmt: skip
def test_float32_on_a_gpu_has_the_rounding_of_tf32(
    device, has_bf16, k3, stops, a_policy, monkeypatch
):
    """vLLM has no other attention for float32 there; with float32's limit no run would start."""
    monkeypatch.setattr(vllm_policy, "own_device", lambda: device)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    policy = a_policy()
    with pytest.raises(RuntimeError, match="k3") if stops else contextlib.nullcontext():
        check_sampler({"loss": 0.0, "sampler_k3": k3}, policy)


class FakeLLM:
    """In place of vLLM: notes its calls, and answers each request with `outputs`."""

    def __init__(self, model="", **settings):
        self.settings, self.told, self.asked, self.outputs, self.weights = settings, [], [], [], {}
        self.answers = []  # that step() gives, one at a time
        self.llm_engine = SimpleNamespace(
            get_num_unfinished_requests=lambda: 0,
            abort_request=lambda ids: None,
            add_request=self.add_request,
        )

    def add_request(self, request, prompt, params):
        assert prompt == {"prompt_token_ids": [5, 6]}
        self.asked.append(params)
        self.answers.append(SimpleNamespace(request_id=request, outputs=self.outputs))
        self.llm_engine.step = lambda: [self.answers.pop(0)]

    def sleep(self, level):
        self.told.append(f"sleep {level}")

    def wake_up(self, tags):
        self.told.append(f"wake {tags[0]}")

    def collective_rpc(self, function, args):
        self.weights = {name: tensor.clone() for name, tensor in args[0]}
        self.told.append("reload")

    def apply_model(self, function):
        pass

    def reset_prefix_cache(self):
        self.told.append("reset")
        return True


@pytest.fixture
def a_policy(tiny, monkeypatch):
    """Returns a function: a VLLMPolicy of the tiny model around a FakeLLM."""
    for name in ("vllm", "vllm.entrypoints.llm"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(LLM=FakeLLM))
    monkeypatch.setattr(VLLMPolicy, "_params", lambda self, **params: params)

    def make(model=None, **changes):
        c = SimpleNamespace(**CONSTANTS | {"MODEL": str(tiny)} | changes)
        return VLLMPolicy(c, AutoTokenizer.from_pretrained(tiny), model)

    return make


def sample_nothing(policy):
    settings = {"group_size": 1, "max_sequences": 1, "max_new_tokens": 1, "temperature": 1.0}
    assert list(policy.stream(iter([]), seed=0, **settings)) == []


# --- Weights --------------------------------------------------------------------------
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_it_takes_the_living_weights_once_a_step(a_policy, tiny, lora_rank):
    living = tiny_policy(tiny, lora_rank=lora_rank)
    policy = a_policy(living.model)
    for step in (0, 1):
        move(living.model, 0.1)
        for _ in range(2):  # rounds, and an evaluation
            with policy.follow(step):
                pass
        assert policy.llm.told.count("reload") == step + 1
        plain = load_policy(str(tiny), living.tokenizer, "float32").model
        load_weights(plain, policy.llm.weights)
        ids = torch.tensor([PROMPTS[0][2]])
        torch.testing.assert_close(plain(ids).logits, living.model(ids).logits)
    assert policy.llm.told[-1] == "reset"  # the prefix cache has the old weights


def test_it_sleeps_on_a_trainers_gpu_and_wakes_part_by_part(a_policy, tiny, monkeypatch):
    """Level 2: the weights are dropped, and loaded again from whoever has them."""
    woken = ["wake weights", "reload", "wake kv_cache", "reset"]
    monkeypatch.setattr(vllm_policy, "accelerator", lambda: "cuda")
    policy = a_policy(tiny_policy(tiny).model)
    assert policy.llm.settings["enable_sleep_mode"]
    for _ in range(2):  # also if no step was made
        with policy.follow(0):
            sample_nothing(policy)
    assert policy.llm.told == ["sleep 2", *woken, "sleep 2", *woken, "sleep 2"]
    worker, weights = a_policy(), dict(tiny_policy(tiny).model.named_parameters())
    worker.load(weights)
    sample_nothing(worker)
    assert worker.llm.told == ["reload", "reset"] and not worker.llm.settings["enable_sleep_mode"]
    assert worker.llm.weights.keys() == weights.keys()


# --- Requests -------------------------------------------------------------------------
def streaming(policy, ids, reason, **settings):
    """-> the parameters that vLLM is given, and the Sample made of its output."""
    found = [{i: SimpleNamespace(logprob=-float(n))} for n, i in enumerate(ids, start=1)]
    answer = SimpleNamespace(token_ids=ids, logprobs=found, finish_reason=reason)
    policy.llm.outputs = [answer]
    settings |= {
        "group_size": 1,
        "max_sequences": 1,
        "max_new_tokens": 9,
        "temperature": 1.0,
        "seed": 0,
    }
    ((_, (completion,)),) = policy.stream(iter([Prompt("key", [5, 6])]), **settings)
    return policy.llm.asked[-1], completion


def test_a_turn_has_a_limit_of_its_own(a_policy):
    policy = a_policy()
    found = SimpleNamespace(token_ids=[7], logprobs=[{7: SimpleNamespace(logprob=-1.0)}])
    found.finish_reason = "length"
    policy.llm.outputs = [found]
    prompts = iter([Prompt("first", [5, 6]), Prompt("later", [5, 6], 4)])
    settings = {"max_sequences": 4, "max_new_tokens": 9, "temperature": 1.0, "seed": 0}
    groups = list(policy.stream(prompts, group_size=1, **settings))
    assert [key for key, _ in groups] == ["first", "later"]
    assert all(len(group) == 1 for _, group in groups)
    asked = policy.llm.asked
    assert [(params["n"], params["max_tokens"]) for params in asked] == [(1, 9), (1, 4)]
    assert len({params["seed"] for params in asked}) == 2


def test_vllm_is_asked_for_stop_strings_and_its_ids_stay(a_policy):
    policy = a_policy(STOP_STRINGS=["=12"])
    tokenizer = policy.tokenizer
    ids = tokenizer("7+5=12 €")["input_ids"]
    end = tokenizer("7+5=12")["input_ids"]
    asked, completion = streaming(policy, end, "stop")
    assert asked["stop"] == ["=12"] and asked["include_stop_str_in_output"]
    assert asked["detokenize"] and not asked["skip_special_tokens"]  # else it finds none
    assert asked["stop_token_ids"] == policy.eos_ids
    assert completion == Sample(end, [-float(n) for n in range(1, len(end) + 1)], False)
    # vLLM may see a string an id later, after half a character; or with the last id it may draw
    for reason, later in (("stop", len(end) + 2), ("length", len(ids))):
        assert streaming(policy, ids[:later], reason)[1] == completion
    assert streaming(policy, end[:-1], "length")[1].truncated
