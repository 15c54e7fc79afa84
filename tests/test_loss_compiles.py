"""The kernels of the fused loss compile for GPUs that are not here."""

import re
import subprocess

import pytest
import torch

import grpo_loss_triton as fused

triton = fused.triton


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


@pytest.mark.skipif(triton is None, reason="no Triton here")
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("capability, dtype, itemsize", [
    (80, "bf16", 2), (90, "fp32 to bf16", 4), (100, "fp32", 4)
])  # fmt: skip
def test_the_kernels_compile(capability, dtype, itemsize, tmp_path, monkeypatch):
    """The interpreter runs what does not compile. No register may spill, no float be a double, and
    logits move 16 bytes at a time: with a mask of the odd vocabulary it would be one by one."""
    from triton.backends.nvidia.compiler import get_ptxas

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    z = torch.empty(1, 151_936, dtype={2: torch.bfloat16, 4: torch.float32}[itemsize])
    constants = fused.constants_of(z, 0.9, 151_665)
    num_warps = constants.pop("num_warps")
    for kernel in (fused.forward_kernel, fused.backward_kernel):
        ptx = ptx_of(kernel, dtype, capability, num_warps, constants)
        (tmp_path / "ptx").write_text(ptx)
        arch = re.search(r"\.target (\w+)", ptx)[1]
        command = [get_ptxas(capability).path, "-v", "-arch", arch, "ptx", "-o", "cubin"]
        report = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        spilled = re.findall(r"(\d+) bytes spill", report.stderr + report.stdout)
        assert spilled == ["0", "0"] and ".f64" not in ptx, (constants, report)
        wide = re.findall(r"(ld|st)\.global\.v4", ptx)
        backward = kernel is fused.backward_kernel
        assert wide.count("ld") >= 2 and wide.count("st") >= (1 if "to" in dtype else 2) * backward
