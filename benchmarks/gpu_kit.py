"""Takes gpu_report.py to a machine without network, in three folders of less than 60 MiB each.

    make gpu-kit                            # here: gathers .gpu/kit, .gpu/model1 and .gpu/model2
    python3 .gpu/kit/run.py --minutes 9     # there: the report, in .gpu/results

run.py is this file. It takes gpu_report.py's options and names of parts, and uses the Python and
the torch of that machine, which needs pip and EXPECTED. Packages that it lacks are installed into
.gpu/site from the kit's wheels. They are for Linux on x86-64 and one version of Python: make
gpu-kit GPU_PYTHON=3.12. The model's folders make the wheel of SmolLM2, for the parts sums_....
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve()
ROOT = HERE.parent.parent
EXPECTED = "torch", "numpy", "transformers", "peft", "accelerate"  # with what they need
# Versions are in constraints.txt. Not needed by the report: datasets, math-verify, matplotlib
BROUGHT = [
    *("bottle", "waitress", "requests", "certifi", "charset-normalizer", "idna", "urllib3"),
    *("einops", "hjson", "msgpack", "ninja", "py-cpuinfo", "pydantic", "pydantic_core"),
    *("annotated-types", "typing-inspection", "typing_extensions"),  # to here: deepspeed's
    *("gguf", "PyYAML", "pytest", "iniconfig", "pluggy", "Pygments", "packaging"),
]
SOURCE = "deepspeed"  # no operation of it is compiled: the trainer uses torch's AdamW
PLATFORMS = "manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64"
LIMIT = 60 << 20  # bytes of a folder


# --- Here -----------------------------------------------------------------------------
def gather(python, to=ROOT / ".gpu"):
    """Fills the three folders, for this version of Python."""
    for name in ("kit", "model1", "model2"):
        shutil.rmtree(to / name, ignore_errors=True)
        (to / name).mkdir(parents=True)
    lines = (ROOT / "constraints.txt").read_text().split()
    versions = {line.split("==")[0].lower(): line for line in lines if "==" in line}
    wheels, pip = to / "kit/wheels", [sys.executable, "-m", "pip"]
    build = [*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", wheels, versions[SOURCE]]
    subprocess.run(build, check=True, env=os.environ | {"DS_BUILD_OPS": "0"})
    ready = [*pip, "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    ready += ["--implementation", "cp", "--python-version", python]
    ready += [word for platform in PLATFORMS for word in ("--platform", platform)]
    subprocess.run([*ready, "--dest", wheels, *(versions[n.lower()] for n in BROUGHT)], check=True)
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, str(ROOT))
        from grpo.commands.smollm2 import WHEEL

        subprocess.run([*ready, "--dest", folder, WHEEL], check=True)
        (wheel,) = Path(folder).iterdir()
        whole = wheel.read_bytes()
        for number, half in enumerate((whole[: len(whole) // 2], whole[len(whole) // 2 :]), 1):
            Path(to, f"model{number}", f"{wheel.name}.{number}").write_bytes(half)
    pack_project(to / "kit")
    for name in ("kit", "model1", "model2"):
        size = sum(path.stat().st_size for path in (to / name).rglob("*"))
        print(f"{to / name}: {size / 2**20:.1f} MiB")
        assert size < LIMIT, (name, size)
    print("copy them to the GPU's machine; there: python3 .gpu/kit/run.py")


def pack_project(kit):
    """Adds the files that git knows, as they are now, their commit, and this file."""
    git = ["git", "-C", ROOT]
    files = subprocess.check_output([*git, "ls-files", "-z"], text=True).split("\0")
    with tarfile.open(kit / "project.tar.gz", "w:gz") as archive:
        for name in filter(None, files):
            if (ROOT / name).exists():
                archive.add(ROOT / name, name)
    describe = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    (kit / "commit").write_bytes(subprocess.check_output(describe))
    shutil.copy(HERE, kit / "run.py")


# --- There ----------------------------------------------------------------------------
def run(base, words):
    """Makes the project, the packages and the model's wheel, and becomes gpu_report.py."""
    kit, project, site = base / "kit", base / "project", base / "site"
    with tarfile.open(kit / "project.tar.gz") as archive:
        archive.extractall(project, filter="data")
    name_of = lambda name: re.sub(r"[-_.]+", "_", name).lower()
    there = importlib.metadata.distributions(path=[*sys.path, str(site)])
    there = {name_of(package.name) for package in there}
    if absent := [name for name in EXPECTED if name not in there]:
        sys.exit(f"{sys.executable} has no {', '.join(absent)}: take a Python that has them")
    wheels = (kit / "wheels").iterdir()
    if wheels := [path for path in wheels if name_of(path.name.split("-")[0]) not in there]:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        subprocess.run([*pip, "--target", site, *wheels], check=True)
    halves = sorted(base.glob("model?/*.whl.?"))
    if len(halves) == 2:
        (base / "wheels").mkdir(exist_ok=True)
        whole = b"".join(half.read_bytes() for half in halves)
        (base / "wheels" / halves[0].stem).write_bytes(whole)
    more = {"PYTHONPATH": os.pathsep.join([str(site), *filter(None, [os.getenv("PYTHONPATH")])])}
    more |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(base / "wheels"), "HF_HUB_OFFLINE": "1"}
    more |= {"GPU_KIT": (kit / "commit").read_text().strip()}
    os.chdir(project)
    report = [sys.executable, "benchmarks/gpu_report.py", "--out", str(base / "results"), *words]
    os.execve(sys.executable, report, {"HOME": str(base)} | os.environ | more)


if __name__ == "__main__":
    if HERE.name == "run.py":
        run(HERE.parent.parent, sys.argv[1:])
    elif len(sys.argv) == 2:
        gather(sys.argv[1])
    else:
        sys.exit(__doc__)
