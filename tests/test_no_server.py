"""The trainer as the only process (REF_SERVER = None): a reference that is refreshed, and resumed."""

from processes import QUICK, command_of, launch, learned
from safetensors.torch import load_file

SMALL = QUICK | {"TASK": "even", "MAX_PROMPT_TOKENS": 64, "EVAL_QUESTIONS": 2, "CPU_THREADS": 1}
WEIGHTS = {0: "model.safetensors", 4: "adapter_model.safetensors"}  # by LORA_RANK


def test_a_refreshed_reference_is_the_policy_of_its_step_also_where_the_run_resumes(tiny, tmp_path):
    """Bit for bit: a resumed run that had MODEL as its reference again learned something else."""
    shared = SMALL | {"MODEL": str(tiny), "REF_SERVER": None, "EVAL_STEPS": 0}
    shared |= {"REFERENCE_REFRESH_STEPS": 2, "STEPS": 5}
    presets = []
    for rank in WEIGHTS:
        for name, starts in {"whole": [5], "halves": [3, 5]}.items():
            own = {"LORA_RANK": rank, "RUN_DIR": str(tmp_path / f"{name}_{rank}")}
            presets += [shared | own | {"STEPS": steps} for steps in starts]
    fixed = presets[0] | {"RUN_DIR": str(tmp_path / "fixed"), "REFERENCE_REFRESH_STEPS": 0}
    presets += [fixed | {"STEPS": 2}, fixed]  # resumes with MODEL, and not with the checkpoint
    launch(1, command_of("grpo_ref_split", *presets), tmp_path / "log")
    fixed = [r["kl"] for r in learned(tmp_path / "fixed")]
    assert fixed[0] < 1e-9 and min(fixed[1:]) > 1e-4
    for rank, file in WEIGHTS.items():
        whole, halves = (learned(tmp_path / f"{name}_{rank}") for name in ("whole", "halves"))
        assert whole == halves and [r["step"] for r in whole] == [1, 2, 3, 4, 5]
        kl = [r["kl"] for r in whole]
        # The first update after a refresh is of the policy that has become the reference
        assert max(kl[0], kl[2], kl[4]) < 1e-9 and min(kl[1], kl[3]) > 1e-6, kl
        if not rank:
            assert kl[1] == fixed[1]
        one, other = (
            load_file(tmp_path / f"{name}_{rank}/final" / file) for name in ("whole", "halves")
        )
        assert all(one[name].equal(other[name]) for name in one)
        kept = load_file(tmp_path / f"whole_{rank}/final/trainer/reference.safetensors")
        assert kept and any(not tensor.eq(0).all() for tensor in kept.values())
    assert not (tmp_path / "fixed/final/trainer/reference.safetensors").exists()
