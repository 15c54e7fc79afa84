"""python -m rehearsal FILE...: pytest on the simulated GPU. test_rehearsal.py starts it."""

import sys

from rehearsal import build

if __name__ == "__main__":
    build.load()
    import pytest

    from rehearsal import cuda

    cuda.pretend()
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *sys.argv[1:]]))
