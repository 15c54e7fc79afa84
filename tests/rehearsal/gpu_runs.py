"""Whole runs on the simulated GPU, by DeepSpeed's engine in its accelerator for CUDA: sampling,
scoring, updates, publishing, evaluation, checkpoints, and the runs that resume from them."""

import pytest
import torch
from processes import QUICK, records
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import grpo_ref_split as trainer
import ref_server
from demo import free_port
from grpo import remote
from grpo.wire import pack_ids, pack_logps, unpack_ids, unpack_logps
from rehearsal.events import counted

SMALL = QUICK | {
    "TASK": "even",  # arithmetic, whose answers a random model meets half of the time
    "PROMPTS_PER_STEP": 2, "MAX_PROMPT_TOKENS": 64, "MAX_COMPLETION_TOKENS": 8,
    "MICRO_BATCH_TOKENS": 256, "GRADIENT_CHECKPOINTING": True, "WARMUP_STEPS": 0,
    "STEPS": 1, "EVAL_STEPS": 2, "EVAL_QUESTIONS": 2, "SAVE_STEPS": 1,
}  # fmt: skip


@pytest.fixture
def main(tiny, tmp_path, monkeypatch):
    """Returns a function that runs the trainer's main() with other constants; -> its records."""
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")

    def run(**constants):
        folder = tmp_path / "run"
        trainer.main(**SMALL | {"MODEL": str(tiny), "RUN_DIR": str(folder)} | constants)
        return [r for r in records(folder) if "loss" in r]

    return run


class Server:
    """ref_server.py's model in this process, in the place of its client; bodies are packed."""

    url = "here"

    def __init__(self, model):
        self.reference = ref_server.Reference(ref_server.settled({"MODEL": model}))
        self.info = self.reference.info

    def check(self, c, tokenizer):
        pass

    def score(self, groups):
        request = ref_server.Request(unpack_ids(pack_ids(groups), **self.reference.limits))
        (logps,) = self.reference.score([request])
        return unpack_logps(pack_logps(logps), groups)


def test_a_run_with_a_reference_and_workers_policies_resumes(main, tiny, tmp_path, monkeypatch):
    server = Server(str(tiny))
    monkeypatch.setattr(remote, "ReferenceClient", lambda url, limit: server)
    batches, waits, real = [], [], trainer.batch_loss

    def accumulate(*args, real=trainer.accumulate, **kwargs):
        with counted() as counts:
            metrics = real(*args, **kwargs)
        waits.append(counts)
        return metrics

    monkeypatch.setattr(trainer, "batch_loss", lambda *a, **k: batches.append(1) or real(*a, **k))
    monkeypatch.setattr(trainer, "accumulate", accumulate)
    two = {"UPDATES_PER_ROLLOUT": 2, "PUBLISH_STEPS": 1, "MAX_STALENESS": 2}
    two["TRAINER"] = f"http://127.0.0.1:{free_port()}"
    steps = main(STEPS=2, **two)
    # 16 a micro-batch: what is brought to the GPU, and transformers' masks; 2 that read the metrics
    total = sum(count.total() for count in waits)
    assert total <= 17 * len(batches) + 2 * len(steps), "\n".join(map(str, waits))
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


def test_adapters_with_an_offloaded_optimizer_and_auto_sizes_resume(main, tmp_path, capfd):
    settings = {"KL_BETA": 0, "LORA_RANK": 4, "OFFLOAD_OPTIMIZER": True, "EVAL_STEPS": 9}
    main(**settings)
    capfd.readouterr()
    first = load_file(tmp_path / "run/step_000001/adapter_model.safetensors")
    steps = main(STEPS=2, **settings)
    assert [r["step"] for r in steps] == [1, 2] and not any(r["skipped"] for r in steps)
    second = load_file(tmp_path / "run/step_000002/adapter_model.safetensors")
    changed = [name for name in first if (first[name] != second[name]).any()]
    assert len(changed) == len(first) == 28  # A and B of 7 linear layers of both blocks
    assert "STEPS 1 -> 2\n" in capfd.readouterr().out
