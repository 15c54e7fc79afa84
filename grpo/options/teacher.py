"""REFERENCE: the local reference is another model with MODEL's tokenizer (docs/teacher.md)."""

from grpo.models import check_context, load_tokenizer
from grpo.policy import load_policy
from grpo.wire import check_facts, facts_of


def load_teacher(c, policy):
    """Returns the model REFERENCE, frozen. SystemExit if its tokenizer or context does not fit."""
    teacher = load_tokenizer(c.REFERENCE, "REFERENCE")
    facts, mine = (facts_of(t, c.TEMPERATURE) for t in (teacher, policy.tokenizer))
    check_facts(facts, mine, f"REFERENCE = {c.REFERENCE!r}", c.MODEL)
    loaded = load_policy(c.REFERENCE, teacher, c.DTYPE)
    check_context(c, loaded.model.config, "REFERENCE")
    return loaded.model.requires_grad_(False)
