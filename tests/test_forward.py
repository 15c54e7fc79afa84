"""CompletionModel: whatever is shared, padded or chunked, the same numbers.

The yardstick is a plain forward of one row at a time, and its gradient.
"""

from types import SimpleNamespace

import pytest
import torch
from families import FAMILIES, PROMPTS, SLOW, TOLERANCE, VOCAB, plain_logps, tiny_model
from torch.nn import functional

from grpo import chunked
from grpo.forward import CompletionModel, has_plain_head

# Rows of PROMPTS, whose tokens number 1, 5, 9 and 3. 0 is the filler and the models' pad id, 2 is
# EOS: pad stands first, within and last, EOS last and within, and two rows are a single token.
ROWS = [
    (PROMPTS[1], [0, 5, 0, 2]),
    (PROMPTS[1], [2]),
    (PROMPTS[1], [8, 109, 0]),
    (PROMPTS[2], [4, 2, 2, 31, 0, 6, 7, 2]),
    (PROMPTS[2], [1, 1]),
    (PROMPTS[0], [5]),
    (PROMPTS[3], [3, 4, 5, 6, 7]),
]
PROMPT_OF, COMPLETIONS = (list(column) for column in zip(*ROWS, strict=True))
ALONE = SLOW | {"bloom"}  # families that can't be packed


def logps_of(model, prompts, completions, temperature=1.0, module=chunked):
    hidden, ids = model(prompts, completions)
    settings = {"temperature": temperature, "vocab_size": VOCAB}
    return module.linear_logps(hidden, model.head, ids, **settings), ids


@torch.no_grad()
def assert_as_plain(ours, plain, rows):
    logps, _ = logps_of(ours, *zip(*rows, strict=True))
    expected = torch.cat([plain_logps(plain, *row, 1.0) for row in rows])
    torch.testing.assert_close(logps, expected, rtol=0, atol=TOLERANCE)


def gradient_of(model, loss):
    gradient = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return torch.cat([g.flatten() for g in gradient if g is not None])


# --- Every family, in every way -----------------------------------------------------
@pytest.mark.parametrize("family, checkpointing", [
    *((family, False) for family in [*FAMILIES, "gemma2 wide", "gpt-oss"]),  # caps; sinks
    *((family, True) for family in ("qwen2", "gemma2", "gpt1", "mamba")),
])  # fmt: skip
def test_logps_and_gradients_are_those_of_a_plain_forward_of_each_row(family, checkpointing):
    """simple_GRPO's mask `ids != pad` lost every EOS where pad is EOS, and any pad id sampled; and
    every ancestor runs a group's prompt once for each completion, forward and backward."""
    torch.manual_seed(0)
    slopes, temperature = torch.randn(sum(map(len, COMPLETIONS))), 0.7
    plain = tiny_model(family)
    expected = torch.cat([plain_logps(plain, p, c, temperature) for p, c in ROWS])
    gradient = gradient_of(plain, (expected * slopes).sum())

    model = CompletionModel(tiny_model(family), gradient_checkpointing=checkpointing)
    assert model.packs == (family not in ALONE)
    whole = "gemma2" in family  # the one that soft-caps its logits
    assert (model.head is None) == whole
    assert len(model.notes) == (family in ALONE) + (checkpointing and family == "gpt1")
    logps, ids = logps_of(model, PROMPT_OF, COMPLETIONS, temperature)
    assert ids.tolist() == [token for c in COMPLETIONS for token in c]  # every one is trained
    torch.testing.assert_close(logps, expected, rtol=0, atol=TOLERANCE)
    # Measured: 6.5e-7 at most
    gap = gradient_of(model.model, (logps * slopes).sum()) - gradient
    assert gap.norm() < 1e-5 * gradient.norm()


LONG = [([1] * 60, [2] * 4), ([3] * 4, [4] * 60)]


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("family, rows", [
    ("qwen2", [([5], [0])]),  # one row; a prompt of one token; a completion of one
    ("qwen2", [([5, 0, 3], [7, 2])]),
    ("qwen2", [([5, 0, 3], [0]), ([5, 0, 3], [0]), ([1, 2, 3], [0])]),  # equal rows
    ("gpt2", LONG),  # it has 64 positions, and padding would go beyond them
])  # fmt: skip
def test_the_smallest_batches_and_the_longest(family, rows, packs, model_of):
    model = model_of(family)
    ours = CompletionModel(model)
    ours.packs = packs
    assert_as_plain(ours, model, rows)


class Spy:
    """Counts the tokens that pass a module."""

    def __init__(self, module):
        self.shapes = []
        self.hook = module.register_forward_hook(lambda *a: self.shapes.append(a[2].shape[:-1]))

    def seen(self):
        self.hook.remove()
        return [tuple(shape) for shape in self.shapes]


@torch.no_grad()
def test_what_is_computed(model_of):
    """A group's prompt once, no padding, no logits of prompts, no state behind the last token;
    what can't be packed is padded to neighbours of like length. simple_GRPO made logits of the
    whole prompt too, and sliced them away."""
    model = model_of("qwen2")
    prompts, completions = [[1] * 30] * 3 + [[2] * 20], [[3] * 4, [4] * 2, [5], [6] * 3]
    ours = CompletionModel(model)
    mlp, head = Spy(model.model.layers[0].mlp), Spy(model.lm_head)
    for packs, passes in ((True, [(1, 50 + 3 + 1 + 0 + 2)]), (False, [(3, 33), (1, 22)])):
        mlp.shapes.clear()
        ours.packs = packs
        hidden, _ = ours(prompts, completions)
        assert hidden.shape == (10, 32)  # the states that predict 4 + 2 + 1 + 3 tokens
        assert [tuple(shape) for shape in mlp.shapes] == passes
    assert mlp.seen() and not head.seen()  # the head is applied by the loss, to these 10 alone
    ours, head = CompletionModel(model_of("gemma2")), Spy(model_of("gemma2").lm_head)
    for ours.packs in (True, False):  # whose head is not plain
        ours([[1] * 30] * 2, [[3] * 4, [4] * 2])
    assert head.seen() == [(1, 4 + 2), (2, 4)]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_checkpointing_keeps_less_and_computes_again(checkpointing):
    """In the backward pass the model has its attention back, and layers need ours."""
    model = tiny_model("qwen2")
    ours = CompletionModel(model, gradient_checkpointing=checkpointing)
    query, kept = Spy(model.model.layers[0].self_attn.q_proj), []
    own = model.config._attn_implementation
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        hidden, _ = ours([[1] * 30] * 8, [[3] * 8] * 8)
    assert query.shapes == [(1, 30 + 8 * 7)] and model.config._attn_implementation == own
    hidden.sum().backward()
    assert len(query.seen()) == (2 if checkpointing else 1)
    assert model.config._attn_implementation == own
    # 64, the inner size of the MLP, is of nothing that is kept outside a layer
    assert any(t.dim() == 3 and t.shape[-1] == 64 for t in kept) != checkpointing


@pytest.mark.parametrize("wrong, reason", [
    ("without positions", "differ"),
    ("dropped", "(TypeError)"),
    ("untold window", "does not get this model"),  # Llama 4's chunks: three sequences are too short
    ("bloom", "does not get this model"),
    *((family, "KV cache") for family in sorted(SLOW)),
])  # fmt: skip
def test_a_model_that_can_not_be_packed_is_found_out(wrong, reason, model_of):
    """And the reason is in words: not "'NoneType' object has no attribute 'shape'"."""
    family = {"without positions": "qwen2", "dropped": "qwen2", "untold window": "llama"}.get(
        wrong, wrong
    )
    model = tiny_model(family)
    body = model.base_model.forward

    def forward(*inputs, position_ids=None, packed=None, **settings):
        if wrong == "without positions" and packed:
            settings["packed"] = packed
        return body(*inputs, **settings)

    if wrong == "untold window":
        model.config.sliding_window, model.config.layer_types = 64, ["sliding_attention"] * 2
    elif family == "qwen2":
        model.model.forward = forward
    ours = CompletionModel(model)
    (note,) = ours.notes
    assert not ours.packs and reason in note
    assert_as_plain(ours, model_of(family), ROWS)


def test_no_memory_is_not_taken_for_no_cache(monkeypatch):
    """Else a rank short of memory would plan other micro-batches than the others: a hang."""

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(CompletionModel, "_packed", full)
    with pytest.raises(torch.OutOfMemoryError):
        CompletionModel(tiny_model("qwen2"))


@pytest.mark.parametrize("change", ["bias", "scale", "norm", "weight"])
def test_a_head_that_is_more_than_a_matrix_is_found_out(change):
    """A bias (Phi), a scale (Cohere, Granite), a norm before it, or of its weight (Baichuan)."""
    model = tiny_model("qwen2")
    head, whole = model.lm_head, model.forward
    if change == "bias":
        head.bias = torch.nn.Parameter(torch.randn(120))
    elif change == "scale":
        model.forward = lambda *a, **k: SimpleNamespace(logits=whole(*a, **k).logits / 3)
    elif change == "norm":
        head.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2,))
    else:
        head.forward = lambda h: functional.linear(h, functional.normalize(head.weight))
    assert not has_plain_head(model)
    assert has_plain_head(tiny_model("qwen2"))


@pytest.mark.parametrize("dtype, noise", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_a_head_is_plain_also_where_two_runs_differ_in_their_last_bits(dtype, noise):
    """As a mixture of experts does on a GPU, where atomic additions happen in any order."""
    model = tiny_model("qwen2").to(dtype)
    mlp = model.model.layers[0].mlp
    exact = mlp.forward
    mlp.forward = lambda x: exact(x) * (1 + noise * torch.randn_like(x))
    assert has_plain_head(model)
