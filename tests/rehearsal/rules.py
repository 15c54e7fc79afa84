"""What CUDA refuses, what the host waits for, and what is a kernel.

An operation is one that PyTorch dispatches: torch._ops.OpOverload. Its tensors of the GPU are
on cuda:0, here too. Sources are files of PyTorch, in aten/src/ATen/native.
"""

import functools

import torch

INDEXING = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"}
# Beside pointwise operations, these take a tensor of the CPU that has no dimensions
SCALARS = {"masked_fill", "masked_fill_", "fill", "fill_"}
UNKNOWN_SIZE = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
# Allocations, views that are not marked as such, and a copy that is counted as a wait
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh"}
FREE |= {"_unsafe_view", "_reshape_alias", "_local_scalar_dense", "resize_", "set_", "lift"}


def is_gpu(device):
    return device is not None and torch.device(device).type == "cuda"


@functools.cache
def base_name(func):
    return func.overloadpacket.__name__


# --- What CUDA refuses ------------------------------------------------------------------
def check(func, args, flat):
    """Raises as CUDA does for an operation on these arguments, which are also given `flat`."""
    name = base_name(func)
    tensors = [x for x in flat if isinstance(x, torch.Tensor)]
    for x in flat:
        if isinstance(x, torch.Generator) and x.device.type != "cuda":
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
    if name.endswith("_like") or name.startswith("new_"):
        return  # the tensor only lends its shape and dtype
    strangers = [x for x in tensors if not x.is_cuda and not may_be_on_the_cpu(func, x, args)]
    if strangers:
        shapes = ", ".join(str(tuple(x.shape)) for x in strangers)
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0"
            f" and cpu! ({func}, on the CPU: {shapes})"
        )


def may_be_on_the_cpu(func, tensor, args):
    """Returns whether the operation takes this tensor of the CPU beside tensors of the GPU."""
    name = base_name(func)
    if name in INDEXING:
        index = any(tensor is i for i in args[1])
        return args[0].is_cuda and (index or "put" in name and not tensor.dim())
    written = func._schema.is_mutable and tensor is args[0]
    return (torch.Tag.pointwise in func.tags or name in SCALARS) and not (tensor.dim() or written)


# --- What the host waits for ----------------------------------------------------------
def waits(func, args):
    """Yields why the host waits in an operation, once for each time."""
    name = base_name(func)
    if name in INDEXING:
        indices = [x for x in args[1] if x is not None]
        # IndexingUtils.h: a mask becomes indices, by nonzero; index_put_ of one number only fills
        fills = "put" in name and args[2].numel() == 1 and not args[2].is_cuda
        if any(x.dtype in (torch.bool, torch.uint8) for x in indices) and not fills:
            yield "a mask as index"
        if any(not x.is_cuda for x in indices):
            yield "an index of the CPU"
    elif name == "multinomial":  # Distributions.cpp: two item()
        yield from [name] * 2
    elif func is torch.ops.aten.isin.Tensor_Tensor:  # TensorCompare.cpp: of so many it sorts
        if args[1].numel() >= 10 * args[0].numel() ** 0.145:
            yield name
    elif UNKNOWN_SIZE & set(func.tags):
        yield name


# --- What is a kernel -----------------------------------------------------------------
def is_kernel(func):
    return base_name(func) not in FREE and not is_view(func)


@functools.cache
def is_view(func):
    return any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
