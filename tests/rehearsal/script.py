"""Runs a script on the pretended GPU.

    PYTHONPATH=tests python -m rehearsal.script grpo_ref_split.py
    PYTHONPATH=tests DS_ACCELERATOR=cuda python -m rehearsal.script grpo_ref_split.py  # with ranks

Python files that the script starts with sys.executable run on the pretended GPU, too; so

    PYTHONPATH=tests python -m rehearsal.script benchmarks/gpu_report.py --step 1M 1

is a part of the GPU report, with server and trainer.

Two processes with RANK and WORLD_SIZE set, as a launcher does, are two ranks of one GPU each: on
two machines, as it were, for LOCAL_RANK is 0 on both.
"""

import os
import runpy
import sys

from rehearsal import build


def pretending():
    """Returns a path to a Python that runs files as this script does, and all else as Python."""
    path = build.BUILD / "python"
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(
        '#!/bin/sh\ncase "$1" in *.py) set -- -m rehearsal.script "$@";; esac\n'
        f'exec {sys.executable} "$@"\n'
    )
    draft.chmod(0o755)
    return str(draft.rename(path))  # whole, also where two processes write it


def main(script, *arguments):
    build.load()
    sys.executable = pretending()
    from rehearsal import cuda

    cuda.pretend()
    sys.argv[:] = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
