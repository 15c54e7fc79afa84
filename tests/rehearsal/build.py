"""Compiles device.cpp, once, and loads it. Imported before anything that imports torch."""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")
BUILD = SOURCE.with_name("build")  # ignored by git
TORCH = Path(importlib.util.find_spec("torch").origin).parent
FLAGS = ["-std=c++20", "-O0", "-shared", "-fPIC"]


def why_not():
    """Returns why no GPU can be simulated here, or None. Does not import torch."""
    if not shutil.which("g++"):
        return "there is no g++ to compile device.cpp with"
    if (TORCH / "lib/libtorch_cuda.so").exists():
        return "this torch is built for CUDA, and has no room for a simulated GPU"


def load():
    """Loads the compiled device.cpp, which torch finds when it is imported afterwards."""
    assert "torch" not in sys.modules, "torch has looked for a GPU already: load the device first"
    for path in (TORCH / "lib/libtorch_cpu.so", compiled()):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def compiled():
    """Returns the compiled library, of this source, these flags and this version of torch."""
    text = SOURCE.read_text() + str(FLAGS) + importlib.metadata.version("torch")
    library = BUILD / f"device_{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        BUILD.mkdir(exist_ok=True)
        draft = library.with_suffix(f".{id(text)}")
        places = [f"-I{TORCH}/include", f"-L{TORCH}/lib", "-ltorch_cpu", "-lc10"]
        subprocess.run(["g++", *FLAGS, str(SOURCE), *places, "-o", str(draft)], check=True)
        draft.rename(library)  # whole, also where two processes compile it
    return library
