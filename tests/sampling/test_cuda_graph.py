"""The recorded step: on a GPU as it is, elsewhere on a tape that does what a CUDA graph does.

A tape keeps operations with the memory that they read and write, and runs these again, without the
Python around them; and like a graph it refuses what waits for the device or brings numbers to it.
So a number of Python's that should have changed, or a tensor that was not copied to its place,
gives wrong logits here too. What a tape cannot show is that CUDA takes it, and what it brings:
`pytest tests/sampling/test_cuda_graph.py` on a GPU, and benchmarks/sampling.py.
"""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from families import (
    MANY,
    OWN_STEP,
    PROMPTS,
    TOLERANCE,
    assert_plain_logps,
    assert_well_formed,
    sample,
    tiny_model,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grpo.sampling import sampler
from grpo.sampling.decoders import cuda_graph
from grpo.sampling.decoders import shared_prompt as decode
from grpo.sampling.decoders.choice import is_right, make_decoder
from grpo.sampling.decoders.cuda_graph import (
    GraphedDecoder,
    GraphedSharedDecoder,
    can_record,
    can_record_layers,
)
from grpo.sampling.decoders.shared_prompt import LlamaDecoder

aten = torch.ops.aten
# .item() and bool(), indices by a mask, and tensors made of Python's numbers
WAITING = {aten._local_scalar_dense, aten.nonzero, aten.lift_fresh, aten.is_nonzero}
WAITING |= {aten.masked_select}
INDEXING = {aten.index, aten.index_put, aten.index_put_}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()


class Tape(TorchDispatchMode):
    """Records operations; see the top of the file."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        indices = args[1] if function.overloadpacket in INDEXING else []
        masked = any(x is not None and x.dtype == torch.bool for x in indices)
        if masked or function.overloadpacket in WAITING:
            raise RuntimeError(f"{function} in a graph")
        out = function(*args, **kwargs or {})
        self.calls.append((function, args, kwargs or {}, out))
        return out

    def replay(self):
        for function, args, kwargs, out in self.calls:
            again = function(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@pytest.fixture(autouse=True)
def taped(monkeypatch, request):
    """-> how often a step was recorded, and how often replayed: on a tape, but for models of a test
    that has a GPU as its device."""
    on_gpu = "cuda" in request.node.name
    counts, real = {"recorded": 0, "replayed": 0}, cuda_graph.record

    def on_tape(function):
        tape = Tape()
        with tape:
            out = function()
        return tape.replay, out.fill_(torch.nan)  # a graph has not run yet when it is recorded

    def counted(function):
        replay, out = (real if on_gpu else on_tape)(function)
        counts["recorded"] += 1

        def count():
            counts["replayed"] += 1
            replay()

        return count, out

    monkeypatch.setattr(cuda_graph, "record", counted)
    return counts


def steps(decoder, model):
    """-> logits of steps in which rows leave, prompts join and the room is doubled."""
    found, ids = [decoder.admit(PROMPTS, [2] * 4)], torch.arange(8, device=model.device) + 3
    found += [decoder.next_logits(ids + i).clone() for i in range(4)]
    decoder.keep(torch.tensor([0, 3, 4, 7], device=model.device))
    found += [decoder.next_logits(ids[:4] + i).clone() for i in range(4)]
    decoder.admit([[4] * 12, [9]], [3, 3])  # longer than all, and shorter
    ids = torch.arange(10, device=model.device)
    found += [decoder.next_logits(ids + i).clone() for i in range(4)]
    # rows of different age, groups of different size, a prompt without any
    decoder.keep(torch.tensor([1, 2, 4, 5, 6, 7], device=model.device))
    found += [decoder.next_logits(ids[:6] + i).clone() for i in range(8)]
    return found


STEPS = [(family, GraphedDecoder) for family in sorted(OWN_STEP)]
OTHERS = ["gemma", "gemma2 wide", "gemma3 wide", "opt", "mixtral", "qwen2"]
STEPS += [(family, GraphedSharedDecoder) for family in OTHERS]


@torch.no_grad()
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family, kind", STEPS)
def test_a_replayed_step_has_the_logits_of_one_that_runs(family, kind, device, taped, monkeypatch):
    monkeypatch.setattr(decode, "ROOM", 8)  # full before the third round, and amid the last
    model = tiny_model(family).to(device)
    graphed, plain = kind(model, 20), kind.kind(model, 20)
    for a, b in zip(steps(graphed, model), steps(plain, model), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=TOLERANCE)
        assert (a.amax(1) - a.amin(1)).min() > 1  # far from flat
    # Four rounds, and one more for the room of 16; the first step of each runs as it is
    assert taped == {"recorded": 5, "replayed": 20 - 5}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("max_sequences", [12, None])
def test_graphed_samples_have_plain_log_probs(max_sequences, device, taped, monkeypatch):
    model = tiny_model("qwen2").to(device)
    monkeypatch.setattr(sampler, "make_decoder", lambda model, n, longest: GraphedDecoder(model, n))
    sizes, step = [], GraphedDecoder.next_logits
    count = lambda self, tokens: sizes.append(len(tokens)) or step(self, tokens)
    monkeypatch.setattr(GraphedDecoder, "next_logits", count)
    generator = torch.Generator(device).manual_seed(0)
    groups = sample(model, MANY, max_sequences=max_sequences, generator=generator)
    assert_well_formed(groups, prompts=9)
    assert_plain_logps(model.cpu(), MANY, groups, tolerance=5 * TOLERANCE)
    longest = max(len(c.ids) for c in itertools.chain(*groups))
    assert taped["replayed"] >= longest / 2 > taped["recorded"]
    assert max(sizes) <= (max_sequences or 27)  # those that have ended leave before others come


def test_a_step_that_looks_at_its_positions_is_not_recorded():
    """A recording that fails leaves its traces in PyTorch's allocator."""
    for rope, static in {"default": 1, "yarn": 1, "dynamic": 0, "longrope": 0}.items():
        body = SimpleNamespace(rotary_emb=SimpleNamespace(rope_type=rope))
        model = SimpleNamespace(device=torch.device("cuda"), model=body)
        assert can_record(model) == static
    assert not can_record(tiny_model("llama"))  # on a CPU


# --- What would be wrong is found out ------------------------------------------------------
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
        model = tiny_model("llama", rope_parameters=DYNAMIC)
    else:
        model = tiny_model("llama")
        assert is_right(GraphedDecoder, model)
        by = {"_forward": a_column_that_stays, "next_logits": inputs_that_stay}
        monkeypatch.setattr(GraphedDecoder, wrong, by[wrong])
    assert not is_right(GraphedDecoder, model)
    reason = "(RuntimeError)" if wrong == "it waits" else "differ by"
    said = capsys.readouterr().out
    assert "without CUDA graphs" in said and reason in said
    assert is_right(LlamaDecoder, model)


# --- On a GPU ----------------------------------------------------------------------------
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@needs_gpu
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_takes_the_recorded_step_and_attention_in_one_kernel(dtype):
    exact, model = tiny_model("qwen2").cuda(), tiny_model("qwen2").to("cuda", dtype)
    assert type(make_decoder(model, 12, 9)) is GraphedDecoder
    expected = steps(LlamaDecoder(exact, 20), exact)
    for found, reference in zip(steps(GraphedDecoder(model, 20), model), expected, strict=True):
        assert (found.float() - reference).norm() < 0.1 * reference.norm()
    dynamic = tiny_model("llama", rope_parameters=DYNAMIC).cuda()
    assert type(make_decoder(dynamic, 12, 9)) is LlamaDecoder and not can_record_layers(dynamic)
    assert type(make_decoder(tiny_model("gemma").cuda(), 12, 9)) is GraphedSharedDecoder


@needs_gpu
@torch.no_grad()
def test_scores_of_bfloat16_are_kept_in_float32():
    """Large scores, as Qwen2.5's biases make them; a score rounded to bfloat16 is off by 0.1."""
    draw = torch.Generator("cuda").manual_seed(0)
    like = {"generator": draw, "device": "cuda", "dtype": torch.bfloat16}
    query, keys, values = (torch.randn(3, 2, n, 64, **like) for n in (4, 300, 300))
    query, settings = query * 4, (None, 1.0, None)
    out, log = decode.attend(query, keys, values, *settings)
    scores = query.double() @ keys.double().mT
    torch.testing.assert_close(log.double(), scores.logsumexp(-1), rtol=0, atol=1e-3)
    expected = scores.softmax(-1) @ values.double()
    assert (out.double() - expected).norm() < 0.01 * expected.norm()
