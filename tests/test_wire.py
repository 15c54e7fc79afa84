"""The wire: groups come back as they were sent, and nothing malformed is unpacked."""

import dataclasses
import json
import struct

import pytest
import safetensors.torch
import torch
from helpers import LIMITS, VOCAB, make_group, raw

from grpo import wire
from grpo.wire import GROUP_PROTOCOL, Group, pack_group, tokenizer_facts, unpack_group


# --- Round trip --------------------------------------------------------------------
def blob(tensors=None, text=None, **meta):
    """-> a body made by hand: a valid one but for what is given (a tensor None is left out)."""
    group = vars(make_group())
    tensors = {k: group[k] for k in wire.TENSORS if group[k] is not None} | (tensors or {})
    facts = {"protocol": GROUP_PROTOCOL} | {k: group[k] for k in wire.METADATA} | meta
    facts = {k: v for k, v in facts.items() if v is not None}
    text = json.dumps(facts) if text is None else text
    return safetensors.torch.save(
        {k: v for k, v in tensors.items() if v is not None}, {"grpo": text}
    )


def one_tensor(dtype, shape, size, end=None):
    """-> a body with one tensor of `size` bytes, of which its header says what it likes."""
    view = {"dtype": dtype, "shape": shape, "data_offsets": [0, size if end is None else end]}
    return raw({"__metadata__": {"grpo": "{}"}, "prompt_ids": view}, bytes(size))


@pytest.mark.parametrize("scored", [False, True])
def test_round_trip(scored):
    group = make_group(ref_logps=-torch.rand(6) if scored else None)
    back = unpack_group(pack_group(group), **LIMITS)
    for field in dataclasses.fields(Group):
        sent, got = getattr(group, field.name), getattr(back, field.name)
        if isinstance(sent, torch.Tensor):
            assert got.dtype == sent.dtype and torch.equal(got, sent), field.name
        else:
            assert got == sent, field.name


def test_completions_splits_a_flat_tensor():
    group = make_group((2, 1))
    a, b = group.completions(torch.tensor([5, 6, 7]))
    assert (a.tolist(), b.tolist()) == ([5, 6], [7])


def test_a_view_is_packed_without_the_storage_behind_it():
    """torch.save would write the whole of it."""
    large = -torch.rand(100_000)
    group = make_group(sampler_logps=large[:6], ref_logps=large[6:12])
    assert len(pack_group(group)) < 2000
    assert torch.equal(unpack_group(pack_group(group)).ref_logps, large[6:12])


def test_ids_of_any_length_and_script_come_back():
    for name in ("a", "å" * 200, "组-0001", "with space"):
        back = unpack_group(pack_group(make_group(id=name, run=name, sampler=name)))
        assert (back.id, back.run, back.sampler) == (name,) * 3


# --- Malformed bodies --------------------------------------------------------------
VALID = pack_group(make_group())
BAD_TENSORS = {
    "no tensor": ({"truncated": None}, "tensors must be"),
    "100 dimensions": ({"rewards": torch.zeros([1] * 100)}, "rewards must be .*, got .1, 1, 1"),
    "one too many": ({"advantages": torch.zeros(3)}, "tensors must be"),
    "int64 ids": ({"prompt_ids": torch.zeros(4, dtype=torch.int64)}, "prompt_ids must be .*int32"),
    "bf16 log-probs": ({"sampler_logps": -torch.ones(6).bfloat16()}, "sampler_logps must be"),
    "uint8 mask": ({"truncated": torch.zeros(3, dtype=torch.uint8)}, "truncated must be"),
    "short ids": ({"completion_ids": torch.zeros(5, dtype=torch.int32)}, "completion_ids must be"),
    "2-d ids": ({"completion_ids": torch.zeros(2, 3, dtype=torch.int32)}, "completion_ids must"),
    "long logps": ({"sampler_logps": -torch.ones(7)}, "sampler_logps must be"),
    "mask of tokens": ({"truncated": torch.zeros(6, dtype=torch.bool)}, "truncated must be"),
    "flat rewards": ({"rewards": torch.zeros(6)}, "rewards must be"),
    "swapped rewards": ({"rewards": torch.zeros(2, 3)}, "rewards must be"),
    "ref shape": ({"ref_logps": -torch.ones(5)}, "ref_logps must be"),
    "no prompt": ({"prompt_ids": torch.zeros(0, dtype=torch.int32)}, "prompt_ids must be"),
    "0-d prompt": ({"prompt_ids": torch.tensor(1, dtype=torch.int32)}, "prompt_ids must be"),
    "2-d prompt": ({"prompt_ids": torch.zeros(2, 2, dtype=torch.int32)}, "prompt_ids must be"),
    "no completions": ({"completion_lengths": torch.zeros(0, dtype=torch.int32)}, "G of 1"),
    "0-d lengths": ({"completion_lengths": torch.tensor(6, dtype=torch.int32)}, "G of 1"),
    "empty completion": (
        {"completion_lengths": torch.tensor([6, 0, 0], dtype=torch.int32)},
        "at least one token",
    ),
    "negative length": (
        {"completion_lengths": torch.tensor([8, -4, 2], dtype=torch.int32)},
        "at least one token",
    ),
    "lengths whose sum wraps to 6 in int32": (
        {"completion_lengths": torch.tensor([2**31 - 1, 2**31 - 1, 8], dtype=torch.int32)},
        "completion_ids must be .4294967302",
    ),
    "infinite reward": ({"rewards": torch.full((3, 2), torch.inf)}, "rewards must be finite"),
    "NaN logp": ({"sampler_logps": torch.full((6,), torch.nan)}, "sampler_logps must be finite"),
    "-inf logp": ({"sampler_logps": torch.full((6,), -torch.inf)}, "sampler_logps must be finite"),
    "positive logp": ({"sampler_logps": torch.full((6,), 0.5)}, "not positive"),
    "NaN ref": ({"ref_logps": torch.full((6,), torch.nan)}, "ref_logps must be finite"),
    "negative id": ({"prompt_ids": torch.tensor([1, -1], dtype=torch.int32)}, "0..394, got -1"),
    "id of the padding": (
        {"completion_ids": torch.full((6,), VOCAB, dtype=torch.int32)},
        "0..394, got .*395",
    ),
    "a bool of 2": (
        {"truncated": torch.tensor([0, 2, 1], dtype=torch.uint8).view(torch.bool)},
        "bytes 0 and 1",
    ),
    "more completions than are packed in seconds": (
        {"completion_lengths": torch.ones(wire.MAX_COMPLETIONS + 1, dtype=torch.int32)},
        "at most 10000 completions",
    ),
    "too long": ({"prompt_ids": torch.zeros(254, dtype=torch.int32)}, "257 tokens exceed"),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_bad_tensors_are_refused_with_the_reason(name):
    """Its shapes, lengths and values: a wrong upload must not be dropped without a word."""
    tensors, reason = BAD_TENSORS[name]
    with pytest.raises(ValueError, match=reason):
        unpack_group(blob(tensors), **LIMITS)


def test_a_reward_that_does_not_apply_is_nan():
    group = unpack_group(blob({"rewards": torch.tensor([[0, 1], [0, torch.nan], [0, 1]])}))
    assert group.rewards.isnan().tolist() == [[False, False], [False, True], [False, False]]


BAD_METADATA = {
    "other protocol": ({"protocol": GROUP_PROTOCOL + 1}, "protocol"),
    "older protocol": ({"protocol": GROUP_PROTOCOL - 1}, "update the older side"),
    "protocol True": ({"protocol": True}, "protocol"),
    "no protocol": ({"protocol": None}, "protocol"),
    "no id": ({"id": None}, "'id' must be str"),
    "id a number": ({"id": 5}, "'id' must be str"),
    "empty id": ({"id": ""}, "1 to 200"),
    "endless id": ({"id": "x" * 201}, "1 to 200"),
    "endless run": ({"run": "x" * 201}, "1 to 200"),
    "id that a lease can't name": ({"id": "__metadata__"}, "not __metadata__"),
    "half a surrogate, which SQLite can't store": ({"run": "\ud800"}, "printable"),
    "NUL": ({"id": "a\0b"}, "printable"),
    "no sampler": ({"sampler": None}, "'sampler' must be str"),
    "empty sampler": ({"sampler": ""}, "sampler .* 1 to 200"),
    "endless sampler": ({"sampler": "x" * 201}, "sampler .* 1 to 200"),
    "sampler with a line feed": ({"sampler": "a\nb"}, "printable"),
    "sampler of half a surrogate": ({"sampler": "\udc00"}, "printable"),
    "no outcome": ({"outcome": None}, "'outcome' must be str"),
    "outcome that is no reward": ({"outcome": "reward"}, "one of reward_names"),
    "no skipped": ({"skipped": None}, "'skipped' must be dict"),
    "skipped a list": ({"skipped": []}, "'skipped' must be dict"),
    "skipped not finite": ({"skipped": {"groups": float("inf")}}, "finite numbers by name"),
    "skipped a number of 400 digits": ({"skipped": {"groups": 10**400}}, "finite numbers by name"),
    "skipped a flag": ({"skipped": {"groups": True}}, "finite numbers by name"),
    "skipped in skipped": ({"skipped": {"groups": {}}}, "finite numbers by name"),
    "endless skipped": ({"skipped": dict.fromkeys(map(str, range(101)), 1)}, "at most 100"),
    "bool as int": ({"policy_version": True}, "'policy_version' must be int"),
    "float as int": ({"item": 3.0}, "'item' must be int"),
    "NaN": ({"item": float("nan")}, "'item' must be int"),
    "negative version": ({"policy_version": -1}, "negative"),
    "huge item": ({"item": 2**63}, "64 bits"),
    "skipped by a name that can't be printed": (
        {"skipped": {"\ud800": 1}},
        "other names must be printable",
    ),
    "skipped by no name": ({"skipped": {"": 1}}, "other names must be printable"),
    "name that can't be printed": ({"reward_names": ["correct", "a\nb"]}, "must be printable"),
    "endless name": ({"reward_names": ["correct", "x" * 201]}, "1 to 200 characters"),
    "names a string": ({"reward_names": "ab"}, "'reward_names' must be list"),
    "no names": ({"reward_names": []}, "list of names"),
    "names of numbers": ({"reward_names": [1, 2]}, "must be printable"),
    "one name twice": ({"reward_names": ["a", "a"]}, "names that differ"),
    "more names than columns": (
        {"reward_names": ["correct", "b", "c"]},
        r"rewards must be \(3, 3\)",
    ),
}


@pytest.mark.parametrize("name", BAD_METADATA)
def test_lying_metadata_is_refused_with_the_reason(name):
    meta, reason = BAD_METADATA[name]
    with pytest.raises(ValueError, match=reason):
        unpack_group(blob(**meta), **LIMITS)


BAD_BODIES = {
    "empty": b"",
    "three bytes": b"abc",
    "text": b"GET / HTTP/1.1\r\n\r\n" * 20,
    "pickle": b"\x80\x04\x95" + b"\0" * 100,
    "truncated by a byte": VALID[:-1],
    "header alone": VALID[: 8 + struct.unpack("<Q", VALID[:8])[0]],
    "cut in its header": VALID[:100],
    "padded": VALID + b"\0",
    "two bodies": VALID + VALID,
    "header of 2 GB": struct.pack("<Q", 2 << 30) + VALID[8:],
    "header of -1 bytes": struct.pack("<q", -1) + VALID[8:],
    "header of no bytes": struct.pack("<Q", 0) + VALID[8:],
    "header of 90 MB": struct.pack("<Q", 90_000_000) + VALID[8:],
    "header no JSON": raw(b"{" * 50),
    "header an array": raw([1, 2, 3]),
    "header no UTF-8": raw(b'{"\xff\xfe": 1}'),
    "header nested deeply": raw(b"[" * 60_000),
    "no metadata": safetensors.torch.save({"prompt_ids": torch.zeros(1)}),
    "other metadata": safetensors.torch.save({"prompt_ids": torch.zeros(1)}, {"format": "pt"}),
    "metadata no JSON": blob(text="run=1"),
    "metadata an array": blob(text="[1]"),
    "metadata null": blob(text="null"),
    "metadata a text": blob(text='"protocol"'),
    "metadata nested deeply": blob(text="[" * 60_000),
    "metadata nested deeply in objects": blob(text='{"a":' * 9_000),
    "a number of 5000 digits": blob(text='{"protocol": ' + "9" * 5000 + "}"),
    "unknown dtype": one_tensor("I33", [1], 4),
    "dtype that torch lacks": one_tensor("F6_E2M3", [4], 3),
    "4-bit dtype": one_tensor("F4", [8], 4),
    "2**63 elements": one_tensor("I32", [2**63], 4),
    "2**64 elements": one_tensor("I32", [2**32, 2**32], 0),
    "negative shape": one_tensor("I32", [-1], 4),
    "4 TB in 4 bytes": one_tensor("I32", [2**40], 4, end=2**42),
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_a_body_that_is_no_group_is_refused(name):
    with pytest.raises(ValueError, match="not a safetensors blob|metadata must be"):
        unpack_group(BAD_BODIES[name], **LIMITS)


def test_a_large_header_is_refused_before_it_is_parsed(monkeypatch):
    """Python needed 3.5 s and 300 MB for a 16 MB header of empty tensors."""
    monkeypatch.setattr(safetensors.torch, "load", lambda body: pytest.fail("it was parsed"))
    empty = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    with pytest.raises(ValueError, match="header claims"):
        unpack_group(raw({f"tensor{i}": empty for i in range(2000)}))


def test_no_flipped_byte_of_the_header_escapes_as_another_error():
    """Whatever a body holds, /upload must answer 400: only ValueError may come out."""
    draw, header = torch.Generator().manual_seed(0), 8 + struct.unpack("<Q", VALID[:8])[0]
    places = torch.randint(0, header, (3000, 2), generator=draw).tolist()
    letters = torch.randint(0, 256, (3000, 2), generator=draw).tolist()
    refused = 0
    for place, letter in zip(places, letters, strict=True):
        body = bytearray(VALID)
        body[place[0]], body[place[1]] = letter
        try:
            unpack_group(bytes(body), **LIMITS)
        except ValueError:
            refused += 1
    assert refused > 2000  # the rest changed a name or a number into another good one


# --- Tokenizer facts and the client ------------------------------------------------
def test_tokenizer_facts_tell_tokenizers_apart(tiny):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    facts = tokenizer_facts(tokenizer)
    assert facts["vocab_size"] == VOCAB == len(tokenizer)
    assert facts == tokenizer_facts(AutoTokenizer.from_pretrained(tiny))
    tokenizer.add_tokens(["<new>"])
    assert tokenizer_facts(tokenizer)["tokenizer"] != facts["tokenizer"]
    assert tokenizer_facts(tokenizer)["vocab_size"] == VOCAB + 1
