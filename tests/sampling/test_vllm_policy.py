"""What of the vLLM worker needs no vLLM: its constants, what the device must offer, sleep."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

import vllm_worker
from grpo.sampling.sampler import Completion
from grpo.sampling.stop_strings import StopStrings
from grpo.sampling.vllm_policy import VLLMPolicy, check_device

CONSTANTS = {name: getattr(vllm_worker, name) for name in vllm_worker.known}


def test_the_constants_are_right_as_they_stand():
    vllm_worker.check_constants(CONSTANTS, group_size=8)


@pytest.mark.parametrize(
    "name, value",
    [
        *(("VLLM_MEMORY_GB", value) for value in ("20", 0, float("nan"))),
        *(("VLLM_SEQUENCES", value) for value in (4, "9")),
        ("TENSOR_PARALLEL", 0),
        ("VLLM_SLEEP", 2),
    ],
)
def test_a_constant_that_can_not_be_is_named(name, value):
    with pytest.raises(SystemExit, match=f"{name} = {value!r} must be"):
        vllm_worker.check_constants(CONSTANTS | {name: value}, group_size=8)


def test_what_the_device_does_not_offer_is_said(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    check_device(20.0, 2, sleep=False)  # a CPU's cores are shared out
    with pytest.raises(SystemExit, match="VLLM_SLEEP = True needs a GPU"):
        check_device(1.0, 1, sleep=True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    sizes = int(30e9), int(80e9)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: sizes)
    check_device(30.0, 2, sleep=True)
    with pytest.raises(SystemExit, match="TENSOR_PARALLEL = 4 needs as many GPUs, and there are 2"):
        check_device(30.0, 4, sleep=True)
    with pytest.raises(SystemExit, match=r"VLLM_MEMORY_GB = 31.0, but of this GPU's 80.0 GB 30.0"):
        check_device(31.0, 1, sleep=False)


class FakeLLM:
    """In place of vLLM: notes what it is told."""

    def __init__(self):
        self.told = []
        self.llm_engine = SimpleNamespace(
            get_num_unfinished_requests=lambda: 0, abort_request=lambda ids: None
        )

    def sleep(self, level):
        self.told.append(f"sleep {level}")

    def wake_up(self):
        self.told.append("wake")


def a_policy(sleeps):
    policy = VLLMPolicy.__new__(VLLMPolicy)
    policy.llm, policy.sleeps, policy.asleep = FakeLLM(), sleeps, False
    policy.gpu, policy.stop_strings = False, None
    return policy


def sample_nothing(policy):
    assert list(policy.stream(iter([]), group_size=1, max_rows=1, seed=0)) == []


@pytest.mark.parametrize("gpu", [False, True])
def test_a_request_has_a_seed_on_a_cpu_alone(gpu):
    """On a GPU each would cost a launch a token."""
    policy, seeds = a_policy(sleeps=False), []
    policy.gpu, policy.eos_ids, policy.max_tokens = gpu, [2], 9

    def note(request, prompt, params):
        assert prompt == {"prompt_token_ids": [5, 6]}
        seeds.append(params["seed"])
        assert not params.keys() & {"stop", "detokenize"}
        policy.llm.llm_engine.step = lambda: [SimpleNamespace(request_id=request, outputs=[])]

    policy.llm.llm_engine.add_request = note
    policy._params = lambda **params: params
    for seed in (3, 3):
        policy.numbers, prompts = iter("a"), iter([("key", [5, 6])])
        settings = {"max_new_tokens": 4, "temperature": 1.0, "seed": seed}
        groups = policy.stream(prompts, group_size=1, max_rows=1, **settings)
        assert list(groups) == [("key", [])]
    assert seeds == [None, None] if gpu else seeds[0] == seeds[1] is not None


def test_it_sleeps_while_there_is_no_work_and_wakes_for_the_next_call():
    policy = a_policy(sleeps=True)
    sample_nothing(policy)
    policy.rest()
    policy.rest()  # there is still no work
    sample_nothing(policy)
    sample_nothing(policy)
    policy.rest()
    assert policy.llm.told == ["sleep 1", "wake", "sleep 1"]
    awake = a_policy(sleeps=False)
    awake.rest()
    assert awake.llm.told == []


def test_memory_that_was_taken_while_it_slept_is_said():
    policy = a_policy(sleeps=True)
    policy.rest()

    def fail():
        raise RuntimeError("CUDA Error: out of memory")

    policy.llm.wake_up = fail
    with pytest.raises(RuntimeError, match="lower VLLM_MEMORY_GB, or .*out of memory"):
        sample_nothing(policy)


# --- Stop strings -------------------------------------------------------------------
def vllm_output(ids, reason):
    found = [{i: SimpleNamespace(logprob=-float(n))} for n, i in enumerate(ids, start=1)]
    return SimpleNamespace(token_ids=ids, logprobs=found, finish_reason=reason)


def streaming(policy, ids, reason, **settings):
    """-> the parameters that vLLM is given, and the Completion made of its output."""
    asked, waiting = [], [("key", [5, 6])]

    def note(request, prompt, params):
        asked.append(params)
        outputs = [vllm_output(ids, reason)]
        policy.llm.llm_engine.step = lambda: [SimpleNamespace(request_id=request, outputs=outputs)]

    policy.llm.llm_engine.add_request, policy._params = note, lambda **params: params
    policy.numbers, policy.eos_ids, policy.max_tokens = iter("a"), [2], 99
    settings |= {"group_size": 1, "max_rows": 1, "max_new_tokens": 9, "temperature": 1.0, "seed": 0}
    groups = policy.stream(iter(waiting), **settings)
    ((_, (completion,)),) = groups
    return asked[0], completion


def test_vllm_is_asked_for_stop_strings_and_its_ids_stay(tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    policy = a_policy(sleeps=False)
    policy.stop_strings = StopStrings(tokenizer, ["=12"])
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
