"""The recorded step on a GPU; tests/rehearsal/gpu_cuda_graph.py has what a simulated one shows."""

import pytest
import torch
from families import DYNAMIC, steps, tiny_model

from grpo.decode_attention import attend
from grpo.decoder import make_decoder
from grpo.options.gpu.cuda_graph import GraphedDecoder, can_record
from grpo.shared_prompt import SharedDecoder

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@needs_gpu
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_takes_the_recorded_step_and_attention_in_one_kernel(dtype):
    exact, model = tiny_model("qwen2").cuda(), tiny_model("qwen2").to("cuda", dtype)
    assert type(make_decoder(model, 12, 9)) is GraphedDecoder
    expected = steps(SharedDecoder(exact, 20), exact)
    for found, reference in zip(steps(GraphedDecoder(model, 20), model), expected, strict=True):
        assert (found.float() - reference).norm() < 0.1 * reference.norm()
    dynamic = tiny_model("llama", rope_parameters=DYNAMIC).cuda()
    assert type(make_decoder(dynamic, 12, 9)) is SharedDecoder
    assert not can_record(dynamic)
    assert type(make_decoder(tiny_model("gemma").cuda(), 12, 9)) is GraphedDecoder


@needs_gpu
@torch.no_grad()
def test_scores_of_bfloat16_are_kept_in_float32():
    """Large scores, as Qwen2.5's biases make them; a score rounded to bfloat16 is off by 0.1."""
    draw = torch.Generator("cuda").manual_seed(0)
    like = {"generator": draw, "device": "cuda", "dtype": torch.bfloat16}
    query, keys, values = (torch.randn(3, 2, n, 64, **like) for n in (4, 300, 300))
    query, settings = query * 4, (None, 1.0, None)
    out, log = attend(query, keys, values, *settings)
    scores = query.double() @ keys.double().mT
    torch.testing.assert_close(log.double(), scores.logsumexp(-1), rtol=0, atol=1e-3)
    expected = scores.softmax(-1) @ values.double()
    assert (out.double() - expected).norm() < 0.01 * expected.norm()
