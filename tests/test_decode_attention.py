"""Attention with its sums: each kernel gives what the pieces do."""

import contextlib

import pytest
import torch
from families import tiny_model
from gpu_kernels import efficient_attention, registered

from grpo import shared_prompt
from grpo.cached import CachedDecoder
from grpo.decode_attention import attend, mask_of
from grpo.decoder import make_decoder
from grpo.options.gpu import decoding
from grpo.options.gpu.decoding import in_one_kernel
from grpo.shared_prompt import SharedDecoder


def some(queries, keys, width=8, dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(3, 2, n, width, generator=draw).to(dtype) for n in (queries, keys, keys)]


@pytest.mark.parametrize("mask", [False, True])
def test_both_kinds_of_attention_give_the_same_and_its_sums(mask):
    """The kernel goes by blocks of 512 keys: here some are hidden as a whole."""
    query, keys, values = some(4, 1100)
    where = torch.zeros(3, 1, 1, 1100, dtype=torch.bool)
    where[0, ..., 50:] = where[1, ..., :1099] = True
    arguments = query, keys, values, mask_of(where, keys) if mask else None, 0.3
    uncapped = attend(*arguments, 1e6)  # a cap that no score is near to
    for a, b in zip(attend(*arguments), uncapped, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)
    scores = query.double() @ keys.double().mT * 0.3
    scores = scores.masked_fill(where, -torch.inf) if mask else scores
    torch.testing.assert_close(uncapped[1], scores.logsumexp(-1).float(), rtol=0, atol=1e-4)


def of_another_layout(*arguments, **settings):
    out, log_sums, *rest = efficient_attention(*arguments, **settings)
    return out.transpose(1, 2).reshape(out.shape), log_sums, *rest


def without_its_mask(query, key, value, attn_bias, *arguments, **settings):
    return efficient_attention(query, key, value, None, *arguments, **settings)


@pytest.mark.parametrize("kernel, reason", [
    (of_another_layout, "its logits differ by"),
    (without_its_mask, "its logits differ by"),
    (None, "NotImplementedError("),
    (efficient_attention, ""),
])  # fmt: skip
def test_a_kernel_that_is_wrong_or_missing_costs_the_decoder(kernel, reason, monkeypatch, capsys):
    monkeypatch.setattr(shared_prompt, "attend", as_on_a_gpu)
    with registered(kernel) if kernel else contextlib.nullcontext():
        decoder = make_decoder(tiny_model("qwen2"), 12, 9)
    assert type(decoder) is (CachedDecoder if reason else SharedDecoder)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == bool(reason)
    assert all("slower" in line and reason in line for line in said)


def as_on_a_gpu(query, keys, values, mask, scaling, softcap=None):
    return in_one_kernel(query, keys, values, mask, scaling)


def test_capped_scores_and_values_of_another_width_go_in_pieces(monkeypatch):
    query, keys, values = some(4, 9)
    monkeypatch.setattr(decoding, "in_one_kernel", lambda *_: pytest.fail("tried"))
    meta = [x.to("meta") for x in (query, keys, values)]
    for last, softcap in ((values, 30.0), (values[..., :4], None)):
        out, log_sums = attend(*meta[:2], last.to("meta"), None, 0.3, softcap)
        assert out.shape == (3, 2, 4, last.shape[-1]) and log_sums.shape == (3, 2, 4)
