"""The cases of experiments/questions.py: what each changes of the demo, and its defect."""

from experiments import defects
from experiments.defects import with_
from experiments.runs import ROOT, Case

STEPS = 60
COMMON = {"STEPS": STEPS, "EVAL_STEPS": 20, "KEEP_BEST": False, "SAVE_STEPS": 1000}
COMMON |= {"IDLE_LIMIT": STEPS}
SMALL = {"MICRO_BATCH_TOKENS": 700}  # 5 micro-batches in the first step, more or fewer later
HACKABLE = {"TASK": str(ROOT / "experiments/hackable.py"), "SKIP_FLAT_GROUPS": "reward"}
CHAINS = {"TASK": str(ROOT / "experiments/chains.py"), "MAX_COMPLETION_TOKENS": 64}
CHAINS |= {"SKIP_FLAT_GROUPS": "reward"}
UNCORRECTED = {"RECOMPUTE_OLD_LOGPS": True, "IS_CAP": 0.0}
UNCLIPPED = {"CLIP_LOW": 1.0, "CLIP_HIGH": 1e9}


def updates(number, **constants):
    """Returns constants for `number` updates on each of STEPS rollouts."""
    scaled = {"STEPS": STEPS * number, "EVAL_STEPS": 20 * number, "WARMUP_STEPS": 5 * number}
    return scaled | {"UPDATES_PER_ROLLOUT": number, "MAX_STALENESS": 20} | constants


def groups_of(size):
    """Returns constants for 128 completions a step in groups of `size`, of which all are trained
    that have any difference in reward, and none are sampled instead of the others."""
    own = {"GROUP_SIZE": size, "PROMPTS_PER_STEP": 128 // size}
    return own | {"MAX_REFILLS": 0, "SKIP_FLAT_GROUPS": "reward"}


def paid_for_format(weight):
    return {"REWARD_WEIGHTS": {"correctness": 2.0, "format": weight}, "SKIP_FLAT_GROUPS": "reward"}


def case(label, constants=None, defect=None, **names):
    return Case(constants or {}, defect, label, **names)


# --- Cases --------------------------------------------------------------------------
CASES = {
    "plain": case("as the demo"),
    "mu4": case("4 updates, clipped", updates(4)),
    "mu4_unclipped": case("4 updates, not clipped", updates(4) | UNCLIPPED),
    "mu4_slow": case("4 updates, a quarter of the rate", updates(4, LEARNING_RATE=1.75e-4)),
    "accumulated": case("in micro-batches", SMALL),
    "sums": case("micro-batches, not divided", SMALL, defects.sums_unscaled),
    "small": case("1/8 of the batch", {"PROMPTS_PER_STEP": 2}),
    "counted": case("1/8 of the updates", {"STEPS": 8, "WARMUP_STEPS": 1}),
    **{f"group{size}": case(f"G = {size}", groups_of(size)) for size in (2, 4, 8, 16, 32)},
    "kl0": case("beta 0", {"KL_BETA": 0.0}),
    "kl02": case("beta 0.2", {"KL_BETA": 0.2}),
    "hacked": case("beta 0.04, hackable reward", HACKABLE),
    "hacked0": case("beta 0, hackable reward", HACKABLE | {"KL_BETA": 0.0}),
    "hacked02": case("beta 0.2, hackable reward", HACKABLE | {"KL_BETA": 0.2}),
    "centred": case("without std", {"ADVANTAGE_STD": False}),
    "grpo": case("grpo", CHAINS, model="chains"),
    "dapo": case("dapo", CHAINS | {"LOSS_TYPE": "dapo"}, model="chains"),
    "dr_grpo": case("dr_grpo", CHAINS | {"LOSS_TYPE": "dr_grpo"}, model="chains"),
    "no_positions": case(
        "left padding, no positions",
        {"SHARE_PROMPTS": False},
        with_(defects.padded_on_the_left, mask=True),
    ),
    "no_mask": case(
        "left padding, no mask, no cap",
        {"SHARE_PROMPTS": False, "IS_CAP": 0.0},
        with_(defects.padded_on_the_left, mask=False),
    ),
    "stale4": case("4 updates old, corrected", {}, with_(defects.stale, by=4)),
    "stale4_raw": case("4 updates old, not", UNCORRECTED, with_(defects.stale, by=4)),
    "stale16": case("16 updates old, corrected", {}, with_(defects.stale, by=16)),
    "stale16_raw": case("16 updates old, not", UNCORRECTED, with_(defects.stale, by=16)),
    "flat_kept": case("kept", {"SKIP_FLAT_GROUPS": False}),
    "flat_skipped": case("skipped", {"MAX_REFILLS": 0}),
    "flat_refilled": case("refilled", {"MAX_REFILLS": 4}),
    "format1": case("format 1", paid_for_format(1.0)),
    "format4": case("format 4", paid_for_format(4.0)),
    "format16": case("format 16", paid_for_format(16.0)),
    "retokenised": case("re-tokenised", {"IS_CAP": 0.0}, defects.retokenised),
    "no_eos": case("EOS not trained", {"MASK_TRUNCATED": False}, defects.no_eos),
    "cooler": case("sampled at 0.9", {"IS_CAP": 0.0}, with_(defects.cooler_sampler, factor=0.9)),
    "micro_means": case(
        "dapo, micro-batch means",
        CHAINS | {"LOSS_TYPE": "dapo"},
        defects.micro_batch_means,
        model="chains",
    ),
}
