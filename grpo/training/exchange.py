"""Groups and reference log-probs on their way between the reference server and the ranks.

    gather_groups                            what the ranks have sampled, on every rank
    Inbox                                    what rank 0, which alone leases, has been handed out
    take_workers_groups, take_regrouped      groups that come whole out of the inbox
    ReferenceLogps                           those of the ranks' own groups, as they are scored

Of the groups that the ranks sampled only the reference's log-probs come back, while the first
micro-batches are trained: scoring then takes no time of its own. Every rank gets to know the whole
step, and works out denominators and everyone's micro-batches by itself; none can disagree.

Collective functions say so in the first word of their docstring: all ranks call them, in the same
order, or the run hangs.
"""

import torch.distributed as dist

from grpo.stop import Wait
from grpo.training.liveness import gathered, meet
from grpo.wire import pack_group, unpack_group

WORKER = "python grpo_ref_split.py worker"


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
    """Waits until the server has this rank's groups. Returns the ids of those that it has made of
    zero-variance ones (regrouping). RuntimeError if it takes no groups of this run."""
    replies = uploader.finish()
    if any(reply.get("dropped") for reply in replies):
        url = uploader.server.url
        raise RuntimeError(f"{url} refuses this run's groups: does another trainer run?")
    return [id for reply in replies for id in reply.get("joined", [])]


# --- From the server ------------------------------------------------------------------
class Inbox:
    """What rank 0 has leased from the server: groups of the run that are scored, each only once.

    A lease that was not acknowledged in time runs out, and the server hands its groups out again:
    to the same run, which has them already.
    """

    def __init__(self, server, run, wait_limit_seconds):
        self.server, self.run, self.limit = server, run, wait_limit_seconds
        self.seen = set()  # ids of all groups that came
        self.groups = {}  # groups that came and were not taken yet, by id
        self.expected = set()  # ids of the ranks' own groups of this step, and ...
        self.ref_logps = {}  # ... of those that came: ((N,) log-probs, completion lengths)
        self.dropped = 0  # groups that were too old to be trained
        self.step = self.oldest = 0  # updates made; version of the oldest policy that may be used

    def expect(self, ids, *, step, oldest):
        """From now on these groups, which the ranks have, are wanted for their log-probs alone."""
        self.expected, self.ref_logps, self.step, self.oldest = set(ids), {}, step, oldest

    def fetch(self, number, *, patience):
        """Leases up to `number` groups, or all whose log-probs are wanted; with patience the server
        waits for the first of them. Returns whether any came that had not come before."""
        number = max(number, len(self.expected - self.seen))
        bodies = self.server.lease(
            self.run, number, oldest=self.oldest, step=self.step, patience=patience
        )
        self.dropped, self.server.dropped = self.dropped + self.server.dropped, 0
        new = [unpack_group(bodies[id]) for id in bodies.keys() - self.seen]
        self.seen |= bodies.keys()
        for group in sorted(new, key=lambda group: group.id):
            if group.id in self.expected:
                self.ref_logps[group.id] = group.ref_logps, group.completion_lengths.tolist()
            else:
                self.groups[group.id] = group
        return bool(new)

    def fetch_until(self, missing, what, why=lambda: "the server has not scored them yet"):
        """Fetches until `missing()`, a number of groups, is 0. Says every 10 s what it waits for
        and `why()`; RuntimeError when nothing new has come for the limit."""
        wait = Wait(f"{what} of {self.run} from {self.server.url}", self.limit)
        while (number := missing()) > 0:
            if self.fetch(number, patience=True):
                wait.moved()
            else:
                wait.turn(f"{number} missing; {why()}", pause=0)

    def drop_older(self, oldest):
        """Forgets groups that are too old, here and at the server, which would lease them again."""
        old = [id for id, group in self.groups.items() if group.policy_version < oldest]
        if old:
            self.server.drop(self.run, old, "too old")
        self.dropped += len([self.groups.pop(id) for id in old])

    def take(self, ids):
        """Returns these groups, which have come."""
        return [self.groups.pop(id) for id in ids]

    def forget_groups(self):
        """The server has a new reference: it scores and leases again what was not taken yet."""
        self.seen -= self.groups.keys()
        self.groups = {}


def take_workers_groups(inbox, number, *, step, oldest, wait):
    """Collective: returns up to `number` groups that workers have sampled; with `wait` just so
    many. `step` is the updates made so far; groups of a policy before version `oldest` are dropped,
    and counted. `inbox` is None but on rank 0."""
    groups = []
    if inbox:
        inbox.expect([], step=step, oldest=oldest)
        inbox.drop_older(oldest)
        if wait:
            inbox.fetch_until(
                lambda: number - len(inbox.groups), "groups", lambda: workers_state(inbox.server)
            )
        while (missing := number - len(inbox.groups)) > 0 and inbox.fetch(missing, patience=False):
            pass
        groups = inbox.take(list(inbox.groups)[:number])
    return shared(groups)


def take_regrouped(inbox, ids):
    """Collective: returns the groups that the server has made of the ranks' zero-variance ones,
    once they are scored; `ids` are this rank's. `inbox` is None but on rank 0."""
    ids = [id for some in gathered(ids, "the other ranks' groups") for id in some]
    groups = []
    if inbox:
        inbox.fetch_until(lambda: len(set(ids) - inbox.groups.keys()), "regrouped groups")
        groups = inbox.take(ids)
    return shared(groups)


def acknowledge(run, groups, step):
    """Collective: tells the server, if there is one, that these groups were trained, after `step`
    updates. Returns whether its store is half full of what no checkpoint covers."""
    if not run.server:
        return False
    with run.clock.part("wait"):
        ids = [group.id for group in groups]
        return shared(run.server.ack(run.progress.run, ids, step) if run.inbox else False)


def staleness(inbox, groups, step):
    """Returns metrics: how many of `step` updates the groups have missed, on average and at most,
    and how many groups were too old so far. `inbox` is None but on rank 0, which logs them."""
    ages = [max(0, step - group.policy_version) for group in groups]
    mean, most = sum(ages) / max(len(ages), 1), max(ages, default=0)
    dropped = inbox.dropped if inbox else 0
    return {"staleness": mean, "staleness_max": most, "groups_dropped": dropped}


def workers_state(server):
    """Returns a sentence about the workers that the server has heard of, and its groups."""
    stats = server.stats()
    workers = {n: w for n, w in stats.get("workers", {}).items() if w["seen_s"] < 60}
    states = ("waiting", "scored", "leased", "pooled", "failed")
    groups = ", ".join(f"{stats[name]} {name}" for name in states if stats.get(name)) or "none"
    if not workers:
        return (
            f"no worker was heard of for a minute: is `{WORKER}` running? Groups at the server:"
            f" {groups}"
        )
    held = ", ".join(f"{name} has {w['held']} outstanding" for name, w in workers.items())
    return f"{held}; groups at the server: {groups}"


class ReferenceLogps:
    """The reference's log-probs of the groups that the ranks sampled for a step, as they arrive.

    All ranks know the same of them, and so decide alike. With nothing expected (no KL penalty)
    there is nothing to wait for, and no server is asked.
    """

    def __init__(self, inbox, clock):
        """`inbox` is None but on rank 0; `clock` gets the time of waiting."""
        self.inbox, self.clock = inbox, clock
        self.expected, self.arrived = set(), {}  # ids; {id: [(T,) of each completion]}

    def expect(self, ids, *, step, oldest):
        """The groups of a new step, which the ranks have uploaded; see Inbox.expect."""
        self.expected, self.arrived = set(ids), {}
        if self.inbox:
            self.inbox.expect(ids, step=step, oldest=oldest)

    def have(self, ids):
        """Whether the log-probs of all these groups are here (or were not asked for)."""
        return ids & self.expected <= self.arrived.keys()

    def in_order_of_arrival(self, turns):
        """Collective: yields the turns (with the set of ids of their `groups`), always one whose
        log-probs are here; where none is, the last: the shortest completions are uploaded first."""
        left = list(turns)
        while left:
            with self.clock.part("wait"):
                if len(left) > 1 and not any(self.have(turn.groups) for turn in left):
                    self._fetch(set().union(*(turn.groups for turn in left)))
            first = (i for i, turn in enumerate(left) if self.have(turn.groups))
            yield left.pop(next(first, -1))

    def wait_for(self, ids):
        """Collective: returns when the log-probs of all these groups are here."""
        if self.have(ids):
            return
        with self.clock.part("wait"):
            if self.inbox:
                there = self.inbox.ref_logps  # and self.arrived
                missing = (ids & self.expected) - self.arrived.keys()
                self.inbox.fetch_until(lambda: len(missing - there.keys()), "log-probs")
            self._share()

    def complete(self, sequences):
        """Gives the sequences that came without the reference's log-probs those that arrived."""
        for sequence in sequences:
            if sequence.ref_logps is None:
                sequence.ref_logps = self.arrived[sequence.group][sequence.number]

    def _fetch(self, ids):
        """Collective: takes what has been scored of these groups; does not wait."""
        if self.inbox:
            missing = (ids & self.expected) - self.arrived.keys() - self.inbox.ref_logps.keys()
            if missing:
                self.inbox.fetch(len(missing), patience=False)
        self._share()

    def _share(self):
        """Collective: all ranks get what rank 0 has fetched."""
        new = shared(self.inbox.ref_logps if self.inbox else None)
        self.arrived |= {id: logps.split(lengths) for id, (logps, lengths) in new.items()}
        if self.inbox:
            self.inbox.ref_logps = {}
