"""Metrics of a task whose completions may have several turns."""

import itertools


def turn_metrics(samples):
    """Returns means over completions of several turns: the number of the model's turns, whether the
    task has replied at all, and the number of tokens that it added; and the share of calls of TOOLS
    that failed."""
    masks, number = [sample.is_model_token or [True] for sample in samples], max(len(samples), 1)
    turns = [1 + sum(a < b for a, b in itertools.pairwise(mask)) for mask in masks]
    heard = [mask.count(False) for mask in masks]
    means = {"num_turns/mean": turns, "environment_tokens": heard}
    means |= {"tools/call_share": list(map(bool, heard))}
    means = {name: sum(values) / number for name, values in means.items()}
    made, failed = map(sum, zip((0, 0), *(sample.tool_calls for sample in samples), strict=True))
    if made:
        means["tools/failure_frequency"] = failed / made
    return means | {"num_turns/max": max(turns, default=0)}
