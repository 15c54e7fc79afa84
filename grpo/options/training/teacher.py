"""REFERENCE: the local reference is another model with MODEL's tokenizer (docs/teacher.md)."""

from grpo.models import check_context, load_tokenizer, weights_of
from grpo.policy import load_policy
from grpo.wire import check_facts, facts_of


def load_teacher(c, policy):
    """Returns (what it is, the frozen model REFERENCE, its name). The name is MODEL's if both have
    the same weights. SystemExit if its tokenizer, embeddings or context do not
    fit."""
    teacher = load_tokenizer(c.REFERENCE, "REFERENCE")
    facts, mine = (facts_of(t, c.TEMPERATURE) for t in (teacher, policy.tokenizer))
    check_facts(facts, mine, f"REFERENCE = {c.REFERENCE!r}", c.MODEL)
    loaded = load_policy(c.REFERENCE, teacher, c.DTYPE)
    check_context(c, loaded.model.config, "REFERENCE")
    if loaded.vocab_size < policy.vocab_size:
        raise SystemExit(f"REFERENCE = {c.REFERENCE!r} has fewer embeddings than {c.MODEL!r}")
    what, name = f"REFERENCE = {c.REFERENCE!r}", c.REFERENCE
    if c.BASE_BITS == 4:  # another model by its log-probs, also if it is MODEL
        return what, loaded.model.requires_grad_(False), f"{name} in 16 bits"
    if weights_of(loaded.model) == weights_of(policy.model):
        what, name = f"{what}, which has the weights of MODEL", c.MODEL
    return what, loaded.model.requires_grad_(False), name
