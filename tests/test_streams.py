"""Streams: waves of prompts, and groups that leave while others are sampled."""

import gc
import itertools

import pytest
import transformers
from families import (
    MANY,
    Shapes,
    assert_plain_logps,
    assert_well_formed,
    sample,
    settings_for,
)

from grpo.options.plain_decoder import PlainDecoder
from grpo.sample import Prompt
from grpo.sampler import CachedDecoder, stream_groups

SOME = ("qwen2", "gpt2", "gemma2 wide", "mamba", "mistral")  # each kind of decoder
FEW_ROWS = [(family, *rows) for family in SOME for rows in ((2, 1), (7, 3))]
MORE = ("bloom", "gpt1", "opt", "mixtral", "gemma3 wide")
FEW_ROWS += [(family, 7, 3) for family in MORE]


@pytest.mark.parametrize("family, max_sequences, group_size", FEW_ROWS)
def test_every_wave_has_plain_log_probs(family, max_sequences, group_size, model_of):
    """Their log-probs are those of a plain forward, whoever shares the batch with them."""
    model = model_of(family)
    groups = sample(model, MANY, group_size=group_size, max_sequences=max_sequences)
    assert_well_formed(groups, prompts=9, group_size=group_size)
    assert_plain_logps(model, MANY, groups)


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "mistral", "mamba"])  # each kind of decoder
def test_prompts_may_have_a_limit_of_their_own(family, model_of):
    """A later turn may have few tokens left."""
    model = model_of(family)
    asked = [Prompt(i, ids, 2 + i) for i, ids in enumerate(MANY)]
    settings = settings_for(model, group_size=2, max_sequences=7)
    found = [[] for _ in asked]
    for key, group in stream_groups(model, iter(asked), **settings):
        found[key] += group
    assert [len(group) for group in found] == [2] * len(asked)
    for (_, ids, limit), group in zip(asked, found, strict=True):
        assert all(len(c.ids) == limit if c.truncated else len(c.ids) <= limit for c in group)
        assert_plain_logps(model, [ids], [group])
    assert sum(c.truncated for group in found for c in group) > 3


@pytest.mark.parametrize("family", ["qwen2", "mamba", "mistral"])
def test_a_group_comes_as_soon_as_it_has_ended_and_a_wave_begins_after_the_last(family, model_of):
    model, begun, ended, lengths = model_of(family), [], [], {}

    def prompts():
        for prompt in itertools.starmap(Prompt, enumerate(MANY)):
            begun.append(prompt.key)
            yield prompt

    with Shapes(model) as shapes:
        for key, group in stream_groups(model, prompts(), **settings_for(model, max_sequences=7)):
            ended.append(key)
            lengths[key] = max(len(c.ids) for c in group)
    assert max(rows for rows, _ in shapes) == 6  # two groups of three, of seven places
    waves = [(0, 1), (2, 3), (4, 5), (6, 7), (8,)]
    for wave in waves:
        assert sorted(ended[: len(wave)]) == list(wave)
        first, last = ended[0], ended[len(wave) - 1]
        assert lengths[first] <= lengths[last]
        ended = ended[len(wave) :]
    assert begun == list(range(9))


@pytest.mark.parametrize("family", ["qwen2", "mistral", "mamba"])
def test_the_cache_is_gone_when_the_samples_are_there(family, model_of):
    """Not when Python's garbage collector runs: training needs the memory at once."""
    kinds = (CachedDecoder, PlainDecoder, transformers.Cache)
    gc.collect()
    gc.disable()
    try:
        sample(model_of(family), MANY, max_sequences=7)
        left = [type(x).__name__ for x in gc.get_objects() if isinstance(x, kinds)]
    finally:
        gc.enable()
    assert left == []
