"""What of the vLLM worker needs no vLLM: its constants, what the device must offer, sleep."""

import contextlib
import itertools
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

import vllm_worker
from grpo.sampling.sampler import Completion
from grpo.sampling.stop_strings import StopStrings
from grpo.sampling.vllm_policy import VLLMPolicy, check_device

CONSTANTS = {name: getattr(vllm_worker, name) for name in vllm_worker.known}


@pytest.mark.parametrize("name, value", [
    *(("VLLM_MEMORY_GB", value) for value in ("20", 0, float("nan"))),
    *(("VLLM_SEQUENCES", value) for value in (4, "9")),
    ("TENSOR_PARALLEL", 0),
    ("VLLM_SLEEP", 2),
])  # fmt: skip
def test_a_constant_that_can_not_be_is_named(name, value):
    vllm_worker.check_constants(CONSTANTS, group_size=8)  # right as they stand
    with pytest.raises(SystemExit, match=f"{name} = {value!r}"):
        vllm_worker.check_constants(CONSTANTS | {name: value}, group_size=8)


@pytest.mark.parametrize("gpus, memory, parallel, sleep, said", [
    (0, 20.0, 2, False, None),  # a CPU's cores are shared out
    (0, 1.0, 1, True, "VLLM_SLEEP = True .*GPU"),
    (2, 30.0, 2, True, None),
    (2, 30.0, 4, True, "TENSOR_PARALLEL = 4 .* 2"),
    (2, 31.0, 1, False, "VLLM_MEMORY_GB = 31.0.* 80.0 GB 30.0"),
])  # fmt: skip
def test_what_the_device_does_not_offer_is_said(gpus, memory, parallel, sleep, said, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (int(30e9), int(80e9)))
    with pytest.raises(SystemExit, match=said) if said else contextlib.nullcontext():
        check_device(memory, parallel, sleep=sleep)


class FakeLLM:
    """In place of vLLM: notes what it is told, and answers each request with `outputs`."""

    def __init__(self):
        self.told, self.asked, self.outputs = [], [], []
        self.llm_engine = SimpleNamespace(
            get_num_unfinished_requests=lambda: 0,
            abort_request=lambda ids: None,
            add_request=self.add_request,
        )

    def add_request(self, request, prompt, params):
        assert prompt == {"prompt_token_ids": [5, 6]}
        self.asked.append(params)
        answer = SimpleNamespace(request_id=request, outputs=self.outputs)
        self.llm_engine.step = lambda: [answer]

    def sleep(self, level):
        self.told.append(f"sleep {level}")

    def wake_up(self):
        self.told.append("wake")


def a_policy(**changes):
    policy = VLLMPolicy.__new__(VLLMPolicy)
    settings = {"sleeps": False, "asleep": False, "gpu": False, "stop_strings": None}
    settings |= {"eos_ids": [2], "max_tokens": 99, "_params": lambda **params: params}
    policy.__dict__.update({"llm": FakeLLM(), "numbers": itertools.count()} | settings | changes)
    return policy


def sample_nothing(policy):
    assert list(policy.stream(iter([]), group_size=1, max_sequences=1, seed=0)) == []


def streaming(policy, ids, reason, **settings):
    """-> the parameters that vLLM is given, and the Completion made of its output."""
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
    ((_, (completion,)),) = policy.stream(iter([("key", [5, 6])]), **settings)
    return policy.llm.asked[-1], completion


@pytest.mark.parametrize("gpu", [False, True])
def test_a_request_has_a_seed_on_a_cpu_alone(gpu):
    """On a GPU each would cost a launch a token."""
    asked = [streaming(a_policy(gpu=gpu), [7, 2], "stop")[0] for _ in range(2)]
    assert not asked[0].keys() & {"stop", "detokenize"}
    assert asked[0]["seed"] == asked[1]["seed"] and (asked[0]["seed"] is None) == gpu


@pytest.mark.parametrize("sleeps, told", [(True, ["sleep 1", "wake", "sleep 1"]), (False, [])])
def test_it_sleeps_while_there_is_no_work_and_wakes_for_the_next_call(sleeps, told):
    policy = a_policy(sleeps=sleeps)
    sample_nothing(policy)
    policy.rest()
    policy.rest()  # there is still no work
    sample_nothing(policy)
    sample_nothing(policy)
    policy.rest()
    assert policy.llm.told == told


def test_memory_that_was_taken_while_it_slept_is_said():
    policy = a_policy(sleeps=True)
    policy.rest()

    def fail():
        raise RuntimeError("CUDA Error: out of memory")

    policy.llm.wake_up = fail
    with pytest.raises(RuntimeError, match="VLLM_MEMORY_GB.*out of memory"):
        sample_nothing(policy)


def test_vllm_is_asked_for_stop_strings_and_its_ids_stay(tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    policy = a_policy(stop_strings=StopStrings(tokenizer, ["=12"]))
    ids = tokenizer("7+5=12 €")["input_ids"]
    end = tokenizer("7+5=12")["input_ids"]
    asked, completion = streaming(policy, end, "stop")
    assert asked["stop"] == ["=12"] and asked["include_stop_str_in_output"]
    assert asked["detokenize"] and not asked["skip_special_tokens"]  # else it finds none
    assert asked["stop_token_ids"] == [2]
    assert completion == Completion(end, [-float(n) for n in range(1, len(end) + 1)], False)
    # vLLM may see a string an id later, after half a character; or with the last id it may draw
    for reason, later in (("stop", len(end) + 2), ("length", len(ids))):
        assert streaming(policy, ids[:later], reason)[1] == completion
    assert streaming(policy, end[:-1], "length")[1].truncated
    # what proves the weights has its length whatever is in it
    asked, whole = streaming(policy, ids, "length", eos_ids=[])
    assert "stop" not in asked and whole.ids == ids
