"""Defects that the trainer does not allow, injected for docs/reading_curves.md.

Each function gets the trainer's module before its main() and changes what it calls. If the check of
the sampler refuses a defect, its words go to REFUSAL in the run's folder, and the run goes on.
"""

from pathlib import Path

REFUSAL = "refusal.txt"  # in a run's folder: what the trainer would have ended with
COOLER = 0.7  # the sampler's temperature; the trainer's is 1


def go_on_if_refused(trainer):
    """Writes what the check of the sampler raises, and lets the run go on."""
    check = trainer.check_sampler

    def told(*arguments):
        try:
            check(*arguments)
        except RuntimeError as error:
            Path(trainer.RUN_DIR, REFUSAL).write_text(str(error))

    trainer.check_sampler = told


def no_eos(trainer):
    """Gives the token that ends a completion hardly any weight, as a mask `ids != pad` gives it
    none if pad is EOS. (A token of weight 0 would not count in the metrics, either.)"""
    from grpo.models import load_tokenizer

    loss, end = trainer.grpo_loss_triton.grpo_loss, []

    def without(hidden, head, ids, old, ref, advantages, weights, **names):
        end[:] = end or [load_tokenizer(trainer.MODEL).eos_token_id]
        weights = weights.masked_fill(ids == end[0], 1e-30)
        return loss(hidden, head, ids, old, ref, advantages, weights, **names)

    trainer.grpo_loss_triton.grpo_loss = without


def cooler_sampler(trainer):
    """Samples at COOLER times the trainer's temperature."""
    from grpo.sampling.policy import Policy

    stream = Policy.stream

    def cooled(self, prompts, *, temperature, **names):
        return stream(self, prompts, temperature=COOLER * temperature, **names)

    Policy.stream = cooled
    go_on_if_refused(trainer)
