"""Regrouping (REGROUP): two zero-variance (flat) groups of a prompt, one all right, one all wrong,
become two groups with advantages.

Measured (benchmarks/results/regroup.md): groups of 8 completions were all wrong and, within four
steps, all right, not once in 60 steps; of groups of 2, one flat group in 18 was joined. The
accuracy was no higher for it.
"""

from dataclasses import replace

import torch

from grpo.wire import is_flat, pack_group, unpack_group


def add_flat(store, group, body, oldest):
    """Keeps a flat group, or joins it with one that fits it, sampled by policy version `oldest`
    or later. Returns the ids of the groups that come of it, none or two; the same for a repeat.
    Raises StoreFull, and ValueError if the id is too long to be extended."""
    if len(group.id) > 198:
        raise ValueError("the id of a group to be joined has 198 characters at most")
    with store.transaction():
        if store.known(group):
            query = "SELECT id FROM groups WHERE run=? AND id IN (?, ?)"
            ids = store.db.rows(query, (group.run, f"{group.id}+0", f"{group.id}+1"))
            return [id for (id,) in ids]
        pooled = store.db.rows(
            "SELECT seq, made, body FROM groups JOIN bodies USING (seq) WHERE state='pooled'"
            " AND run=? AND item=? AND version>=? ORDER BY seq DESC",
            (group.run, group.item, oldest),
        )
        for seq, made, other in pooled:
            if joined := join_flat(unpack_group(other), group):
                join(store, seq, made, group, body, joined)
                return [new.id for new in joined]
        store.insert(group, body, "pooled")
        return []


def join(store, seq, made, group, body, joined):
    """Puts `joined` in the place of the pooled group `seq` and of `group`. `made` is the step
    in which the ranks sampled the former, or None. They sample it again if the step is undone:
    then the join is undone, too, and a worker's part of it is pooled again."""
    own = group.sampler == "trainer"
    steps = [made, group.policy_version if own else None]
    made = max((step for step in steps if step is not None), default=None)
    kept = body if made is not None and not own else b""
    store.move("join", "seq=?", (seq,), step=made)  # first: to insert may evict what is pooled
    mine = store.insert(group, kept, "pooled")
    store.move("join", "seq=?", (mine,), step=made if kept else None)
    for new in joined:
        store.insert(new, pack_group(new), "waiting", made=made)


PARTS = ("completion_ids", "completion_lengths", "sampler_logps", "truncated", "rewards")


def join_flat(old, new):
    """Returns two groups as large as `new`, each of half of either's completions, with the version
    of the older policy; [] if the two do not fit, or have the same outcome."""
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


def part(group, name, which):
    """Returns the field `name` of the completions `which`, a slice."""
    values = getattr(group, name)
    if name in ("completion_ids", "sampler_logps"):
        return torch.cat(group.completions(values)[which])
    return values[which]
