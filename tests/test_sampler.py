"""The sampler on tiny random models of every family.

The yardstick is a plain forward of one sequence at a time, without cache or padding."""

import itertools
import math

import pytest
import torch
from families import (
    EOS,
    FAMILIES,
    PROMPTS,
    VOCAB,
    Shapes,
    assert_plain_logps,
    assert_well_formed,
    sample,
)
from transformers import GenerationConfig

from grpo.sampler import draw

# --- Every family ------------------------------------------------------------------


@pytest.mark.parametrize("family, temperature", [*((f, 0.7) for f in FAMILIES), ("qwen2", 1.0)])
def test_logps_are_those_of_a_plain_forward(family, temperature, model_of):
    """simple_GRPO sampled at 0.9 and took log-probs at 1, of text that it tokenised again."""
    model = model_of(family)
    groups = sample(model, PROMPTS, temperature=temperature, group_size=8)
    assert_well_formed(groups, group_size=8)
    assert 0 < sum(c.truncated for c in itertools.chain(*groups)) < 32  # some rows left the batch
    for group in groups:  # samples, not copies: two of the same are likely only as short ones
        long = [tuple(c.ids) for c in group if len(c.ids) > 2]
        assert len(set(long)) == len(long)
    assert_plain_logps(model, PROMPTS, groups, temperature)
    with pytest.raises(AssertionError):  # the models are sharp enough for it
        assert_plain_logps(model, PROMPTS, groups, 1.7 - temperature, tolerance=0.1)


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen2", "gpt2", "gemma2", "mistral", "bloom", "mamba"])
def test_greedy_is_that_of_generate(family, model_of):
    model = model_of(family)
    groups = sample(model, PROMPTS, temperature=0, group_size=2)
    assert_well_formed(groups, group_size=2)
    assert_plain_logps(model, PROMPTS, groups, 1.0)  # greedy log-probs are those at temperature 1
    pinned = GenerationConfig(
        do_sample=False,
        max_new_tokens=12,
        eos_token_id=sorted(EOS),
        pad_token_id=0,
        suppress_tokens=list(range(VOCAB, 120)),
    )
    for prompt, group in zip(PROMPTS, groups, strict=True):
        ids = torch.tensor([prompt])  # with a mask, or generate infers one from the pad id in it
        ids = model.generate(ids, attention_mask=ids >= 0, generation_config=pinned)[0]
        assert [c.ids for c in group] == [ids[len(prompt) :].tolist()] * 2


@pytest.mark.parametrize("eos_ids", [EOS, {12}, set(range(VOCAB)), {500}])
@pytest.mark.parametrize("longest", [1, 3])
def test_a_completion_ends_with_eos_or_is_truncated(eos_ids, longest, model_of):
    """simple_GRPO cut EOS away, so stopping was never trained, and did not know cut answers."""
    changes = {"group_size": 64, "max_new_tokens": longest, "eos_ids": eos_ids}
    groups = sample(model_of("qwen2"), PROMPTS, **changes)
    assert_well_formed(groups, **changes)
    ended = {(len(c.ids), c.ids[-1]) for c in itertools.chain(*groups) if not c.truncated}
    lengths, ids = ({pair[i] for pair in ended} for i in (0, 1))
    if eos_ids == EOS:  # each of several ids ends a completion, at its last token too
        assert len(ids) > 4 and longest in lengths
    elif len(eos_ids) == VOCAB:
        assert lengths == {1}
    elif eos_ids == {500}:
        assert not ended


@pytest.mark.parametrize("family", ["gemma", "mistral"])  # with and without a window
def test_a_prompt_runs_once_and_finished_rows_leave_in_bunches(family, model_of):
    """A row that has ended is not read any more; more than an eighth of them leave together."""
    with Shapes(model_of(family)) as shapes:
        groups = sample(model_of(family), PROMPTS, group_size=6)
    lengths = [len(c.ids) for c in itertools.chain(*groups)]
    batch, expected = 24, []
    for t in range(1, max(lengths)):
        running = sum(n > t for n in lengths)
        if batch - running > batch // 8:
            batch = running
        expected.append((batch, 1))
    assert shapes == [(len(PROMPTS), 9), *expected]
    batches = [rows for rows, _ in expected]
    assert batches[-1] < 24 and any(  # some left, and some stayed for a while after they had ended
        rows > sum(n > t for n in lengths) for t, rows in enumerate(batches, 1)
    )


# --- What is sampled ---------------------------------------------------------------


def chi_square(counts, probabilities):
    """-> (statistic, limit) of drawn counts (K,) under exact probabilities (K,). The limit is 5
    standard deviations above the mean of a right sampler, k - 1, whose variance is 2 (k - 1)."""
    expected, freedom = probabilities * counts.sum(), len(counts) - 1
    assert expected.min() > 5  # else it is not chi-squared
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    return statistic, freedom + 5 * (2 * freedom) ** 0.5


def test_tokens_are_drawn_from_the_softmax_at_the_temperature():
    """Ids from likely to rare, 1e-4, and some of probability zero before, between and behind."""
    logits = 1.5 * torch.randn(50, generator=torch.Generator().manual_seed(1))
    logits[[0, 1, 20, 21, 49]] = -torch.inf
    possible = logits.isfinite()
    tokens, logps = draw(0.7 * logits.expand(200_000, 50), 0.7, torch.Generator().manual_seed(0))
    counts = torch.bincount(tokens, minlength=50)
    assert not counts[~possible].any()
    for heat, is_right in ((1.0, True), (0.9, False)):
        exact = torch.softmax(logits[possible].double() / heat, 0)
        value, limit = chi_square(counts[possible], exact)
        assert (value < limit) == is_right
    torch.testing.assert_close(logps, torch.log_softmax(logits, -1)[tokens], rtol=0, atol=1e-5)


def test_logits_that_are_not_finite_draw_an_id_without_log_prob():
    """On a GPU an index out of range is a device-side assert; `write` names what is wrong."""
    logits = torch.zeros(4, 9)
    logits[0], logits[1, 3], logits[2, 3] = torch.nan, torch.nan, torch.inf
    tokens, logps = draw(logits, 1.0, torch.Generator().manual_seed(0))
    assert 0 <= tokens.min() and tokens.max() < 9
    assert logps.isfinite().tolist() == [False, False, False, True]


def test_the_rare_ids_of_a_large_vocabulary_keep_their_share(monkeypatch):
    """Summed up in float32, eight of these would become one, behind the likely id."""
    rare = 1 << 16  # with 2 ** -26 each
    logits = torch.full((16, rare + 1), -26 * math.log(2))
    logits[:, 0] = 0
    wanted = torch.randint(rare, (16,), generator=torch.Generator().manual_seed(0))
    uniform = (1 + (wanted.double() + 0.5) * 2**-26) / (1 + rare * 2**-26)
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda self, **_: self.copy_(uniform[:, None]))
    tokens, _ = draw(logits, 1.0, None)
    assert (tokens - 1 - wanted).abs().max() <= 1
