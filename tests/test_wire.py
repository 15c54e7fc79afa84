"""The wire: what is packed comes back as it was, and nothing malformed is unpacked."""

import dataclasses
import json
import struct

import pytest
import safetensors.torch
import torch
from helpers import LIMITS, VOCAB, make_group, raw
from transformers import AutoTokenizer

from grpo import wire
from grpo.wire import (
    PROTOCOL,
    Group,
    facts_of,
    ids_by_sequence,
    pack_group,
    pack_ids,
    pack_logps,
    unpack_group,
    unpack_ids,
    unpack_logps,
)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def blob(tensors=None, text=None, **meta):
    """-> a group's body made by hand: a valid one but for what is given (None is left out)."""
    group = vars(make_group())
    tensors = {k: group[k] for k in wire.TENSORS if group[k] is not None} | (tensors or {})
    facts = {"protocol": PROTOCOL} | {k: group[k] for k in wire.METADATA} | meta
    text = json.dumps({k: v for k, v in facts.items() if v is not None}) if text is None else text
    present = {k: v for k, v in tensors.items() if v is not None}
    return safetensors.torch.save(present, {"grpo": text})


def ids_blob(**tensors):
    """-> the ids of two prompts, with 2 and 1 completions; but for what is given."""
    good = {"prompt_ids": int32(1, 2, 3), "prompt_lengths": int32(2, 1)}
    good |= {"completion_ids": int32(4, 5, 6, 7), "completion_lengths": int32(2, 1, 1)}
    good |= {"group_sizes": int32(2, 1)} | tensors
    return safetensors.torch.save({k: v for k, v in good.items() if v is not None})


# --- Round trips ------------------------------------------------------------------------
@pytest.mark.parametrize("scored", [False, True])
def test_a_group_comes_back(scored):
    large = -torch.rand(100_000)  # a view is packed without what is behind it
    logps = large[:6] if scored else None
    for name in ("a", "å" * 200, "组-0001", "with space"):
        rewards = torch.tensor([[0, 1], [0, torch.nan], [0, 1]])  # NaN: does not apply
        group = make_group(id=name, run=name, sampler=name, rewards=rewards, ref_logps=logps)
        body = pack_group(group)
        back = unpack_group(body, **LIMITS)
        assert len(body) < 6000
        for field in dataclasses.fields(Group):
            sent, got = getattr(group, field.name), getattr(back, field.name)
            if isinstance(sent, torch.Tensor):
                assert got.dtype == sent.dtype, field.name
                assert torch.equal(got.nan_to_num(9), sent.nan_to_num(9)), field.name
            else:
                assert got == sent, field.name
    parts = back.completions(back.completion_ids)
    assert [len(part) for part in parts] == [3, 1, 2]


def test_ids_come_back_with_a_prompt_for_each_completion():
    groups = [make_group((3, 1), seed=1, prompt=2), make_group((5,), seed=2, prompt=7)]
    prompts, completions = ids_by_sequence(unpack_ids(pack_ids(groups), **LIMITS))
    assert prompts == [g.prompt_ids.tolist() for g in (groups[0], groups[0], groups[1])]
    assert completions == [c.tolist() for g in groups for c in g.completions(g.completion_ids)]
    assert prompts[0] is prompts[1]  # of 64 completions it is kept once


# --- What is no blob at all -------------------------------------------------------------
def one_tensor(dtype, shape, size, end=None):
    """-> a body with one tensor of `size` bytes, of which its header says what it likes."""
    view = {"dtype": dtype, "shape": shape, "data_offsets": [0, size if end is None else end]}
    return raw({"__metadata__": {"grpo": "{}"}, "prompt_ids": view}, bytes(size))


VALID = pack_group(make_group())
HEADER = 8 + struct.unpack("<Q", VALID[:8])[0]
NO_BLOBS = {
    "empty": b"",
    "truncated by a byte": VALID[:-1],
    "header of 2 GB": struct.pack("<Q", 2 << 30) + VALID[8:],
    "header no JSON": raw(b"{" * 50),
    "header no UTF-8": raw(b'{"\xff\xfe": 1}'),
    "header nested deeply": raw(b"[" * 60_000),
    "no metadata": safetensors.torch.save({"prompt_ids": torch.zeros(1)}),
    "metadata an array": blob(text="[1]"),
    "metadata nested deeply": blob(text="[" * 60_000),
    "a number of 5000 digits": blob(text='{"protocol": ' + "9" * 5000 + "}"),
    "unknown dtype": one_tensor("I33", [1], 4),
    "4-bit dtype": one_tensor("F4", [8], 4),
    "2**64 elements": one_tensor("I32", [2**32, 2**32], 0),
    "negative shape": one_tensor("I32", [-1], 4),
    "4 TB in 4 bytes": one_tensor("I32", [2**40], 4, end=2**42),
}


@pytest.mark.parametrize("name", NO_BLOBS)
def test_a_body_that_is_no_blob_of_ours_is_refused(name):
    body = NO_BLOBS[name]
    for unpack in (
        lambda: unpack_group(body, **LIMITS),
        lambda: unpack_ids(body, **LIMITS),
        lambda: unpack_logps(body, [make_group()]),
    ):
        with pytest.raises(ValueError):
            unpack()


def test_a_large_header_is_refused_before_it_is_parsed(monkeypatch):
    """Python needed 3.5 s and 300 MB for a 16 MB header of empty tensors."""
    monkeypatch.setattr(safetensors.torch, "load", lambda body: pytest.fail("it was parsed"))
    empty = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    with pytest.raises(ValueError):
        unpack_group(raw({f"tensor{i}": empty for i in range(2000)}))


# --- Ids that do not fit ----------------------------------------------------------------
MOST = wire.MAX_COMPLETIONS
BAD_IDS = {  # a name in the reason
    "no tensor": ({"group_sizes": None}, "group_sizes"),
    "int64": ({"prompt_ids": torch.zeros(3, dtype=torch.int64)}, "prompt_ids"),
    "2-d": ({"completion_ids": torch.ones(2, 2, dtype=torch.int32)}, "completion_ids"),
    "0-d": ({"group_sizes": torch.tensor(3, dtype=torch.int32)}, "group_sizes"),
    "empty": ({"prompt_ids": int32()}, "prompt_ids"),
    "length 0": ({"completion_lengths": int32(4, 0, 0)}, "completion_lengths"),
    "negative length": ({"prompt_lengths": int32(4, -1)}, "prompt_lengths"),
    "fewer ids": ({"prompt_ids": int32(1, 2)}, "prompt_lengths"),
    "lengths that wrap": ({"prompt_lengths": int32(2**31 - 1, 2**31 - 1, 5)}, "prompt_lengths"),
    "a prompt more": ({"group_sizes": int32(1, 1, 1)}, "group_sizes"),
    "a completion more": ({"group_sizes": int32(2, 2)}, "group_sizes"),
    "no completions": ({"group_sizes": int32(3, 0)}, "group_sizes"),
    "negative id": ({"prompt_ids": int32(1, -1, 2)}, "-1"),
    "id of the padding": ({"completion_ids": int32(1, 2, 3, VOCAB)}, str(VOCAB)),
    "too long": (
        {"prompt_ids": torch.ones(256, dtype=torch.int32), "prompt_lengths": int32(255, 1)},
        "257",
    ),
    "more completions than are packed in seconds": (
        {"completion_lengths": torch.ones(MOST + 1, dtype=torch.int32)},
        str(MOST),
    ),
}


@pytest.mark.parametrize("name", BAD_IDS)
def test_ids_that_do_not_fit_are_refused_with_what_does_not(name):
    tensors, named = BAD_IDS[name]
    with pytest.raises(ValueError, match=named):
        unpack_ids(ids_blob(**tensors), **LIMITS)
    unpack_ids(ids_blob(), **LIMITS)


def test_an_answer_that_does_not_fit_its_groups_is_refused():
    groups = [make_group((3, 1))]
    logps = {"short": torch.zeros(3), "long": torch.zeros(5), "2-d": torch.zeros(2, 2)}
    logps |= {"float64": torch.zeros(4).double(), "NaN": torch.full((4,), torch.nan)}
    for tensor in logps.values():
        with pytest.raises(ValueError, match="4"):
            unpack_logps(pack_logps(tensor), groups)
    with pytest.raises(ValueError):
        unpack_logps(safetensors.torch.save({"other": torch.zeros(4)}), groups)


# --- Groups that do not fit -------------------------------------------------------------
BAD_TENSORS = {
    "no tensor": {"truncated": None},
    "one too many": {"advantages": torch.zeros(3)},
    "bf16 log-probs": {"sampler_logps": -torch.ones(6).bfloat16()},
    "uint8 mask": {"truncated": torch.zeros(3, dtype=torch.uint8)},
    "lengths of 5 ids": {"completion_lengths": int32(3, 1, 1)},
    "long logps": {"sampler_logps": -torch.ones(7)},
    "1-d rewards": {"rewards": torch.zeros(6)},
    "swapped rewards": {"rewards": torch.zeros(2, 3)},
    "ref shape": {"ref_logps": -torch.ones(5)},
    "no prompt": {"prompt_ids": int32()},
    "infinite reward": {"rewards": torch.full((3, 2), torch.inf)},
    "NaN logp": {"sampler_logps": torch.full((6,), torch.nan)},
    "-inf logp": {"sampler_logps": torch.full((6,), -torch.inf)},
    "positive logp": {"sampler_logps": torch.full((6,), 0.5)},
    "NaN ref": {"ref_logps": torch.full((6,), torch.nan)},
    "negative id": {"prompt_ids": int32(1, -1)},
    "a bool of 2": {"truncated": torch.tensor([0, 2, 1], dtype=torch.uint8).view(torch.bool)},
    "too long": {"prompt_ids": torch.zeros(254, dtype=torch.int32)},
}
BAD_METADATA = [
    *({"protocol": value} for value in (PROTOCOL + 1, PROTOCOL - 1, True, None)),
    *({"id": value} for value in (None, 5, "", "x" * 201, "a\0b", "\udc00")),
    *({"run": value} for value in (None, "x" * 201, "\ud800")),
    *({"sampler": value} for value in (None, "", "x" * 201, "a\nb", "\udc00")),
    *({"outcome": value} for value in (None, "reward")),
    *({"skipped": value} for value in (None, [], {"": 1}, {"\ud800": 1}, {"groups": {}})),
    *({"skipped": {"groups": value}} for value in (float("inf"), 10**400, True)),
    {"skipped": dict.fromkeys(map(str, range(101)), 1)},
    *({"policy_version": value} for value in (True, -1)),
    *({"item": value} for value in (3.0, float("nan"), 2**63)),
    *({"reward_names": value} for value in ("ab", [], [1, 2], ["a", "a"])),
    *({"reward_names": ["correct", value]} for value in ("a\nb", "x" * 201)),
    {"reward_names": ["correct", "b", "c"]},  # the rewards have two columns
]


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_tensors_that_do_not_fit_are_refused(name):
    with pytest.raises(ValueError):
        unpack_group(blob(BAD_TENSORS[name]), **LIMITS)


@pytest.mark.parametrize("meta", BAD_METADATA, ids=range(len(BAD_METADATA)))
def test_lying_metadata_is_refused(meta):
    with pytest.raises(ValueError):
        unpack_group(blob(**meta), **LIMITS)
    unpack_group(blob(), **LIMITS)


# --- Tokenizers -------------------------------------------------------------------------
def test_facts_tell_tokenizers_apart(tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    facts = facts_of(tokenizer, 0.5)
    assert facts["vocab_size"] == VOCAB == len(tokenizer) and facts["temperature"] == 0.5
    assert facts == facts_of(AutoTokenizer.from_pretrained(tiny), 0.5)
    tokenizer.add_tokens(["<new>"])
    assert facts_of(tokenizer, 0.5)["tokenizer"] != facts["tokenizer"]
    assert facts_of(tokenizer, 0.5)["vocab_size"] == VOCAB + 1
