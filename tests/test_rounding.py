"""bfloat16 weights are rounded at random, by place, and a run that resumes has the same bits."""

from types import SimpleNamespace

import deepspeed.runtime.utils
import pytest
import torch
from processes import QUICK, command_of, launch, learned
from rank_threads import Ranks
from safetensors.torch import load_file

from grpo import bfloat16
from grpo.bfloat16 import BLOCK, noise, rounded
from grpo.bfloat16_step import round_masters
from grpo.engine import load_states


@pytest.mark.parametrize("below", [1.0, 0.1103515625, -3.0, 2.0**-20, -1e-30])
@pytest.mark.parametrize("share", [0.002, 0.3, 0.5, 0.98])
def test_the_mean_of_many_roundings_is_the_master(below, share):
    """Rounded to the nearest, all would be one neighbour. Both neighbours have their share."""
    low = torch.tensor(below).bfloat16()
    high = torch.nextafter(low, torch.tensor(torch.inf).bfloat16())
    low, gap = low.double(), high.double() - low.double()
    master = (low + share * gap).float()
    found = rounded(master.expand(BLOCK).contiguous(), 3 * BLOCK, seed=1).double()
    assert set(found.tolist()) == {low.item(), (low + gap).item()}
    exact = ((master.double() - low) / gap).item()
    error = (exact * (1 - exact) / BLOCK) ** 0.5  # standard error of the share that is above
    assert abs((found - low).mean().item() / gap.item() - exact) < 5 * error + 2**-16


def test_a_bfloat16_number_stays():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    every = every[every.isfinite()]
    assert rounded(every.float(), 5, seed=0).view(torch.int16).equal(every.view(torch.int16))
    nans = torch.tensor([2**31 - 1, -1], dtype=torch.int32).view(torch.float32)  # a GPU's NaN
    assert rounded(nans, 5, seed=0).isnan().all()


def test_places_and_seeds_have_independent_numbers():
    """Measured for 40 million places: correlations below 3e-4, which is their standard error."""
    one = noise(0, BLOCK, seed=0, device="cpu").double()
    others = [noise(BLOCK, BLOCK, seed=0, device="cpu"), noise(0, BLOCK, seed=1, device="cpu")]
    pairs = [(one, other.double()) for other in others]
    pairs += [(one[:-lag], one[lag:]) for lag in (1, 2, 64, 576, 4096)]
    for a, b in pairs:
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 5e-3
    counts = torch.histc(one, 256, 0, 2**16)
    assert ((counts - BLOCK / 256) ** 2 / (BLOCK / 256)).sum() < 255 + 5 * (2 * 255) ** 0.5
    assert 0 <= one.min() and one.max() < 2**16


def bits_of(world, masters, monkeypatch):
    """-> the weights that `world` ranks give the model, each from its part of the masters."""
    size = len(masters) // world
    flat = torch.zeros(len(masters)).bfloat16()
    parts = list(flat.split(size))

    def round_part(rank):
        own = {"parallel_partitioned_bit16_groups": [parts], "bit16_groups_flat": [flat]}
        own |= {"single_partition_of_fp32_groups": [masters[rank * size :][:size]]}
        names = "real_dp_process_group", "nccl_start_alignment_factor", "allgather_bucket_size"
        round_masters(SimpleNamespace(**own, **dict.fromkeys(names)), seed=3)

    gather = lambda **groups: None  # all ranks' parts are views of one row here
    monkeypatch.setattr(deepspeed.runtime.utils, "all_gather_dp_groups", gather)
    Ranks(monkeypatch, world).run(round_part)
    return flat.view(torch.int16)


def test_any_number_of_ranks_gives_the_same_bits(monkeypatch):
    """Each weight's depends on its place among all, not on how they are cut."""
    monkeypatch.setattr(bfloat16, "BLOCK", 1000)
    masters = torch.randn(12_000, generator=torch.Generator().manual_seed(0))
    one = bits_of(1, masters, monkeypatch)
    assert not one.equal(masters.bfloat16().view(torch.int16))
    for world in (2, 3, 8):
        assert bits_of(world, masters, monkeypatch).equal(one)


KINDS = {  # constants, the file of the weights, the largest share that one step may change
    "full": ({}, "model.safetensors", 0.2),
    # LoRA's B begins at 0, where bfloat16 has numbers for every update
    "offload": ({"LORA_RANK": 4, "OFFLOAD_OPTIMIZER": True}, "adapter_model.safetensors", 0.7),
}


@pytest.mark.long
def test_two_ranks_move_by_less_than_the_spacing_and_resume_with_the_same_bits(tiny, tmp_path):
    """The rate is so low that the nearest bfloat16 of nearly all weights would be MODEL's."""
    shared = QUICK | {"MODEL": str(tiny), "TASK": "even", "REF_SERVER": None, "EVAL_STEPS": 0}
    shared |= {"DTYPE": "bfloat16", "MAX_PROMPT_TOKENS": 128, "LEARNING_RATE": 1e-6}
    presets = [
        shared | own | {"RUN_DIR": str(tmp_path / kind / name), "STEPS": steps}
        for kind, (own, *_) in KINDS.items()
        for name, steps in (("whole", 4), ("resumed", 2), ("resumed", 4))
    ]
    launch(2, command_of("grpo_ref_split", *presets), tmp_path / "log")
    for kind, (_, file, most) in KINDS.items():
        whole, resumed = tmp_path / kind / "whole", tmp_path / kind / "resumed"
        steps = learned(whole)
        assert all(0 < step["weights_changed"] < most for step in steps), (kind, steps)
        assert learned(resumed) == steps and len(steps) == 4
        one, other = (load_file(folder / "final" / file) for folder in (whole, resumed))
        assert one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)
        parts = [load_states(whole / f"final/trainer/optimizer_{rank}.pt") for rank in (0, 1)]
        masters = torch.cat([part["single_partition_of_fp32_groups"][0] for part in parts])
        assert len(masters) <= BLOCK
        expected = rounded(masters, 0, seed=0).double()
        found = sum(weight.double().sum().item() for weight in one.values())
        assert found == pytest.approx(expected.sum().item(), abs=1e-9)
        assert found != pytest.approx(masters.bfloat16().double().sum().item(), abs=1e-9)
