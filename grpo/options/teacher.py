"""REFERENCE: the local reference is another model with MODEL's tokenizer (docs/loss.md)."""

from grpo.forward import CompletionModel
from grpo.models import check_context, load_tokenizer
from grpo.prepare import load_policy
from grpo.wire import check_facts, facts_of


def load_teacher(c, policy):
    """Returns (the frozen model REFERENCE, what it is, its name, which is never MODEL's). Raises
    SystemExit if its tokenizer, embeddings or context do not fit."""
    teacher = load_tokenizer(c.REFERENCE, "REFERENCE")
    facts, mine = (facts_of(t) for t in (teacher, policy.tokenizer))
    check_facts(facts, mine, f"REFERENCE = {c.REFERENCE!r}", c.MODEL)
    loaded = load_policy(c.REFERENCE, teacher, c.DTYPE)
    check_context(c, loaded.model.config, "REFERENCE")
    if loaded.vocab_size < policy.vocab_size:
        raise SystemExit(f"REFERENCE = {c.REFERENCE!r} has fewer embeddings than {c.MODEL!r}")
    what = f"REFERENCE = {c.REFERENCE!r}"
    model = CompletionModel(loaded.model.requires_grad_(False))
    return model, what, f"{c.REFERENCE} (REFERENCE)"
