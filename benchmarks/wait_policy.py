"""What OpenMP's threads do while they wait: spin long, as by default, or sleep, or spin briefly.

    python benchmarks/wait_policy.py runs/demo/warm_start   # 40 minutes, on an idle machine

Runs of the trainer beside its server, on cases of benchmarks/end_to_end.py, in turns. Where one
core is busy, one more process computes all the while, as a colleague's does. A figure is the median
of a run's steps after the first three, in seconds.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import end_to_end
from benchmarks.counting import make_model
from benchmarks.measure import facts

TURNS = 2
WAYS = {  # environment of trainer and server; libgomp's default is 300 000, says its manual
    "default": {"GOMP_SPINCOUNT": "300000"},
    "PASSIVE": {"GOMP_SPINCOUNT": "0"},
    "spin 10000": {"GOMP_SPINCOUNT": "10000"},
    "spin 1000": {"GOMP_SPINCOUNT": "1000"},  # what the scripts set
}
CASES = [  # case, ranks, steps, whether the machine is busy
    ("demo", 1, 30, False),
    ("demo", 1, 10, True),
    ("mixed", 1, 7, False),
    ("mixed", 1, 6, True),
    ("mixed", 2, 7, False),
]


def seconds_of(case, model, steps, ranks, way):
    """Returns a run's median seconds a step."""
    os.environ.update(WAYS[way])
    try:
        return end_to_end.run_ours(case, model, steps, ranks)[0]
    finally:
        for name in WAYS[way]:
            del os.environ[name]


def main(demo_model):
    counting = tempfile.mkdtemp(prefix="counting-")
    make_model(counting)
    print(facts("torch", "deepspeed"), "\n")
    print(f"| case | ranks | machine | {' | '.join(WAYS)} |\n|---|---|---|{'---|' * len(WAYS)}")
    for case, ranks, steps, busy in CASES:
        model, found = demo_model if case == "demo" else counting, {way: [] for way in WAYS}
        other = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if busy else None
        try:
            for turn in range(TURNS):
                for way in list(WAYS)[:: -1 if turn % 2 else 1]:
                    found[way].append(seconds_of(case, model, steps, ranks, way))
        finally:
            if other:
                other.kill()
        cells = [" ".join(f"{x:.3f}" for x in sorted(times)) for times in found.values()]
        machine = "one core busy" if busy else "idle"
        print(f"| {case} | {ranks} | {machine} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
