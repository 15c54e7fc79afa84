"""A step with nothing to train: which of its constants and numbers are the reason."""

from grpo.rewards import functions_of


def why_idle(recipe, metrics, groups):
    """Returns why a step trains nothing, as a text. `metrics` are the rollout's; `groups` are those
    that were not skipped."""
    c = recipe.c
    cut = f"{metrics['completions/clipped_ratio']:.0%} of the completions were truncated"
    kept = f"{len(groups)} of {metrics['groups_sampled']} groups were kept"
    names = "accuracy", "reward", "frac_reward_zero_std"
    found = ", ".join(f"{name} {metrics[name]:.2f}" for name in names if name in metrics)
    why = (
        f"{kept} (SKIP_FLAT_GROUPS = {c.SKIP_FLAT_GROUPS}, OUTCOME = {recipe.outcome!r}:"
        f" {found}), and {cut} (MASK_TRUNCATED = {c.MASK_TRUNCATED}, MAX_COMPLETION_TOKENS ="
        f" {c.MAX_COMPLETION_TOKENS})"
    )
    if c.MASK_TRUNCATED and (groups or metrics["completions/clipped_ratio"] == 1):  # all of them
        why += "; raise that limit, or train on them: MASK_TRUNCATED = False"
    if metrics.get("tools/call_share") == 0:
        why += "; reply() never returned a text: does the model make no call"
        why += ", or is STOP_STRINGS wrong?" if c.STOP_STRINGS else "?"
    if metrics.get("rewards/none") == 1:
        why = (
            f"no completion had a reward: {' and '.join(functions_of(recipe.task))} returned"
            " None for all of them, or took too long; is a service that the task asks down?"
        )
    return why
