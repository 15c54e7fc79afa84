"""The kernels of the fused loss compile for GPUs that are not here."""

import re
import subprocess

import pytest

import grpo_loss_triton as fused

triton = fused.triton
NEEDS_TRITON = pytest.mark.skipif(triton is None, reason="no Triton here")
# The interpreter computes masked lanes with numpy, which warns of what it finds there.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")

NAMES = ("CISPO", "UNBIASED_KL", "ON_POLICY", "KL_BETA", "IS_CAP", "IS_MASK", "RATIO_CAP")
OFF = dict(zip(NAMES, (False, False, True, 0.0, 0.0, False, 0.0), strict=True))
ON = dict(zip(NAMES, (True, True, False, 0.04, 2.0, True, 2.0), strict=True))
USUAL = ON | {"CISPO": False, "UNBIASED_KL": False, "IS_MASK": False}
FORWARD, BACKWARD, BOTH = ({"FORWARD": f, "BACKWARD": b} for f, b in ((1, 0), (0, 1), (1, 1)))
MODES = [FORWARD | OFF, BACKWARD | OFF, BOTH | OFF, BOTH | ON, BOTH | USUAL]


def ptx_of(kernel, dtype, capability, num_warps, constants):
    """-> the PTX that Triton makes of a kernel for a card of this compute capability."""
    logits, _, grad = dtype.partition(" to ")
    kinds = {"ids": "*i64", "logits": "*" + logits, "grad": "*" + (grad or logits)}
    names = kernel.arg_names
    source = triton.compiler.ASTSource(
        kernel,
        {name: "constexpr" if name in constants else kinds.get(name, "*fp32") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in constants},
    )
    target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": num_warps}).asm["ptx"]


@NEEDS_TRITON
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("dtype, itemsize", [("bf16", 2), ("fp32", 4), ("fp32 to bf16", 4)])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_kernels_compile(capability, dtype, itemsize, tmp_path, monkeypatch):
    """The interpreter runs what does not compile. No register may spill, no float be a double, and
    logits move 16 bytes at a time: with a mask of the odd vocabulary it would be one by one.
    """
    from triton.backends.nvidia.compiler import get_ptxas

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    fixed = {"VOCAB": 151_665, "WIDTH": 151_936, "INV_TAU": 1 / 0.9, "CLIP_LOW": 0.2,
             "CLIP_HIGH": 0.28, "MAX_LOG_RATIO": fused.MAX_LOG_RATIO}  # fmt: skip
    fixed |= fused.block_of(151_936, itemsize)
    num_warps = fixed.pop("num_warps")
    for mode in MODES:
        constants = fixed | mode
        ptx = ptx_of(fused.row_kernel, dtype, capability, num_warps, constants)
        (tmp_path / "ptx").write_text(ptx)
        arch = re.search(r"\.target (\w+)", ptx)[1]
        command = [get_ptxas(capability).path, "-v", "-arch", arch, "ptx", "-o", "cubin"]
        report = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        spilled = re.findall(r"(\d+) bytes spill", report.stderr + report.stdout)
        assert spilled == ["0", "0"] and ".f64" not in ptx, (constants, report)
        wide = re.findall(r"(ld|st)\.global\.v4", ptx)
        assert wide.count("ld") >= 2 * (mode["FORWARD"] + mode["BACKWARD"])
        assert wide.count("st") >= (1 if "to" in dtype else 2) * mode["BACKWARD"]
