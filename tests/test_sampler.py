"""The sampler on tiny random models of every family: what it samples, records and leaves alone.

`FAMILIES`, `tiny_model` and `plain_logps` are the yardstick of test_loss.py too: a plain forward of
one row at a time, with no padding, mask, position or cache to get wrong.
"""

import gc
import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import AttentionInterface, AutoModelForCausalLM, GenerationConfig

from grpo.models import accepts, can_cache
from grpo.sampling.decoders import llama as llama_step
from grpo.sampling.decoders import shared_prompt as decode
from grpo.sampling.decoders.cached import CachedDecoder, PlainDecoder
from grpo.sampling.decoders.choice import is_right, make_decoder
from grpo.sampling.decoders.llama import LlamaDecoder
from grpo.sampling.decoders.shared_prompt import SharedDecoder
from grpo.sampling.sampler import draw, sample_groups, stream_groups

VOCAB = 110  # ids of the tokenizer; the models embed 120, as real ones pad their embedding
# Float32, cached and batched against plain; measured over families and seeds: 2.4e-6.
TOLERANCE = 1e-5
PROMPTS = [[7], [3, 99, 4, 11, 5], [9, 8, 7, 6, 5, 4, 3, 2, 1], [5, 6, 0]]  # 0 is also the filler
EOS = set(range(10, 26))  # many, so that rows end at different tokens

SHAPE = {
    "vocab_size": 120,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
LLAMA = SHAPE | {"intermediate_size": 64, "num_key_value_heads": 2}
GEMMA = LLAMA | {"head_dim": 8}
GPT = {"vocab_size": 120, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
MAMBA = {"vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
FAMILIES = {  # name: config class and sizes; windows slide within the prompts and the completions
    "qwen2": ("Qwen2Config", LLAMA),
    "llama": ("LlamaConfig", LLAMA),
    "qwen3": ("Qwen3Config", GEMMA),
    "gemma": ("GemmaConfig", GEMMA),
    "gemma2": ("Gemma2Config", GEMMA | {"sliding_window": 4}),
    "gemma3": ("Gemma3TextConfig", GEMMA | {"sliding_window": 4}),
    "gpt2": ("GPT2Config", GPT),
    "mistral": ("MistralConfig", LLAMA | {"sliding_window": 4}),
    "opt": ("OPTConfig", SHAPE | {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "bloom": ("BloomConfig", {"vocab_size": 120, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "mixtral": ("MixtralConfig", LLAMA | {"num_local_experts": 4}),
    "mamba": ("MambaConfig", MAMBA),
    "gpt1": ("OpenAIGPTConfig", GPT),
    "lfm2": ("Lfm2Config", LLAMA | {"layer_types": ["conv", "full_attention"]}),
}
WIDE = {  # the same with windows wider than any text here, and attention that is capped hard
    "gemma2 wide": (
        "Gemma2Config",
        GEMMA | {"sliding_window": 64, "attn_logit_softcapping": 2.0},
    ),
    "gemma3 wide": ("Gemma3TextConfig", GEMMA | {"sliding_window": 64}),
    "mistral wide": ("MistralConfig", LLAMA | {"sliding_window": 64}),
}
MIXTURE = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8}
DEEPSEEK = SHAPE | MIXTURE | LATENT | {"v_head_dim": 8, "moe_intermediate_size": 16}
SINKS = GEMMA | {"num_local_experts": 4, "layer_types": ["full_attention"] * 2}
ELSEWHERE = "its attention does not go through transformers' attention interface"
UNSHARED = {  # families that can't have shared prompts, and the reason that is printed
    "bloom": (*FAMILIES["bloom"], ELSEWHERE),
    "falcon": ("FalconConfig", SHAPE, ELSEWHERE),
    "mpt": (
        "MptConfig",
        {"vocab_size": 120, "d_model": 32, "n_heads": 4, "n_layers": 2},
        ELSEWHERE,
    ),
    "deepseek v3": ("DeepseekV3Config", DEEPSEEK, "its attention keeps its own cache format"),
    "gpt-oss": ("GptOssConfig", SINKS, "its attention has sinks"),
}
OWN_STEP = {"qwen2", "llama", "qwen3", "mistral wide"}  # of llama_step.py
SHARING = {*OWN_STEP, "gemma", "gpt2", "opt", "mixtral", *WIDE}
SLOW = {"mamba", "gpt1", "lfm2"}  # their past is not (only) a key-value cache


def tiny_model(family, seed=0, **changes):
    """-> a random model in eval mode whose next-token distribution is far from flat."""
    name, sizes, *_ = (UNSHARED | FAMILIES | WIDE)[family]
    sizes = sizes | changes
    torch.manual_seed(seed)
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model = AutoModelForCausalLM.from_config(getattr(transformers, name)(**sizes, **special))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture(scope="module")
def model_of():
    made = {}
    return lambda family: made.setdefault(family, tiny_model(family))


def plain_logps(model, prompt, completion, temperature):
    """-> log-probs of the completion's tokens from one forward of the one row, float32 (T,)."""
    ids = torch.tensor([prompt + completion])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    log_probs = torch.log_softmax(logits[:, :VOCAB].float() / temperature, dim=-1)
    return log_probs[torch.arange(len(completion)), torch.tensor(completion)]


def sample(model, prompts, seed=0, **changes):
    settings = {"group_size": 3, "max_new_tokens": 12, "temperature": 1.0, "eos_ids": EOS}
    settings |= {"vocab_size": VOCAB, "generator": torch.Generator().manual_seed(seed)}
    return sample_groups(model, prompts, **(settings | changes))


def assert_well_formed(groups, *, prompts, group_size, max_new_tokens, eos_ids):
    assert [len(group) for group in groups] == [group_size] * prompts
    for c in itertools.chain(*groups):
        assert 1 <= len(c.ids) == len(c.logps) <= max_new_tokens
        assert all(0 <= i < VOCAB for i in c.ids)
        assert not eos_ids & set(c.ids[:-1])  # nothing comes after EOS
        assert c.truncated == (c.ids[-1] not in eos_ids)
        assert len(c.ids) == max_new_tokens or not c.truncated


# --- Every family --------------------------------------------------------------------
def test_which_families_are_cached(model_of):
    """The others take the slow path, which is exact for every causal model."""
    assert {family for family in FAMILIES if not can_cache(model_of(family))} == SLOW
    assert not can_cache(SimpleNamespace(_is_stateful=True))  # DeepSeek-V4's word is taken


@torch.no_grad()
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("family", FAMILIES)
def test_logps_are_those_of_a_plain_forward(family, temperature, model_of):
    """simple_GRPO sampled at 0.9 and took log-probs at 1, of text that it tokenised again."""
    model = model_of(family)
    groups = sample(model, PROMPTS, temperature=temperature, group_size=8)
    assert_well_formed(groups, prompts=4, group_size=8, max_new_tokens=12, eos_ids=EOS)
    everyone = list(itertools.chain(*groups))
    assert 0 < sum(c.truncated for c in everyone) < 32  # some rows left the batch, some did not
    other = 1.7 - temperature  # the wrong one of the two
    gaps = {temperature: [], other: []}
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for c, t in itertools.product(group, gaps):
            gap = torch.tensor(c.logps) - plain_logps(model, prompt, c.ids, t)
            gaps[t].append(gap.abs().max().item())
    assert max(gaps[temperature]) < TOLERANCE
    assert max(gaps[other]) > 0.1  # so the models are sharp enough to tell


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_that_of_generate(family, model_of):
    model = model_of(family)
    groups = sample(model, PROMPTS, temperature=0, group_size=2)
    assert_well_formed(groups, prompts=4, group_size=2, max_new_tokens=12, eos_ids=EOS)
    pinned = GenerationConfig(
        do_sample=False,
        max_new_tokens=12,
        eos_token_id=sorted(EOS),
        pad_token_id=0,
        suppress_tokens=list(range(VOCAB, 120)),
    )
    for prompt, group in zip(PROMPTS, groups, strict=True):
        ids = torch.tensor([prompt])  # with a mask, or generate infers one from the pad id in it
        ids = model.generate(ids, attention_mask=ids >= 0, generation_config=pinned)[0]
        expected = ids[len(prompt) :].tolist()
        for c in group:
            assert c.ids == expected
            gap = torch.tensor(c.logps) - plain_logps(model, prompt, c.ids, 1.0)
            assert gap.abs().max() < TOLERANCE  # greedy log-probs are those at temperature 1


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen2", "gpt2", "mamba"])
@pytest.mark.parametrize("prompt", [[5], [5, 6, 7]])
@pytest.mark.parametrize("longest", [1, 4])
def test_the_smallest_batches(family, prompt, longest, model_of):
    """One prompt, of one token, one completion, of one token."""
    groups = sample(model_of(family), [prompt], group_size=1, max_new_tokens=longest)
    assert_well_formed(groups, prompts=1, group_size=1, max_new_tokens=longest, eos_ids=EOS)
    (c,) = groups[0]
    gap = torch.tensor(c.logps) - plain_logps(model_of(family), prompt, c.ids, 1.0)
    assert gap.abs().max() < TOLERANCE


# --- Ends ------------------------------------------------------------------------------
@pytest.mark.parametrize("eos_ids", [{12}, {12, 99}, set(range(VOCAB)), {500}])
@pytest.mark.parametrize("longest", [1, 2, 9])
def test_a_completion_ends_with_eos_or_is_truncated(eos_ids, longest, model_of):
    """simple_GRPO cut EOS away, so stopping was never trained, and did not know cut answers."""
    groups = sample(
        model_of("qwen2"), PROMPTS, group_size=8, max_new_tokens=longest, eos_ids=eos_ids
    )
    assert_well_formed(groups, prompts=4, group_size=8, max_new_tokens=longest, eos_ids=eos_ids)
    everyone = list(itertools.chain(*groups))
    if len(eos_ids) == VOCAB:  # all end at once
        assert all(len(c.ids) == 1 and not c.truncated for c in everyone)
    if eos_ids == {500}:  # none can end
        assert all(len(c.ids) == longest and c.truncated for c in everyone)


def test_every_eos_id_ends_a_row_and_so_does_one_at_the_last_token(model_of):
    everyone = list(
        itertools.chain(*sample(model_of("qwen2"), PROMPTS, group_size=64, max_new_tokens=3))
    )
    ended = {c.ids[-1] for c in everyone if not c.truncated}
    assert len(ended) > 4 and ended <= EOS
    assert any(len(c.ids) == 3 and not c.truncated for c in everyone)


# --- Groups and cost -------------------------------------------------------------------
@pytest.mark.parametrize("group_size", [1, 2, 7])
def test_group_sizes(group_size, model_of):
    groups = sample(model_of("qwen2"), PROMPTS[:2], group_size=group_size)
    assert_well_formed(groups, prompts=2, group_size=group_size, max_new_tokens=12, eos_ids=EOS)
    for group in groups:  # samples, not copies: two of the same are likely only as short ones
        long = [tuple(c.ids) for c in group if len(c.ids) > 2]
        assert len(set(long)) == len(long)


class Shapes:
    """The shapes of the ids that a model is given."""

    def __init__(self, model):
        self.model, self.seen = model, []

    def __enter__(self):
        self.hook = self.model.register_forward_pre_hook(
            lambda module, args, kwargs: self.seen.append(tuple(kwargs["input_ids"].shape)),
            with_kwargs=True,
        )
        return self.seen

    def __exit__(self, *_):
        self.hook.remove()


@pytest.mark.parametrize("family", ["gemma", "mistral"])  # which have different decoders
def test_a_prompt_runs_once_and_finished_rows_leave_in_bunches(family, model_of):
    """A row that has ended is not read any more; more than an eighth of them leave together."""
    make_decoder(model_of(family), 12, longest_prompt=9)  # tried now, if it was not before
    with Shapes(model_of(family)) as shapes:
        groups = sample(model_of(family), PROMPTS, group_size=6)
    lengths = [len(c.ids) for c in itertools.chain(*groups)]
    batch, expected = 24, []
    for t in range(1, max(lengths)):
        running = sum(n > t for n in lengths)
        if batch - running > batch // 8:
            batch = running
        expected.append((batch, 1))
    assert shapes == [(len(PROMPTS), 9), *expected]
    batches = [rows for rows, _ in expected]
    assert batches[-1] < 24 and any(  # some left, and some stayed for a while after they had ended
        rows > sum(n > t for n in lengths) for t, rows in enumerate(batches, 1)
    )


# --- Decoders --------------------------------------------------------------------------
@pytest.mark.parametrize("family", FAMILIES | WIDE)
def test_which_families_share_prompts(family, model_of):
    """ALiBi (BLOOM) is of no attention interface, and a window may hide a part of the prompt."""
    kind = type(make_decoder(model_of(family), 12, longest_prompt=9))
    slow = PlainDecoder if family in SLOW else CachedDecoder
    sharing = LlamaDecoder if family in OWN_STEP else SharedDecoder
    assert kind is (sharing if family in SHARING else slow)
    if family in WIDE:  # 64 tokens of window are just enough for these
        assert type(make_decoder(model_of(family), 12, longest_prompt=52)) is sharing
        for longest in (53, None):
            assert type(make_decoder(model_of(family), 12, longest)) is CachedDecoder


@torch.no_grad()
@pytest.mark.parametrize("family", UNSHARED)
def test_a_slower_decoder_is_taken_for_a_reason_in_words(family, capsys):
    """Nobody can do anything with "'Tensor' object has no attribute 'past'"."""
    model = tiny_model(family)
    assert type(make_decoder(model, 12, 9)) is CachedDecoder
    *_, reason = UNSHARED[family]
    said = f"this model is sampled without shared prompts, so slower: {reason}\n"
    assert capsys.readouterr().out == said
    make_decoder(model, 12, 9)
    assert capsys.readouterr().out == ""  # once for a model
    for prompt, group in zip(PROMPTS, sample(model, PROMPTS), strict=True):
        for c in group:
            gap = torch.tensor(c.logps) - plain_logps(model, prompt, c.ids, 1.0)
            assert gap.abs().max() < TOLERANCE


def test_a_decoder_that_fails_is_no_reason_to_stop(monkeypatch, capsys):
    def fail(*_):
        raise AttributeError("'NoneType' object has no attribute 'to'")

    monkeypatch.setattr(SharedDecoder, "next_logits", fail)
    assert type(make_decoder(tiny_model("gemma"), 12, 9)) is CachedDecoder
    assert "so slower: its layers fail in this way (AttributeError)\n" in capsys.readouterr().out


@torch.no_grad()
@pytest.mark.parametrize("family", sorted({*SHARING, "bloom", "mistral"}))
def test_the_slow_path_is_the_fast_one(family, model_of):
    """A model with a cache has the same logits without it: three engines, one answer."""
    model, logits = model_of(family), []
    engines = [PlainDecoder(model), CachedDecoder(model)]
    engines += [SharedDecoder(model, 12)] if family in SHARING else []
    engines += [LlamaDecoder(model, 12)] if family in OWN_STEP else []
    everyone, kept = torch.arange(8) + 3, torch.tensor([0, 3, 4, 7])

    def compare(turn):
        first, *others = [turn(engine) for engine in engines]
        for other in others:
            torch.testing.assert_close(other, first, rtol=0, atol=TOLERANCE)
        logits.append(first)

    compare(lambda engine: engine.admit(PROMPTS, 2))
    compare(lambda engine: engine.next_logits(everyone))
    for engine in engines:
        engine.keep(kept)
    compare(lambda engine: engine.next_logits(everyone[:4]))
    engines = [e for e in engines if not isinstance(e, CachedDecoder)]  # it waits for all to end
    compare(lambda engine: engine.admit([[4] * 12, [9]], 3))  # longer than all, and shorter
    compare(lambda engine: engine.next_logits(torch.arange(10)))
    for engine in engines:  # rows of different age, groups of different size, a prompt without any
        engine.keep(torch.tensor([1, 2, 4, 5, 6, 7]))
    compare(lambda engine: engine.next_logits(torch.arange(6)))
    compare(lambda engine: engine.next_logits(torch.arange(6) + 9))
    assert all((x.amax(1) - x.amin(1)).min() > 1 for x in logits)  # far from flat


@torch.no_grad()
def test_a_long_completion_outgrows_its_room_and_keeps_its_past(model_of):
    """Room is 64 tokens at first, then doubled."""
    model = model_of("qwen2")
    groups = sample(model, PROMPTS[:2], group_size=2, max_new_tokens=150, eos_ids={500})
    for prompt, group in zip(PROMPTS, groups, strict=False):
        for c in group:
            gap = torch.tensor(c.logps) - plain_logps(model, prompt, c.ids, 1.0)
            assert len(c.ids) == 150 and gap.abs().max() < 5 * TOLERANCE  # measured: 8e-6


def without_softcap(module, query, key, value, mask, scaling=None, softcap=None, **others):
    return decode.shared_attention(module, query, key, value, mask, scaling, None, **others)


def without_own(module, query, key, value, mask, **others):
    out, _ = decode.shared_attention(module, query, key, value, mask, **others)
    return out * 0.99, None


@pytest.mark.parametrize("family, wrong", [
    ("gemma2 wide", without_softcap),
    ("gpt2", without_own),
    ("qwen2", "positions"),
    ("qwen2", "padding"),
    ("qwen2", "ages"),
    ("gpt2", "positions"),
])  # fmt: skip
def test_shared_prompts_that_would_be_wrong_are_found_out(family, wrong, monkeypatch):
    """It is tried on every model, for nobody has tried it on all architectures."""
    model, arrange, slots = tiny_model(family), SharedDecoder._arrange, SharedDecoder.slots_for
    kinds = [SharedDecoder] + ([LlamaDecoder] if family in OWN_STEP else [])
    assert all(is_right(kind, model) for kind in kinds)
    if callable(wrong):
        AttentionInterface.register(decode.SHARED, wrong)

    def arrange_wrongly(self):
        arrange(self)
        if wrong == "positions":
            self.layout = replace(self.layout, start=self.layout.start + 1)
        elif wrong == "padding":
            self.layout = replace(self.layout, padding=None)

    monkeypatch.setattr(SharedDecoder, "_arrange", arrange_wrongly)
    if wrong == "ages":  # rows that joined late see what was never written
        seeing = lambda *arguments: replace(slots(*arguments), unwritten=None)
        monkeypatch.setattr(SharedDecoder, "slots_for", seeing)
    try:
        assert not any(is_right(kind, model) for kind in kinds)
        assert type(make_decoder(model, 12, 9)) is CachedDecoder
    finally:
        AttentionInterface.register(decode.SHARED, decode.shared_attention)


# --- The step of our own ---------------------------------------------------------------
@pytest.mark.parametrize("family", sorted(OWN_STEP))
@pytest.mark.parametrize("part", ["norm", "rotated"])
def test_an_own_step_that_would_be_wrong_is_found_out(family, part, monkeypatch, capsys):
    """Such a model is sampled by transformers' layers."""
    wrong = {"norm": lambda module, x: x * module.weight, "rotated": lambda x, cos, sin: x * cos}
    monkeypatch.setattr(llama_step, part, wrong[part])
    assert type(make_decoder(tiny_model(family), 12, 9)) is SharedDecoder
    said = capsys.readouterr().out
    assert "is sampled without Llama layers of our own, so slower: its logits differ by" in said


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True, "mlp_bias": True, "head_dim": 16},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
        {"tie_word_embeddings": True, "num_key_value_heads": 1, "hidden_act": "gelu"},
    ],
)
def test_llamas_of_other_shapes_take_our_step(changes):
    assert_our_step_records_plain_logps(tiny_model("llama", **changes))


def test_adapters_take_our_step():
    from peft import LoraConfig

    model = tiny_model("qwen2")
    layers = ["q_proj", "v_proj", "down_proj"]
    model.add_adapter(LoraConfig(r=4, target_modules=layers, init_lora_weights=False))
    assert_our_step_records_plain_logps(model.eval())


@torch.no_grad()
def assert_our_step_records_plain_logps(model):
    assert type(make_decoder(model, 12, 9)) is LlamaDecoder
    for prompt, group in zip(PROMPTS, sample(model, PROMPTS), strict=True):
        for c in group:
            gap = torch.tensor(c.logps) - plain_logps(model, prompt, c.ids, 1.0)
            assert gap.abs().max() < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen2", "gemma"])
def test_bfloat16_is_near_float32(family):
    """Measured: 0.02 to 0.04, as near as with transformers' own cache."""
    model, kinds = tiny_model(family), [CachedDecoder, SharedDecoder]
    kinds += [LlamaDecoder] if family in OWN_STEP else []
    half = tiny_model(family).to(torch.bfloat16)

    def logits(decoder):
        decoder.admit(PROMPTS, 2)
        found = [decoder.next_logits(torch.arange(8))]
        if decoder.joins:  # rows of different age: some of what they have room for is unwritten
            decoder.admit([[4] * 12, [9]], 3)
            found += [decoder.next_logits(torch.arange(14))]
        return [x.float() for x in found]

    expected = logits(PlainDecoder(model))
    for kind in kinds:
        decoder = kind(half) if kind is CachedDecoder else kind(half, 12)
        for found, exact in zip(logits(decoder), expected, strict=False):
            assert (found - exact).norm() < 0.1 * exact.norm(), kind


@pytest.mark.parametrize("mask", [False, True])
def test_both_kinds_of_attention_give_the_same_and_its_sums(mask):
    """PyTorch's kernel for CPUs, and what other devices and capped scores take. The kernel goes by
    blocks of 512 keys: here some are hidden as a whole."""
    numbers = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(3, 2, n, 8, generator=numbers) for n in (4, 1100, 1100))
    hidden = torch.zeros(3, 1, 1, 1100)
    hidden[0, ..., 50:] = hidden[1, ..., :1099] = -torch.inf
    arguments = query, keys, values, hidden if mask else None, 0.3
    uncapped = decode.attend(*arguments, 1e6)  # a cap that no score is near to
    for a, b in zip(decode.attend(*arguments, None), uncapped, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)
    scores = query.double() @ keys.double().mT * 0.3 + (hidden if mask else 0)
    torch.testing.assert_close(uncapped[1], scores.logsumexp(-1).float(), rtol=0, atol=1e-4)


def test_the_models_own_attention_is_back_after_each_step(model_of):
    model = model_of("gemma")
    before = model.config._attn_implementation
    decoder = make_decoder(model, 12, 9)
    decoder.admit(PROMPTS, 2)
    decoder.next_logits(torch.arange(8))
    assert model.config._attn_implementation == before != decode.SHARED


# --- Streams ---------------------------------------------------------------------------
MANY = [[3 + i] * n for i, n in enumerate([1, 9, 4, 2, 12, 1, 7, 3, 5])]  # of different lengths


FEW_ROWS = [(family, 7, 3) for family in FAMILIES | WIDE]
SOME = ("qwen2", "gpt2", "gemma2 wide", "mamba", "mistral")
FEW_ROWS += [(family, *rows) for family in SOME for rows in ((2, 1), (9, 1))]


@torch.no_grad()
@pytest.mark.parametrize("family, max_rows, group_size", FEW_ROWS)
def test_prompts_are_let_in_while_rows_run(family, max_rows, group_size, model_of):
    """Their log-probs are those of a plain forward, whoever shares the batch with them."""
    model = model_of(family)
    groups = sample(model, MANY, group_size=group_size, max_rows=max_rows)
    assert_well_formed(groups, prompts=9, group_size=group_size, max_new_tokens=12, eos_ids=EOS)
    for prompt, group in zip(MANY, groups, strict=True):
        for c in group:
            gap = torch.tensor(c.logps) - plain_logps(model, prompt, c.ids, 1.0)
            assert gap.abs().max() < TOLERANCE


@pytest.mark.parametrize("family", ["gpt1", "gpt2"])
@pytest.mark.parametrize("max_rows, group_size, eos", [(9, 1, 2), (8, 4, 4)])
def test_an_ended_row_stays_within_the_models_positions(
    family, max_rows, group_size, eos, model_of
):
    """Both have a table of 64, and it may stay in the batch while others run."""
    prompts, eos_ids = [[5 + i] * 9 for i in range(30)], set(range(12, 12 + eos))
    settings = {"group_size": group_size, "max_rows": max_rows, "max_new_tokens": 55}
    groups = sample(model_of(family), prompts, eos_ids=eos_ids, **settings)
    assert len(groups) == 30


class Desk:
    """Gives prompts to a stream, and notes what it was asked for and what has come of it."""

    def __init__(self, prompts):
        self.waiting, self.events = list(enumerate(prompts)), []

    def take(self, number):
        given, self.waiting = self.waiting[:number], self.waiting[number:]
        self.events.append((number, [key for key, _ in given]))
        return given

    def run(self, model, **changes):
        settings = {"group_size": 3, "max_rows": 7, "max_new_tokens": 12, "temperature": 1.0}
        settings |= {"eos_ids": EOS, "vocab_size": VOCAB, "longest_prompt": 12}
        settings["generator"] = torch.Generator().manual_seed(0)
        for key, group in stream_groups(model, self.take, **settings | changes):
            self.events.append(key)
            yield key, group


@pytest.mark.parametrize("family", ["qwen2", "mamba", "mistral"])
def test_a_group_comes_as_soon_as_it_has_ended_and_makes_room(family, model_of):
    desk, lengths = Desk(MANY), {}
    with Shapes(model_of(family)) as shapes:
        for key, group in desk.run(model_of(family)):
            lengths[key] = max(len(c.ids) for c in group)
    assert max(rows for rows, _ in shapes) <= 7 + 1  # one that has ended may stay for a while
    assert sorted(lengths) == list(range(9)) and len(desk.events) > 9
    asked = [event for event in desk.events if isinstance(event, tuple)]
    given = [key for _, keys in asked for key in keys]
    assert given == list(range(9)) and asked[-1] == (2, [])
    assert all(0 < number <= 2 for number, _ in asked)
    first_two = [event for event in desk.events if event in (0, 1)]
    if lengths[0] != lengths[1]:
        assert first_two == sorted((0, 1), key=lengths.get)
    # Between those that ended first and last, a third began, if the decoder allows it
    before = desk.events[: desk.events.index(first_two[1])]
    assert any(2 in e[1] for e in before if isinstance(e, tuple)) == (family == "qwen2")


@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_who_reads_a_group_may_ask_for_another_even_after_the_last(family, model_of):
    """A flat group is seen when it comes, and replaced: the stream must not have ended by then."""
    desk, came = Desk(MANY[:1]), []
    for key, _ in desk.run(model_of(family)):
        came.append(key)
        if key < 5:
            desk.waiting.append((key + 1, MANY[key + 1]))
    assert came == [0, 1, 2, 3, 4, 5]


def test_a_stream_without_prompts_ends(model_of):
    assert list(Desk([]).run(model_of("qwen2"))) == []
    assert sample(model_of("qwen2"), []) == []


@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_greedy_is_the_same_however_many_rows_there_are(family, model_of):
    settings = {"temperature": 0, "group_size": 1}
    whole = sample(model_of(family), MANY, **settings)
    for max_rows in (1, 4):
        few = sample(model_of(family), MANY, max_rows=max_rows, **settings)
        assert [[c.ids for c in group] for group in few] == [[c.ids for c in g] for g in whole]


@pytest.mark.parametrize("family", ["qwen2", "mistral", "mamba"])
def test_the_cache_is_gone_when_the_samples_are_there(family, model_of):
    """Not when Python's garbage collector comes round: training needs the memory at once."""
    sample(model_of(family), PROMPTS)  # with the trial of a decoder
    kinds = (SharedDecoder, CachedDecoder, PlainDecoder, decode.SharedLayer, transformers.Cache)
    gc.collect()
    gc.disable()
    try:
        sample(model_of(family), MANY, max_rows=7)
        left = [type(x).__name__ for x in gc.get_objects() if isinstance(x, kinds)]
    finally:
        gc.enable()
    assert left == []


def test_the_weights_may_change_between_two_rounds(model_of):
    """What is known of a model from the trial is how it computes, and no value."""
    model = tiny_model("qwen2")
    before = sample(model, PROMPTS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for prompt, group in zip(PROMPTS, sample(model, PROMPTS), strict=True):
            gap = torch.tensor(group[0].logps) - plain_logps(model, prompt, group[0].ids, 1.0)
            assert gap.abs().max() < TOLERANCE
    assert sample(model, PROMPTS) != before


def test_accepts_looks_through_the_wrapper(model_of):
    """DeepSpeed's engine takes (*inputs, **kwargs): its own signature says nothing."""
    for family, known in {"qwen2": True, "bloom": False}.items():
        assert accepts(model_of(family), "position_ids") == known
        assert accepts(SimpleNamespace(module=model_of(family)), "position_ids") == known


# --- What is sampled ---------------------------------------------------------------------
def test_same_seed_same_samples(model_of):
    first, again, other = (sample(model_of("qwen2"), PROMPTS, seed=s) for s in (0, 0, 1))
    assert first == again != other


def test_sampling_leaves_the_global_random_numbers_alone(model_of):
    model = model_of("qwen2")  # seeds them when it is made
    before = torch.random.get_rng_state()
    sample(model, PROMPTS)
    assert torch.equal(before, torch.random.get_rng_state())


# What Qwen2.5-Instruct ships, and what transformers then takes for every setting left unnamed.
HOSTILE = {
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "repetition_penalty": 1.05,
    "eos_token_id": [3],
    "max_new_tokens": 2,
}


def test_the_models_generation_config_changes_nothing():
    """simple_GRPO sampled with top_k, top_p and repetition_penalty that it had not asked for."""
    model = tiny_model("qwen2")
    before = sample(model, PROMPTS), sample(model, PROMPTS, temperature=0)
    model.generation_config = GenerationConfig(**HOSTILE)
    assert (sample(model, PROMPTS), sample(model, PROMPTS, temperature=0)) == before


GROUPS, DRAWS = 20, 20_000


@pytest.fixture(scope="module")
def sharp():
    """A model with logits so far apart that 20,000 draws tell temperature 0.9 from 1."""
    model = tiny_model("qwen2")
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    return model


def chi_square(counts, probabilities):
    """-> (statistic, limit) of drawn counts (K,) under exact probabilities (K,).

    Cells that expect fewer than 5 draws are pooled. The statistic of a right sampler has mean k - 1
    and variance 2 (k - 1) for k cells: the limit is 5 standard deviations above.
    """
    expected = probabilities.double() * counts.sum()
    few = expected < 5
    counts = torch.cat([counts[~few].double(), counts[few].sum()[None].double()])
    expected = torch.cat([expected[~few], expected[few].sum()[None]])
    if expected[-1] < 5:  # too few even together: join the smallest of the others
        smallest = expected[:-1].argmin()
        for x in (counts, expected):
            x[smallest] += x[-1].item()
        counts, expected = counts[:-1], expected[:-1]
    freedom = len(expected) - 1
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    return statistic, freedom + 5 * (2 * freedom) ** 0.5


@torch.no_grad()
def exact_first(model, prompt, temperature=1.0, vocab_size=VOCAB):
    logits = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1, :vocab_size]
    return torch.softmax(logits.double() / temperature, 0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_first_token_has_the_probabilities_of_the_softmax(temperature, sharp):
    prompt = PROMPTS[1]

    def statistic(**changes):
        # A longer prompt in the batch, so that the one under test is padded.
        prompts = [*[prompt] * GROUPS, PROMPTS[2]]
        *groups, _ = sample(sharp, prompts, group_size=DRAWS // GROUPS, max_new_tokens=1, **changes)
        first = torch.tensor([c.ids[0] for c in itertools.chain(*groups)])
        counts = torch.bincount(first, minlength=VOCAB)
        return chi_square(counts, exact_first(sharp, prompt, temperature))

    value, limit = statistic(temperature=temperature)
    assert value < limit
    value, limit = statistic(temperature=0.9 * temperature)  # simple_GRPO's mistake would show
    assert value > limit


def test_generate_with_unasked_settings_would_fail_that_test(sharp):
    """The statistic has the power: top_k 20 alone, or the model's settings, are far off."""
    exact = exact_first(sharp, PROMPTS[1])
    own = {"top_p": 1.0, "repetition_penalty": 1.0, "top_k": 20}
    for settings in (own, {k: HOSTILE[k] for k in own}):
        torch.manual_seed(0)
        ids = sharp.generate(
            torch.tensor([PROMPTS[1]]),
            do_sample=True,
            max_new_tokens=1,
            num_return_sequences=DRAWS,
            pad_token_id=0,
            suppress_tokens=list(range(VOCAB, 120)),
            **settings,
        )
        counts = torch.bincount(ids[:, -1], minlength=VOCAB)
        value, limit = chi_square(counts, exact)
        assert value > 10 * limit


def test_two_tokens_have_the_probabilities_of_the_softmax(sharp):
    """Over a vocabulary of 12 ids, all pairs: EOS alone, or a first id and a second."""
    prompt, eos, few = PROMPTS[1], 5, 12
    first = exact_first(sharp, prompt, vocab_size=few)
    exact = torch.zeros(few, few, dtype=torch.double)
    for i in range(few):
        second = exact_first(sharp, prompt + [i], vocab_size=few)
        exact[i] = first[i] * second if i != eos else 0
    exact[eos, eos] = first[eos]  # ended: counted as the pair (EOS, EOS)

    def statistic(temperature):
        *groups, _ = sample(
            sharp,
            [*[prompt] * GROUPS, PROMPTS[2]],
            group_size=DRAWS // GROUPS,
            max_new_tokens=2,
            vocab_size=few,
            eos_ids={eos},
            temperature=temperature,
        )
        everyone = list(itertools.chain(*groups))
        pairs = torch.tensor([(c.ids * 2)[:2] for c in everyone])
        assert all(len(c.ids) == (1 if c.ids[0] == eos else 2) for c in everyone)
        counts = torch.bincount(pairs[:, 0] * few + pairs[:, 1], minlength=few * few)
        return chi_square(counts, exact.flatten())

    value, limit = statistic(1.0)
    assert value < limit
    value, limit = statistic(0.9)
    assert value > limit


def test_a_token_of_probability_zero_is_never_drawn():
    """Neither before, between nor behind the others: a sum that stays equal is no interval."""
    logits = torch.full((4096, 9), -torch.inf)
    logits[:, [2, 3, 6]] = torch.tensor([0.0, 1.0, 0.0])
    tokens, logps = draw(logits, 1.0, torch.Generator().manual_seed(0))
    counts = torch.bincount(tokens, minlength=9)
    exact = torch.softmax(logits[0].double(), 0)
    assert counts.nonzero().flatten().tolist() == [2, 3, 6]
    torch.testing.assert_close(logps, torch.log_softmax(logits, -1)[0, tokens])
    value, limit = chi_square(counts, exact)
    assert value < limit


def test_the_rare_ids_of_a_large_vocabulary_keep_their_share(monkeypatch):
    """Summed up in float32, eight of these would become one, behind the likely id."""
    rare = 1 << 16  # with 2 ** -26 each
    logits = torch.full((16, rare + 1), -26 * math.log(2))
    logits[:, 0] = 0
    wanted = torch.randint(rare, (16,), generator=torch.Generator().manual_seed(0))
    uniform = (1 + (wanted.double() + 0.5) * 2**-26) / (1 + rare * 2**-26)
    monkeypatch.setattr(torch, "rand", lambda *_, **__: uniform[:, None])
    tokens, _ = draw(logits, 1.0, None)
    assert (tokens - 1 - wanted).abs().max() <= 1
