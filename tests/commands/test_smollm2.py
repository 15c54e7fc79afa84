"""SmolLM2: the folder that is made from a GGUF file, and the questions of tasks/sums.py."""

import itertools
import os
import re
import signal
import sys
from pathlib import Path

import numpy
import pytest
from processes import PATIENCE, python, start, wait_for_step
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from grpo.commands import smollm2
from grpo.models import prompt_ids
from grpo.task import load_task
from tasks import sums

ROOT = Path(__file__).parents[2]
HIDDEN, WORDS = 64, ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abc=+-", "ab"]
SIZES = {
    "attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64),
    "ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96),
}  # fmt: skip


def make_gguf(path, head=None):
    """Writes a model of 33 000 weights in the wheel's form: matrices in Q4_1. The head is tied;
    `head` is "rounded" (the embedding in Q8_0, as llama.cpp keeps Qwen's), or another matrix."""
    import gguf

    file, draw = gguf.GGUFWriter(path, "llama"), numpy.random.default_rng(0)
    file.add_block_count(1)
    file.add_context_length(128)
    file.add_embedding_length(HIDDEN)
    file.add_feed_forward_length(96)
    file.add_head_count(2)
    file.add_head_count_kv(1)
    file.add_rope_dimension_count(32)
    file.add_rope_freq_base(10_000.0)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_vocab_size(len(WORDS))
    file.add_tokenizer_model("gpt2")
    file.add_token_list(WORDS)
    file.add_token_types([3] * 3 + [1] * (len(WORDS) - 3))
    file.add_token_merges(["a b"])
    file.add_bos_token_id(1)  # transformers 5.17 reads it
    file.add_eos_token_id(2)
    file.add_pad_token_id(2)
    file.add_chat_template("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    kind = gguf.GGMLQuantizationType.Q4_1
    for name, size in SIZES.items():
        weights = gguf.quantize(draw.normal(size=size).astype("float32"), kind)
        file.add_tensor(f"blk.0.{name}.weight", weights, raw_dtype=kind)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        file.add_tensor(f"{name}.weight", numpy.ones(HIDDEN, "float32"))
    embedding, other = draw.normal(size=(2, len(WORDS), HIDDEN)).astype("float32")
    file.add_tensor("token_embd.weight", embedding)
    if head:
        kind = gguf.GGMLQuantizationType.Q8_0
        kept = gguf.quantize(embedding if head == "rounded" else other, kind)
        file.add_tensor("output.weight", kept, raw_dtype=kind)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path


def test_a_gguf_becomes_a_folder_once(tmp_path, monkeypatch):
    import gguf

    path = make_gguf(tmp_path / "made.gguf")
    monkeypatch.setattr(smollm2, "download", lambda folder: path)
    smollm2.make(tmp_path / "models/out")
    monkeypatch.setattr(smollm2, "download", None)
    smollm2.make(tmp_path / "models/out")  # does nothing
    assert [p.name for p in (tmp_path / "models").iterdir()] == ["out"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "models/out")
    assert str(model.dtype) == "torch.float32" and not hasattr(model.config, "quantization_config")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    (stored,) = [t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.ffn_down.weight"]
    weights = gguf.dequantize(stored.data, stored.tensor_type)
    assert numpy.array_equal(model.model.layers[0].mlp.down_proj.weight.detach(), weights)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "models/out")
    ends = GenerationConfig.from_pretrained(tmp_path / "models/out").eos_token_id
    assert ends == tokenizer.eos_token_id == 2
    assert prompt_ids(tokenizer, [{"role": "user", "content": "a=b"}]) == [3, 6, 4]  # without EOS


@pytest.mark.parametrize("head", ["rounded", "another"])
def test_two_roundings_of_a_tied_matrix_become_the_more_precise_one(tmp_path, head):
    import gguf

    path = make_gguf(tmp_path / "made.gguf", head)
    smollm2.convert(path, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    own, embedding = model.lm_head.weight, model.model.embed_tokens.weight
    stored = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
    tied = head == "rounded"
    assert (own is embedding) == model.config.tie_word_embeddings == tied
    assert numpy.array_equal(own.detach(), stored["output.weight"])
    assert numpy.array_equal(embedding.detach(), stored["token_embd.weight"]) != tied


def test_the_splits_of_sums_share_what_they_say():
    splits = {name: sums.load(name) for name in sums.SIZES}
    assert splits["test"] == sums.load("test")
    questions = {name: {item["question"] for item in items} for name, items in splits.items()}
    pairs = {n: {frozenset((i["a"], i["b"])) for i in items} for n, items in splits.items()}
    for name in splits.keys() - {"train"}:
        assert len(splits[name]) == 500 and not questions["train"] & questions[name]
    assert not questions["validation"] & questions["test"]
    assert pairs["validation"] | pairs["test"] <= pairs["train"]
    assert not pairs["train"] & (pairs["pairs"] | pairs["large"]) and len(pairs["pairs"]) > 30
    assert min(min(pair) for pair in pairs["large"]) == 21
    assert {item["operator"] for item in splits["train"]} == {"+", "-"}
    assert {item["operator"] for item in splits["other"]} == {"*"}
    for item in itertools.chain(*splits.values()):
        assert sums.rewards(item, sums.gold(item)) == {"correctness": 1.0}


def test_the_control_shuffles_the_rewards_of_sums():
    control, item = load_task("shuffled_sums"), {"answer": "2"}
    drawn = [control.group_rewards(item, ["7-5=2", "7+5=12", "1 or 2", ""]) for _ in range(40)]
    assert all(sorted(r["shuffled"] for r in rewards) == [0, 0, 0, 1] for rewards in drawn)
    assert {[r["shuffled"] for r in rewards].index(1) for rewards in drawn} == {0, 1, 2, 3}
    assert control.REWARD_WEIGHTS == {"correctness": 0.0, "shuffled": 1.0}


@pytest.mark.long
def test_the_demo_stops_at_ctrl_c_resumes_and_shows_both_models(tiny, tmp_path):
    run, log = tmp_path / "run", tmp_path / "log"
    small = "EVAL_QUESTIONS=4 PROMPTS_PER_STEP=1 GROUP_SIZE=2 SKIP_FLAT_GROUPS=False"
    words = [f"MODEL={tiny}", f"RUN_DIR={run}", "MAX_PROMPT_TOKENS=200", *small.split()]
    command = [ROOT / "demo_real.py", *words]
    first = start([sys.executable, *command, "STEPS=9999"], log)
    wait_for_step(run, 1, first, log)
    os.killpg(first.pid, signal.SIGINT)  # as a terminal does
    first.wait(PATIENCE)
    saved = int(re.search(r"stopped by SIGINT; step (\d+) is saved", log.read_text())[1])
    again = python(*command, f"STEPS={saved + 2}")
    assert again.returncode == 0, again.stderr
    assert re.search(f"resumes from .*step_{saved:06d}", again.stdout), again.stdout
    assert re.search(rf"0\.\d+ at step 0, .*at step {saved + 2}\n", again.stdout)
    assert again.stdout.count("How many") >= 3 and (run / "curves.png").exists()
