"""Attention with its sums: each kernel gives what the pieces do, or the pieces are taken."""

import contextlib

import pytest
import torch
from families import tiny_model
from gpu_kernels import efficient_attention, registered

from grpo.sampling.decoders import attention, shared_prompt
from grpo.sampling.decoders.attention import attend, in_one_kernel, in_pieces, kernel_works, mask_of
from grpo.sampling.decoders.choice import make_decoder
from grpo.sampling.decoders.shared_prompt import LlamaDecoder

CPU = torch.device("cpu")


@pytest.fixture
def gpus_kernel():
    kernel_works.cache_clear()
    with registered(efficient_attention):
        yield
    kernel_works.cache_clear()


def some(queries, keys, width=8, dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(3, 2, n, width, generator=draw).to(dtype) for n in (queries, keys, keys)]


@pytest.mark.parametrize("mask", [False, True])
def test_both_kinds_of_attention_give_the_same_and_its_sums(mask):
    """PyTorch's kernel for CPUs, and what other devices and capped scores take. The kernel goes by
    blocks of 512 keys: here some are hidden as a whole."""
    query, keys, values = some(4, 1100)
    where = torch.zeros(3, 1, 1, 1100, dtype=torch.bool)
    where[0, ..., 50:] = where[1, ..., :1099] = True
    arguments = query, keys, values, mask_of(where, keys) if mask else None, 0.3
    uncapped = attend(*arguments, 1e6)  # a cap that no score is near to
    for a, b in zip(attend(*arguments, None), uncapped, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)
    scores = query.double() @ keys.double().mT * 0.3
    scores = scores.masked_fill(where, -torch.inf) if mask else scores
    torch.testing.assert_close(uncapped[1], scores.logsumexp(-1).float(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("columns", [1, 7, 8, 40, 61])
@pytest.mark.parametrize("queries", [1, 32, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpus_kernel_takes_what_decoders_have(dtype, queries, columns, gpus_kernel):
    """Any number of columns, of a larger room; a mask for all heads and queries; sums in rows of
    32, of which the rest is not theirs."""
    query, keys, values = some(queries, 64, dtype=dtype)
    query = query.transpose(1, 2).contiguous().transpose(1, 2)  # heads innermost
    keys, values = keys[:, :, :columns], values[:, :, :columns]
    where = torch.arange(columns) > torch.tensor([0, 3, 99])[:, None, None, None]
    for mask in (None, mask_of(where, keys)):
        found = in_one_kernel(query, keys, values, mask, 0.3)
        exact = (None if x is None else x.float() for x in (query, keys, values, mask))
        for a, b in zip(found, in_pieces(*exact, 0.3, None), strict=True):
            assert a.shape == b.shape
            torch.testing.assert_close(
                a.float(), b, rtol=0, atol=2e-2 if a.dtype != b.dtype else 1e-5
            )


# --- Tried before it is used --------------------------------------------------------
def half_off(*arguments, **settings):
    out, log_sums, *rest = efficient_attention(*arguments, **settings)
    return out, log_sums + 0.5, *rest


def of_another_layout(*arguments, **settings):
    out, log_sums, *rest = efficient_attention(*arguments, **settings)
    return out.transpose(1, 2).reshape(out.shape), log_sums, *rest


def without_its_mask(query, key, value, attn_bias, *arguments, **settings):
    return efficient_attention(query, key, value, None, *arguments, **settings)


@pytest.mark.parametrize("kernel, reason", [
    (half_off, "0.5 off"),
    (of_another_layout, " off"),
    (without_its_mask, " off"),
    (None, "(NotImplementedError)"),
])  # fmt: skip
def test_a_kernel_that_is_wrong_or_missing_costs_the_kernel_and_no_decoder(
    kernel, reason, monkeypatch, capsys
):
    kernel_works.cache_clear()
    monkeypatch.setattr(shared_prompt, "attend", as_on_a_gpu)
    with registered(kernel) if kernel else contextlib.nullcontext():
        assert type(make_decoder(tiny_model("qwen2"), 12, 9)) is LlamaDecoder
    kernel_works.cache_clear()
    (said,) = capsys.readouterr().out.splitlines()  # once
    assert "in pieces" in said and "float32 and heads of 8" in said and said.endswith(reason)


def as_on_a_gpu(query, keys, values, mask, scaling, softcap):
    if softcap is None and kernel_works(CPU, query.dtype, query.shape[-1]):
        return in_one_kernel(query, keys, values, mask, scaling)
    return in_pieces(query, keys, values, mask, scaling, softcap)


def test_a_right_kernel_is_taken_without_a_word(gpus_kernel, capsys):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert kernel_works(CPU, dtype, 64) and kernel_works(CPU, dtype, 256)
    assert capsys.readouterr().out == ""
    assert not kernel_works(CPU, torch.bfloat16, 20)  # rows of 40 bytes


def test_capped_scores_and_values_of_another_width_go_in_pieces(monkeypatch):
    query, keys, values = some(4, 9)
    monkeypatch.setattr(attention, "kernel_works", lambda *_: pytest.fail("tried"))
    meta = [x.to("meta") for x in (query, keys, values)]
    for last, softcap in ((values, 30.0), (values[..., :4], None)):
        out, log_sums = attend(*meta[:2], last.to("meta"), None, 0.3, softcap)
        assert out.shape == (3, 2, 4, last.shape[-1]) and log_sums.shape == (3, 2, 4)
