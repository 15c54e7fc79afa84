"""What the trainer's arithmetic of memory computes, against living tensors of its own code; what it
chooses by that; and benchmarks/memory.py, which tabulates it."""

import contextlib
import functools
import json
import os
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from fakes import a_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
import memory
from memory import BF16, trainer

import grpo_loss_triton
from grpo import forward
from grpo.sampling import memory as sampling_memory
from grpo.sampling.memory import MARGIN, USUAL, fit_worker, need, sampling_phases
from grpo.training import memory as training_memory
from grpo.training.engine import make_engine
from grpo.training.memory import fill_card, model_states, sizes_that_fit, training
from grpo.training.reference import LocalReference
from grpo.weights import MergedAdapters

CASES = [  # memory.MODELS' shape, prompt, completion, group, shared prompts, LoRA rank
    ((256, 4, 4, 2, 768, 2048, True), 64, 48, 4, True, 0),
    ((256, 4, 4, 2, 768, 2048, True), 64, 48, 4, True, 8),
    ((256, 4, 4, 2, 768, 2048, True), 64, 48, 4, False, 0),
    ((256, 4, 4, 2, 768, 2048, True), 64, 48, 4, False, 8),
    ((256, 3, 4, 2, 512, 8192, False), 64, 32, 4, True, 0),
    ((256, 3, 4, 2, 512, 8192, True), 64, 32, 4, False, 0),
    ((256, 4, 4, 2, 768, 2048, True), 160, 24, 8, True, 0),
    ((256, 4, 4, 2, 768, 2048, True), 16, 64, 4, True, 8),
    ((256, 8, 4, 2, 1024, 2048, True), 48, 24, 4, True, 0),
    ((512, 2, 4, 2, 1536, 4096, True), 48, 64, 4, True, 0),
]
aten = torch.ops.aten
PRODUCTS = (
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)


class Live(TorchDispatchMode):
    """Counts the bytes of living tensors. Products are not computed: zeros of their shape."""

    def __init__(self, known):
        super().__init__()
        self.now, self.peak, self.seen = 0, 0, {}
        for tensor in known:
            self.count(tensor)

    def count(self, tensor):
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key not in self.seen and tensor.device.type == "cpu":
            self.seen[key] = weakref.ref(storage, lambda _: self.forget(key, size))
            self.now += size
            self.peak = max(self.peak, self.now)

    def forget(self, key, size):
        del self.seen[key]
        self.now -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (aten.mm.out, aten.addmm_.default):
            return kwargs.get("out", args[0]).zero_()
        out = zeros(func, args, kwargs) if func in PRODUCTS else func(*args, **kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor)
        return out


def zeros(func, args, kwargs):
    def made(t):
        size = t.untyped_storage().nbytes() // t.element_size()
        return torch.zeros(size, dtype=t.dtype).as_strided(t.shape, t.stride())

    def each(change, tree):
        return tree_map(lambda t: change(t) if isinstance(t, torch.Tensor) else t, tree)

    args, kwargs = each(lambda t: t.to("meta"), (args, kwargs))
    return each(made, func(*args, **kwargs))


class Engine:
    """DeepSpeed's place: it frees each gradient when it is finished, and does nothing else."""

    device = "cpu"

    def __init__(self, policy):
        self.module = forward.CompletionModel(
            policy.model,
            share_prompts=trainer.SHARE_PROMPTS,
            gradient_checkpointing=trainer.GRADIENT_CHECKPOINTING,
        )
        assert self.module.shares == trainer.SHARE_PROMPTS, self.module.notes
        for weight in policy.model.parameters():
            if weight.requires_grad:
                weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))

    def __call__(self, prompts, completions):
        return self.module(prompts, completions)

    def backward(self, loss):
        loss.backward()

    def set_gradient_accumulation_boundary(self, _):
        pass

    def step(self):
        pass


def constants(m, share, group, checkpointing=True):
    """The trainer's, small; a CPU's chunk of logits, and no rows for torch's copies of them, as the
    GPU's kernel works in place."""
    small = {"GROUP_SIZE": group, "SAMPLE_BATCH": 8, "MICRO_BATCH_TOKENS": 1024}
    stack = contextlib.ExitStack()
    for patch in (
        mock.patch.multiple(
            trainer, SHARE_PROMPTS=share, GRADIENT_CHECKPOINTING=checkpointing, **small
        ),
        mock.patch.object(grpo_loss_triton, "CHUNK_BYTES", BF16 * m.vocab * m.hidden),
        mock.patch.object(grpo_loss_triton.Rows, "slabs", lambda *_: iter(())),
    ):
        stack.enter_context(patch)
    return stack


def one_rank():
    alone = {"get_rank": lambda: 0, "get_world_size": lambda: 1, "all_reduce": lambda *_, **__: 0}
    return mock.patch.multiple(trainer.dist, **alone)


def summed(phases, left_out=()):
    """-> {phase: bytes} of what `measure` tells apart."""
    sums = {n: sum(b for p, b in x.items() if p not in left_out) for n, x in phases.items()}
    del sums["step"]
    rollout = {name: sums.pop(name) for name in ("sampling", "evaluation")}
    return rollout | {"training": max(sums.values())}


def count(config, rank, prompt, completion, engine):
    policy = memory.random_policy(config, rank)
    live = Live([*policy.model.parameters(), *policy.model.buffers()])
    return memory.measure(policy, prompt, completion, engine, live)


def compare(shape, prompt, completion, group, share, rank, checkpointing=True):
    """-> {phase: (computed, counted)}, bytes beside the weights."""
    config = memory.config_of(*shape)
    m = memory.Sizes(config, rank)
    with constants(m, share, group, checkpointing), one_rank():
        counted = count(config, rank, prompt, completion, Engine)
        phases = memory.phases_of(m, prompt, completion)
    computed = summed(phases, (*memory.STATES, "DeepSpeed's sums"))
    return {name: (n, counted[name] - BF16 * m.held) for name, n in computed.items()}


DEEPSPEED_CASES = [  # shared prompts, LoRA rank, offload; run by benchmarks/memory.py only: minutes
    (True, 0, False),
    (False, 0, False),
    (True, 8, False),
    (True, 0, True),
]


def compare_deepspeed(share, rank, offload):
    """-> {phase: (computed, counted)}, bytes of everything; the engine is DeepSpeed's."""
    config = memory.config_of(512, 4, 4, 2, 2048, 16384, False)
    m = memory.Sizes(config, rank)
    os.environ.update(memory.ALONE)
    settings = {"LORA_RANK": rank, "OFFLOAD_OPTIMIZER": offload}
    quiet = contextlib.redirect_stdout(sys.stderr)
    with constants(m, share, 4), mock.patch.multiple(trainer, **settings), quiet:
        memory.join_ranks(60)
        counted = count(
            config, rank, 64, 32, functools.partial(make_engine, memory.shipped(64, 32))
        )
        computed = summed(memory.phases_of(m, 64, 32, 1, offload))
    # with offload: master weights, Adam, gradients and a bf16 copy; a buffer
    in_ram = (4 * 4 + BF16) * m.trained + BF16 * m.largest if offload else 0
    return {name: (n + in_ram, counted[name]) for name, n in computed.items()}


@pytest.mark.parametrize("case", [CASES[0], CASES[4], (*CASES[1], False)])
def test_computed_peaks_are_those_of_living_tensors(case):
    """Measured: 0.97 to 1.10 over all CASES (benchmarks/results/memory.md), these two to 1.06; and
    without checkpointing 0.95 to 1.01 for those of CASES that share prompts."""
    for name, (computed, counted) in compare(*case).items():
        assert 0.85 < computed / counted < 1.15, (name, computed, counted)


def test_parameters_are_as_published():
    for name, (*_, published) in memory.MODELS.items():
        m = memory.sizes_of(name, 0)
        assert abs(m.total / 1e9 / published - 1) < 0.005, name
    config = memory.config_of(*CASES[0][0])
    model = memory.random_policy(config, 8).model
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trained == memory.Sizes(config, 8).trained
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}  # adapters, too


def test_merged_adapters_are_as_large_as_computed():
    config = memory.config_of(*CASES[1][0])
    merged = MergedAdapters(memory.random_policy(config, 8).model)
    copies = sum(weight.nbytes for *_, weight in merged.layers)
    assert copies == memory.merged_bytes(memory.Sizes(config, 8)) > 0


def test_cards():
    assert [memory.card(n * 2**30) for n in (1, 20, 39, 43, 138, 150)] == [
        *("16", "24", "40", "48", "141", "none"),
    ]
    m = memory.sizes_of("Qwen2.5-3B", 0)
    sizes = [memory.need(memory.phases_of(m, 512, 512, w, o))[0] for o in (0, 1) for w in (1, 8)]
    assert sizes[0] > max(sizes[1:]) and min(sizes) == sizes[3]


# --- What is chosen -----------------------------------------------------------------
def job(**changes):
    """-> the trainer's constants as shipped, with others; all that fill the card are "auto"."""
    return memory.shipped(512, 512, **dict.fromkeys(USUAL, "auto") | changes)


@pytest.mark.parametrize(
    ("name", "card", "world", "changes", "chosen"),
    [  # SAMPLE_BATCH, MICRO_BATCH_TOKENS, GRADIENT_CHECKPOINTING
        ("Qwen2.5-0.5B", 24, 1, {}, (256, 16_384, True)),
        ("Qwen2.5-0.5B", 80, 1, {}, (256, 16_384, False)),
        ("Qwen2.5-3B", 24, 1, {"LORA_RANK": 16}, (64, 16_384, True)),
        ("Qwen2.5-3B", 24, 7, {}, (128, 8_192, True)),
        ("Qwen2.5-3B", 80, 1, {}, (256, 16_384, True)),
        ("Qwen2.5-3B", 80, 1, {"OFFLOAD_OPTIMIZER": True}, (256, 8_192, False)),
        ("Qwen2.5-3B", 80, 7, {}, (256, 8_192, False)),
        ("Qwen2.5-3B", 80, 7, {"FUSED_LOSS": False}, (256, 8_192, False)),
        ("Qwen2.5-7B", 24, 1, {"LORA_RANK": 16}, (32, 8_192, True)),
        ("Qwen2.5-7B", 80, 7, {}, (256, 16_384, True)),
        ("Qwen2.5-7B", 80, 7, {"GROUP_SIZE": 24}, (256, 16_384, True)),
        ("Qwen2.5-7B", 80, 7, {"GROUP_SIZE": 300}, (300, 16_384, True)),
    ],
)
def test_what_is_chosen_fits_and_the_next_larger_does_not(name, card, world, changes, chosen):
    c, m = job(**changes), memory.sizes_of(name, changes.get("LORA_RANK", 0))
    room = memory.CARDS[card] * 2**30
    values, size = sizes_that_fit(c, m, room, world)
    assert tuple(values[name] for name in USUAL) == chosen
    vars(c).update(values)
    found = sampling_phases(m, c, model_states(m, c, world)) | training(m, c, world)
    assert need(found)[0] <= size <= MARGIN * room  # beside adapters that are merged


@pytest.mark.parametrize("own", [*({name: 1} for name in USUAL), dict.fromkeys(USUAL, 10**6)])
def test_a_number_overrides_what_fits(own):
    """A million tokens fit no card: they are the user's to try."""
    own = own | {"GROUP_SIZE": 1}
    values, _ = sizes_that_fit(job(**own), memory.sizes_of("Qwen2.5-0.5B", 0), 79 * 2**30, 1)
    assert {name: {**job(**own).__dict__, **values}[name] for name in own} == own


def test_too_little_memory_is_told_with_what_to_do():
    m = memory.sizes_of("Qwen2.5-7B", 0)
    told = "need 28.7 GB, computed, with SAMPLE_BATCH = 8, and this GPU has 23.5: GRADIENT_CHECK"
    with pytest.raises(SystemExit, match=told):
        sizes_that_fit(job(), m, 23.5 * 2**30, 7)
    with pytest.raises(SystemExit, match="CHECKPOINTING = False, MICRO_BATCH_TOKENS = 1024"):
        sizes_that_fit(job(GRADIENT_CHECKPOINTING=False), m, 35 * 2**30, 7)
    told = r"with GRADIENT_CHECKPOINTING = True, MICRO_BATCH_TOKENS = 1024, and this GPU has 35.0: "
    with pytest.raises(SystemExit, match=told):
        sizes_that_fit(job(), m, 35 * 2**30, 7)


def test_a_card_without_bfloat16_may_hold_a_small_model():
    """Of a T4's 15 GB only weights and activations are twice as large in float32."""
    m = memory.Sizes(memory.config_of(*memory.MODELS["Qwen2.5-0.5B"]), 0, size=4)
    values, size = sizes_that_fit(job(), m, 14.6 * 2**30, 1)
    assert values["SAMPLE_BATCH"] >= 8 and size <= MARGIN * 14.6 * 2**30


def policy_on(device, dtype="bfloat16"):
    config = memory.config_of(*memory.MODELS["Qwen2.5-0.5B"])
    model = SimpleNamespace(device=torch.device(device), config=config)
    return SimpleNamespace(model=model, dtype=dtype)


def test_ranks_take_what_fits_the_fullest_of_their_gpus(monkeypatch, capsys):
    """Else each would plan other micro-batches than the others."""
    monkeypatch.setattr(training_memory.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(training_memory, "room_on", lambda model: 80 * 2**30)
    for other, expected in ((80, (16_384, False)), (14, (16_384, True))):
        rooms = lambda mine, other=other: [mine, other * 2**30]
        monkeypatch.setattr(training_memory, "gathered", rooms)
        c = job()
        fill_card(c, policy_on("cuda:0"))
        assert (c.MICRO_BATCH_TOKENS, c.GRADIENT_CHECKPOINTING) == expected
        assert c.SAMPLE_BATCH == 256
        way = "checkpointing" if expected[1] else "no checkpointing"
        line = f"SAMPLE_BATCH = 256, MICRO_BATCH_TOKENS = 16384, {way}: "
        assert line in (out := capsys.readouterr().out) and f"of {other}.0 GB" in out


@pytest.mark.parametrize(
    ("device", "model_type", "said"),
    [("cpu", "qwen2", ""), ("cuda:0", "gpt2", "the memory of such layers is not computed")],
)
def test_nothing_is_asked_on_a_cpu_or_for_other_layers(
    device, model_type, said, monkeypatch, capsys
):
    """On a CPU "auto" is what was shipped before, and nothing is said."""
    monkeypatch.setattr(torch.accelerator, "get_memory_info", None)
    monkeypatch.setattr(training_memory, "gathered", lambda mine: [mine])
    c, policy = job(), policy_on(device)
    policy.model.config.model_type = model_type
    fill_card(c, policy)
    assert {name: getattr(c, name) for name in USUAL} == USUAL
    out = capsys.readouterr().out
    assert said in out and bool(out) == bool(said)
    fit_worker(worker := job(), policy)
    assert worker.SAMPLE_BATCH == 64
    own = job(**USUAL)  # numbers: the ranks need not even meet
    fill_card(own, None)
    fit_worker(own, None)
    assert own == job(**USUAL)


def test_a_worker_takes_what_fits_beside_its_weights(monkeypatch, capsys):
    for room, dtype, rows in ((8, "bfloat16", 256), (8, "float32", 128), (3, "bfloat16", 32)):
        monkeypatch.setattr(sampling_memory, "room_on", lambda model, room=room: room * 2**30)
        fit_worker(c := job(), policy_on("cuda:0", dtype))
        assert c.SAMPLE_BATCH == rows
        assert f"SAMPLE_BATCH = {rows}: " in capsys.readouterr().out


# --- A reference in the trainer ---------------------------------------------------------
def a_group_of(rows):
    """-> the wire.Group of these Sequences, which share a prompt."""
    return a_group(
        [[0.0, 0.0]] * len(rows),
        lengths=[len(row.completion) for row in rows],
        truncated=[False] * len(rows),
        prompt_ids=torch.tensor(rows[0].prompt, dtype=torch.int32),
        completion_ids=torch.tensor([i for row in rows for i in row.completion]).int(),
        ref_logps=None,
    )


def test_a_reference_in_the_trainer_is_as_large_as_computed_and_its_scoring_no_larger():
    """The bound is the server's, too. Counted: 0.77 of it."""
    config = memory.config_of(*CASES[0][0])
    m = memory.Sizes(config, 0)
    with constants(m, True, 4), one_rank():
        c = memory.shipped(64, 48, REF_SERVER=None)
        policy = memory.random_policy(config, 0)
        live = Live([*policy.model.parameters(), *policy.model.buffers()])
        rows = memory.random_rows(config.vocab_size, 64, 48, 8)
        groups = [a_group_of(rows[i : i + c.GROUP_SIZE]) for i in range(0, len(rows), c.GROUP_SIZE)]
        before = live.now
        with live:
            reference = LocalReference(c, policy)
            copy, live.peak = live.now - before, live.now
            answers = [reference.logps(group) for group in groups]
            assert all(len(answer.result()) == 4 * 48 for answer in answers)
    assert copy == pytest.approx(BF16 * training_memory.copied(m, c), rel=1e-3)
    counted, computed = live.peak - before - copy, sum(training_memory.scoring(m, c).values())
    assert 0.5 < counted / computed < 1


def test_the_reference_in_the_trainer_is_counted_where_it_lies():
    m, c = memory.sizes_of("Qwen2.5-7B", 0), memory.shipped(512, 512, REF_SERVER=None)
    away = memory.shipped(512, 512, REF_SERVER=None, REFERENCE_ON_CPU=True)
    weights = [model_states(m, x, 8)["weights, bf16"] for x in (memory.shipped(512, 512), c, away)]
    assert weights == [BF16 * m.total, 2 * BF16 * m.total, BF16 * m.total]
    (parts,) = (x for name, x in training(m, away, 8).items() if name == "reference")
    assert parts["reference"] == BF16 * m.total and "reference" not in training(m, c, 8)
    none = memory.shipped(512, 512, REF_SERVER=None, KL_BETA=0)
    adapters = memory.sizes_of("Qwen2.5-7B", 16)
    assert training_memory.copied(m, none) == training_memory.copied(adapters, c) == 0


# --- The table ----------------------------------------------------------------------
def test_a_cell_names_the_card_and_the_one_that_also_holds_the_server(monkeypatch):
    monkeypatch.setattr(memory, "measured", lambda *_: None)  # also where there is a GPU
    assert memory.cell("Qwen2.5-3B", 512, 512, 0, 2, True) == "22.3 (24, 40)"
    assert memory.cell("Qwen2.5-0.5B", 512, 512, 0, 1, True) == "6.6 (16, 16)"


def test_a_gpu_is_read_phase_by_phase(monkeypatch, capsys):
    """A faked one: each phase's peak is asked for once, after it was reset."""
    asked = []
    for name, answer in {
        "reset_peak_memory_stats": lambda: asked.append("reset"),
        "max_memory_allocated": lambda: asked.append("read") or len(asked),
        "memory_reserved": lambda: 10,
        "max_memory_reserved": lambda: 12,
        "get_memory_info": lambda: (70, 100),
    }.items():
        monkeypatch.setattr(torch.accelerator, name, answer)
    shape = (32, 2, 4, 2, 64, 416, True, 0.0)
    monkeypatch.setitem(memory.MODELS, "tiny", shape)
    monkeypatch.setattr(memory, "make_engine", lambda constants, policy: Engine(policy))
    monkeypatch.setattr(memory, "join_ranks", lambda seconds: None)
    for name, value in {"SAMPLE_BATCH": 8, "MICRO_BATCH_TOKENS": 64, "LORA_RANK": 0}.items():
        monkeypatch.setattr(trainer, name, value)
    monkeypatch.setattr(trainer, "OFFLOAD_OPTIMIZER", False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with one_rank():
        memory.measure_here("tiny", 6, 4, 0, 0)
    result = json.loads(capsys.readouterr().out)
    assert asked == ["reset", "read"] * 6  # two steps, sampling, evaluation
    assert result["need"] == max(result[n] for n in ("training", "step", "sampling")) + 20 + 2
