"""Kills server, ranks, trainer and workers with SIGKILL, at random, and starts them again with the
same commands; then checks that nothing was lost, trained twice or left behind.

    python tests/chaos.py        # 20 kills of each: eleven minutes on two cores
    python tests/chaos.py 3      # 3 of each

A trainer of two ranks and two workers train a tiny model, all with their own seeds, and a witness
uploads groups of another run and remembers which were answered with 200. test_recovery.py has the
short form.
"""

import json
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

import requests

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from helpers import make_group
from processes import command_of, free_port, kill, start, start_ranks

from grpo.client import RefServer
from grpo.wire import pack_group

PROMPTS = 4
CONSTANTS = {
    "TASK": "even",
    "PROMPTS_PER_STEP": PROMPTS,
    "GROUP_SIZE": 4,
    "SAMPLE_BATCH": 8,
    "MAX_COMPLETION_TOKENS": 12,
    "MAX_PROMPT_TOKENS": 128,
    "SKIP_FLAT_GROUPS": False,
    "MASK_TRUNCATED": False,
    "LEARNING_RATE": 1e-3,
    "PUBLISH_STEPS": 1,
    "SAVE_STEPS": 3,
    "EVAL_STEPS": 10**6,
    "EVAL_QUESTIONS": 4,
    "STEPS": 10**6,  # until the kills are done
}


class Witness(threading.Thread):
    """Uploads a group now and then; `answered` has the ids of those that the server has taken."""

    def __init__(self, url):
        super().__init__(daemon=True)
        self.server, self.answered, self.over, self.error = RefServer(url, 300), [], False, None

    def run(self):
        try:
            while not self.over:
                group = make_group(seed=len(self.answered), run="witness", sampler="witness")
                self.server.call("POST", "/upload", data=pack_group(group))
                self.answered.append(group.id)
                time.sleep(0.3)
        except Exception as error:  # noqa: BLE001 (reported with the rest)
            self.error = error


class Household:
    """The processes, by role; each is started again with the same command when it has ended."""

    def __init__(self, model, folder, ranks, workers):
        port = int(free_port())
        self.url, self.folder, self.ranks = f"http://127.0.0.1:{port}", Path(folder), ranks
        here = {"MODEL": str(model), "RUN_DIR": str(self.folder / "run"), "REF_SERVER": self.url}
        self.constants = CONSTANTS | here
        store = {"MODEL": str(model), "PORT": port, "STORE": str(self.folder / "store.sqlite")}
        self.commands = {
            "server": command_of("ref_server", store),
            "trainer": command_of("grpo_ref_split", self.constants),
        }
        for n in range(1, workers + 1):
            self.commands[f"worker {n}"] = command_of("grpo_ref_split:worker", self.constants)
        self.running = {}

    def tend(self):
        """Starts what is not running; a trainer of which a rank is gone as a whole."""
        for role, command in self.commands.items():
            processes, log = self.running.get(role, []), self.folder / f"{role}.log"
            if not processes or any(p.poll() is not None for p in processes):
                kill(*processes)
                if role == "trainer":
                    self.steps = steps_in(self.folder)
                    self.running[role] = start_ranks(self.ranks, command, log)
                else:
                    self.running[role] = [start(command, log, OMP_NUM_THREADS="1")]

    def end(self):
        kill(*(p for processes in self.running.values() for p in processes))


def run(model, folder, victims, *, seed, ranks, workers):
    """-> the list of what was wrong; empty if nothing was."""
    draw, house = random.Random(seed), Household(model, folder, ranks, workers)
    witness = Witness(house.url)
    draw.shuffle(victims)
    started = time.monotonic()
    try:
        house.tend()
        witness.start()
        for number, victim in enumerate(victims):
            role = "trainer" if victim == "rank" else victim
            # half of the time soon, perhaps while things start, and half when there is a new step
            if draw.random() < 0.5:
                watch(house, draw.uniform(0, 15))
            else:
                wait_for_steps(house, steps_in(house.folder) + draw.randint(1, 4))
            processes = house.running[role]
            kill(*([draw.choice(processes)] if victim == "rank" else processes))
            print(f"{time.monotonic() - started:.0f} s: kill {number + 1}: {victim}", flush=True)
            if victim == "rank" and steps_in(house.folder) > house.steps:
                gone_by = time.monotonic() + 30
                while any(p.poll() is None for p in processes):  # the others end by themselves
                    if time.monotonic() > gone_by:
                        return [f"30 s after a rank was killed another is alive: {processes}"]
                    time.sleep(0.1)
            house.tend()
        wait_for_steps(house, steps_in(house.folder) + 3)
        # the run is to end: the same command, but for the number of steps
        kill(*house.running["trainer"])
        last = house.constants | {"STEPS": steps_in(house.folder) + 3}
        house.commands["trainer"] = command_of("grpo_ref_split", last)
        house.tend()
        for trainer in house.running["trainer"]:
            trainer.wait(200)
        witness.over = True
        witness.join(60)
        return wrongs(house, witness, last["STEPS"])
    finally:
        house.end()


def steps_in(folder):
    path = Path(folder, "run/metrics.jsonl")
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return max((r["step"] for r in map(json.loads, lines) if "loss" in r), default=0)


def watch(house, seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        house.tend()
        time.sleep(0.1)


def wait_for_steps(house, step, limit=200):
    until = time.monotonic() + limit
    while steps_in(house.folder) < step:
        if time.monotonic() > until:
            raise AssertionError(f"no step {step} after {limit} s; see {house.folder}/*.log")
        watch(house, 0.2)


def wrongs(house, witness, steps):
    found = [f"the witness ended: {witness.error!r}"] if witness.error else []
    codes = [p.returncode for p in house.running["trainer"]]
    if any(codes):
        found.append(f"the trainer ended with {codes}; see {house.folder}/trainer.log")
    run = json.loads((house.folder / "run/run.json").read_text())["run"]
    ledger = requests.get(f"{house.url}/stats", params={"run": run}, timeout=30).json()["ledger"]
    print(f"the run's ledger: {ledger}", flush=True)
    ends = sum(ledger[k] for k in ("trained", "waiting", "failed"))
    if ledger["uploaded"] != ends + sum(ledger["dropped"].values()):
        found.append(f"the ledger does not add up: {ledger}")
    if ledger["waiting"] or ledger["failed"]:
        found.append(f"groups were left behind: {ledger}")
    if ledger["trained"] != PROMPTS * steps:  # nothing is left out, flat groups neither
        found.append(f"{ledger['trained']} groups were trained in {steps} steps of {PROMPTS}")
    records = [json.loads(x) for x in (house.folder / "run/metrics.jsonl").read_text().splitlines()]
    made = [r["step"] for r in records if "loss" in r]
    if made != list(range(1, steps + 1)):
        found.append(f"metrics.jsonl has the steps {made}, not 1 to {steps}")
    kept, ids = RefServer(house.url, 60), set()
    while bodies := kept.lease("witness", 100):
        if ids & bodies.keys():
            found.append(f"handed out twice: {ids & bodies.keys()}")
        ids |= bodies.keys()
    lost = set(witness.answered) - ids
    if lost or not witness.answered:
        found.append(f"answered with 200 and lost: {lost} of {len(witness.answered)}")
    print(f"{len(ids)} groups of the witness are there", flush=True)
    return found


def main(kills=20):
    from tiny import make_tiny

    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    make_tiny(folder / "tiny")
    victims = kills * ["server", "rank", "trainer", "worker 1", "worker 2"]
    found = run(folder / "tiny", folder, victims, seed=int(time.time()), ranks=2, workers=2)
    print("\n".join(found) or f"nothing was lost, trained twice or left behind ({folder})")
    sys.exit(bool(found))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
