"""BASE_BITS = 4: a base in NF4 under LoRA's adapters."""

import copy
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from fakes import a_recipe, move, tiny_policy
from families import tiny_model
from processes import QUICK, command_of, free_port, launch, learned, start
from safetensors.torch import load_file

import evaluate
import grpo_ref_split as trainer
from grpo.checkpoint import CONSTANTS
from grpo.checks import trainer_constants
from grpo.commands.merge import bits_of, merge_into
from grpo.forward import CompletionModel
from grpo.models import load_model
from grpo.options.lora import add_adapters
from grpo.prepare import loader_of
from grpo.reference import is_teacher
from grpo.rehearsal import sample_longest
from grpo.start import make_reference

bitsandbytes = pytest.importorskip("bitsandbytes")

IDS = torch.tensor([[3, 4, 5, 6, 7, 8]])
ROUNDING = 2e-5  # of float32; measured: 3e-6


def in_4_bits(folder, family, dtype="float32"):
    tiny_model(family).save_pretrained(folder)
    return load_model(str(folder), dtype, 110, loader_of(4))[0]


def dequantized(model):
    """-> a copy whose layers are plain ones of float32, with the values that 4 bits stand for."""
    plain = copy.deepcopy(model)
    for path, layer in list(plain.named_modules()):
        if isinstance(layer, bitsandbytes.nn.Linear4bit):
            packed = layer.weight
            weight = bitsandbytes.functional.dequantize_4bit(packed.data, packed.quant_state)
            linear = torch.nn.Linear(*weight.T.shape, bias=layer.bias is not None)
            linear.weight.data, linear.bias = weight.float(), layer.bias
            parent, _, name = path.rpartition(".")
            setattr(plain.get_submodule(parent), name, linear.requires_grad_(False))
    return plain


def test_the_rehearsal_has_adapters_beside_the_layers(tiny):
    """Merging them into packed weights ended a run on a GPU at its start."""
    policy = tiny_policy(tiny, lora_rank=4, bits=4)
    sample_longest(a_recipe(GROUP_SIZE=4).c, policy, 8, 8, turns=False)


@pytest.mark.parametrize("family", ["qwen2", "llama", "opt", "gpt2", "gemma2"])
def test_adapters_have_the_gradients_of_a_dequantized_copy(family, tmp_path):
    model = in_4_bits(tmp_path, family)
    plain = dequantized(model)
    layers = [m for m in model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]
    assert layers and {m.weight.quant_state.quant_type for m in layers} == {"nf4"}
    assert all(m.weight.quant_state.nested for m in layers)  # scales have 8 bits
    assert type(model.get_output_embeddings()) is torch.nn.Linear
    assert (tiny_model(family)(IDS).logits - model(IDS).logits).abs().max() > 1e-3
    found = []
    for one in (model, plain):
        torch.manual_seed(0)
        add_adapters(one, 4)
        move(one, 0.1)
        logits = one(IDS).logits
        logits.log_softmax(-1)[:, :, 7].sum().backward()
        grads = {n: p.grad for n, p in one.named_parameters() if p.grad is not None}
        found.append((logits.detach(), grads))
    (logits, grads), (expected, others) = found
    torch.testing.assert_close(logits, expected, rtol=0, atol=5e-5)
    assert grads.keys() == others.keys() and all(".lora_" in name for name in grads)
    for name, grad in grads.items():
        assert (grad - others[name]).norm() < 1e-4 * others[name].norm(), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sampler_and_trainer_run_one_path_from_the_first_token_on(dtype, tmp_path, monkeypatch):
    """On CPUs with bfloat16 bitsandbytes repacks a layer's weights when it is first used without a
    gradient, for another product, which training does not use."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
    assert bitsandbytes.nn.Linear4bit(64, 64).support_avx512bf16_for_cpu
    model = in_4_bits(tmp_path, "qwen2", dtype)
    add_adapters(model, 4)
    layers = [m for m in model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]
    assert not any(m.support_avx512bf16_for_cpu for m in layers)
    before = [m.weight.data.clone() for m in layers]
    first = model(IDS).logits.detach()
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, first)
    assert torch.equal(model(IDS).logits, first)
    assert all(map(torch.equal, before, (m.weight.data for m in layers)))
    trained = CompletionModel(model)
    assert trained.packs and trained.separable


@pytest.mark.parametrize("changes, installed, sentence", [
    ({"LORA_RANK": 0}, True, "BASE_BITS = 4 must be 16 with LORA_RANK = 0"),
    ({"BASE_BITS": 8}, True, "BASE_BITS = 8 must be one of 16, 4"),
    ({"SAMPLER": "vllm"}, True, "SAMPLER = 'vllm' must be 'torch' with BASE_BITS = 4"),
    ({}, False, r"bitsandbytes is not installed \(pip install -e .\[bits\]\)"),
])  # fmt: skip
def test_what_does_not_go_with_4_bits_is_one_sentence(changes, installed, sentence, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: installed)
    with pytest.raises(SystemExit, match=sentence):
        trainer_constants(trainer.DEFAULTS, {"BASE_BITS": 4, "LORA_RANK": 16} | changes)


@pytest.mark.long
def test_two_ranks_train_and_may_have_a_server_of_either_kind(tiny, tmp_path):
    shared = QUICK | {"MODEL": str(tiny), "TASK": "even", "MAX_PROMPT_TOKENS": 128, "EVAL_STEPS": 0}
    shared |= {"LORA_RANK": 4, "BASE_BITS": 4, "LEARNING_RATE": 1e-2, "REF_SERVER": None}
    presets = [shared | {"STEPS": 2, "RUN_DIR": str(tmp_path / "alone")}]
    for bits in (4, 16):
        port, run = free_port(), str(tmp_path / f"served_{bits}")
        served = {"MODEL": str(tiny), "PORT": int(port), "BASE_BITS": bits}
        start(command_of("ref_server", served), tmp_path / f"server_{bits}.log")
        own = {"STEPS": 1, "RUN_DIR": run, "REF_SERVER": f"http://127.0.0.1:{port}"}
        presets.append(shared | own)
    launch(2, command_of("grpo_ref_split", *presets), tmp_path / "log")
    saved = load_file(tmp_path / "alone/final/adapter_model.safetensors")
    assert saved and all(".lora_" in name for name in saved)
    first, _ = learned(tmp_path / "alone")
    assert first["sampler_k3"] < 1e-9 and first["kl"] < 1e-9
    (same,), (other,) = (learned(tmp_path / f"served_{bits}") for bits in (4, 16))
    assert same["kl"] < 1e-9 and "teacher_kl" not in same
    assert other["teacher_kl"] > 1e-4  # what rounding to 4 bits has changed
    log = (tmp_path / "log").read_text()
    assert "LoRA of rank 4 on weights of 4 bits" in log
    assert f"not MODEL: {tiny} in 16 bits" in log


@pytest.fixture
def adapter(tiny, tmp_path):
    """-> the folder of an adapter that a run has trained beside 4 bits, and its policy."""
    folder = tmp_path / "run/step_000003"
    folder.mkdir(parents=True)
    policy = tiny_policy(tiny, drift=0.1, lora_rank=4, bits=4)
    policy.save(folder)
    run = {"TASK": "even", "MAX_PROMPT_TOKENS": 128, "MAX_COMPLETION_TOKENS": 6, "BASE_BITS": 4}
    (folder / CONSTANTS).write_text(json.dumps(run | {"EVAL_QUESTIONS": 12, "DTYPE": "float32"}))
    return folder, policy


def test_an_adapter_is_loaded_beside_its_4_bits(adapter, tiny):
    folder, policy = adapter
    model, _ = load_model(str(tiny), "float32", policy.vocab_size, loader_of(bits_of(folder)))
    merge_into(model, folder)
    torch.testing.assert_close(model(IDS).logits, policy.model(IDS).logits, rtol=0, atol=ROUNDING)
    assert bits_of(tiny) == 16


def test_evaluate_takes_an_adapter_with_its_4_bit_base(adapter, tiny, tmp_path, monkeypatch):
    seen, make = [], evaluate.make_policy
    noted = lambda c, tokenizer: seen.append((c.BASE_BITS, c.LORA_RANK)) or make(c, tokenizer)
    monkeypatch.setattr(evaluate, "make_policy", noted)
    out = ["--out", str(tmp_path / "out")]
    for more in ([], ["BASE_BITS=4"]):
        monkeypatch.setattr(sys, "argv", ["", str(tiny), str(adapter[0]), "even", *out, *more])
        evaluate.main()
    assert seen == [(16, 0), (4, 0), (4, 0), (4, 0)]


def test_a_local_teacher_has_16_bits_also_if_it_is_model(tiny):
    policy = tiny_policy(tiny, lora_rank=4, bits=4)
    c = SimpleNamespace(KL_BETA=0.1, LORA_RANK=4, BASE_BITS=4, TEMPERATURE=1.0, DTYPE="float32")
    c.MODEL = c.REFERENCE = str(tiny)
    c.MAX_PROMPT_TOKENS, c.MAX_COMPLETION_TOKENS = 8, 8
    info = make_reference(c, policy, server=None).info
    assert is_teacher(info, c.MODEL)
