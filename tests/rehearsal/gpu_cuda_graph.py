"""The recorded step on the simulated GPU: a number of Python's that should have changed, or a
tensor that was not copied to its place, gives wrong logits here too."""

from dataclasses import replace

import pytest
import torch
from families import DYNAMIC, TOLERANCE, steps, tiny_model

from grpo import shared_prompt as decode
from grpo.decoder import is_right
from grpo.options.gpu import cuda_graph
from grpo.options.gpu.cuda_graph import GraphedDecoder
from grpo.shared_prompt import SharedDecoder


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3", "gemma2 wide", "opt"])
def test_a_replayed_step_has_the_logits_of_one_that_runs(family, monkeypatch):
    monkeypatch.setattr(decode, "ROOM", 8)  # full before the third round, and amid the last
    recorded, real = [], cuda_graph.record
    monkeypatch.setattr(cuda_graph, "record", lambda step: recorded.append(step) or real(step))
    model = tiny_model(family).to("cuda")
    graphed, plain = GraphedDecoder(model, 20), SharedDecoder(model, 20)
    for a, b in zip(steps(graphed, model), steps(plain, model), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=TOLERANCE)
        assert (a.amax(1) - a.amin(1)).min() > 1  # far from flat
    assert len(recorded) == 5  # four rounds, and one more for the room of 16
    assert cuda_graph.recorder.cache_info().misses == 1  # one stream and one pool of memory


def a_column_that_stays(self, tokens, columns):
    """The column that is written is a number of Python's, and the same in each replay."""
    slots = self.decoder.slots_for(columns, self.decoder.room)
    where = (..., self.decoder.lengths[0], slice(None))
    return self.decoder.forward(tokens, replace(slots, where=where))


def inputs_that_stay(self, tokens, real=GraphedDecoder.next_logits):
    """What has changed is not copied to where the recorded step reads it."""
    logits = real(self, tokens)
    if self.graph:
        self.graph.inputs = [x.clone() for x in self.graph.inputs]
    return logits


@pytest.mark.parametrize("wrong", ["_forward", "next_logits", "it waits"])
def test_a_recorded_step_that_would_be_wrong_is_found_out(wrong, monkeypatch, capsys):
    if wrong == "it waits":  # its rotary embedding looks at the largest position
        model = tiny_model("llama", rope_parameters=DYNAMIC).to("cuda")
    else:
        model = tiny_model("llama").to("cuda")
        assert is_right(GraphedDecoder, model)
        by = {"_forward": a_column_that_stays, "next_logits": inputs_that_stay}
        monkeypatch.setattr(GraphedDecoder, wrong, by[wrong])
    assert not is_right(GraphedDecoder, model)
    reason = "RuntimeError(" if wrong == "it waits" else "differ by"
    said = capsys.readouterr().out
    assert "without CUDA graphs" in said and reason in said
    assert is_right(SharedDecoder, model)
