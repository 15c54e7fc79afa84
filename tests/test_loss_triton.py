"""The fused log-probs: against float64, against grpo/loss.py's, and at their edges."""

import functools
import gc
import importlib.util
import math
import types
import weakref

import pytest
import torch
from oracle import error
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import grpo_loss_triton as fused
from grpo import chunked
from grpo import loss as plain

# --- Engines -------------------------------------------------------------------------
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
    module.check_device = lambda device: None
    return module


@pytest.fixture(params=[
    "rows",
    pytest.param("interpreter", marks=NEEDS_TRITON),
    pytest.param("cuda", marks=[NEEDS_TRITON, NEEDS_CUDA, pytest.mark.gpu]),
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
        module={"rows": lambda: chunked, "interpreter": interpreted, "cuda": lambda: fused}[
            request.param
        ](),
        device="cuda" if request.param == "cuda" else "cpu",
    )


def make(size=24, *, width=97, hidden=16, dtype=torch.float32, device="cpu"):
    """-> hidden (N, H), head (V', H), ids (N,), slopes (N,), d loss / d logp. The first ids are
    column 0, the last column and the likeliest one."""
    torch.manual_seed(0)
    states, head = torch.randn(size, hidden).to(dtype), (torch.randn(width, hidden) / 2).to(dtype)
    ids = torch.randint(width, (size,))
    corners = torch.tensor([width - 1, 0, (states @ head.T)[min(2, size - 1)].argmax()])
    ids[:3] = corners[:size]
    return [tensor.to(device) for tensor in (states, head, ids, torch.randn(size))]


def run(module, hidden, head, ids, slopes, **options):
    """-> (logps, entropy), the gradients of hidden and head"""
    leaves = [t.detach().clone().requires_grad_() for t in (hidden, head) if t is not None]
    states, matrix = leaves if len(leaves) > 1 else (*leaves, None)
    found = module.linear_logps(states, matrix, ids, **options, entropy=True)
    return found, torch.autograd.grad(found[0], leaves, slopes)


def exact(hidden, head, ids, slopes, *, temperature=1.0, vocab_size=None):
    """-> the same by definition, in float64."""
    leaves = [t.detach().double().requires_grad_() for t in (hidden, head) if t is not None]
    z = (leaves[0] if head is None else leaves[0] @ leaves[1].T)[..., :vocab_size]
    log_p = torch.log_softmax(z / temperature, -1)
    logps = log_p.gather(-1, ids[..., None]).squeeze(-1)
    entropy = -(log_p.exp() * log_p).nan_to_num(0).sum(-1)  # 0 x -inf
    return (logps, entropy), torch.autograd.grad(logps, leaves, slopes.double())


def check(engine, tensors, *, tolerance=5e-6, **options):
    """Log-probs, entropy and gradients are what they are defined as, and in range."""
    hidden, before = tensors[0], tensors[0].clone()
    (logps, entropy), gradients = run(engine.module, *tensors, **options)
    expected, wanted = exact(*tensors, **options)
    for mine, theirs in zip((logps, entropy), expected, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), theirs, rtol=2e-6, atol=2e-6)
    assert not entropy.requires_grad
    vocab = options.get("vocab_size") or (hidden if tensors[1] is None else tensors[1].T).shape[-1]
    assert logps.max() <= 0 <= entropy.min() and entropy.max() <= math.log(vocab) + 1e-6
    for mine, theirs in zip(gradients, wanted, strict=True):
        assert error(mine, theirs) < tolerance  # measured: 3.1e-7
    assert torch.equal(hidden, before)  # the model's logits, perhaps


# --- Log-probs, entropy and gradients ------------------------------------------------
@pytest.mark.parametrize("vocab_size, temperature", [(None, 1.0), (90, 0.7), (90, 1.6)])
def test_logps_of_a_heads_logits(engine, vocab_size, temperature):
    hidden, head, ids, slopes = make(device=engine.device)
    ids = ids.clamp(max=89)
    options = {"vocab_size": vocab_size, "temperature": temperature}
    check(engine, (hidden, head, ids, slopes), **options)
    check(engine, (hidden, head, ids, torch.ones_like(slopes[0]).expand(24)), **options)  # .sum()'s
    ids = torch.stack([ids, torch.zeros_like(ids)], 1)[:, 0]  # a column of a table has gaps
    check(engine, (hidden.view(4, 6, 16), head, ids.view(4, 6), slopes.view(4, 6)), **options)


# Columns to a power of two are one block of the kernel; more are blocks of 4096 in float32.
@pytest.mark.parametrize("vocab, width, count", [
    (97, 97, 1),
    (40, 64, 4),
    (4097, 8192, 4),
    (9001, 9001, 4),
    (151_665, 151_936, 3),  # Qwen2.5 to 1.5B
])  # fmt: skip
def test_any_width(engine, vocab, width, count):
    hidden, head, ids, slopes = make(count, width=width, device=engine.device)
    # dH is a sum over the columns: of 150 000, torch's product alone loses 3.7e-5 in float32.
    tolerance = 5e-6 if width < 100_000 else 1e-4
    tensors = hidden, head, ids.clamp(max=vocab - 1), slopes
    check(engine, tensors, tolerance=tolerance, vocab_size=vocab, temperature=0.7)


@pytest.mark.parametrize("rows", [3, None])
def test_the_result_does_not_depend_on_the_chunks(engine, rows, monkeypatch):
    tensors = make(24 if rows else 140, width=33, device=engine.device)
    if rows:
        monkeypatch.setattr(chunked, "chunk_rows", lambda *_: rows)
    else:  # of a GPU: 128 rows, the least, and 12
        monkeypatch.setattr(chunked, "CHUNK_BYTES", 1)
    check(engine, tensors)
    with Recorder() as recorder:
        run(engine.module, *tensors)
    assert recorder.products == 4 * math.ceil(len(tensors[0]) / (rows or 128))


def test_bfloat16_costs_no_more_than_in_plain_torch(engine):
    tensors = make(64, width=1009, dtype=torch.bfloat16, device=engine.device)
    in_bf16 = lambda hidden, head, ids, **o: plain.linear_logps(hidden @ head.T, None, ids, **o)
    modules = engine.module, types.SimpleNamespace(linear_logps=in_bf16)
    found, specified = (run(module, *tensors) for module in modules)
    results = zip(*(tree_leaves(r) for r in (found, specified, exact(*tensors))), strict=True)
    for mine, theirs, right in results:
        assert mine.dtype == theirs.dtype
        # Measured: 1.0 times at most; of the interpreter, which cuts bf16 off, not rounds, 1.5
        assert error(mine, right) < 2 * error(theirs, right) + 1e-6


def test_the_heads_gradient_is_summed_in_float32_over_many_chunks(engine, monkeypatch):
    """In bf16 each of 256 chunks would round the sum anew: 4.6e-3 of it, against 2.8e-3."""
    if engine.name == "interpreter":
        pytest.skip("its bf16 is cut off, not rounded, and that bias hides the sum's")
    tensors = make(256, width=1009, dtype=torch.bfloat16, device=engine.device)
    whole = run(engine.module, *tensors)[1][1]
    monkeypatch.setattr(chunked, "chunk_rows", lambda *_: 1)
    many = run(engine.module, *tensors)[1][1]
    assert many.dtype == torch.bfloat16
    assert error(many, whole) < 3.5e-3


def test_no_token_at_all(engine):
    hidden, head, ids, slopes = make(device=engine.device)
    (logps, _), gradients = run(engine.module, hidden[:0], head, ids[:0], slopes[:0])
    assert logps.shape == (0,)
    for gradient, like in zip(gradients, (hidden[:0], head), strict=True):
        assert torch.equal(gradient, torch.zeros_like(like))


# --- Products and memory -------------------------------------------------------------
class Recorder(TorchDispatchMode):
    """Counts the matrix products, and notes the numbers in the largest tensor that was made."""

    products = largest = 0

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        made = function(*args, **kwargs or {})
        self.products += function.overloadpacket.__name__ in ("mm", "addmm", "addmm_")
        sizes = [t.numel() for t in tree_leaves(made) if isinstance(t, torch.Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        return made


@pytest.mark.parametrize("trained", [("hidden", "head"), ("hidden",), ("head",), ()])
def test_no_product_is_made_for_what_is_frozen(engine, trained):
    """LoRA freezes the head: it would be a quarter of the work, and as much memory as the head."""
    hidden, head, ids, slopes = make(device=engine.device)
    wanted = dict(zip(("hidden", "head"), exact(hidden, head, ids, slopes)[1], strict=True))
    leaves = {"hidden": hidden, "head": head}
    for name in trained:
        leaves[name].requires_grad_()
    with Recorder() as recorder:
        logps = engine.module.linear_logps(hidden, head, ids)
        assert logps.requires_grad == bool(trained) and recorder.products == 1
        if trained:
            logps.backward(slopes)
    assert recorder.products == 1 + len(trained) + bool(trained)
    for name, leaf in leaves.items():
        assert error(leaf.grad, wanted[name]) < 5e-6 if name in trained else leaf.grad is None


def test_the_logits_never_exist_at_once(monkeypatch):
    """A chunk, here of two of the slabs that a CPU takes at once, is the largest tensor made. For
    the backward pass autograd keeps the arguments and two numbers a token, but no logits."""
    monkeypatch.setattr(chunked, "CHUNK_BYTES", 1)
    tensors, largest, kept = make(512, width=16_384, hidden=4), [], {}
    for module in (plain, chunked):
        kept.clear()
        keep = lambda tensor: kept.update({tensor.data_ptr(): tensor.numel()}) or tensor
        with Recorder() as recorder, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            run(module, *tensors)
        largest.append(recorder.largest)
    assert largest == [512 * 16_384, 128 * 16_384]
    assert sum(kept.values()) == sum(tensor.numel() for tensor in tensors[:3]) + 2 * 512


@pytest.mark.parametrize("backward", [False, True])
def test_memory_is_freed_at_once(engine, backward):
    """Not when the garbage collector runs: until then a step's gradients would lie there twice."""
    hidden, head, ids, _ = make(device=engine.device)
    gc.disable()
    try:
        hidden = hidden.requires_grad_() * 1
        result = engine.module.linear_logps(hidden, head, ids).sum()
        node = result.grad_fn
        while not isinstance(node, torch.autograd.function.BackwardCFunction):
            node = node.next_functions[0][0]
        held = [weakref.ref(hidden), weakref.ref(node)]
        if backward:
            result.backward()
        del hidden, node, result
        assert [there() for there in held] == [None, None]
    finally:
        gc.enable()


# --- Given logits ----------------------------------------------------------------------
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
    """A fused kernel's wrong log-probs ended the rewards of verl's issue 2656."""
    torch.manual_seed(0)
    with torch.device(engine.device):
        logits = LOGITS[name]()
        ids = logits.argmax(-1)
        ids[::2] = logits.shape[-1] - 1
        check(engine, (logits, None, ids, torch.randn(ids.shape)), temperature=0.7)


# --- Where there is no card ------------------------------------------------------------
def test_the_kernels_are_refused_where_they_can_not_run():
    with pytest.raises(SystemExit, match="FUSED_LOSS = True needs Triton and a GPU"):
        run(fused, *make())
