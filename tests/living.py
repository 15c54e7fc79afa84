"""Counts the bytes of living tensors on a CPU, as a GPU's statistics do."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
PRODUCTS = aten.mm.default, aten.addmm.default, aten.bmm.default


class Live(TorchDispatchMode):
    def __init__(self, model):
        super().__init__()
        self.now, self.peak, self.seen = 0, 0, {}
        for tensor in [*model.parameters(), *model.buffers()]:
            self.count(tensor)

    def reset(self, *_):
        self.peak = self.now

    def count(self, tensor):
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key not in self.seen and tensor.device.type == "cpu":
            self.seen[key] = weakref.ref(storage, lambda _: self.forget(key, size))
            self.now += size
            self.peak = max(self.peak, self.now)

    def forget(self, key, size):
        del self.seen[key]
        self.now -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in PRODUCTS and args[-1].dtype == torch.bfloat16:  # a CPU may be slow in bfloat16
            out = func(*(x.float() for x in args)).bfloat16()
        else:
            out = func(*args, **kwargs or {})
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor)
        return out
