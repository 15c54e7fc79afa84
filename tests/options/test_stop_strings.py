"""STOP_STRINGS: where they end a completion, and that its ids stay those that were sampled.

The yardstick is the text of all ids, decoded after each of them. The tiny model draws single bytes,
so its texts are full of characters that are cut in two."""

import pytest
from fakes import a_recipe, tiny_policy

from grpo.options.stop_strings import StopStrings
from grpo.options.workers.policy_proof import sample_proof
from grpo.sample import Prompt
from grpo.sampler import sample_groups

PROMPTS = [[5, 6, 7, 8], [40, 41, 42, 43, 44, 45]]


@pytest.fixture(scope="module")
def policy(tiny):
    return tiny_policy(tiny)


def plain_length(tokenizer, ids, strings):
    """-> how many ids there are when the text of all has one of the strings, or None."""
    for n in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:n], clean_up_tokenization_spaces=False)
        if any(string in text for string in strings):
            return n


def sample(policy, strings, **changes):
    stops = StopStrings(policy.tokenizer, strings) if strings else None
    settings = {"group_size": 1, "max_new_tokens": 48, "temperature": 0, "eos_ids": {-1}}
    settings |= {"vocab_size": policy.vocab_size, "generator": policy.generator(0)}
    groups = sample_groups(policy.model, PROMPTS, stop_strings=stops, **settings | changes)
    return [c for group in groups for c in group]


@pytest.mark.parametrize("text, string, end", [
    ("7+5=12, so", "12", "7+5=12"),  # of two ids
    ("how many now", "an", "how many"),  # in the middle of one, whose rest stays
    ("5 €, 6 €", "€", "5 €"),  # a character of three ids
    ("è€é€", "é€", "è€é€"),  # after another half, and another of the same end
    ("so <answer>7</answer> and", "</answer>", "so <answer>7</answer>"),  # a single id
    ("\n\n7\n\n8", "7\n\n", "\n\n7\n\n"),
    ("7+5", "75", None),
])  # fmt: skip
def test_a_string_ends_with_the_id_that_completes_it(text, string, end, policy):
    tokenizer = policy.tokenizer
    ids = tokenizer(text)["input_ids"]
    found = StopStrings(tokenizer, ["never", string]).length(ids)
    assert found == plain_length(tokenizer, ids, [string])
    assert end == (found and tokenizer.decode(ids[:found]))


def test_greedy_is_a_prefix_of_what_it_was_without(policy):
    """Two sequences that end at different ids, each with the log-probs that it had."""
    whole = sample(policy, [])
    texts = [policy.tokenizer.decode(c.ids) for c in whole]
    at = 6
    strings = [policy.tokenizer.decode(c.ids[i : i + 2]) for c, i in zip(whole, (at, 3 * at))]
    assert strings[0] not in texts[1][: 3 * at] and len(strings[1]) > 1
    stopped = sample(policy, strings)
    lengths = [plain_length(policy.tokenizer, c.ids, strings) for c in whole]
    assert 1 < lengths[0] != lengths[1] < 48
    for before, after, length in zip(whole, stopped, lengths, strict=True):
        assert after.ids == before.ids[:length] and not after.truncated
        assert after.logps == pytest.approx(before.logps[:length], abs=1e-5)
        assert policy.text(after) == policy.tokenizer.decode(after.ids)  # with its last id
    # one that ends with the last id that it may have has ended all the same
    last = sample(policy, strings, max_new_tokens=max(lengths))
    assert [c.ids for c in last] == [c.ids for c in stopped]
    assert not any(c.truncated for c in last)


def test_sequences_end_where_the_text_of_all_their_ids_does(policy):
    """Sampled, in groups, while others leave the batch and join it."""
    strings, eos = ["a", "\u00e9", "7", "th", "="], {3, 4, 5}
    settings = {"temperature": 1.0, "group_size": 24, "max_sequences": 30, "eos_ids": eos}
    completions = sample(policy, strings, **settings)
    kinds = set()
    for c in completions:
        found = plain_length(policy.tokenizer, c.ids, strings)
        assert found in (None, len(c.ids))
        kind = "string" if found else "eos" if c.ids[-1] in eos else "cut"
        assert c.truncated == (kind == "cut") and (not c.truncated or len(c.ids) == 48)
        kinds.add(kind)
    assert {"string", "eos"} <= kinds
    assert len({len(c.ids) for c in completions}) > 9


def test_a_policy_has_them_but_not_where_it_proves_its_weights(tiny):
    """Evaluations and rollouts both go by `stream`."""
    plain = tiny_policy(tiny)
    policy = tiny_policy(tiny, stop_strings=["a", "e", "1"])
    settings = {"group_size": 8, "max_sequences": 8, "max_new_tokens": 40}
    ((_, group),) = policy.stream(
        iter([Prompt(0, PROMPTS[0])]), seed=0, temperature=1.0, **settings
    )
    assert any(policy.text(c)[-1:] in ("a", "e", "1") for c in group)
    recipe = a_recipe([(0, {}, PROMPTS[0])], MAX_COMPLETION_TOKENS=60)
    assert sample_proof(policy, recipe) == sample_proof(plain, recipe)
