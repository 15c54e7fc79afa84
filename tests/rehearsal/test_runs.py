"""Whole runs on the pretended GPU, by DeepSpeed's engine in its accelerator for CUDA: sampling,
scoring, updates, publishing, evaluation, checkpoints, and the runs that resume from them."""

import functools
import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from helpers import InProcess
from processes import PRESET, records
from safetensors.torch import load_file
from tiny import make_tiny
from transformers import AutoModelForCausalLM

import grpo_ref_split as trainer
from demo import free_port
from grpo.sampling import start
from grpo.sampling.memory import USUAL
from grpo.serving.policies import Policies
from grpo.serving.scoring import Reference, score_groups
from grpo.serving.store import Store
from grpo.training import local_reference
from ref_server import make_app
from rehearsal.events import counted
from tasks import arithmetic, even

SMALL = {
    "TASK": "even",  # arithmetic, whose answers a random model meets half of the time
    "PROMPTS_PER_STEP": 2,
    "GROUP_SIZE": 4,
    "SAMPLE_BATCH": 8,
    "MAX_PROMPT_TOKENS": 64,
    "MAX_COMPLETION_TOKENS": 8,
    "MICRO_BATCH_TOKENS": 256,
    "GRADIENT_CHECKPOINTING": True,
    "SKIP_FLAT_GROUPS": False,
    "MASK_TRUNCATED": False,  # it seldom finds its EOS
    "STEPS": 1,
    "EVAL_STEPS": 2,
    "EVAL_QUESTIONS": 2,
    "SAVE_STEPS": 1,
    "LEARNING_RATE": 1e-3,
    "WARMUP_STEPS": 0,
}


@pytest.fixture
def tiny(tmp_path):
    return make_tiny(tmp_path / "tiny")


@pytest.fixture
def main(tiny, tmp_path, monkeypatch):
    """Returns a function that runs the trainer's main() with other constants; -> its records."""
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)  # all runs share it
    monkeypatch.setattr(trainer, "watch_launcher", lambda: None)
    monkeypatch.setattr(even, "load", lambda split: arithmetic.load(split)[:20])

    def run(**constants):
        folder = tmp_path / "run"
        for name, value in (SMALL | {"MODEL": str(tiny), "RUN_DIR": str(folder)}).items():
            monkeypatch.setattr(trainer, name, value)
        for name, value in constants.items():
            monkeypatch.setattr(trainer, name, value)
        trainer.main()
        return [r for r in records(folder) if "loss" in r]

    return run


def server_on_the_gpu(model, folder, monkeypatch):
    """Makes the trainer call the server's routes in this process, where what it uploads is scored
    at once; -> the store."""
    store = Store(folder / "store.sqlite", 10**7)
    settings = {"dtype": "auto", "temperature": 1.0, "budget": 256}
    settings["share_prompts"] = True
    reference = Reference(store, folder, model=str(model), **settings)
    policies = Policies(store, folder / "policies", 10**7)
    limits = {"token": None, "max_body_bytes": 10**7, "lease_seconds": 60, "lease_wait": 0}
    app = make_app(store, policies, reference, **limits)

    def score():
        if waiting := store.waiting(99, 0):
            score_groups(store, waiting, reference.score, **reference.limits)

    client = functools.cache(lambda url, limit: InProcess(app, limit, after=score))
    monkeypatch.setattr(start, "RefServer", client)
    return store


def test_a_run_with_a_reference_and_workers_policies_resumes(main, tiny, tmp_path, monkeypatch):
    store = server_on_the_gpu(tiny, tmp_path, monkeypatch)
    batches, waits, real = [], [], trainer.batch_loss

    def accumulate(*args, real=trainer.accumulate, **kwargs):
        with counted() as counts:
            metrics = real(*args, **kwargs)
        waits.append(counts)
        return metrics

    monkeypatch.setattr(trainer, "batch_loss", lambda *a, **k: batches.append(1) or real(*a, **k))
    monkeypatch.setattr(trainer, "accumulate", accumulate)
    two = {"UPDATES_PER_ROLLOUT": 2, "PUBLISH_STEPS": 1, "MAX_STALENESS": 2}
    steps = main(STEPS=2, **two)
    # 16 a micro-batch: what is brought to the GPU, and transformers' masks; 2 that read the metrics
    total = sum(count.waits.total() for count in waits)
    assert total <= 16 * len(batches) + 2 * len(steps), "\n".join(map(str, waits))
    assert [r["step"] for r in steps] == [1, 2] and not any(r["skipped"] for r in steps)
    assert steps[0]["ratio"] == 1 and steps[0]["sampler_k3"] < 0.01 > abs(steps[0]["kl"])
    assert steps[1]["ratio"] != 1 and min(r["grad_norm"] for r in steps) > 1e-3
    before = AutoModelForCausalLM.from_pretrained(tiny).state_dict()
    saved = load_file(tmp_path / "run/step_000002/model.safetensors")
    assert any((before[name].to(x.dtype) != x).any() for name, x in saved.items())
    assert {x.dtype for x in saved.values()} == {torch.bfloat16}
    evaluations = [r["step"] for r in records(tmp_path / "run") if "eval_accuracy" in r]
    assert evaluations == [0, 2]

    steps = main(STEPS=3, **two)
    assert [r["step"] for r in steps] == [1, 2, 3] and not steps[2]["skipped"]
    store.db.close()


def test_a_reference_that_waits_on_the_cpu_scores_on_the_gpu(main, monkeypatch):
    """It comes once a rollout, and between two of them no tensor of it is on the GPU."""
    places, real = [], local_reference.LocalReference._score

    def score(self, sequences):
        places.append(self.model.model.device.type)
        real(self, sequences)
        places.append(self)

    monkeypatch.setattr(local_reference.LocalReference, "_score", score)
    alone = {
        "REF_SERVER": None,
        "REFERENCE_ON_CPU": True,
        "PAGE_PORT": 0,
        "EVAL_STEPS": 9,
        "SAVE_STEPS": 9,
    }
    steps = main(STEPS=2, UPDATES_PER_ROLLOUT=2, **alone)
    first, reference = places
    assert first == "cuda" and reference.model.model.device.type == "cpu"
    tensors = local_reference.tensors_of(reference.model.model)
    assert {tensor.device.type for *_, tensor in tensors} == {"cpu"}
    assert abs(steps[0]["kl"]) < 1e-3 < steps[1]["kl"]


def test_adapters_with_an_offloaded_optimizer_resume(main, tmp_path):
    settings = {"KL_BETA": 0, "LORA_RANK": 4, "OFFLOAD_OPTIMIZER": True, "EVAL_STEPS": 9}
    main(**settings)
    first = load_file(tmp_path / "run/step_000001/adapter_model.safetensors")
    steps = main(STEPS=2, **settings)
    assert [r["step"] for r in steps] == [1, 2] and not any(r["skipped"] for r in steps)
    second = load_file(tmp_path / "run/step_000002/adapter_model.safetensors")
    changed = [name for name in first if (first[name] != second[name]).any()]
    assert len(changed) == len(first) == 28  # A and B of 7 linear layers of both blocks
    assert json.loads((tmp_path / "run/step_000002/trainer/rank_0.json").read_text())


def test_auto_fills_the_gpu_and_a_run_that_resumes_says_what_has_changed(
    main, tmp_path, monkeypatch, capfd
):
    auto = {"KL_BETA": 0, "EVAL_STEPS": 9} | dict.fromkeys(USUAL, "auto")
    main(**auto)
    filled = "SAMPLE_BATCH = 256, MICRO_BATCH_TOKENS = 16384, no checkpointing: 1.7 of 80.0 GB"
    assert filled in capfd.readouterr().out
    state = json.loads((tmp_path / "run/step_000001/trainer/state.json").read_text())
    assert [state["constants"][name] for name in USUAL] == [256, 16_384, False]

    main(STEPS=2, **auto)
    assert (out := capfd.readouterr().out).count(filled) == 1
    assert "other constants: STEPS 1 -> 2\n" in out

    small = int(1.7 * 2**30)  # the allowance for CUDA itself is most of it
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda *_: (small, 2 * small))
    steps = main(STEPS=3, **auto)
    assert not any(r["skipped"] for r in steps) and len(steps) == 3
    out = capfd.readouterr().out
    assert "SAMPLE_BATCH = 256, MICRO_BATCH_TOKENS = 8192, checkpointing: 1.6 of 1.7 GB" in out
    changed = "MICRO_BATCH_TOKENS 16384 -> 8192, GRADIENT_CHECKPOINTING False -> True"
    assert f"other constants: STEPS 2 -> 3, {changed}\n" in out, out


@pytest.mark.long
def test_two_ranks_train_a_step(tiny, tmp_path):
    """In processes of their own, as on two machines with a GPU each."""
    constants = SMALL | {"MODEL": str(tiny), "KL_BETA": 0, "EVAL_QUESTIONS": 1, "EVAL_STEPS": 9}
    constants |= {"RUN_DIR": str(tmp_path / "run")} | dict.fromkeys(USUAL, "auto")
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    group |= {"LOCAL_RANK": "0", "LOCAL_SIZE": "1", "DS_ACCELERATOR": "cuda"}
    command = [sys.executable, "-m", "rehearsal.script", str(PRESET), "grpo_ref_split"]
    ranks = [
        subprocess.Popen(
            [*command, json.dumps([constants])],
            env=os.environ | group | {"RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in "01"
    ]
    try:
        outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert not any(rank.returncode for rank in ranks), "\n".join(o[-3000:] for o in outputs)
    (step,) = (r for r in records(tmp_path / "run") if "loss" in r)
    assert not step["skipped"] and step["grad_norm"] > 1e-3
    # each rank keeps its half of the master weights and of the optimizer's states
    parts = list((tmp_path / "run/step_000001/trainer").glob("optimizer_*.pt"))
    assert len(parts) == 2
