"""What rank 0 fetches from the reference server and shares with the other ranks.

Groups that workers sampled come whole. Of what the ranks sampled themselves they have all but the
reference's log-probs: those arrive while the first micro-batches are trained, so that scoring takes
no time of its own. Every rank sees the whole step, and works out denominators and everyone's
micro-batches by itself; none can disagree.
"""

import functools
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from grpo.client import Wait
from grpo.packing import number_prompts, plan_micro_batches
from grpo.training.liveness import meet
from grpo.wire import check_group, pack_group, unpack_group

WORKER = "python grpo_ref_split.py worker"


class Exchange:
    """All ranks call its methods together; only rank 0 talks to the server."""

    def __init__(self, server, run, wait_limit_seconds):
        self.server, self.run, self.limit = server, run, wait_limit_seconds
        self.seen = set()  # ids of all that came: a lease that ran out hands them out again
        self.spare = {}  # rank 0: groups of workers that came and nobody asked for yet, by id
        self.wanted, self.scores = set(), {}  # what was sampled for this step; {id: [(T,), ...]}
        self.fresh = {}  # rank 0: log-probs (N,) and lengths that the other ranks do not know yet
        self.dropped, self.oldest = 0, 0  # groups that were too old; policies that are not
        self.step = 0  # updates so far

    @property
    def same_machine(self):
        """Whether the server's address is this machine's, so that it may share the ranks' cores."""
        return urlsplit(self.server.url).hostname in ("127.0.0.1", "localhost", "::1")

    def workers_groups(self, number, *, step, oldest, wait):
        """-> up to `number` groups that workers sampled, just so many if `wait`.

        `step` is the updates made so far. Those that a policy before version `oldest` sampled are
        dropped, and counted.
        """
        self.wanted, self.step, groups = set(), step, []
        if dist.get_rank() == 0:
            waiting = Wait(f"groups of {self.run} from {self.server.url}", self.limit)
            while True:
                self._drop([id for id, g in self.spare.items() if g.policy_version < oldest])
                groups += [self.spare.pop(id) for id in list(self.spare)[: number - len(groups)]]
                if len(groups) == number:
                    break
                if self._fetch(number - len(groups), oldest, patience=wait):
                    waiting.moved()
                elif not wait:
                    break
                else:
                    missing = f"{number - len(groups)} of {number} are missing"
                    waiting.turn(f"{missing}; {who_samples(self.server.stats())}", pause=0)
        return self._shared(groups)

    def begin(self, ids, *, step, oldest):
        """The ranks have uploaded groups with these ids, to have them scored; what a policy before
        version `oldest` sampled is of no more use to this run."""
        self.wanted, self.scores, self.step, self.oldest = set(ids), {}, step, oldest
        self.fresh = {}

    def whole(self, ids):
        """-> these groups, once the server has scored them all."""
        groups = []
        if dist.get_rank() == 0:
            waiting = Wait(f"regrouped groups from {self.server.url}", self.limit)
            while missing := set(ids) - self.spare.keys():
                if self._fetch(len(missing), self.oldest, patience=True):
                    waiting.moved()
                else:
                    waiting.turn(f"{len(missing)} of {len(ids)} are not scored yet", pause=0)
            groups = [self.spare.pop(id) for id in ids]
        self._tell()  # scores may have come with them, and all ranks must know the same
        return self._shared(groups)

    def first_scored(self, choices):
        """-> the number of one of `choices`, sets of ids, whose scores are there; if there is none,
        of the last: a step's shortest completions are uploaded first. Does not wait."""
        if len(choices) > 1 and not any(map(self.has, choices)):
            self.look(set().union(*choices))
        return next((i for i, ids in enumerate(choices) if self.has(ids)), len(choices) - 1)

    def look(self, ids):
        """Takes what has been scored of these groups; does not wait."""
        missing = len((ids & self.wanted) - self.scores.keys())
        if missing:
            if dist.get_rank() == 0:
                self._fetch(missing, self.oldest, patience=False)
            self._tell()

    def has(self, ids):
        """Whether `self.scores` has the log-probs of all these groups that were sampled for this
        step: the same on all ranks, without a word."""
        return ids & self.wanted <= self.scores.keys()

    def wait_for(self, ids):
        """Returns when it has them, on all ranks."""
        if self.has(ids):
            return
        ids = ids & self.wanted
        if dist.get_rank() == 0:
            waiting = Wait(f"log-probs of {self.run} from {self.server.url}", self.limit)
            while missing := len(ids - self.scores.keys() - self.fresh.keys()):
                left = self.wanted - self.scores.keys() - self.fresh.keys()
                if self._fetch(len(left), self.oldest, patience=True):
                    waiting.moved()
                else:
                    waiting.turn(f"{missing} groups are not scored yet", pause=0)
        self._tell()

    def _fetch(self, number, oldest, patience):
        """Leases up to `number` groups. -> whether any came that had not come before."""
        bodies = self.server.lease(
            self.run, number, oldest=oldest, step=self.step, patience=patience
        )
        self.dropped, self.server.dropped = self.dropped + self.server.dropped, 0
        new = [unpack_group(bodies[id]) for id in bodies.keys() - self.seen]
        self.seen |= bodies.keys()
        for group in sorted(new, key=lambda group: group.id):
            if group.id in self.wanted:
                self.fresh[group.id] = group.ref_logps, group.completion_lengths.tolist()
            else:
                self.spare[group.id] = group
        return bool(new)

    def _tell(self):
        """All ranks take in the log-probs that rank 0 has fetched."""
        fresh, self.fresh = self._shared(self.fresh), {}
        self.scores |= {id: logps.split(lengths) for id, (logps, lengths) in fresh.items()}

    def _drop(self, ids):
        """Forgets spare groups that are too old; the server would hand them out again."""
        if ids:
            self.server.drop(self.run, ids, "too old")
        self.dropped += len([self.spare.pop(id) for id in ids])

    def staleness(self, groups, step):
        """-> metrics: how many of `step` updates the groups have missed, and how many were too old
        to be among them."""
        ages = [max(0, step - group.policy_version) for group in groups]
        mean, most = sum(ages) / max(len(ages), 1), max(ages, default=0)
        return {"staleness": mean, "staleness_max": most, "groups_dropped": self.dropped}

    def trained(self, groups, step, clock):
        """Tells the server that these groups were trained, after `step` updates. -> whether its
        store is half full of what was trained, and wants a checkpoint."""
        half_full = False
        with clock.part("wait"):
            if dist.get_rank() == 0:
                half_full = self.server.ack(self.run, [group.id for group in groups], step)
            return self._shared(half_full)

    def new_reference(self, version):
        """Rank 0 only: makes that policy, which was published, the reference. The server scores
        spare groups again, and hands them out again."""
        self.server.set_reference(self.run, version)
        self.seen -= self.spare.keys()
        self.spare = {}

    def _shared(self, value):
        """-> rank 0's value, on all ranks."""
        if dist.get_world_size() == 1:  # as it is: pickling a step's log-probs takes 10 ms
            return value
        meet("the other ranks (rank 0 asks the server)")
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]


def all_ranks_groups(mine, uploader, exchange, *, step, oldest, scored):
    """-> what all ranks sampled for this step, this one `mine`, and what the server made of flat
    groups. `uploader` has got what the server needs: flat ones, and if `scored` the others; it is
    None where that is nothing, and `exchange` where there is no server."""
    replies = uploader.finish() if uploader else []
    if any(reply.get("dropped") for reply in replies):
        url = uploader.server.url
        raise RuntimeError(f"{url} refuses this run's groups: does another trainer run?")
    joined = [id for reply in replies for id in reply.get("joined", [])]
    groups, world = list(mine), dist.get_world_size()
    if not scored:  # else the server does
        for group in mine:
            check_group(group, None, None)
    if world > 1:
        everyone = [None] * world
        meet("the other ranks' groups")
        dist.all_gather_object(everyone, ([pack_group(group) for group in mine], joined))
        groups = [unpack_group(body) for bodies, _ in everyone for body in bodies]
        joined = [id for _, ids in everyone for id in ids]
    if exchange:
        exchange.begin((g.id for g in groups if scored), step=step, oldest=oldest)
        groups += exchange.whole(joined)
    return groups


def who_samples(stats):
    """-> a sentence about the workers that the server has heard of, and what waits there."""
    workers = {n: w for n, w in stats.get("workers", {}).items() if w["seen_s"] < 60}
    states = ("waiting", "scored", "leased", "pooled", "failed")
    waits = ", ".join(f"{stats[name]} {name}" for name in states if stats.get(name)) or "nothing"
    if not workers:
        return f"no worker was heard of for a minute: is `{WORKER}` running? At the server: {waits}"
    held = ", ".join(f"{name} has {w['held']} in hand" for name, w in workers.items())
    return f"{held}; at the server: {waits}"


# --- The order ----------------------------------------------------------------------
def micro_batches(rows, engine, exchange, clock, *, budget, threads, own_cores):
    """Yields (mine, last, score) for each micro-batch: this rank's rows, perhaps none; whether it
    is the step's last; and what waits for their log-probs under the reference.

    That which the reference has scored first comes first, the same on all ranks. `threads` are this
    process's on a CPU: one less while a server beside it scores, unless they are its `own_cores`.
    """
    numbers = number_prompts([row.prompt for row in rows], engine.module.shares)
    sizes = [(n, len(r.prompt), len(r.completion)) for n, r in zip(numbers, rows, strict=True)]
    plans = plan_micro_batches(sizes, dist.get_world_size(), budget)
    left = list(range(len(plans[0])))  # numbers of micro-batches; each rank has as many
    needs = [{rows[i].group for plan in plans for i in plan[k]} for k in left]
    everything = set().union(*needs)
    beside = exchange and exchange.same_machine
    shared = beside and engine.device.type == "cpu" and not own_cores

    def share_cores():
        # A server on these cores is computing meanwhile: a thread too many waits for the others
        if shared:
            torch.set_num_threads(max(1, threads - (not exchange.has(everything))))

    def score(mine, groups):
        if exchange:
            with clock.part("wait"):
                exchange.wait_for(groups)
                if shared and dist.get_world_size() == 1:  # where it costs no broadcast
                    exchange.look(everything)
                share_cores()
            for row in mine:
                if row.ref_logps is None and row.group in exchange.scores:
                    row.ref_logps = exchange.scores[row.group][row.number]

    torch.set_num_threads(threads)
    while left:
        with clock.part("wait"):
            now = left.pop(exchange.first_scored([needs[k] for k in left]) if exchange else 0)
            share_cores()
        mine = [rows[i] for i in plans[dist.get_rank()][now]]
        yield mine, not left, functools.partial(score, mine, needs[now])
