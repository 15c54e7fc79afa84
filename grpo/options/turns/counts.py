"""Metrics of a task whose completions may have several turns."""

import itertools
from collections import Counter

from grpo.ranks import add_up, gathered


def turn_metrics(groups):
    """Collective: returns means over all ranks' completions of several turns: the number of the
    model's turns, whether the task has replied at all, and the number of tokens that it added; and
    the share of calls of TOOLS that failed."""
    samples = [sample for group in groups for sample in group.samples]
    masks = [sample.is_model_token or [True] for sample in samples]
    turns = [1 + sum(a < b for a, b in itertools.pairwise(mask)) for mask in masks]
    heard = [mask.count(False) for mask in masks]
    count = Counter(n=len(masks), turns=sum(turns), heard=sum(heard), calls=sum(map(bool, heard)))
    count["made"], count["failed"] = map(sum, zip((0, 0), *(s.tool_calls for s in samples)))
    total, most = add_up(count), max(gathered(max(turns, default=0)))  # collective
    means = {"num_turns/mean": "turns", "tools/call_share": "calls", "environment_tokens": "heard"}
    means = {name: total[key] / max(total["n"], 1) for name, key in means.items()}
    if total["made"]:
        means["tools/failure_frequency"] = total["failed"] / total["made"]
    return means | {"num_turns/max": most}
