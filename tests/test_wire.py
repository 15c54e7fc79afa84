"""The wire: what is packed is unpacked as it was, and nothing malformed is unpacked."""

import dataclasses
import json
import math
import struct

import pytest
import safetensors.torch
import torch
from helpers import LIMITS, VOCAB, make_group
from transformers import AutoTokenizer

from grpo import wire
from grpo.wire import (
    PROTOCOL,
    facts_of,
    group_of,
    ids_by_sequence,
    pack_group,
    pack_ids,
    pack_logps,
    read_group,
    unpack_ids,
    unpack_logps,
)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def blob(**changes):
    """-> a group's body made by hand: a valid one but for what is given (None is left out)."""
    meta, tensors = wire.read_blob(VALID, "", wire.TENSORS)
    fields = {k: v for k, v in (meta | tensors | changes).items() if v is not None}
    tensors = {name: fields.pop(name) for name in wire.TENSORS if name in fields}
    return safetensors.torch.save(tensors, {"grpo": json.dumps(fields)})


def ids_blob(**tensors):
    """-> the ids of two prompts, with 2 and 1 completions; but for what is given."""
    good = {"prompt_ids": int32(1, 2, 3), "prompt_lengths": int32(2, 1)}
    good |= {"completion_ids": int32(4, 5, 6, 7), "completion_lengths": int32(2, 1, 1)}
    good |= {"group_sizes": int32(2, 1)} | tensors
    return safetensors.torch.save({k: v for k, v in good.items() if v is not None})


VALID = pack_group(make_group())


# --- Round trips ------------------------------------------------------------------------
@pytest.mark.parametrize("mask", [None, [True, False, True]])
def test_a_group_comes_back(mask):
    """The ids themselves; its item, texts and what the trainer has added stay where they are."""
    for name in ("a", "å" * 200, "组-0001", "with space"):
        group = make_group(id=name, run=name, sampler=name)
        group.samples[0].is_model_token, group.samples[1].tool_calls = mask, (5, 2)
        for sample, reward in zip(group.samples, (0.5, math.nan, 1.0), strict=True):
            sample.rewards = {"format": 0.25, "correct": reward}  # NaN: does not apply
        body = pack_group(dataclasses.replace(group, item={"question": "?"}))
        assert len(body) < 6000 and repr(group_of(*read_group(body))) == repr(group)  # NaN != NaN


def test_ids_come_back_with_a_prompt_for_each_completion():
    groups = [make_group((3, 1), seed=1, prompt=2), make_group((5,), seed=2, prompt=7)]
    prompts, completions = ids_by_sequence(unpack_ids(pack_ids(groups), **LIMITS))
    assert prompts == [s.group.prompt for g in groups for s in g.samples]
    assert completions == [s.ids for g in groups for s in g.samples]
    assert prompts[0] is prompts[1]  # of 64 completions it is kept once


# --- What is no blob at all -------------------------------------------------------------
def header_of(text):
    """-> a blob that is a header alone."""
    return struct.pack("<Q", len(text)) + text


DEEP = json.dumps({"__metadata__": {"grpo": "[" * 100_000}}).encode()
NO_BLOBS = {
    "metadata that is a list": header_of(b'{"__metadata__": {"grpo": "[1]"}}'),
    "metadata that is deep": header_of(DEEP),
    "no metadata at all": header_of(b'{"__metadata__": null}'),
    "a dtype that torch lacks": header_of(
        b'{"x": {"dtype": "Q9", "shape": [], "data_offsets": []}}'
    ),
    "empty": b"",
    "truncated by a byte": VALID[:-1],
    "HTML": b"<!doctype html>",
    "no metadata": safetensors.torch.save({"prompt_ids": torch.zeros(1)}),
}


@pytest.mark.parametrize("name", NO_BLOBS)
def test_a_body_that_is_no_blob_of_ours_is_refused(name):
    body = NO_BLOBS[name]
    for unpack in (
        lambda: read_group(body),
        lambda: unpack_ids(body, **LIMITS),
        lambda: unpack_logps(body, [make_group()]),
    ):
        with pytest.raises(ValueError):
            unpack()


# --- Ids that do not fit ----------------------------------------------------------------
BAD_IDS = {  # a name in the reason
    "no tensor": ({"group_sizes": None}, "group_sizes"),
    "int64": ({"prompt_ids": torch.zeros(3, dtype=torch.int64)}, "prompt_ids"),
    "length 0": ({"completion_lengths": int32(4, 0, 0)}, "completion_lengths"),
    "fewer ids": ({"prompt_ids": int32(1, 2)}, "prompt_lengths"),
    "negative id": ({"prompt_ids": int32(1, -1, 2)}, "-1"),
    "id of the padding": ({"completion_ids": int32(1, 2, 3, VOCAB)}, str(VOCAB)),
    "groups too small": ({"group_sizes": int32(1, 1)}, "group_sizes"),
    "groups too large": ({"group_sizes": int32(2, 2**31 - 1)}, "group_sizes"),
    "an empty group": ({"group_sizes": int32(3, 0)}, "group_sizes"),
    "a negative group": ({"group_sizes": int32(4, -1)}, "group_sizes"),
    "a group without a prompt": ({"group_sizes": int32(1, 1, 1)}, "group_sizes"),
    "no prompts": ({"prompt_lengths": int32(), "prompt_ids": int32()}, "prompt_lengths"),
    "a matrix": ({"completion_ids": int32(4, 5, 6, 7)[None]}, "one dimension"),
    "a number": ({"completion_lengths": torch.tensor(4, dtype=torch.int32)}, "one dimension"),
    "too long": (
        {"prompt_ids": torch.ones(256, dtype=torch.int32), "prompt_lengths": int32(255, 1)},
        "257",
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
@pytest.mark.parametrize("wrong", [
    {"truncated": None}, {"logps": -torch.ones(6).bfloat16()}, {"protocol": PROTOCOL - 1},
    {"version": "7"}, {"index": None}, {"run": ["run"]}, {"id": "\ud800"},
])  # fmt: skip
def test_a_group_without_a_part_or_of_another_type_is_refused(wrong):
    with pytest.raises(ValueError):
        read_group(blob(**wrong))
    read_group(blob())


def test_a_group_of_another_version_is_told_to_update_whatever_its_tensors_are():
    body = safetensors.torch.save({"own": torch.ones(1)}, {"grpo": json.dumps({"protocol": 4})})
    with pytest.raises(ValueError, match="protocol must be 8: update the older side"):
        read_group(body)


# --- Tokenizers -------------------------------------------------------------------------
def test_facts_tell_tokenizers_apart(tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    facts = facts_of(tokenizer)
    assert facts["vocab_size"] == VOCAB == len(tokenizer)
    assert facts == facts_of(AutoTokenizer.from_pretrained(tiny))
    tokenizer.add_tokens(["<new>"])
    assert facts_of(tokenizer)["tokenizer"] != facts["tokenizer"]
    assert facts_of(tokenizer)["vocab_size"] == VOCAB + 1
