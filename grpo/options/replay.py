"""REPLAY = N: a zero-variance group takes a completion of the other outcome from N rollouts back.

The completion replaces the last one of the group, which then is no longer flat: it is trained, and
not replaced (MAX_REFILLS). It keeps the version and the log-probs with which it was sampled. So its
rollout is trained as if a worker had sent it: the ratio is taken to the sampler's log-probs, and
IS_CAP bounds it. Each rank keeps the completions that it sampled itself, and a run that resumes
begins with none.

Choosing by outcome biases the gradient: benchmarks/results/regroup.md.
"""

import math
from collections import deque
from dataclasses import replace


class Replay:
    """Calling it with a group, of any rollout that is not older than the last, returns whether the
    group took a completion. `outcome` names the reward that decides correctness."""

    def __init__(self, rollouts, outcome):
        self.outcome, self.version = outcome, None
        # Of each rollout, this one first: {(a question's index, whether it is right): a Sample}
        self.kept = deque(maxlen=1 + rollouts)

    def __call__(self, group):
        if group.version != self.version:
            self.version = group.version
            self.kept.appendleft({})
        outcomes = set()
        for sample in group.samples:
            if not math.isnan(reward := sample.rewards[self.outcome]):  # NaN: it does not apply
                outcomes.add(reward > 0)
                old = replace(sample, version=group.version)  # a copy: training changes the sample
                self.kept[0][group.index, reward > 0] = old
        if not group.flat or len(outcomes) != 1:
            return False
        key = group.index, not outcomes.pop()
        found = next((kept[key] for kept in self.kept if key in kept), None)
        if found:
            group.samples[-1], group.flat = replace(found), False
        return bool(found)
