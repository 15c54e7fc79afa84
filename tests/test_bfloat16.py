"""A run in bfloat16: on a CPU what a GPU runs by default, and on a GPU the same (pytest -m gpu).

It trains, saves, is killed, resumes and evaluates, with all weights and with LoRA."""

import pytest
import torch
from processes import (
    QUICK,
    command_of,
    free_port,
    kill,
    launch,
    learned,
    records,
    start,
    start_ranks,
    wait_for_step,
)
from safetensors.torch import load_file

ON_GPU = torch.cuda.is_available()


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.parametrize("rank, at", [(0, "a server"), (4, "the trainer")])
def test_a_run_in_bfloat16_that_is_killed_goes_on_as_one_that_never_stopped(
    rank, at, tiny, tmp_path
):
    """Bit by bit where nothing scores in batches as they arrive, and no GPU adds in any order."""
    log, url = tmp_path / "log", None
    if at == "a server":
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        served = {"MODEL": str(tiny), "PORT": int(port), "DTYPE": "bfloat16"}
        start(command_of("ref_server", served), tmp_path / "server")
    preset = QUICK | {"MODEL": str(tiny), "TASK": "even", "MAX_PROMPT_TOKENS": 128, "STEPS": 5}
    preset |= {
        "SAVE_STEPS": 2,
        "KEEP_CHECKPOINTS": 9,
        "EVAL_STEPS": 2,
        "DTYPE": "bfloat16",
        "LORA_RANK": rank,
    }
    preset |= {"REF_SERVER": url, "KL_BETA": 0.04}
    killed, whole = (preset | {"RUN_DIR": str(tmp_path / name)} for name in ("killed", "whole"))
    (process,) = start_ranks(1, command_of("grpo_ref_split", killed), log)
    wait_for_step(tmp_path / "killed", 3, process, log)
    kill(process)
    launch(1, command_of("grpo_ref_split", killed, whole), log)
    found, expected = (learned(tmp_path / name) for name in ("killed", "whole"))
    assert [step["step"] for step in found] == [1, 2, 3, 4, 5]
    if url is None and not ON_GPU:
        assert found == expected
    for step in found:
        assert step["sampler_k3"] < 1e-2 and step["grad_norm"] > 1e-4 and not step["skipped"]
        assert step["weights_changed"] > 0.01 and step["kl"] < 0.5
    assert found[0]["ratio"] == 1 and abs(found[0]["kl"]) < 1e-2
    evaluated = [r["step"] for r in records(tmp_path / "killed") if "eval_accuracy" in r]
    assert evaluated == [0, 2, 4, 5]
    name = "adapter_model.safetensors" if rank else "model.safetensors"
    first, last = (load_file(tmp_path / f"killed/step_{n:06d}/{name}") for n in (2, 5))
    assert {x.dtype for x in last.values()} == {torch.bfloat16}
    assert any((first[name] != last[name]).any() for name in first)
