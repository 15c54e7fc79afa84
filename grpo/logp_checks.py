"""Checks an update by log-probs: its samples are the policy's, and so is the reference."""

import math

from grpo.log import say
from grpo.policy import NOISE, check_gap
from grpo.ranks import RunFailed, all_or_none
from grpo.reference import is_teacher

MISMATCH = "sampling/sampling_logp_difference/mean"  # mean |d|, by TRL's name
# Largest relative difference between the temperatures of sampler and trainer, as sampler_stats
# estimates it. The table of policy.NOISE has 0.003 at most at equal temperatures, and 0.047 for a
# sampler 5% hotter, which mean k3 (2e-4 to 5e-4) can't separate from rounding.
TILT = 0.03
EVIDENCE = 200.0  # nats^2 of surprise (about 1000 tokens), below which TILT is not checked


# --- The checks -------------------------------------------------------------------------
def check_logps(run, step, samples, metrics):
    """Collective: if a check of the update of step `step` fails, rank 0 writes its samples to a
    file, which the error names, and all ranks raise RunFailed."""
    c, info = run.c, run.reference.info
    is_first = not run.progress.checked and math.isfinite(metrics["loss"])
    try:
        with all_or_none():  # collective
            by_workers = any(sample.group.sampler != "trainer" for sample in samples)
            rounded = run.engine.module.head is None and run.policy.dtype == "bfloat16"
            check_sampler(metrics, run.sampler, by_workers, rounded)
            if is_first:
                check_reference(metrics, run.policy.dtype, info, model=c.MODEL)
    except RunFailed as failure:  # on all ranks
        from grpo.bad_step import keep_evidence

        error = failure.__cause__ or failure
        error.add_note(keep_evidence(run, step, samples, metrics, error))  # collective
        raise
    if is_first:
        names = ["sampler_k3", "sampler_tilt", *["kl"] * (not is_teacher(info, c.MODEL))]
        found = ", ".join(f"{name} {metrics[name]:.1g}" for name in names if name in metrics)
        say(f"the log-probs of the first update agree: {found}")


def check_sampler(metrics, sampler, by_workers=False, rounded=False):
    """Raises RuntimeError if the trainer's log-probs of freshly sampled tokens differ from the
    sampler's by more than its rounding; workers (`by_workers`) may sample in bfloat16. Then the two
    compute different things (temperature, dropout, attention), or the sampler's weights are old or
    damaged.
    Logits that are `rounded` to bfloat16 tilt like another temperature, if a policy is sure.
    """
    if not math.isfinite(metrics["loss"]):  # the step will be skipped anyway
        return
    if "sampler_k3" in metrics:
        what = "trainer and sampler should have the same weights, but differ"
        check_gap(metrics["sampler_k3"], max(sampler.noise, by_workers * NOISE["bfloat16"]), what)
    tilt = metrics.get("sampler_tilt", 0.0)
    if abs(tilt) > TILT and not rounded:
        raise RuntimeError(
            f"the sampler seems to draw at {1 + tilt:.3f} times the trainer's temperature, though"
            " TEMPERATURE sets both; see docs/troubleshooting.md"
        )


def check_reference(metrics, dtype, reference, *, model):
    """Raises RuntimeError if, at the run's first update, the reference has the policy's name but
    other weights: log-probs that differ by more than rounding. `reference` is its /info."""
    if "kl" in metrics and not is_teacher(reference, model):
        what = f"at the first update the reference's weights differ from those of {model}"
        check_gap(metrics["kl"], max(NOISE[dtype], NOISE[reference["dtype"]]), what)
