"""Models and tokenizers: chat templates, stop ids, merged adapters."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import jinja2
import pytest
import torch
from fakes import a_recipe, tiny_policy
from families import tiny_model
from processes import python
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, Phi3Config

import ref_server
from grpo import models
from grpo.commands.merge import merge
from grpo.models import check_context, config_of, load_model, load_tokenizer, prompt_ids
from grpo.prepare import load_policy
from grpo.sample import Sample
from grpo.task import load_split


def test_a_chat_is_templated_once_and_a_role_it_does_not_know_is_folded_in(tokenizer):
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
    example = [{"role": "assistant", "content": "4"}, {"role": "user", "content": "3 + 3?"}]
    text = tokenizer.decode(prompt_ids(tokenizer, chat + example))
    assert "2 + 2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n<|im_start|>user\n3 + 3?" in text
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(jinja2.TemplateError, match="roles must alternate"):
        prompt_ids(tokenizer, chat[1:])


def changed(tiny, folder, change=None, **config):
    """-> a copy of the tiny model, with other entries of its config and other weights."""
    shutil.copytree(tiny, folder)
    path, weights = folder / "config.json", load_file(folder / "model.safetensors")
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    if change:
        change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


NORM = "model.norm.weight"
INCOMPLETE = {  # what is named: config, weights
    "lm_head.weight is missing": ({"tie_word_embeddings": False}, None),
    r"layers.2.* is missing, .* and 9 more": ({"num_hidden_layers": 3, "layer_types": None}, None),
    rf"{NORM} has the shape \(31,\) instead of \(32,\)": (
        {},
        lambda weights: weights.update({NORM: torch.ones(31)}),
    ),
}


@pytest.mark.parametrize("named", INCOMPLETE)
def test_missing_and_mismatched_weights_are_refused_by_all_who_load_a_model(named, tiny, tmp_path):
    """transformers fills them with random numbers, and prints a table."""
    config, change = INCOMPLETE[named]
    folder = changed(tiny, tmp_path / "model", change, **config)
    tiny_policy(tiny, lora_rank=2).save(adapter := tmp_path / "adapter")
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": folder}))
    c = ref_server.server_constants({"MODEL": folder})
    loads = [
        lambda: tiny_policy(folder),  # trainer, worker and evaluate.py
        lambda: ref_server.Reference(c),
        lambda: merge(str(adapter), str(tmp_path / "out")),
    ]
    for load in loads:
        with pytest.raises(SystemExit, match=named):
            load()
    assert not (tmp_path / "out").exists()


def test_a_quantized_model_is_refused_in_one_sentence(tiny, tmp_path):
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    folder = changed(tiny, tmp_path / "model", quantization_config=settings)
    with pytest.raises(SystemExit, match="model' is quantized .*LORA_RANK.*BASE_BITS") as error:
        tiny_policy(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("named", ["of its own", "qwen2"])
def test_code_of_a_models_own_never_runs_and_nobody_is_asked(named, tiny, tmp_path, monkeypatch):
    code = {f"Auto{x}": f"own.{x}" for x in ("Config", "ModelForCausalLM", "Tokenizer")}
    folder = changed(tiny, tmp_path / "model", auto_map=code, model_type=named)
    Path(folder, "own.py").write_text("raise SystemExit('it runs')")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks"))
    if named == "qwen2":  # which transformers has, too
        assert load_tokenizer(folder) and config_of(folder)
        assert load_model(folder, "float32", 99)
        return
    with pytest.raises(SystemExit, match="it has code of its own, which we never run"):
        config_of(folder)
    Path(folder, "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}})
    )
    with pytest.raises(SystemExit, match="MODEL = .* has code of its own, which we never run"):
        load_tokenizer(folder)


def test_files_that_are_no_weights_are_refused_in_one_sentence(tiny, tmp_path):
    folder = changed(tiny, tmp_path / "model")
    (tmp_path / "model/model.safetensors").write_bytes(b"version https://git-lfs")
    with pytest.raises(SystemExit, match="can't be loaded: .*header"):
        tiny_policy(folder)


def test_a_model_that_does_not_fit_is_named(tiny, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(models.AutoModelForCausalLM, "from_pretrained", full)
    with pytest.raises(SystemExit, match=r"does not fit into memory.*memory\.md"):
        models.whole_model(str(tiny))


def test_every_eos_of_model_and_tokenizer_ends_a_completion(tiny, tokenizer, capsys):
    policy = load_policy(str(tiny), tokenizer, "float32")
    assert tokenizer.eos_token_id in policy.eos_ids
    assert policy.vocab_size < policy.model.get_input_embeddings().weight.shape[0]
    ended = Sample([40, 41, tokenizer.eos_token_id], [-1.0] * 3, truncated=False)
    cut = Sample([40, 41], [-1.0] * 2, truncated=True)
    assert policy.text(ended) == policy.text(cut) == tokenizer.decode([40, 41])
    vocab = tokenizer.get_vocab()  # it lacks id 41 from here on, as some have holes
    tokenizer.get_vocab = lambda: {token: i for token, i in vocab.items() if i != 41}
    path = tiny / "generation_config.json"
    before = path.read_text()
    path.write_text(json.dumps({"eos_token_id": [tokenizer.eos_token_id, 41, 10**6]}))
    assert models.stop_ids(str(tiny), tokenizer, []) == {tokenizer.eos_token_id}
    del tokenizer.get_vocab
    plain = [tokenizer.convert_tokens_to_ids(text) for text in "1=a2b+-.ce0"]
    assert min(plain) >= 0  # ordinary text; STOP_TOKENS may name it all the same
    path.write_text(json.dumps({"eos_token_id": [*plain, tokenizer.eos_token_id]}))
    found = models.stop_ids(str(tiny), tokenizer, ["a", "<|none|>"])
    assert found == {tokenizer.eos_token_id, plain[2]}
    said = capsys.readouterr().out
    assert "ordinary text" in said and "has no <|none|> (STOP_TOKENS)" in said
    path.write_text(before)
    tokenizer.add_tokens([f"new{i}" for i in range(50)])
    with pytest.raises(SystemExit, match="embeddings.*ids"):
        load_policy(str(tiny), tokenizer, "float32")


def test_an_id_of_the_tokenizer_without_an_embedding_is_neither_sampled_nor_asked(
    tiny, tmp_path, monkeypatch, capsys
):
    """Gemma 3's text models have none for the token of an image."""
    policy = tiny_policy(tiny)
    policy.model.resize_token_embeddings(policy.vocab_size - 1)
    policy.save(tmp_path)
    short = load_policy(str(tmp_path), policy.tokenizer, "float32")
    last = policy.vocab_size - 1
    assert short.vocab_size == last
    task = SimpleNamespace(
        load=lambda split: [{"n": 4}, {"n": last}], messages=lambda item: [item | {"role": ""}]
    )
    monkeypatch.setattr(models, "prompt_ids", lambda tokenizer, chat, **_: [5, chat[0]["n"]])
    monkeypatch.setattr("grpo.task.is_chat", lambda chat: True)
    recipe = a_recipe(task=task, MODEL=str(tmp_path))
    (question,) = load_split(recipe, "train", policy.tokenizer)
    assert question.ids == [5, 4] and f"no embedding for token {last}" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no EOS token"):
        models.stop_ids(str(tiny), policy.tokenizer, [], min(short.eos_ids))


def test_the_context_is_that_of_the_text_and_what_long_ropes_positions_allow():
    config = Gemma3Config(text_config={"max_position_embeddings": 99})
    assert models.context_of(config) == 99 and models.context_of(None) is None
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    rope |= {"original_max_position_embeddings": 4096, "rope_theta": 1e4}
    config = Phi3Config(max_position_embeddings=131072, rope_parameters=rope, pad_token_id=0)
    assert models.context_of(config) == 4096


def test_an_adapter_as_model_is_refused_with_the_command_that_merges_it(tiny, tmp_path):
    tiny_policy(tiny, lora_rank=2).save(adapter := tmp_path / "adapter")
    with pytest.raises(SystemExit, match=f"python -m grpo.commands.merge {adapter} OUT"):
        tiny_policy(adapter)


def test_both_constants_of_the_context_and_their_largest_sum_are_named(tiny):
    c = SimpleNamespace(MODEL=str(tiny), MAX_PROMPT_TOKENS=200, MAX_COMPLETION_TOKENS=56)
    check_context(c)
    c.MAX_COMPLETION_TOKENS = 57
    with pytest.raises(SystemExit, match="MAX_PROMPT_TOKENS = 200 .* 57 exceed .* 256 tokens"):
        check_context(c)


def test_a_model_that_caps_its_scores_is_loaded_so_that_it_does(tmp_path, tiny):
    """Other ways of attention lose Gemma 2's soft-cap in transformers 5.17 to 5.19."""
    tiny_model("gemma2").save_pretrained(tmp_path)
    for folder, way in ((tmp_path, "eager"), (tiny, "sdpa")):
        assert load_model(str(folder), "float32", 100)[0].config._attn_implementation == way


@pytest.mark.skipif(
    sys.platform != "linux" or torch.cuda.is_available(), reason="glibc's malloc, without a GPU"
)
def test_large_tensors_reuse_memory_on_a_cpu():
    """By default each of 40 MB is mapped anew, in 9 800 page faults."""
    program = """
import resource, torch
from grpo.models import own_device
own_device()
for _ in range(20):
    torch.ones(10_000_000).sum()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
for _ in range(20):
    torch.ones(10_000_000).sum()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""
    before, after = python("-c", program).stdout.split()[-2:]
    assert int(after) - int(before) < 50_000
