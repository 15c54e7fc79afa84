"""Kills server, ranks and workers with SIGKILL, at random, and starts them again with the same
commands; then checks that every run ends, with the accuracy of a run that nobody killed.

    python tests/chaos.py        # 100 kills: twelve minutes on two cores; prints a table
    python tests/chaos.py 30     # fewer

The demo's model, task and constants, with a reference server and one worker beside the ranks; one
run after another, with one rank and with two in turns, until there were so many kills. A run takes
longer than in the demo, as its trainer begins again at its last checkpoint. test_recovery.py has a
short form.
"""

import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from processes import command_of, free_port, kill, records, start, start_ranks

LEAST = 0.05  # a run may be so much less accurate than the one without kills
END_SECONDS = 30  # of a rank, once another one was killed
RUN_SECONDS = 600  # of a run, after the last kill


class Household:
    """A run's processes, by role; each is started again with the same command when it has ended."""

    def __init__(self, folder, ranks, constants):
        self.folder, self.ranks, self.running = Path(folder), ranks, {}
        self.killed, self.wrong = None, []  # the role that was killed last, until it runs again
        self.folder.mkdir(parents=True, exist_ok=True)
        port = free_port()
        constants = constants | {"RUN_DIR": str(self.folder / "run"), "PUBLISH_STEPS": 1}
        constants |= {"REF_SERVER": f"http://127.0.0.1:{port}"}
        constants |= {"TRAINER": f"http://127.0.0.1:{free_port()}"}
        self.commands = {
            "server": command_of("ref_server", {"MODEL": constants["MODEL"], "PORT": int(port)}),
            "trainer": command_of("grpo_ref_split", constants),
            "worker": command_of("grpo_ref_split:worker", constants),
        }

    def tend(self):
        """Starts what is not running; all ranks, where one of them has ended. Returns whether the
        run is over."""
        for role, command in self.commands.items():
            processes, log = self.running.get(role, []), self.folder / f"{role}.log"
            codes = [p.poll() for p in processes]
            if role == "trainer" and codes and set(codes) == {0}:
                return True
            # One rank may see its end before the other
            if codes and set(codes) <= {None, 0} and (None in codes):
                continue
            if processes and role != self.killed:
                self.wrong.append(f"{role} has ended by itself with {codes}; see {log}")
            kill(*processes)
            self.killed = None if role == self.killed else self.killed
            if role == "trainer":
                self.running[role] = start_ranks(self.ranks, command, log)
                self.step = self.steps()
            else:
                self.running[role] = [start(command, log, OMP_NUM_THREADS="1")]
        return False

    def watch(self, seconds, until_step=10**9):
        """Tends the processes for so many seconds, or until a step; returns whether the run is
        over."""
        until = time.monotonic() + seconds
        while self.steps() < until_step and time.monotonic() < until:
            if self.tend():
                return True
            time.sleep(0.1)
        return False

    def kill(self, role, draw):
        """Kills a process of the role; the other ranks then end by themselves."""
        processes, self.killed = self.running[role], role
        kill(draw.choice(processes))
        until = time.monotonic() + END_SECONDS
        while self.steps() > self.step and any(p.poll() is None for p in processes):
            if time.monotonic() > until:  # before the first step it may still wait for the others
                self.wrong.append(f"{END_SECONDS} s after a rank was killed another one is alive")
                break
            time.sleep(0.1)
        self.tend()

    def steps(self):
        return max((r["step"] for r in records(self.folder / "run") if "loss" in r), default=0)

    def end(self):
        kill(*(p for processes in self.running.values() for p in processes))


def run(folder, victims, draw, ranks, constants):
    """Makes a run, and kills the first of `victims` (roles) while it lasts, which it removes from
    the list. Returns (what was wrong, its records, kills by role)."""
    house, kills, steps = Household(folder, ranks, constants), Counter(), constants["STEPS"]
    try:
        over = house.tend()
        while victims and not over:
            # half of the time soon, perhaps while things start, and half once there are new steps
            if draw.random() < 0.5:
                over = house.watch(draw.uniform(0, 6))
            else:
                over = house.watch(RUN_SECONDS, until_step=house.steps() + draw.randint(1, 4))
            if not over and house.steps() < steps:
                role = victims.pop(0)
                kills[role] += 1
                house.kill(role, draw)
        found = house.wrong
        if not house.watch(RUN_SECONDS):
            found.append(f"the run did not end; see {house.folder}")
        told = records(house.folder / "run")
        made = [r["step"] for r in told if "loss" in r]
        if made != list(range(1, steps + 1)):
            found.append(f"metrics.jsonl has the steps {made}, not 1 to {steps}")
        return found, told, kills
    finally:
        house.end()


# --- The demo's task ------------------------------------------------------------------
HEAD = "run | ranks | kills: server | rank | worker | mean staleness | accuracy | seconds"


def main(number=100):
    from benchmarks.measure import facts
    from grpo.options.tiny_model import warm_start
    from presets import demo
    from tasks import arithmetic

    folder, seed = Path(tempfile.mkdtemp(prefix="chaos-")), int(time.time())
    draw = random.Random(seed)
    warm_start(str(folder / "warm_start"), arithmetic, 0, 800)
    constants = {name: value for name, value in vars(demo).items() if name.isupper()}
    constants |= {"MODEL": str(folder / "warm_start"), "SAVE_STEPS": 5, "EVAL_STEPS": 10**6}
    victims = (["server", "trainer", "worker"] * number)[:number]
    draw.shuffle(victims)
    machine = facts("torch", "deepspeed", "transformers").split(": ")[1]
    print(f"`python tests/chaos.py {number}`: {machine}\n")
    print(f"| {HEAD} |\n|{'---|' * 8}", flush=True)
    wrong, bar, count = [], None, 0
    while victims or bar is None:
        constants["SEED"], ranks, began = count, 1 + count % 2, time.monotonic()
        own = [] if bar is None else victims  # the first run is left alone
        found, told, kills = run(folder / f"run_{count}", own, draw, ranks, constants)
        wrong += found
        accuracy = [r["eval_accuracy"] for r in told if "eval_accuracy" in r][-1]
        stale = statistics.mean(r["staleness"] for r in told if "loss" in r)
        row = [count, ranks, *(kills[role] for role in ("server", "trainer", "worker"))]
        row += [f"{stale:.2f}", f"{accuracy:.3f}", f"{time.monotonic() - began:.0f}"]
        print("| " + " | ".join(map(str, row)) + " |", flush=True)
        bar = accuracy - LEAST if bar is None else bar
        if accuracy < bar:
            wrong.append(f"run {count} ended at {accuracy}, below {bar:.3f}")
        count += 1
    print("\n".join(wrong) or "\nEvery run has ended as it should.", f"Seed {seed}, {folder}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
