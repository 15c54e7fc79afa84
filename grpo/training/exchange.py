"""Groups and reference log-probs on their way between the reference server and the ranks.

Rank 0 alone leases groups, into its Inbox, and shares them. Of the ranks' own groups only the
reference's log-probs come back (ReferenceLogps), while the first micro-batches are trained: so
scoring takes no time of its own. Every rank knows all groups of the step, and computes denominators
and everyone's micro-batches by itself.

All ranks call a function marked "Collective", in the same order; otherwise the run hangs.
"""

import torch.distributed as dist

from grpo.stop import Wait
from grpo.training.liveness import gathered, meet
from grpo.wire import pack_group, unpack_group


# --- Between the ranks ---------------------------------------------------------------
def shared(value):
    """Collective: returns rank 0's value, on all ranks."""
    if dist.get_world_size() == 1:  # as it is: pickling a step's log-probs takes 10 ms
        return value
    box = [value]
    meet("rank 0 (it waits for the server, or for workers)")
    dist.broadcast_object_list(box, src=0)
    return box[0]


def gather_groups(mine):
    """Collective: returns the groups that all ranks have sampled."""
    if dist.get_world_size() == 1:
        return list(mine)
    everyone = gathered([pack_group(group) for group in mine], "the other ranks' groups")
    return [unpack_group(body) for bodies in everyone for body in bodies]


def finish_uploads(uploader):
    """Waits until the server has this rank's groups; `uploader` may be None. RuntimeError if it
    refuses groups of this run."""
    if uploader and any(reply.get("dropped") for reply in uploader.finish()):
        url = uploader.server.url
        raise RuntimeError(f"{url} refuses this run's groups: does another trainer run?")


# --- From the server ------------------------------------------------------------------
class Inbox:
    """The scored groups of the run that rank 0 has leased from the server, each only once: when a
    lease expires unacknowledged, the server hands its groups out again."""

    def __init__(self, server, run, wait_limit_seconds):
        self.server, self.run, self.limit = server, run, wait_limit_seconds
        self.seen = set()  # ids of all groups received
        self.groups = {}  # groups received and not taken yet, by id
        self.expected = set()  # ids of the ranks' own groups of this step, and ...
        self.ref_logps = {}  # ... what came for them: ((N,) log-probs, completion lengths)
        self.oldest = 0  # version of the oldest usable policy

    def expect(self, ids, *, oldest):
        """Of these groups, which the ranks have, only the log-probs are wanted from now on."""
        self.expected, self.ref_logps, self.oldest = set(ids), {}, oldest

    def fetch(self, number, *, patience):
        """Leases up to `number` groups, or all whose log-probs are wanted; with patience the server
        waits for the first of them. Returns whether any is new."""
        number = max(number, len(self.expected - self.seen))
        bodies = self.server.lease(self.run, number, oldest=self.oldest, patience=patience)
        new = [unpack_group(bodies[id]) for id in bodies.keys() - self.seen]
        self.seen |= bodies.keys()
        for group in sorted(new, key=lambda group: group.id):
            if group.id in self.expected:
                self.ref_logps[group.id] = group.ref_logps, group.completion_lengths.tolist()
            else:
                self.groups[group.id] = group
        return bool(new)

    def fetch_until(self, missing, what, why=lambda: "the server has not scored them yet"):
        """Fetches until `missing()`, a number of groups, is 0. Says every 10 s what it waits for,
        and `why()`; RuntimeError if nothing new comes for the limit."""
        wait = Wait(f"{what} of {self.run} from {self.server.url}", self.limit)
        while (number := missing()) > 0:
            if self.fetch(number, patience=True):
                wait.moved()
            else:
                wait.turn(f"{number} missing; {why()}", pause=0)

    def drop_older(self, oldest):
        """Drops groups that are too old, here and at the server, which would lease them again."""
        old = [id for id, group in self.groups.items() if group.policy_version < oldest]
        if old:
            self.server.drop(self.run, old, "too old")
            self.server.dropped += len(self.take(old))

    def take(self, ids):
        return [self.groups.pop(id) for id in ids]

    def forget_groups(self):
        """The reference is a new one: the server scores and leases again what was not taken yet."""
        self.seen -= self.groups.keys()
        self.groups = {}


def take_workers_groups(inbox, number, *, oldest, wait):
    """Collective: returns up to `number` groups that workers have sampled; with `wait` no fewer.
    Groups of a policy before version `oldest` are dropped and counted. `inbox` is None but on rank
    0."""
    groups = []
    if inbox:
        inbox.expect([], oldest=oldest)
        inbox.drop_older(oldest)
        if wait:
            inbox.fetch_until(
                lambda: number - len(inbox.groups), "groups", lambda: workers_state(inbox.server)
            )
        while (missing := number - len(inbox.groups)) > 0 and inbox.fetch(missing, patience=False):
            pass
        groups = inbox.take(list(inbox.groups)[:number])
    return shared(groups)


def acknowledge(run, groups, step):
    """Collective: reports these groups to the server as trained, after `step` updates. Returns
    whether groups that no checkpoint covers fill half of its store."""
    if not run.server:
        return False
    with run.clock.part("wait"):
        ids = [group.id for group in groups]
        return shared(run.server.ack(run.progress.run, ids, step) if run.inbox else False)


def staleness(inbox, groups, step):
    """Returns metrics: updates made since the groups were sampled, mean and largest, and how many
    groups were too old so far. `inbox` is None but on rank 0, which logs them."""
    ages = [max(0, step - group.policy_version) for group in groups]
    mean, most = sum(ages) / max(len(ages), 1), max(ages, default=0)
    dropped = inbox.server.dropped if inbox else 0
    return {"staleness": mean, "staleness_max": most, "groups_dropped": dropped}


def workers_state(server):
    """Returns a sentence about the workers that the server has heard of, and its groups."""
    stats = server.stats()
    states = ("waiting", "scored", "leased", "failed")
    groups = ", ".join(f"{stats[name]} {name}" for name in states if stats.get(name)) or "none"
    workers = stats.get("workers", {}).items()
    held = [f"{name} has {w['held']} outstanding" for name, w in workers if w["seen_s"] < 60]
    if held:
        return f"{', '.join(held)}; groups at the server: {groups}"
    quiet = "no worker was heard of for a minute: is `python grpo_ref_split.py worker` running?"
    return f"{quiet} Groups at the server: {groups}"


class ReferenceLogps:
    """The reference's log-probs of the ranks' own groups of a step, as they arrive.

    All ranks know the same, and so decide alike. Without a KL penalty nothing is expected, and no
    server is asked.
    """

    def __init__(self, inbox, clock):
        """`inbox` is None but on rank 0; `clock` gets the time of waiting."""
        self.inbox, self.clock = inbox, clock
        self.expected, self.arrived = set(), {}  # ids; {id: [(T,) of each completion]}

    def expect(self, ids, *, oldest):
        """A step begins, and the ranks have uploaded these groups; see Inbox.expect."""
        self.expected, self.arrived = set(ids), {}
        if self.inbox:
            self.inbox.expect(ids, oldest=oldest)

    def have(self, ids):
        """Returns whether the log-probs of all these groups are here, or were not asked for."""
        return ids & self.expected <= self.arrived.keys()

    def in_order_of_arrival(self, turns):
        """Collective: yields the turns, always one whose `groups` (a set of ids) are scored; if no
        turn is ready, the last one: the shortest completions are uploaded first."""
        left = list(turns)
        while left:
            with self.clock.part("wait"):
                if len(left) > 1 and not any(self.have(turn.groups) for turn in left):
                    if self.inbox:
                        self.inbox.fetch(0, patience=False)  # whatever is expected
                    self._share()
            first = (i for i, turn in enumerate(left) if self.have(turn.groups))
            yield left.pop(next(first, -1))

    def wait_for(self, ids):
        """Collective: returns when the log-probs of all these groups are here."""
        if self.have(ids):
            return
        with self.clock.part("wait"):
            if self.inbox:
                missing = (ids & self.expected) - self.arrived.keys()
                self.inbox.fetch_until(
                    lambda: len(missing - self.inbox.ref_logps.keys()), "log-probs"
                )
            self._share()

    def complete(self, turn):
        """Collective: gives the turn's sequences that have no reference log-probs theirs."""
        self.wait_for(turn.groups)
        for sequence in turn.batch:
            if sequence.ref_logps is None and sequence.group in self.expected:
                sequence.ref_logps = self.arrived[sequence.group][sequence.number]

    def _share(self):
        """Collective: all ranks get what rank 0 has fetched."""
        new = shared(self.inbox.ref_logps if self.inbox else None)
        self.arrived |= {id: logps.split(lengths) for id, (logps, lengths) in new.items()}
        if self.inbox:
            self.inbox.ref_logps = {}
