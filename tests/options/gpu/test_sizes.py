"""Sizes that are tried on a GPU, with faked out-of-memory errors; benchmarks/memory.py's arithmetic
and the trials against the living tensors of the trainer's code."""

import gc
import math
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fakes import tiny_policy
from gpu_kernels import varlen_attn
from living import Live
from peft import LoraConfig
from rank_threads import Ranks
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
import memory
from memory import BF16, FP32, trainer

import grpo_loss_triton
from grpo import start as start_module
from grpo.devices import out_of_memory_names
from grpo.forward import CompletionModel, checkpoint_layers
from grpo.metrics import Clock
from grpo.models import load_model
from grpo.options.gpu import sample_sizes as sampling
from grpo.options.gpu import sizes as training
from grpo.options.training.lora import ALL
from grpo.policy import Policy
from grpo.sampler import sample_groups
from grpo.start import USUAL, fit_sizes


def random_policy(config, rank, folder=None):
    """Returns the Policy with random bf16 weights, rounded to 4 bits by way of a `folder`."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if folder:
        model.save_pretrained(folder)
        model, _ = load_model(str(folder), "bfloat16", config.vocab_size, bits=4)
    if rank:
        model.add_adapter(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=ALL))
    return Policy("random", model, None, {-1}, config.vocab_size, "bfloat16")


CASES = [  # memory.MODELS' shape, prompt, completion, group, LoRA rank, bits, checkpointing
    ((256, 3, 4, 2, 512, 8192, False), 64, 32, 4, 0, 16, True),
    ((256, 4, 4, 2, 768, 2048, True), 64, 48, 4, 8, 16, False),
    ((256, 4, 4, 2, 768, 2048, True), 64, 48, 4, 8, 4, False),
]


def a_gpu(monkeypatch, **statistics):
    """A GPU's statistics in the place of torch's; its tensors are on the CPU."""
    usual = {"get_memory_info": (2**30, 2**30), "memory_reserved": 0}
    usual |= {"max_memory_allocated": 2**20, "reset_peak_memory_stats": None}
    answers = {name: lambda *_, value=value: value for name, value in usual.items()}
    for name, answer in (answers | statistics).items():
        monkeypatch.setattr(torch.accelerator, name, answer)
    for module in (sampling, start_module):
        monkeypatch.setattr(module, "accelerator", lambda: "cuda")


# --- Living tensors -----------------------------------------------------------------
def sample_all(c, policy, group):
    """Samples a batch to its end, by the adapters themselves."""
    prompts = [[1] * (c.MAX_PROMPT_TOKENS - n % 2) for n in range(c.SAMPLE_BATCH // group)]
    settings = {"group_size": group, "max_new_tokens": c.MAX_COMPLETION_TOKENS}
    settings |= {"temperature": 1.0, "eos_ids": {-1}, "vocab_size": policy.vocab_size}
    sample_groups(policy.model, prompts, generator=None, **settings)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_computed_and_tried_sizes_are_those_of_living_tensors(case, monkeypatch, tmp_path):
    """Measured: computed over counted 0.96 to 1.07, tried over counted 0.996 to 1.000."""
    shape, prompt, completion, group, rank, bits, checkpointing = case
    config = memory.config_of(*shape)
    m = memory.Sizes(config, rank, bits)
    policy = random_policy(config, rank, tmp_path if bits == 4 else None)
    # a CPU's chunk of logits, and no rows for torch's copies: the GPU's kernel works in place
    monkeypatch.setattr(grpo_loss_triton, "CHUNK_BYTES", BF16 * m.vocab * m.hidden)
    monkeypatch.setattr(grpo_loss_triton, "slabs", lambda *_: iter(()))
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    monkeypatch.setattr(training.dist, "get_world_size", lambda: 1)
    sizes = {"MICRO_BATCH_TOKENS": 512, "GRADIENT_CHECKPOINTING": checkpointing}
    own = {
        "LORA_RANK": rank,
        "GROUP_SIZE": group,
        "SAMPLE_BATCH": 8,
    }
    c = memory.shipped(prompt, completion, **own | sizes)
    model = CompletionModel(policy.model)
    model.varlen = True  # as on a GPU
    live = Live(policy.model)
    a_gpu(monkeypatch, reset_peak_memory_stats=live.reset, max_memory_allocated=lambda _: live.peak)

    def peak(function, *arguments, **constants):
        found = sampling.measured(partial(function, c, *arguments, **constants), 0, "cpu")[1]
        return found - m.weights

    trial = training.forward_and_backward
    with live:
        arguments = trial, trainer.batch_loss, model, policy.vocab_size
        trained = peak(*arguments, **sizes)
        if checkpointing:
            monkeypatch.setattr(training, "BUCKET", 0)  # larger gradients are kept
            assert peak(*arguments, **sizes) > 1.1 * trained
        counted = {size: peak(sample_all, policy, size) for size in (1, group)}
        tried = {size: peak(sampling.sample, policy, size, 8) for size in (1, group)}
    phases = memory.sampling_phases(m, c, {}) | memory.training(m, c, 1)
    left_out = (*memory.STATES, "DeepSpeed's sums")
    sums = {n: sum(b for p, b in x.items() if p not in left_out) for n, x in phases.items()}
    computed = {group: sums.pop("sampling"), 1: sums.pop("evaluation")}
    del sums["step"]
    sums["loss"] += FP32 * m.vocab * m.hidden  # on a CPU float32 logits are of casts
    assert max(sums.values()) == pytest.approx(trained, rel=0.15)
    for size, peak_bytes in counted.items():
        assert computed[size] == pytest.approx(peak_bytes, rel=0.15)
        assert tried[size] == pytest.approx(peak_bytes, rel=0.01)


def test_parameters_are_as_published_and_adapters_as_computed():
    for name, (*_, published) in memory.MODELS.items():
        assert abs(memory.sizes_of(name, 0).total / 1e9 / published - 1) < 0.005, name
    config = memory.config_of(*CASES[0][0])
    model, m = random_policy(config, 8).model, memory.Sizes(config, 8)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == m.trained


# --- Tried --------------------------------------------------------------------------
def auto(**changes):
    return memory.shipped(8, 16, **dict.fromkeys(USUAL, "auto") | changes)


@pytest.mark.parametrize(
    ("fails", "own", "chosen"),
    [  # how often rank 1 runs out of memory; constants; tokens, checkpointing
        (0, {}, (256, False)),
        (2, {}, (256, True)),  # checkpointing last
        (5, {}, None),
        (1, {"MICRO_BATCH_TOKENS": 75}, (75, True)),
        (2, {"GRADIENT_CHECKPOINTING": False}, (64, False)),
    ],
)
def test_ranks_step_down_together(fails, own, chosen, tiny, monkeypatch, capsys):
    """What rank 0 could hold does not matter once rank 1 is out of memory."""
    a_gpu(monkeypatch)
    monkeypatch.setattr(training, "TOKENS", {False: (256, 128), True: (256, 128, 64)})
    monkeypatch.setattr(sampling, "BATCHES", (128, 64, 32))
    ranks, policies = Ranks(monkeypatch), [tiny_policy(tiny), tiny_policy(tiny)]
    tried, draw = [[], []], sampling.draw
    sizes = {"SAMPLE_BATCH": 64} if fails else {}  # else "auto", too

    def batch_loss(c, hidden, head, ids, batch, vocab_size, old):
        mine, length = tried[ranks.get_rank()], len(batch[-1].ids)
        if length == 16:  # then one of short completions follows
            mine.append(len(batch))
            if ranks.get_rank() and len(mine) <= fails:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return trainer.batch_loss(c, hidden[-length:], head, ids[-length:], batch[-1:], vocab_size)

    def drawn(logits, *others):
        if ranks.get_rank() and len(logits) > 64:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return draw(logits, *others)

    def start(rank):
        found = fit_sizes(auto(**sizes | own), *[policies[rank]] * 2, batch_loss, turns=False)
        return list(vars(found).values())

    monkeypatch.setattr(sampling, "draw", drawn)
    if chosen is None:
        with pytest.raises(SystemExit, match="MICRO_BATCH_TOKENS = 64, .*VLLM_CACHE_GB"):
            ranks.run(start)
    else:
        assert ranks.run(start) == 2 * [[64, *chosen]]
        line = "SAMPLE_BATCH = 64 fits: a trial took 0.0 GB"
        found = line in capsys.readouterr().out
        assert found != bool(sizes)
    assert tried[0] == tried[1]
    for policy in policies:
        for weight in policy.model.parameters():
            assert weight.grad is None and not weight._post_accumulate_grad_hooks


NO_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory"),
    torch.AcceleratorError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory"
    ),
    MemoryError("Unable to allocate 2 GiB"),
    OSError(12, "Cannot allocate memory"),
    RuntimeError("HIP error: hipErrorOutOfMemory"),
    RuntimeError("CUSPARSE_STATUS_INSUFFICIENT_RESOURCES"),
    RuntimeError("UR_RESULT_ERROR_OUT_OF_RESOURCES"),
    RuntimeError("NVML_SUCCESS == r INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp"),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 2 bytes"),
]
OTHERS = [
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"),
    RuntimeError("out of resource: shared memory, Required: 262144"),
    ValueError("the text says: out of memory"),
]


@pytest.mark.parametrize("error", NO_MEMORY + OTHERS, ids=lambda error: str(error)[:40])
def test_every_error_that_means_out_of_memory_counts_as_one(error, monkeypatch):
    """In a trial, in a run, and where the server halves its batch; no other error does."""
    a_gpu(monkeypatch)

    def fail(*_, **__):
        raise error

    if error in OTHERS:
        for use in (lambda: sampling.measured(fail, 0, "cpu"), in_a_run(fail)):
            with pytest.raises(type(error)) as raised:
                use()
            assert raised.value is error
        return
    if not isinstance(error, OSError):  # of a file or a pipe, in a run alone
        assert sampling.measured(fail, 0, "cpu")[0] == math.inf
    with pytest.raises(SystemExit, match="MICRO_BATCH_TOKENS = 4 is too large"):
        in_a_run(fail)()


def in_a_run(fail):
    def use():
        with out_of_memory_names("MICRO_BATCH_TOKENS", 4):
            fail()

    return use


def test_a_trial_that_fails_leaves_no_tensors(alone, tiny, monkeypatch):
    """Functions, too, keep those of a checkpointed forward pass."""

    def fail(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def tensors():
        gc.collect()
        return sum(isinstance(x, torch.Tensor) for x in gc.get_objects())

    a_gpu(monkeypatch)
    policy = tiny_policy(tiny)
    model = CompletionModel(policy.model)
    trial = partial(
        training.forward_and_backward, auto(), fail, model, policy.vocab_size, 300, True
    )
    before = tensors()
    for _ in range(3):
        share, *_ = sampling.measured(trial, 0, policy.model.device)
    assert share == math.inf and tensors() <= before


def test_what_fits_leaves_a_share_of_the_gpu_free(tiny, monkeypatch):
    """For a worker, too. Layers that were checkpointed in a trial are not checkpointed again."""
    policy = tiny_policy(tiny)
    peaks = iter([0.99, 1 - sampling.SPARE / 2, 1 - sampling.SPARE])
    a_gpu(monkeypatch, max_memory_allocated=lambda _: next(peaks) * 2**30)
    assert sampling.fit_worker(auto(GROUP_SIZE=4), policy, turns=False) == 64
    layers = policy.model.model.layers
    once = [checkpoint_layers(policy.model), [layer.forward for layer in layers]]
    assert once == [checkpoint_layers(policy.model), [layer.forward for layer in layers]]


NO_SIZES = SimpleNamespace(sizes={})  # a sampler that has set none itself


def test_on_a_cpu_and_for_numbers_nothing_is_tried(monkeypatch, capsys):
    monkeypatch.setattr(sampling, "measured", None)
    for group in (8, 80):
        expected, c = USUAL | {"SAMPLE_BATCH": max(64, group)}, auto(GROUP_SIZE=group)
        assert fit_sizes(c, None, NO_SIZES, None, turns=True).constants() == expected
        assert sampling.fit_worker(c, None, turns=True) == expected["SAMPLE_BATCH"]
    a_gpu(monkeypatch)
    own = auto(**USUAL)
    assert fit_sizes(own, None, NO_SIZES, None, turns=False).constants() == USUAL
    assert sampling.fit_worker(own, None, turns=False) == USUAL["SAMPLE_BATCH"]
    assert not capsys.readouterr().out


def test_out_of_memory_later_names_the_constant(alone, tiny, monkeypatch):
    def fail(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. More")

    monkeypatch.setattr(trainer, "accumulate", fail)
    c = auto(MICRO_BATCH_TOKENS=4096)
    run = SimpleNamespace(c=c, sizes=fit_sizes(c, None, NO_SIZES, None, False), clock=Clock())
    with pytest.raises(SystemExit, match=r"MICRO_BATCH_TOKENS = 4096 .*2 GiB"):
        trainer.update(run, [], 1, "now")
    prompts = (fail() for _ in range(1))
    groups = tiny_policy(tiny).stream(prompts, seed=0, max_sequences=32,
                                      group_size=4, max_new_tokens=8, temperature=1.0)  # fmt: skip
    with pytest.raises(SystemExit, match=r"SAMPLE_BATCH = 32 .*2 GiB"):
        next(groups)
