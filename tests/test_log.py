"""Output to a pipe that nobody reads any more."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


GONE = """
import os, sys
from grpo.log import lasting_output, say, tell
read, write = os.pipe()
kept = os.dup(1)
for descriptor in (1, 2):
    os.dup2(write, descriptor)
with lasting_output():
    print("heard", flush=True)
    os.close(read)  # the reader goes, unseen
    for write in (say, tell, print):
        write("not heard" * 10_000)
    sys.stdout.flush()
    os.write(kept, b"goes on")
tell("not heard either")
"""


def test_a_reader_that_goes_in_the_middle_of_a_write_ends_nothing():
    """`| tee log`, which the Ctrl-C that asks for a checkpoint ends as well."""
    done = subprocess.run(
        [sys.executable, "-c", GONE], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "goes on", "")
