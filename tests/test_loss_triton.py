"""The fused loss: against an oracle in float64, against the plain loss, and at its edges."""

import functools
import gc
import importlib.util
import inspect
import math
import types
import weakref

import pytest
import torch
from oracle import CLIPS, VARIANTS, check, error, errors, make, on_device, oracle, run, with_garbage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import grpo_loss_triton as fused
from grpo import loss as plain

# --- The loss ----------------------------------------------------------------------
triton = fused.triton
NEEDS_TRITON = pytest.mark.skipif(triton is None, reason="no Triton here")
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
# The interpreter computes masked lanes with numpy, which warns of what it finds there.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")


@functools.cache
def interpreted():
    """-> a copy of the module whose kernels are interpreted; `fused` itself stays what it is."""
    spec = importlib.util.spec_from_file_location("grpo_loss_interpreted", fused.__file__)
    module = importlib.util.module_from_spec(spec)
    with triton.knobs.runtime.scope():  # sets TRITON_INTERPRET, which only the decorators read
        triton.knobs.runtime.interpret = True
        spec.loader.exec_module(module)
    module.use_triton = lambda tensor: True
    return module


@pytest.fixture(params=[
    "rows",
    pytest.param("interpreter", marks=NEEDS_TRITON),
    pytest.param("cuda", marks=[NEEDS_TRITON, NEEDS_CUDA]),
])  # fmt: skip
def engine(request, monkeypatch):
    """-> name, module, device."""
    if request.param == "interpreter":
        # Both are themselves written in Triton, and were decorated when torch imported it.
        tl, of = triton.language, triton.language.standard
        monkeypatch.setattr(tl, "max", lambda x, axis: tl.reduce(x, axis, of._elementwise_max))
        monkeypatch.setattr(tl, "sum", lambda x, axis: tl.reduce(x, axis, of._sum_combine))
    return types.SimpleNamespace(
        name=request.param,
        module=interpreted() if request.param == "interpreter" else fused,
        device="cuda" if request.param == "cuda" else "cpu",
    )


@pytest.mark.parametrize("name", ["grpo_loss", "linear_logps"])
def test_the_plain_and_the_fused_file_have_the_same_signatures(name):
    """So that either can be imported in the other's place."""
    assert inspect.signature(getattr(fused, name)) == inspect.signature(getattr(plain, name))


@pytest.mark.parametrize("shape", [(24,), (4, 6)], ids=["flat", "padded"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradients_are_the_oracles(engine, variant, shape):
    stats = check(engine, *make(VARIANTS[variant], shape))
    if "on_policy" not in variant and shape == (24,):  # else the variant shows nothing
        assert stats["clip_low"].any() and stats["clip_high"].any()


@pytest.mark.parametrize("shape", [(1, 6), (24,)], ids=["one_sequence", "columns"])
def test_tokens_in_any_memory_layout(engine, shape):
    """The kernel reads float after float: not so an advantage expanded, nor a column of a table."""
    batch, settings = make(VARIANTS["capped"], shape)
    if shape == (24,):
        for name in ("ids", "old_logps", "ref_logps", "advantages", "weights", "sampler_logps"):
            batch[name] = torch.stack([batch[name], torch.zeros_like(batch[name])], 1)[:, 0]
    check(engine, batch, settings)


FAR = {name: VARIANTS[name] for name in ("clip", "bounded", "unbiased_kl", "cispo", "gspo")}
FAR |= {
    "bounded_gspo": VARIANTS["gspo"] | {"ratio_cap": 1.3},
    "unbiased_cispo": VARIANTS["cispo"] | {"unbiased_kl": True},
    "bounded_unbiased": VARIANTS["unbiased_kl"] | {"ratio_cap": 1.3, "is_cap": 1.1},
}


@pytest.mark.parametrize("sign", [1, 0, -1])
@pytest.mark.parametrize("variant", FAR)
def test_ratios_that_overflow(engine, variant, sign):
    """Plain torch, the torch path and the kernel agree. The oracle, whose ratios float64 holds, has
    the same gradients where the clip or the cap stops a token."""
    batch, settings = make(FAR[variant])
    gspo = batch["sequences"] is not None
    far = slice(0, 6) if gspo else slice(2, 5)  # of gspo a whole sequence
    batch["advantages"][far] = sign * batch["advantages"][far].abs()
    batch["old_logps"][far] -= torch.tensor([89.0, 200, 600, 100, 89, 300])[: far.stop - far.start]
    batch = on_device(engine, batch)
    (got, stats), (specified, expected) = (run(m, batch, settings) for m in (engine.module, plain))
    stopped = sign >= 0 or "ratio_cap" in settings or settings.get("objective") == "cispo"
    # Without the cap nothing stops the r of r k3
    stopped = stopped and ("ratio_cap" in settings or not settings.get("unbiased_kl"))
    for mine, theirs in zip(got, specified, strict=True):
        assert torch.isfinite(theirs).all() and torch.isfinite(mine).all()
        assert error(mine, theirs.double()) < 5e-6
        assert (theirs.abs().max() > 1e30) != stopped
    torch.testing.assert_close(stats, expected, rtol=1e-5, atol=1e-5)
    if stopped:
        assert all(e < 5e-6 for e in errors(got, oracle(**batch, **settings)))


# Columns to a power of two are one block of the kernel; more are blocks of 4096 in float32.
@pytest.mark.parametrize("vocab, width, count", [
    (97, 97, 1),
    (40, 64, 4),
    (4096, 4096, 4),
    (4097, 8192, 4),
    (8192, 9001, 4),
    (9001, 9001, 4),
    (151_665, 151_936, 3),  # Qwen2.5 to 1.5B
    (152_064, 152_064, 3),  # from 7B on, and all of its columns
])  # fmt: skip
def test_any_width(engine, vocab, width, count):
    variant = VARIANTS["padded_head"] | {"vocab_size": vocab}
    # dH is a sum over the columns: of 150 000, torch's product alone loses 3.7e-5 in float32.
    tolerance = 5e-6 if width < 100_000 else 1e-4
    check(engine, *make(variant, (count,), width=width), tolerance)


@pytest.mark.parametrize("gspo", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 7, None])
def test_the_result_does_not_depend_on_the_chunks(engine, rows, gspo, monkeypatch):
    batch, settings = make(VARIANTS["kl"] | {"gspo": gspo}, (24 if rows else 140,), width=33)
    if rows:
        monkeypatch.setattr(engine.module, "chunk_rows", lambda *_: rows)
    else:
        monkeypatch.setattr(
            engine.module, "CHUNK_BYTES", 1
        )  # of a GPU: 128 rows, the least, and 12
    check(engine, batch, settings)
    with Recorder() as recorder:
        run(engine.module, on_device(engine, batch), settings)
    assert recorder.products == (4 if gspo else 3) * math.ceil(len(batch["ids"]) / (rows or 128))


@pytest.mark.parametrize("variant", ["kl", "capped_cispo", "padded_head", "gspo_kl"])
def test_bfloat16_costs_no_more_than_in_plain_torch(engine, variant):
    batch, settings = make(VARIANTS[variant], (64,), width=1009, dtype=torch.bfloat16)
    batch = on_device(engine, batch)
    exact = oracle(**batch, **settings)
    (got, _), (specified, _) = (run(m, batch, settings) for m in (engine.module, plain))
    assert [t.dtype for t in got] == [t.dtype for t in specified]
    # Measured: 1.0 times at most; of the interpreter, which cuts bf16 off where a GPU rounds, 1.06.
    for mine, theirs in zip(errors(got, exact), errors(specified, exact), strict=True):
        assert mine < 2 * theirs + 1e-6


def test_the_heads_gradient_is_summed_in_float32_over_many_chunks(engine, monkeypatch):
    """In bf16 each of 256 chunks would round the sum anew: 4.6e-3 of it, against 2.8e-3."""
    if engine.name == "interpreter":
        pytest.skip("its bf16 is cut off, not rounded, and that bias hides the sum's")
    batch, settings = make(VARIANTS["kl"], (256,), width=1009, dtype=torch.bfloat16)
    batch = on_device(engine, batch)
    (*_, whole), _ = run(engine.module, batch, settings)
    monkeypatch.setattr(engine.module, "chunk_rows", lambda *_: 1)
    (*_, many), _ = run(engine.module, batch, settings)
    assert many.dtype == torch.bfloat16
    assert error(many, whole) < 3.5e-3


@pytest.mark.parametrize("gspo", [False, True])
def test_no_token_at_all(engine, gspo):
    """A rank whose micro-batch was all masked still needs gradients, to reduce with the others'."""
    batch, settings = make(VARIANTS["kl"] | {"gspo": gspo}, (4, 6))
    batch = on_device(engine, batch | {"weights": torch.zeros(4, 6)})
    got, stats = run(engine.module, with_garbage(batch), settings)
    for result, like in zip(got, (torch.zeros(()), batch["hidden"], batch["head"]), strict=True):
        assert torch.equal(result, torch.zeros_like(like, device=engine.device))
    for values in stats.values():
        assert values.shape == (4, 6) and not values.any()


# --- Autograd, products and memory -------------------------------------------------
class Recorder(TorchDispatchMode):
    """Counts the matrix products, and notes the numbers in the largest tensor that was made."""

    products = largest = 0

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        made = function(*args, **kwargs or {})
        self.products += function.overloadpacket.__name__ in ("mm", "addmm", "addmm_")
        sizes = [t.numel() for t in tree_leaves(made) if isinstance(t, torch.Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        return made


@pytest.mark.parametrize("gspo", [False, True])
@pytest.mark.parametrize("trained", [("hidden", "head"), ("hidden",), ("head",), ()])
def test_no_product_is_made_for_what_is_frozen(engine, trained, gspo):
    """LoRA freezes the head: it would be a third of the work, and as much memory as the head."""
    batch, settings = make(VARIANTS["kl"] | {"gspo": gspo})
    batch = on_device(engine, batch)
    exact = dict(zip(("hidden", "head"), oracle(**batch, **settings)[1:3], strict=True))
    for name in ("hidden", "head"):
        batch[name].requires_grad_(name in trained)
    with Recorder() as recorder:
        loss, _ = engine.module.grpo_loss(**batch, **settings)
        assert loss.requires_grad == bool(trained)
        if trained:
            loss.backward()
    assert recorder.products == 1 + len(trained) + (gspo and bool(trained))
    for name in ("hidden", "head"):
        grad = batch[name].grad
        assert error(grad, exact[name]) < 5e-6 if name in trained else grad is None
    with Recorder() as recorder, torch.no_grad():
        loss, _ = engine.module.grpo_loss(**batch, **settings)
    assert recorder.products == 1 and not loss.requires_grad


def test_gradients_are_given_out_once(engine):
    """They were made by the forward pass, and scaled in place: a second time they'd be wrong."""
    batch, settings = make(VARIANTS["clip"])
    batch = on_device(engine, batch)
    batch["hidden"].requires_grad_()
    loss, _ = engine.module.grpo_loss(**batch, **settings)
    loss.backward(retain_graph=True)
    first = batch["hidden"].grad.clone()
    with pytest.raises(RuntimeError, match="an earlier call"):
        loss.backward()
    assert torch.equal(batch["hidden"].grad, first)


def test_gradients_are_times_what_backward_is_given(engine):
    """Gradient accumulation, or a loss scaler."""
    batch, settings = make(VARIANTS["kl"], width=1009)
    batch = on_device(engine, batch)
    (_, *once), _ = run(engine.module, batch, settings)
    for factor in (3.0, -0.5, 0.0):
        (_, *scaled), _ = run(engine.module, batch, settings, factor=factor)
        for mine, whole in zip(scaled, once, strict=True):
            torch.testing.assert_close(mine, whole * factor, rtol=1e-6, atol=0)


@pytest.mark.parametrize("gspo", [False, True])
def test_the_logits_never_exist_at_once(gspo, monkeypatch):
    """A chunk, here of two of the slabs that a CPU takes at once, is the largest tensor made."""
    batch, settings = make(VARIANTS["kl"] | {"gspo": gspo}, (512,), width=16_384, size=4)
    monkeypatch.setattr(fused, "CHUNK_BYTES", 1)
    results, largest = [], []
    for module in (fused, plain):
        with Recorder() as recorder:
            results.append(run(module, batch, settings)[0])
        largest.append(recorder.largest)
    assert largest == [128 * 16_384, 512 * 16_384]
    for mine, theirs in zip(*results, strict=True):
        assert error(mine, theirs) < 5e-6  # measured: 1.2e-6


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", ["grpo_loss", "linear_logps"])
def test_memory_is_freed_at_once(engine, name, backward):
    """Not when the garbage collector comes: until then a step's gradients would lie there twice."""
    batch, settings = make(VARIANTS["kl"])
    batch = on_device(engine, batch)
    batch["head"].requires_grad_()
    gc.disable()
    try:
        hidden = batch.pop("hidden") * 1
        if name == "grpo_loss":
            result, stats = engine.module.grpo_loss(hidden, **batch, **settings)
        else:
            result = stats = engine.module.linear_logps(hidden, batch["head"], batch["ids"]).sum()
        node = result.grad_fn
        while not isinstance(node, torch.autograd.function.BackwardCFunction):
            node = node.next_functions[0][0]
        held = [weakref.ref(hidden), weakref.ref(node)]
        if backward:
            result.backward()
        del hidden, node, result, stats
        assert [there() for there in held] == [None, None]
    finally:
        gc.enable()


# --- Log-probs ---------------------------------------------------------------------
def check_logps(engine, hidden, head, ids, slopes, **options):
    """Log-probs, entropy and gradients are what they are defined as, in float64, and in range.

    The gradient is asked of linear_logps, and of grpo_loss where it is that of sum(slopes logps).
    """
    leaves = [t.requires_grad_() for t in (hidden, head) if t is not None]
    before, exact = hidden.detach().clone(), [t.detach().double().requires_grad_() for t in leaves]
    z = (exact[0] if head is None else exact[0] @ exact[1].T)[..., : options.get("vocab_size")]
    log_p = torch.log_softmax(z / options["temperature"], -1)
    expected = log_p.gather(-1, ids[..., None]).squeeze(-1)
    entropy = -(log_p.exp() * log_p).nan_to_num(0).sum(-1)  # 0 x -inf
    wanted = torch.autograd.grad(expected, exact, slopes.double())

    logps, *more = engine.module.linear_logps(hidden, head, ids, **options, entropy=True)
    loss, stats = engine.module.grpo_loss(
        hidden, head, ids, None, None, -slopes, torch.ones_like(slopes), **CLIPS, **options
    )
    for a, b in ((logps, *more), (stats["logps"], stats["entropy"])):
        assert a.dtype == b.dtype == torch.float32 and not b.requires_grad
        torch.testing.assert_close(a.double(), expected, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(b.double(), entropy, rtol=2e-6, atol=2e-6)
        assert a.max() <= 0 <= b.min() and b.max() <= math.log(z.shape[-1]) + 1e-6
    for grads in (torch.autograd.grad(logps, leaves, slopes), torch.autograd.grad(loss, leaves)):
        for mine, theirs in zip(grads, wanted, strict=True):
            assert error(mine, theirs) < 5e-6  # measured: 2.9e-7
    assert torch.equal(hidden, before)  # the model's own logits, perhaps


LOGITS = {
    "sequences": lambda: torch.randn(2, 5, 1009),
    "later_tokens": lambda: torch.randn(2, 5, 1009)[:, 1:],
    "fewer_columns": lambda: torch.randn(6, 1012)[:, :1009],
    "later_columns": lambda: torch.randn(6, 1012)[:, 3:],
    "transposed": lambda: torch.randn(1009, 6).T,
    "huge": lambda: 1e4 * torch.randn(4, 1009).sign(),
    "far_up": lambda: torch.randn(4, 1009) + 1e4,  # top + log-sum would be good to 0.001 only
    "far_down": lambda: torch.randn(4, 1009) - 1e4,
    "equal": lambda: torch.full((4, 1009), 3.0),
    "flat_to_sharp": lambda: torch.randn(40, 1009) * torch.logspace(-4, 6, 40)[:, None],
    # as a grammar leaves them; of the kernel's blocks it takes the whole first one
    "holes": lambda: torch.randn(4, 9001).index_fill_(1, torch.arange(4100), -math.inf),
}


@pytest.mark.parametrize("name", LOGITS)
def test_logps_of_logits(engine, name):
    """A fused kernel's wrong log-probs ended the rewards of verl's issue 2656: see check_logps."""
    torch.manual_seed(0)
    with torch.device(engine.device):
        logits = LOGITS[name]()
        ids = logits.argmax(-1)
        ids[::2] = logits.shape[-1] - 1
        check_logps(engine, logits, None, ids, torch.randn(ids.shape), temperature=0.7)


@pytest.mark.parametrize("vocab_size, temperature", [(None, 1.0), (1000, 0.7)])
def test_logps_of_a_heads_logits(engine, vocab_size, temperature):
    torch.manual_seed(0)
    with torch.device(engine.device):
        hidden, head = torch.randn(2, 5, 16), torch.randn(1009, 16)
        ids = (torch.arange(10) * 111).view(2, 5)
        for slopes in (torch.randn(2, 5), torch.ones(()).expand(2, 5)):  # .sum()'s is expanded
            options = {"vocab_size": vocab_size, "temperature": temperature}
            check_logps(engine, hidden, head, ids, slopes, **options)


# --- A kernel that does not work ---------------------------------------------------
@pytest.mark.parametrize("engine", ["interpreter"], indirect=True)
@pytest.mark.parametrize("fault", [None, "raises", "wrong"])
def test_a_kernel_that_does_not_work_is_said_and_done_without(engine, fault, monkeypatch):
    """A card too old, no compiler, a bug: tried on three rows before it is trusted."""
    launch = engine.module.launch

    def faulty(rows, *args, **kwargs):
        if fault == "raises":
            raise RuntimeError("Failed to find C compiler")
        launch(rows, *args, **kwargs)
        rows.logps += 0.01  # at each of two launches

    if fault:
        monkeypatch.setattr(engine.module, "launch", faulty)
    works = functools.partial(engine.module.kernel_works.__wrapped__, torch.device("cpu"))
    if fault is None:
        assert works(torch.float32) and works(torch.bfloat16)
        return
    why = {"raises": "Failed to find C compiler", "wrong": "differs by 0.02"}[fault]
    with pytest.warns(UserWarning, match=f"kernel fails.*{why}"):
        assert not works(torch.float32)
