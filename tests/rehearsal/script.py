"""Runs a script on the pretended GPU.

    PYTHONPATH=tests python -m rehearsal.script grpo_ref_split.py
    PYTHONPATH=tests DS_ACCELERATOR=cuda python -m rehearsal.script grpo_ref_split.py  # with ranks

Two processes with RANK and WORLD_SIZE set, as a launcher does, are two ranks of one GPU each: on
two machines, as it were, for LOCAL_RANK is 0 on both.
"""

import os
import runpy
import sys

from rehearsal import build


def main(script, *arguments):
    build.load()
    from rehearsal import cuda

    cuda.pretend()
    sys.argv[:] = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
