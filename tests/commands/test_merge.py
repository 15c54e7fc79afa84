"""A LoRA checkpoint becomes a whole model."""

import json
import re
import runpy
import shutil
import sys

import pytest
import torch
from fakes import tiny_policy
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import evaluate
from grpo.commands.merge import merge

PROMPT, COMPLETION = [5, 6, 7, 8], [40, 41, 42, 2]


@pytest.fixture(scope="module")
def adapter(tiny, tmp_path_factory):
    """-> the folder of a checkpoint with adapters that were trained, as a run with LORA_RANK saves
    it, and log-probs of the policy."""
    folder = tmp_path_factory.mktemp("adapter")
    policy = tiny_policy(tiny, drift=0.1, lora_rank=4)
    policy.save(folder)
    return folder, policy.logps(PROMPT, COMPLETION)


def test_the_command_makes_a_model_that_computes_what_the_adapted_one_does(
    tiny, tmp_path, adapter, monkeypatch
):
    folder, expected = adapter
    monkeypatch.setattr(sys, "argv", ["grpo/commands/merge.py", str(folder), str(tmp_path / "out")])
    runpy.run_path("grpo/commands/merge.py", run_name="__main__")
    out = tiny_policy(tmp_path / "out", "auto")
    # Measured: 2e-6 at most
    assert out.logps(PROMPT, COMPLETION) == pytest.approx(expected, abs=2e-5)
    assert tiny_policy(tiny).logps(PROMPT, COMPLETION) != pytest.approx(expected, abs=0.1)
    assert not list((tmp_path / "out").glob("adapter*"))
    assert out.eos_ids == tiny_policy(tiny).eos_ids


def test_a_small_adapter_moves_a_model_in_bfloat16(tiny, tmp_path):
    """Rounded to the nearest, most of what was trained would be lost."""
    base = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(tiny).save_pretrained(tmp_path / "base")
    policy = tiny_policy(tmp_path / "base", "float32", drift=3e-4, lora_rank=4)
    policy.save(tmp_path / "adapter")
    merge(str(tmp_path / "adapter"), str(tmp_path / "out"))
    files = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "out"))
    old, new = files
    path = "model.layers.0.mlp.up_proj"
    parts = load_file(tmp_path / "adapter/adapter_model.safetensors")
    a, b = (parts[f"base_model.model.{path}.lora_{part}.weight"].double() for part in "AB")
    moved, found = 2 * b @ a, new[f"{path}.weight"].double() - old[f"{path}.weight"].double()
    assert new[f"{path}.weight"].dtype == torch.bfloat16
    assert ((found * moved.sign()).sum() / moved.abs().sum()).item() == pytest.approx(1, abs=0.1)


def test_an_adapter_of_others_has_a_scale_and_perhaps_no_tokenizer(tiny, tmp_path, adapter):
    from peft import AutoPeftModelForCausalLM

    folder = shutil.copytree(adapter[0], tmp_path / "theirs")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 3}))
    for path in folder.glob("*token*"):
        path.unlink()
    merge(str(folder), str(tmp_path / "out"))
    ids = torch.tensor([PROMPT + COMPLETION])
    theirs = AutoPeftModelForCausalLM.from_pretrained(folder)(ids).logits
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(ids).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template


def test_what_can_not_be_merged_is_refused_with_a_reason(tiny, tmp_path, adapter):
    folder, full = str(adapter[0]), tmp_path / "full"
    full.mkdir()
    (full / "kept").touch()
    for path in (full, full / "kept"):
        with pytest.raises(SystemExit, match=re.escape(repr(str(path)))):
            merge(folder, str(path))
    with pytest.raises(SystemExit, match=f"{tiny} has no adapter_config.json"):
        merge(str(tiny), str(tmp_path / "out"))
    config = json.loads((adapter[0] / "adapter_config.json").read_text())
    theirs = shutil.copytree(adapter[0], tmp_path / "theirs")
    for changes, reason in (
        ({"r": 2}, "size mismatch"),
        ({"target_modules": ["c_attn"]}, "c_attn"),
    ):
        (theirs / "adapter_config.json").write_text(json.dumps(config | changes))
        with pytest.raises(SystemExit, match=reason):
            merge(str(theirs), str(tmp_path / "out"))
    (theirs / "adapter_config.json").write_text(json.dumps(config))
    tensors = load_file(theirs / "adapter_model.safetensors")
    more = {n.replace("layers.1", "layers.2"): x + 0 for n, x in tensors.items() if ".1." in n}
    fewer = {name: x for name, x in tensors.items() if name != max(tensors)}
    for wrong in (tensors | more, fewer):
        save_file(wrong, theirs / "adapter_model.safetensors")
        with pytest.raises(SystemExit, match="does not fit"):
            merge(str(theirs), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("layer", ["lm_head", "embed_tokens"])
def test_an_adapter_of_a_tied_weight_is_refused(tiny, tmp_path, layer):
    """Its sum changed the embedding and the LM head, of which the adapter changes one."""
    from peft import LoraConfig, get_peft_model

    base = AutoModelForCausalLM.from_pretrained(tiny)
    get_peft_model(base, LoraConfig(target_modules=[layer])).save_pretrained(tmp_path / "theirs")
    with pytest.raises(SystemExit, match=f"ties the weight of .*{layer} .*tie_word_embeddings"):
        merge(str(tmp_path / "theirs"), str(tmp_path / "out"))


def test_a_base_with_a_relative_path_is_looked_for_here_and_its_file_is_named(
    tiny, tmp_path, monkeypatch, adapter
):
    """The error named the hub alone, if the command ran in another folder than the run."""
    theirs = shutil.copytree(adapter[0], tmp_path / "theirs")
    config = json.loads((theirs / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = f"{tiny.parent.name}/{tiny.name}"
    (theirs / "adapter_config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tiny.parent.parent)
    merge(str(theirs), str(tmp_path / "out"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["evaluate.py", str(theirs), "sums"])
    for command in (lambda: merge(str(theirs), "other"), evaluate.main):
        with pytest.raises(SystemExit, match=f"path in {theirs}/adapter_config.json .a relative"):
            command()
