"""What a GPU needs and a CPU does not show, tested on a machine without one."""

import pytest
import torch
from fakes import tiny_policy
from transformers import AutoModelForCausalLM

import ref_server
from grpo import devices
from grpo.commands import tiny_model as warm_start
from grpo.models import choose_dtype, load_model, own_device
from tasks import arithmetic


# --- cuDNN's attention ---------------------------------------------------------------
@pytest.mark.parametrize("load", [
    lambda folder, _: tiny_policy(folder),
    lambda folder, _: ref_server.Reference(ref_server.server_constants({"MODEL": str(folder)})),
    lambda _, scratch: warm_start.warm_start(scratch / "warm", arithmetic, seed=0, steps=1),
], ids=["trainer", "server", "demo"])  # fmt: skip
def test_no_path_runs_a_model_by_cudnns_attention(load, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(arithmetic, "SIZES", {"train": 20})
    torch.backends.cuda.enable_cudnn_sdp(True)  # as PyTorch starts
    load(tiny, tmp_path)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


# --- Which device, which dtype -------------------------------------------------------
@pytest.mark.parametrize("build, visible, files, refused", [
    (None, None, "", False),  # a build for the CPU
    ("13.0", None, "", True),
    ("13.0", "-1", "", False),  # as wished
    ("13.0", None, "none", False),  # a laptop with PyPI's torch
])  # fmt: skip
def test_a_gpu_that_torch_can_not_use_is_no_reason_to_train_on_the_cpu(
    build, visible, files, refused, monkeypatch, tmp_path
):
    def init():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020).")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(devices, "DRIVER", (str(tmp_path / files),))
    monkeypatch.setattr(torch.version, "cuda", build)
    if refused:
        with pytest.raises(SystemExit, match="too old"):
            own_device()
    else:
        assert own_device() == "cpu"


def test_auto_takes_bfloat16_where_the_card_has_it(monkeypatch, capsys):
    assert choose_dtype("auto", "cpu") == "float32"
    assert choose_dtype("bfloat16", "cpu") == "bfloat16"
    for native, dtype in ((True, "bfloat16"), (False, "float32")):  # a T4 emulates it
        has = lambda including_emulation, native=native: including_emulation or native
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", has)
        assert choose_dtype("auto", "cuda:0") == dtype
        assert choose_dtype("bfloat16", "cuda:0") == "bfloat16"
        assert capsys.readouterr().out.count("bfloat16") == (0 if native else 2)


def test_a_rank_loads_the_model_straight_to_its_gpu(tiny, monkeypatch):
    """Not to RAM first: seven ranks with 7B would take 107 GB of it."""
    asked, load = [], AutoModelForCausalLM.from_pretrained

    def recorded(name, **settings):
        asked.append(settings.pop("device_map", None))
        return load(name, **settings)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", recorded)
    placed = []
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, device: placed.append(device) or self)
    cuda = lambda check_available: torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", cuda)
    monkeypatch.setattr(torch.accelerator, "set_device_index", placed.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setenv("LOCAL_RANK", "5")
    load_model(str(tiny), "float32", 400)
    assert asked == [{"": "cuda:5"}] and placed == ["cuda:5"] * 2  # the rank and the model
