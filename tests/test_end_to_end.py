"""Both scripts as processes, from sampling to a checkpoint that transformers loads."""

import os
import re
import sys
from pathlib import Path

import pytest
import torch
from fakes import move
from helpers import Replies, reply
from processes import PATIENCE, QUICK, command_of, free_port, launch, records, start
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo.logp_checks import MISMATCH

ROOT = Path(__file__).parent.parent


def model_of(folder, tiny, config_class, **settings):
    """Saves a random model of another family, with the tiny tokenizer; -> its folder."""
    torch.manual_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    ids = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "pad_token_id": 0}
    model = AutoModelForCausalLM.from_config(config_class(**settings, **ids))
    move(model, 0.05)  # flat outputs would hide mistakes
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
SMALL["vocab_size"] = 448  # the reference's 416 rows are other padding of the same tokenizer


def check_adapter(folder, base):
    """Every layer has learned, and the base model has not."""
    steps = [r for r in records(folder) if "loss" in r]
    assert steps[1]["grad_norm"] > 1e-4
    saved = [f.name for f in (folder / "step_000002").glob("*.safetensors")]
    assert saved == ["adapter_model.safetensors"]  # the frozen model is not saved again
    trained = AutoModelForCausalLM.from_pretrained(folder / "step_000002").state_dict()
    weights = AutoModelForCausalLM.from_pretrained(base).state_dict()
    changed = [name for name in trained if ".lora_B." in name and trained[name].any()]
    assert len(changed) == 14  # B starts as 0: all 7 linear layers of both blocks have learned
    for name, weight in weights.items():
        same = trained.get(name, trained.get(name.replace(".weight", ".base_layer.weight")))
        assert torch.equal(weight, same), name


@pytest.mark.long
def test_families_train_on_two_ranks_against_a_reference_of_another_size(tiny, tmp_path):
    from transformers import Gemma2Config, GPT2Config, Qwen3Config

    gpt2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "vocab_size": 448}
    families = {
        "qwen3": (Qwen3Config, SMALL | {"head_dim": 8},
                  {"LOSS_TYPE": "dr_grpo", "OBJECTIVE": "cispo", "UNBIASED_KL": True}),
        "gemma2": (Gemma2Config, SMALL | {"head_dim": 8},  # soft-caps its logits
                   {"RATIO_LEVEL": "sequence", "UPDATES_PER_ROLLOUT": 2}),
        "gpt2": (GPT2Config, gpt2,  # ships dropout 0.1, which would make the ratio noise
                 {"LOSS_TYPE": "dapo", "GRADIENT_CHECKPOINTING": False}),
    }  # fmt: skip
    presets = []
    for name, (config, settings, constants) in families.items():
        model = model_of(tmp_path / name, tiny, config, **settings)
        own = {"MODEL": str(model), "TASK": "even", "RUN_DIR": str(tmp_path / f"run_{name}")}
        own |= {"STEPS": 2, "MAX_PROMPT_TOKENS": 128, "GRADIENT_CHECKPOINTING": True}
        presets.append(QUICK | own | constants)
    # No reference and no server: nothing listens at REF_SERVER
    alone = presets[0] | {"KL_BETA": 0, "REF_SERVER": "http://127.0.0.1:9", "DTYPE": "bfloat16"}
    alone["RUN_DIR"] = str(tmp_path / "alone")
    adapter = presets[0] | {"RUN_DIR": str(tmp_path / "adapter"), "LORA_RANK": 4}
    port = free_port()
    server = command_of("ref_server", {"MODEL": str(tiny), "PORT": int(port)})
    server = start(server, tmp_path / "server.log")
    url = {"REF_SERVER": f"http://127.0.0.1:{port}"}
    presets = [preset | url for preset in (*presets, adapter)]
    launch(2, command_of("grpo_ref_split", *presets, alone), tmp_path / "log")
    assert server.poll() is None, (tmp_path / "server.log").read_text()
    steps = [r for r in records(tmp_path / "alone") if "loss" in r]
    assert len(steps) == 2 and all("kl" not in r and r[MISMATCH] < 0.05 for r in steps)
    for name in families:
        steps = [r for r in records(tmp_path / f"run_{name}") if "loss" in r]
        assert steps[0]["ratio"] == 1 and steps[0][MISMATCH] < 1e-5, name
        assert steps[0]["kl"] > 1e-3 and steps[0]["teacher_kl"] > 0, name  # another model
        assert steps[1]["grad_norm"] > 1e-4, name
        assert (steps[1]["ratio"] != 1) == (name == "gemma2"), name  # its second update
        AutoModelForCausalLM.from_pretrained(tmp_path / f"run_{name}/step_000002")
    check_adapter(tmp_path / "adapter", tmp_path / "qwen3")


def test_one_process_needs_no_launcher_and_ends_with_a_reason_where_it_has_nothing_to_train(
    tiny, tmp_path
):
    log, flat = tmp_path / "log", tmp_path / "flat"
    preset = QUICK | {"MODEL": str(tiny), "TASK": "arithmetic", "RUN_DIR": str(tmp_path / "run")}
    preset |= {"MAX_PROMPT_TOKENS": 128, "STEPS": 1, "KL_BETA": 0}
    preset["tasks.arithmetic.SIZES"] = {"train": 64, "validation": 8, "test": 8}
    all_wrong = preset | {"SKIP_FLAT_GROUPS": True, "IDLE_LIMIT": 2, "RUN_DIR": str(flat)}
    presets = [preset | {"REPORT_TO": ["tensorboard"]}, all_wrong | {"STEPS": 9}]
    process = start(command_of("grpo_ref_split", *presets), log, OMP_NUM_THREADS="1")
    assert process.wait(PATIENCE) == 1, log.read_text()[-3000:]
    assert [r["step"] for r in records(tmp_path / "run") if "loss" in r] == [1]
    assert os.readlink(tmp_path / "run/final") == "step_000001" and not (flat / "final").exists()
    events = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    assert [e.step for e in events.Scalars("loss")] == [1]
    assert [e.step for e in events.Scalars("eval_accuracy")] == [0, 1]
    ended = rf"(?s)2 steps.*0 of 4 groups.*OUTCOME = 'correctness'.*{flat}/samples.jsonl"
    assert re.search(ended, log.read_text())
    *_, last = records(flat)
    samples = records(flat, "samples.jsonl")[-8:]  # a random model may be right by chance before
    assert [last["step"] - s["step"] for s in samples] == [1] * 4 + [0] * 4
    assert samples[0]["question"]
    assert all(s["rewards"]["correctness"] == -1 for s in samples)


def test_a_worker_begins_with_the_constants_of_its_command(tiny, tmp_path):
    """It needs the trainer alone, and no reference server."""
    task = ROOT / "tests/tasks/even.py"
    preset = QUICK | {"MODEL": str(tiny), "TASK": str(task), "KL_BETA": 0}
    preset |= {"TRAINER": "http://127.0.0.1:9", "WAIT_LIMIT_SECONDS": 9, "MAX_PROMPT_TOKENS": 128}
    path = tmp_path / "tiny.py"
    path.write_text("\n".join(f"{name} = {value!r}" for name, value in preset.items()))
    command = [sys.executable, ROOT / "grpo_ref_split.py", "worker", path]
    strict = Replies(reply(401, b'{"error": "the token is wrong"}'))
    away = start([*command, "WAIT_LIMIT_SECONDS=1"], tmp_path / "away")
    refused = start([*command, f"TRAINER={strict.url}"], tmp_path / "refused")
    assert (away.wait(PATIENCE), refused.wait(PATIENCE)) == (1, 1)
    assert "waited 1 s for http://127.0.0.1:9/policy" in (tmp_path / "away").read_text()
    log = (tmp_path / "refused").read_text()
    assert "answered 401" in log and "the token is wrong" in log and "Traceback" not in log
