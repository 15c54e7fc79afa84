"""A bfloat16 model whose head is not plain keeps its logits, and its packed sequences."""

import copy

import pytest

from grpo.forward import CompletionModel
from grpo.options.sampling.float32_head import ConvertedHead, give_float32_head


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "qwen2"])
def test_packing_stays(family, model_of):
    model = copy.deepcopy(model_of(family)).bfloat16()
    before = CompletionModel(model).packs
    give_float32_head(model)
    assert CompletionModel(model).packs == before
    assert ("forward" in vars(model.get_output_embeddings())) == (family != "gemma2")
    with ConvertedHead(model):
        pass
