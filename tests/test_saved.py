"""A checkpoint beside its weights: what can't be saved is found at the start, and its answers end
where those of the run did."""

import json
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from fakes import tiny_policy
from transformers import AutoModelForCausalLM, GenerationConfig

from grpo.checkpoint import try_save, write_model
from grpo.commands.merge import merge
from grpo.commands.tiny_model import warm_start
from tasks import arithmetic

# Files that transformers loads and refuses to save, refuses to load, or can't even parse
GENERATION = [
    {"do_sample": False, "temperature": 0.7, "top_p": 0.8, "eos_token_id": [2, 1]},  # as Llama 2's
    {"eos_token_id": 1},
    {"pad_token_id": -1},
    {"watermarking_config": {"greenlist_ratio": 7}},
    {"compile_config": 3},
    {"eos_token_id": ["2", 1, -1, True, 9999, [3]], "stop_strings": ["x"], "min_new_tokens": 5},
    [1, 2],
    "no JSON",
]
EOS, STOP = 2, "<|im_start|>"  # a token that the tiny model's EOS is not
PROMPT = [5, 6, 7, 8]


def with_file(tiny, folder, contents):
    """-> a copy of the tiny model with this generation_config.json."""
    shutil.copytree(tiny, folder)
    text = contents if isinstance(contents, str) else json.dumps(contents)
    (folder / "generation_config.json").write_text(text)
    return folder


@pytest.mark.parametrize("contents", GENERATION, ids=range(len(GENERATION)))
@pytest.mark.parametrize("rank", [0, 4])
def test_a_generation_config_that_is_not_valid_costs_no_run(tiny, tmp_path, contents, rank, capsys):
    own = contents.get("eos_token_id", []) if isinstance(contents, dict) else []
    policy = tiny_policy(with_file(tiny, tmp_path / "model", contents), lora_rank=rank)
    own = [i for i in (own if isinstance(own, list) else [own]) if i in (2, 1)]
    assert policy.eos_ids == {EOS} | set(own)
    policy.save(tmp_path / "saved")
    if rank:
        merge(str(tmp_path / "saved"), str(tmp_path / "merged"))
    for folder in ["saved", "merged"][: 1 + bool(rank)]:
        found = GenerationConfig.from_pretrained(tmp_path / folder)
        assert found.eos_token_id == sorted(policy.eos_ids) and found.temperature in (None, 1.0)
        assert found.stop_strings is found.min_new_tokens is None


@pytest.mark.parametrize("rank", [0, 4])
def test_answers_end_where_those_of_the_run_did_and_are_drawn_as_there(tiny, tmp_path, rank):
    """Also after a merge. The model draws STOP next, which only STOP_TOKENS makes an end."""
    folder = with_file(tiny, tmp_path / "model", {"do_sample": True, "top_p": 0.8})
    policy = tiny_policy(folder, lora_rank=rank, stop_tokens=[STOP])
    (stop,) = policy.eos_ids - {EOS}
    policy.save(out := tmp_path / "saved")
    if rank:
        merge(str(out), str(out := tmp_path / "merged"))
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.generation_config.top_p in (None, 1.0)
    with torch.no_grad():  # a head whose largest logit is always STOP's
        model.lm_head.weight = torch.nn.Parameter(torch.zeros_like(model.lm_head.weight))
        model.lm_head.register_forward_hook(lambda _, __, out: out.index_fill(-1, ids, 9.0))
    ids = torch.tensor([stop])
    answer = model.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False)
    assert answer[0].tolist() == [*PROMPT, stop]


def test_what_can_not_be_saved_ends_the_run_before_its_first_step(tiny, tmp_path, monkeypatch):
    c = SimpleNamespace(MODEL="m", RUN_DIR=str(tmp_path))
    for rank in (0, 4):
        policy = tiny_policy(tiny, lora_rank=rank)
        try_save(c, policy)
        assert not list(tmp_path.iterdir())
        for at in (policy.model.config, policy.model.generation_config, policy.tokenizer):
            if rank and at is policy.model.config:
                at = policy.model.peft_config["default"]
            with monkeypatch.context() as patch:
                patch.setattr(type(at), "save_pretrained", lambda *_, **__: 1 / 0)
                with pytest.raises(SystemExit, match="MODEL = 'm'.*ZeroDivisionError"):
                    try_save(c, policy)


@pytest.mark.parametrize("mask, mode", [(0o027, 0o640)])
def test_all_files_have_the_mode_that_the_umask_gives(
    tiny, tmp_path, alone, monkeypatch, mask, mode
):
    """Weights, too: another user, a container with another user or vLLM may load them."""
    monkeypatch.setattr(arithmetic, "SIZES", {"train": 20})
    before = os.umask(mask)
    try:
        for rank in (0, 4):
            tiny_policy(tiny, lora_rank=rank).save(tmp_path / f"saved {rank}")
        merge(str(tmp_path / "saved 4"), str(tmp_path / "merged"))
        warm_start(tmp_path / "tiny", arithmetic, seed=0, steps=1)
        c = SimpleNamespace(SAVE_STEPS=0)
        run = SimpleNamespace(policy=tiny_policy(tiny), c=c, record={})
        write_model(run, tmp_path / ".unfinished/checkpoint")
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sum(path.suffix == ".safetensors" for path in files) == 5
    assert {path.stat().st_mode & 0o777 for path in files} == {mode}
    folders = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o777 & ~mask}
