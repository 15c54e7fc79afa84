"""Regrouping (REGROUP): two zero-variance groups of a prompt, one all right, one all wrong, become
two groups with something to compare.

    pool = Pool(store)
    pool.add(group, body, oldest)  # -> [], and it is kept; or the ids of two groups to score

Measured (benchmarks/results/regroup.md): of 8 completions all wrong and, within four steps, all
right, not once in 60 steps; of 2 one flat group in 18. The accuracy was no higher for it.
"""

from dataclasses import replace

import torch

from grpo.wire import is_flat, pack_group, unpack_group


class Pool:
    """Flat groups in the store that wait for another of their prompt."""

    def __init__(self, store):
        self.store = store

    def add(self, group, body, oldest):
        """Keeps a flat group, or joins it with one that fits it and that policy `oldest` or a newer
        one sampled. Returns the ids of the groups to score that come of it, none or two; the same
        for a repeat. Raises StoreFull, and ValueError if the id is too long to be extended."""
        if len(group.id) > 198:
            raise ValueError("the id of a group to be joined has 198 characters at most")
        with self.store.transaction():
            if self.store.known(group):
                query = "SELECT id FROM groups WHERE run=? AND id IN (?, ?)"
                ids = self.store.db.rows(query, (group.run, f"{group.id}+0", f"{group.id}+1"))
                return [id for (id,) in ids]
            pooled = self.store.db.rows(
                "SELECT seq, made, body FROM groups JOIN bodies USING (seq) WHERE state='pooled'"
                " AND run=? AND item=? AND version>=? ORDER BY seq DESC",
                (group.run, group.item, oldest),
            )
            for seq, made, other in pooled:
                if joined := join_flat(unpack_group(other), group):
                    self._join(seq, made, group, body, joined)
                    return [new.id for new in joined]
            self.store.insert(group, body, "pooled")
            return []

    def _join(self, seq, made, group, body, joined):
        """Puts `joined` in the place of the pooled group `seq` and of `group`. `made` is the step
        in which the ranks sampled the former, or None. They sample it again if the step is undone:
        then the join is undone, too, and a worker's part of it is pooled again."""
        own = group.sampler == "trainer"
        steps = [made, group.policy_version if own else None]
        made = max((step for step in steps if step is not None), default=None)
        kept = body if made is not None and not own else b""
        mine = self.store.insert(group, kept, "pooled")
        self.store.move("join", "seq=?", (seq,), step=made)
        self.store.move("join", "seq=?", (mine,), step=made if kept else None)
        for new in joined:
            self.store.insert(new, pack_group(new), "waiting", made=made)


def join_flat(old, new):
    """Returns two groups, each of half of either's completions; [] if both have the same outcome.

    They have as many completions as `new`, log-probs of whoever sampled, and the version of the
    older policy.
    """
    column, size = new.reward_names.index(new.outcome), len(new.completion_lengths)
    if old.reward_names != new.reward_names or len(old.completion_lengths) != size or size < 2:
        return []
    if is_flat([old.rewards[0, column].item(), new.rewards[0, column].item()]):
        return []
    version = min(old.policy_version, new.policy_version)
    base = replace(new, sampler="regrouped", skipped={}, policy_version=version, ref_logps=None)
    first, second = size // 2, size - size // 2  # completions of old and of new in the first group
    cuts = [(slice(first), slice(second)), (slice(first, None), slice(second, None))]
    joined = []
    for i, (a, b) in enumerate(cuts):
        parts = {name: torch.cat([part(old, name, a), part(new, name, b)]) for name in PARTS}
        joined.append(replace(base, id=f"{new.id}+{i}", **parts))
    return joined


PARTS = ("completion_ids", "completion_lengths", "sampler_logps", "truncated", "rewards")


def part(group, name, which):
    """Returns what the field `name` holds of the completions `which`, a slice."""
    values = getattr(group, name)
    if name in ("completion_ids", "sampler_logps"):
        return torch.cat(group.completions(values)[which])
    return values[which]
