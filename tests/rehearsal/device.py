"""Tensors of the simulated GPU, and the operations on them.

Symbols: an OnGPU holds its values `inner`, a tensor of the CPU of the same shape, strides, dtype.
"""

import functools

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rehearsal import kernels, rules
from rehearsal.events import Recording, waited

CPU = torch.device("cpu")


class OnGPU(torch.Tensor):
    """A tensor on cuda:0."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner, requires_grad=False):
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device="cuda:0",
            requires_grad=requires_grad,
        )
        self.inner = inner
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return execute(func, args, kwargs or {})

    def __getitem__(self, index):
        return super().__getitem__(with_tensors(index))

    def __setitem__(self, index, value):
        super().__setitem__(with_tensors(index), value)

    @property
    def data(self):
        return self.detach()

    @data.setter
    def data(self, other):
        torch._C.TensorBase.data.__set__(self, other)
        self.inner = other.inner

    def tolist(self):
        return self.cpu().tolist()

    def record_stream(self, stream):
        pass

    def data_ptr(self):
        return self.inner.data_ptr()

    def untyped_storage(self):
        return self.inner.untyped_storage()

    def __reduce_ex__(self, protocol):
        waited("pickle")
        return OnGPU, (self.inner.detach().clone(), self.requires_grad)

    def __deepcopy__(self, memo):
        return OnGPU(self.inner.detach().clone(), self.requires_grad)

    def __repr__(self, **_):
        return f"OnGPU({self.inner!r})"


torch.serialization.add_safe_globals([OnGPU])  # in checkpoints; a real GPU's tensors are plain


class Device(TorchDispatchMode):
    """Sees also the operations that take no tensor of the GPU: they may make one."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return execute(func, args, kwargs or {})


def with_tensors(index):
    """Returns an index with tensors for lists, which PyTorch copies where no dispatch sees it."""
    if isinstance(index, tuple):
        return tuple(map(with_tensors, index))
    return torch.tensor(index) if isinstance(index, list) else index


def inner_of(x):
    return x.inner if isinstance(x, OnGPU) else x


def mapped(function, x):
    """Returns x with function(leaf) for each leaf: x is one, or a list or tuple of such."""
    if isinstance(x, list | tuple):
        return type(x)(mapped(function, part) for part in x)
    return function(x)


def execute(func, args, kwargs):
    """Returns what the operation `func` returns, as CUDA would compute it."""
    flat = []
    mapped(flat.append, (args, list(kwargs.values())))
    from_gpu = any(isinstance(x, OnGPU) for x in flat)
    device = kwargs.get("device")
    to_gpu = from_gpu if device is None else rules.is_gpu(device)
    if func.namespace == "c10d" and not from_gpu:
        raise RuntimeError(f"No backend type associated with device type cpu: {func}")  # NCCL's
    if not from_gpu and not to_gpu:
        return func(*args, **kwargs)
    if rules.base_name(func) in ("copy_", "_to_copy"):
        return copied(func, args, kwargs, to_gpu)
    rules.check(func, args, flat)
    for reason in rules.waits(func, args):
        waited(reason)
    for argument in written_arguments(func):
        mapped(note_write, value_of(func, argument, args, kwargs))
    out = computed(func, args, kwargs, flat, Recording.call if rules.is_kernel(func) else run_it)
    return returned(func, args, kwargs, out) if to_gpu else out


def note_write(x):
    if isinstance(x, OnGPU):
        Recording.writes(x.inner)


def run_it(function, *args, **kwargs):
    return function(*args, **kwargs)


def computed(func, args, kwargs, flat, run):
    """Returns what the operation returns on the CPU, by run(function, *args, **kwargs). Kernels of
    the CPU take no generator of the GPU: they get one that has its state."""
    twins = {x: torch.Generator() for x in flat if isinstance(x, torch.Generator)}
    for generator, twin in twins.items():
        twin.set_state(generator.get_state())

    def on_cpu(x):
        if isinstance(x, OnGPU):
            return x.inner
        if isinstance(x, torch.device):
            return CPU
        return twins[x] if isinstance(x, torch.Generator) else x

    settings = {name: mapped(on_cpu, x) for name, x in kwargs.items() if name != "pin_memory"}
    out = run(kernels.ONLY_CUDA.get(func, func), *mapped(on_cpu, args), **settings)
    for generator, twin in twins.items():
        generator.set_state(twin.get_state())
    return out


@functools.cache
def written_arguments(func):
    return [a for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]


def value_of(func, argument, args, kwargs):
    if argument.name in kwargs:
        return kwargs[argument.name]
    place = [a.name for a in func._schema.arguments].index(argument.name)
    return args[place] if place < len(args) else None


def on_gpu(x):
    return OnGPU(x) if isinstance(x, torch.Tensor) else x


def returned(func, args, kwargs, out):
    """Returns `out` with tensors of the GPU; where an argument was written, that argument."""
    several = len(func._schema.returns) > 1
    results = list(out) if several else [out]
    for i, declared in enumerate(func._schema.returns):
        info = declared.alias_info
        if info and info.is_write:
            (argument,) = (
                a for a in written_arguments(func) if a.alias_info.before_set == info.before_set
            )
            results[i] = value_of(func, argument, args, kwargs)
            if isinstance(results[i], OnGPU) and results[i].inner.shape != results[i].shape:
                results[i].data = OnGPU(results[i].inner)  # resize_, squeeze_
        else:
            results[i] = mapped(on_gpu, results[i])
    return tuple(results) if several else results[0]


def copied(func, args, kwargs, to_gpu):
    """Returns what copy_(target, source) or _to_copy(source) returns: between host and GPU a copy,
    for which the host waits unless it is asynchronous (Copy.cu), else a kernel."""
    if rules.base_name(func) == "copy_":
        result, source = args[:2]
        asynchronous = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        crosses = result.is_cuda != source.is_cuda
        Recording.writes(inner_of(result))
        inputs, settings = (inner_of(result), inner_of(source)), {}
    else:
        source, result = args[0], None
        asynchronous = kwargs.get("non_blocking", False)
        crosses = source.is_cuda != to_gpu
        inputs, settings = (inner_of(source),), kwargs | {"device": CPU, "non_blocking": False}
    # of nothing, Copy.cpp returns at once
    if source.numel() and crosses and (Recording.current or not asynchronous):
        waited("copy to the GPU" if source.device == CPU else "copy to the host")
    out = func(*inputs, **settings) if crosses else Recording.call(func, *inputs, **settings)
    if result is not None:
        return result
    if crosses and out.data_ptr() == inputs[0].data_ptr():
        out = out.clone()
    return OnGPU(out) if to_gpu else out
