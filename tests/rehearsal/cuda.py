"""torch.cuda and torch.accelerator as the simulated GPU has them: memory, streams, graphs, the
process group."""

import contextlib
import importlib.util
import os
import threading
from types import SimpleNamespace

import torch
import torch._dynamo  # before torch.cuda is replaced: it looks for what is there
import torch.cuda.nvtx
import torch.distributed as dist
import torch.nn.attention.varlen
from torch.nn import functional
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves

from rehearsal import kernels, rules
from rehearsal.device import Device
from rehearsal.events import Recording, SyncDebug, waited

MEMORY = 80 << 30  # bytes that it reports
tensor_of_torch, move_of_torch = torch.tensor, torch.nn.Module.to
join_of_torch, run_of_torch = dist.init_process_group, threading.Thread.run


class CUDAGraph:
    """The calls that were recorded, to be made again on the same memory."""

    def capture_begin(self, *_, **__):
        assert Recording.current is None, "one graph records at a time"
        self.recording = Recording.current = Recording()

    def capture_end(self):
        """Nothing has run yet: what was written gets its values back, what is new has none."""
        recording, Recording.current = self.recording, None
        with torch._C._DisableTorchDispatch():
            for tensor, values in reversed(recording.before):
                tensor.copy_(values)
            written = {tensor.data_ptr() for tensor, _ in recording.before}
            for *_, out in recording.calls:
                for x in tree_leaves(out):
                    if x.is_floating_point() and x.data_ptr() not in written:
                        x.fill_(torch.nan)

    def replay(self):
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            for function, args, kwargs, out in self.recording.calls:
                again = function(*args, **kwargs)
                for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


class Stream:
    """A stream or an event: nothing runs beside anything else here."""

    def __init__(self, *_, **__):
        self.cuda_stream, self.device = 0, torch.device("cuda:0")

    def nothing(self, *_):
        pass

    wait_stream = wait_event = record_event = record = nothing

    def synchronize(self):
        waited("synchronize")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def nothing(*_, **__):
    pass


A100 = SimpleNamespace(name="A100", total_memory=MEMORY, major=8, minor=0)
A100.multi_processor_count = 108
TORCH_CUDA = {
    # the device
    "is_available": lambda: True,
    "_lazy_init": nothing,
    "_is_in_bad_fork": lambda: False,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": nothing,
    "get_device_properties": lambda *_: A100,
    "get_device_capability": lambda *_: (A100.major, A100.minor),
    "get_arch_list": lambda: ["sm_80"],
    "is_bf16_supported": lambda *_, **__: True,
    # memory
    "mem_get_info": lambda *_: (MEMORY, MEMORY),
    "MemPool": lambda: SimpleNamespace(id=(0, 1)),
    # what waits
    "get_sync_debug_mode": lambda: SyncDebug.mode,
    "set_sync_debug_mode": SyncDebug.set,
    # random numbers: a torch.Generator("cuda") draws them
    "manual_seed_all": nothing,
    # streams
    "Stream": Stream,
    "Event": Stream,
    "stream": lambda stream: contextlib.nullcontext(),
    "current_stream": Stream,
    "CUDAGraph": CUDAGraph,
    "is_current_stream_capturing": lambda: Recording.current is not None,
}
BOTH = {  # of torch.cuda and torch.accelerator, whose other functions ask device.cpp
    "memory_allocated": lambda *_: 0,
    "memory_reserved": lambda *_: 0,
    "max_memory_allocated": lambda *_: 0,
    "reset_peak_memory_stats": nothing,
    "empty_cache": nothing,
    "synchronize": lambda *_: waited("synchronize"),
}


def tensor(data, *, dtype=None, device=None, requires_grad=False, pin_memory=False):
    """torch.tensor, which copies to the device where no dispatch mode sees it."""
    if not rules.is_gpu(device):
        return tensor_of_torch(data, dtype=dtype, device=device, requires_grad=requires_grad)
    return tensor_of_torch(data, dtype=dtype).to(device).requires_grad_(requires_grad)


def move(module, *args, **kwargs):
    """torch.nn.Module.to: a parameter that changes sides keeps its identity, as it does on CUDA.
    Tied ones stay tied, and an optimizer's are still the model's."""
    device = torch._C._nn._parse_to(*args, **kwargs)[0]
    crosses = any(device and p.device.type != device.type for p in module.parameters())
    torch.__future__.set_swap_module_params_on_conversion(crosses)
    try:
        return move_of_torch(module, *args, **kwargs)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def join(backend=None, *args, **kwargs):
    """torch.distributed.init_process_group: gloo carries what NCCL would; execute() refuses what
    NCCL would refuse."""
    return join_of_torch("gloo", *args, **kwargs)


def run(thread):
    """threading.Thread.run: threads see the GPU, too."""
    with Device():
        run_of_torch(thread)


def pretend():
    """Gives this process a GPU, for good. After build.load()."""
    if importlib.util.find_spec("bitsandbytes"):  # PEFT imports it, and it would look for kernels
        import bitsandbytes  # noqa: F401
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # torch.compile() knows torch's functions alone
    _device_constructors()  # a table of them, made before torch.tensor changes
    for name, value in (TORCH_CUDA | BOTH).items():
        setattr(torch.cuda, name, value)
    for name, value in BOTH.items():
        setattr(torch.accelerator, name, value)
    torch.accelerator.get_memory_info = torch.cuda.mem_get_info
    torch.cuda.nvtx._nvtx = SimpleNamespace(rangePushA=lambda _: 0, rangePop=int)
    functional.scaled_dot_product_attention = kernels.attention
    torch._C._nn.scaled_dot_product_attention = kernels.attention
    torch.nn.attention.varlen.varlen_attn = kernels.varlen
    torch.tensor = tensor
    torch.nn.Module.to, torch.nn.Module.cuda = move, lambda module: move(module, "cuda")
    dist.init_process_group, threading.Thread.run = join, run
    dist.distributed_c10d._get_object_coll_device = lambda group=None: "cuda"
    Device().__enter__()
