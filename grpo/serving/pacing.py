"""Which worker samples how much, so that no worker's group grows too old.

Groups that wait in the store and groups outstanding at workers are together at most the
`capacity` that the run has published.
"""

import time

from grpo.wire import is_name

WORKER_SECONDS = 120  # what is outstanding at a worker not heard from for so long counts as lost
MAX_WORKERS = 1000  # those heard from last are remembered


class Pacing:
    def __init__(self, store, policies, patience):
        """`patience` is how many seconds a worker without groups waits for an answer."""
        self.store, self.policies, self.patience = store, policies, patience
        self.workers = {}  # name -> {"groups", "held", "version", "seen"}

    def work(self, worker, held, want, run, version, sha256, pulled=False):
        """Returns {"policy": record or None, "first": position, "count": n}: the newest policy, and
        what to sample (Policies.take_prompts); while there is a newer policy the count is 0.

        `held` groups are outstanding at the worker, which could begin `want` more with `version` of
        `run`. `sha256` is that policy's: a resumed run may give a version other weights. `pulled`:
        see is_newer. A worker without groups waits while there is no run or no room. Raises
        ValueError for a malformed name.
        """
        if not is_name(worker):
            raise ValueError("a worker's name has 1 to 200 printable characters")
        deadline = time.monotonic() + (0 if held else self.patience)
        with self.store.db.changed:
            while True:
                me = self._remember(worker, max(0, held), version)
                record = self.policies.record()
                newer = record and is_newer(record, run, version, sha256, pulled)
                count = max(0, min(want, self._room(record))) if record and not newer else 0
                left = deadline - time.monotonic()
                if newer or count or left <= 0:
                    first = self.policies.take_prompts(record["run"], count) if count else 0
                    me["held"] += count
                    return {"policy": record, "first": first, "count": count}
                self.store.db.changed.wait(left)

    def _remember(self, worker, held, version):
        if len(self.workers) > MAX_WORKERS:  # whatever names come, the table stays short
            del self.workers[min(self.workers, key=lambda name: self.workers[name]["seen"])]
        me = self.workers.setdefault(worker, {"groups": 0})
        me |= {"held": held, "version": version, "seen": time.monotonic()}
        return me

    def _room(self, record):
        """Returns how many groups may be begun now."""
        alive = time.monotonic() - WORKER_SECONDS
        held = sum(w["held"] for w in self.workers.values() if w["seen"] > alive)
        return record["capacity"] - self.store.queued(record["run"]) - held

    def uploaded(self, worker):
        """Counts a stored group of the worker. It stays outstanding until the worker asks again."""
        with self.store.db.changed:
            if worker in self.workers:
                self.workers[worker]["groups"] += 1
                self.workers[worker]["seen"] = time.monotonic()

    def stats(self):
        """Returns for each worker its groups uploaded and outstanding ("held"), the version of its
        policy, and the seconds since it was heard from."""
        now = time.monotonic()
        with self.store.db.changed:
            return {
                name: {"groups": w["groups"], "held": w["held"], "version": w["version"]}
                | {"seen_s": round(now - w["seen"], 1)}
                for name, w in self.workers.items()
            }


def is_newer(record, run, version, sha256, pulled):
    """Whether a worker with these weights should fetch the record's before it samples; not where it
    has just `pulled` its own and they are not too old: over a slow link it would fetch for ever."""
    if pulled and record["run"] == run and version >= record["oldest"]:
        return False
    return (record["run"], record["version"], record["sha256"]) != (run, version, sha256)
