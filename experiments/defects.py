"""Defects that this trainer does not allow, put into it for an experiment.

Each function gets the trainer's module before its main() and changes what it calls. Those that the
check of the first update refuses write its words to REFUSAL in the run's folder, and go on.
"""

import functools
import itertools
from collections import Counter, deque
from dataclasses import replace
from pathlib import Path

REFUSAL = "refusal.txt"  # in a run's folder: what the trainer would have ended with


def go_on_if_refused(trainer):
    """Writes what the check of the first update raises, and lets the run go on."""
    check = trainer.checks.check_first_update

    def told(*arguments, **names):
        try:
            return check(*arguments, **names)
        except RuntimeError as error:
            Path(trainer.RUN_DIR, REFUSAL).write_text(str(error))
            return f"NO, but this script goes on: {error}"

    trainer.checks.check_first_update = told


# --- Tokens, masks, temperature -------------------------------------------------------
def no_eos(trainer):
    """Gives the token that ends a completion hardly any weight, as a mask `ids != pad` gives none
    where pad is EOS. (Those of weight 0 would not count in the metrics, either.)"""
    from grpo.models import load_tokenizer

    loss, end = trainer.grpo_loss_triton.grpo_loss, []

    def without(hidden, head, ids, old, ref, advantages, weights, **names):
        end[:] = end or [load_tokenizer(trainer.MODEL).eos_token_id]
        weights = weights.masked_fill(ids == end[0], 1e-30)
        return loss(hidden, head, ids, old, ref, advantages, weights, **names)

    trainer.grpo_loss_triton.grpo_loss = without


def cooler_sampler(trainer, factor):
    """Samples at `factor` times the trainer's temperature."""
    from grpo.sampling.policy import Policy

    stream = Policy.stream

    def cooled(self, prompts, *, temperature, **names):
        return stream(self, prompts, temperature=factor * temperature, **names)

    Policy.stream = cooled
    go_on_if_refused(trainer)


def retokenised(trainer):
    """Trains the ids of the decoded text in the place of the sampled ones, EOS kept; the reference
    scores the same."""
    share, update, seen = trainer.sample_share, trainer.update, Counter()

    def remade(run, *arguments):
        for group, is_flat in share(run, *arguments):
            changed = retokenise(group, run.policy.tokenizer, seen)
            yield changed, is_flat

    def told(run, sequences):
        share = seen["changed"] / max(seen["completions"], 1)
        seen.clear()
        return update(run, sequences) | {"retokenised": share}

    trainer.sample_share, trainer.update = remade, told
    go_on_if_refused(trainer)


def retokenise(group, tokenizer, seen):
    """Returns the group with the ids of its texts; `seen` counts completions."""
    import torch  # after the trainer, which sets what torch reads

    before, after, logps = group.completions(group.completion_ids), [], []
    for ids, sampled in zip(before, group.completions(group.sampler_logps), strict=True):
        ids = ids.tolist()
        ended = ids[-1:] == [tokenizer.eos_token_id]
        text = tokenizer.decode(ids[: len(ids) - ended])
        again = tokenizer(text, add_special_tokens=False)["input_ids"] + ids[-1:] * ended
        same = again == ids or not again
        after.append(ids if same else again)
        # Nothing is known of the new tokens: IS_CAP=0
        logps.append(sampled if same else sampled[:1].expand(len(again)))
        seen.update(completions=1, changed=int(not same))
    return replace(
        group,
        completion_ids=torch.tensor([i for ids in after for i in ids], dtype=torch.int32),
        completion_lengths=torch.tensor([len(ids) for ids in after], dtype=torch.int32),
        sampler_logps=torch.cat(logps),
    )


# --- Means --------------------------------------------------------------------------
def scaled_micro_batches(trainer, weight):
    """Multiplies each micro-batch's loss by `weight(batch, number)`, of its sequences and the
    number of the step's micro-batches."""
    plan, loss, turns = trainer.plan_turns, trainer.batch_loss, []

    def planned(*arguments):
        turns[:] = plan(*arguments)
        return list(turns)

    def scaled(hidden, head, ids, batch, vocab_size):
        value, stats = loss(hidden, head, ids, batch, vocab_size)
        return weight(batch, turns) * value, stats

    trainer.plan_turns, trainer.batch_loss = planned, scaled


def sums_unscaled(trainer):
    """Multiplies the step's loss by the number of its micro-batches, as a sum of their means does
    that nobody divides."""
    scaled_micro_batches(trainer, lambda batch, turns: len(turns))


def micro_batch_means(trainer):
    """Makes each group a micro-batch, as simple_GRPO does, and divides by its tokens, and by the
    number of micro-batches; LOSS_TYPE dapo divides by the tokens of the whole step."""

    def by_group(sequences, *_):
        groups = itertools.groupby(sequences, key=lambda sequence: sequence.prompt)
        return [(list(batch), False) for _, batch in groups]

    trainer.plan_turns = by_group

    def own_mean(batch, turns):
        tokens = [sum(len(s.completion) for s in batch) for batch, _ in turns]
        mine = sum(len(s.completion) for s in batch)
        return sum(tokens) / mine / len(turns)

    scaled_micro_batches(trainer, own_mean)


# --- Old samples --------------------------------------------------------------------
def stale(trainer, by):
    """Trains each group `by` steps after it was sampled; as many wait before the first step, so the
    age of what is trained rises from 0 to `by`."""
    sample, waiting = trainer.sample_step, deque()

    def from_the_queue(run):
        while True:
            groups, metrics, sampled = sample(run)
            number = len(waiting)
            waiting.append([replace(g, id=f"{g.id}-{number}") for g in groups])
            if len(waiting) > by:
                return waiting.popleft(), metrics, sampled

    trainer.sample_step = from_the_queue
    # Its words are on policies that are the same: here the sampler's is older
    trainer.checks.check_first_update = lambda *_, **__: "not tried"


# --- Padding ------------------------------------------------------------------------
def padded_on_the_left(trainer, *, mask):
    """Runs each prompt and completion padded on the left without position ids, in the trainer and
    its reference; without `mask` the padding is attended to. The ratio is taken to the sampler's
    log-probs, which are right."""
    from grpo.forward import CompletionModel
    from grpo.models import left_padded

    def separate(self, prompts, completions):
        sequences = [p + c[:-1] for p, c in zip(prompts, completions, strict=True)]
        ids, _, seen = left_padded(sequences, self.model.device)
        states = self._run(ids, ids.shape[1], seen if mask else None, use_cache=False)
        return states, [ids.shape[1] - len(c) for c in completions]

    CompletionModel._separate = separate
    trainer.takes_old_from_sampler = lambda groups, step: True
    go_on_if_refused(trainer)


def with_(defect, **settings):
    """Returns a defect with its settings; its name is the defect's."""
    return functools.update_wrapper(functools.partial(defect, **settings), defect)
