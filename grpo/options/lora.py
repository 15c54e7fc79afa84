"""LORA_RANK: trains adapters of that rank, while the model itself is frozen.

Every linear layer but the LM head gets an adapter, W x + 2 B A x, with B = 0 at first (LoRA,
2106.09685, sec. 4.1). PEFT makes them and writes their files. While tokens are sampled they are
merged (not with BASE_BITS = 4), and the reference is the model without them.
"""

import contextlib
from pathlib import Path

import torch
from transformers.pytorch_utils import Conv1D

from grpo.bfloat16 import rounded_to
from grpo.log import say

LORA_SCALE = 2  # s = alpha / rank, in W + s B A
ALL = "all-linear"  # PEFT's name for every linear layer but the LM head


def add_adapters(model, rank):
    """Freezes the model and adds adapters, which alone are trained."""
    from peft import LoraConfig

    config = LoraConfig(r=rank, lora_alpha=LORA_SCALE * rank, target_modules=ALL)
    config.task_type = "CAUSAL_LM"  # else PEFT's Auto classes do not load what is saved
    try:
        model.add_adapter(config)
    except ValueError as error:
        raise SystemExit(f"LORA_RANK = {rank} must be 0 with this model: {error}") from error
    if any(type(module).__name__ == "ParamWrapper" for module in model.modules()):
        raise SystemExit(f"LORA_RANK = {rank} must be 0: the model's experts are not linear layers")
    if Path(model.name_or_path).is_dir():  # absolute, for who loads the adapter elsewhere
        config.base_model_name_or_path = str(Path(model.name_or_path).absolute())
    reached = sum(x.in_features * x.out_features for *_, x in adapted_layers(model))
    total = model.num_parameters() - model.num_parameters(only_trainable=True)
    say(f"adapters of rank {rank} reach {reached / total:.0%} of the model's weights")


# --- Merged -------------------------------------------------------------------------
@torch.no_grad()
def merge_adapters(model, tensors):
    """Yields (name, weight) for all weights of a policy, one at a time. If `tensors` (by name)
    has an adapter for a layer of the base `model`, its weight is W + s B A, else the model's.
    Raises ValueError if the model lacks a layer."""
    adapters = {name.split(".lora_A.")[0]: name for name in tensors if ".lora_A." in name}
    weights = dict(model.named_parameters())
    if missing := [path for path in adapters if f"{path}.weight" not in weights]:
        raise ValueError(f"the model has no layer {missing[0]}: MODEL must be the adapter's base")
    for name, weight in weights.items():
        path = name.removesuffix(".weight")
        if a := adapters.get(path):
            b = a.replace("lora_A", "lora_B")
            weight = merged_weight(model.get_submodule(path), tensors[a], tensors[b])
        yield name, weight.detach()


def merged_weight(layer, a, b):
    """Returns W + s B A in the dtype of W. The sum is made in float32 and rounded once: in bfloat16
    at random (bfloat16.py), as the nearest number is W itself until s B A has become large."""
    update = LORA_SCALE * (b.float() @ a.float()).to(layer.weight.device)
    if isinstance(layer, Conv1D):  # GPT-2 keeps matrices transposed
        update = update.T
    return rounded_to(layer.weight.dtype, layer.weight.float() + update)


def adapted_layers(model):
    """Returns [(parent, its name for the layer, layer)] of the layers that have an adapter."""
    paths = [(path.rpartition("."), x) for path, x in model.named_modules() if hasattr(x, "lora_A")]
    return [(model.get_submodule(parent), name, layer) for (parent, _, name), layer in paths]


# --- Without adapters ---------------------------------------------------------------
@contextlib.contextmanager
def adapters_off(model):
    """In the block the adapters are off, so the model is the frozen base model. PEFT's switch
    would also change which parameters have a gradient."""
    layers = adapted_layers(model)
    try:
        for parent, name, layer in layers:
            setattr(parent, name, layer.base_layer)
        yield
    finally:
        for parent, name, layer in layers:
            setattr(parent, name, layer)


class MergedAdapters:
    """Inside `with`, each layer that has an adapter is a plain layer with W + 2 B A: one matrix
    product, while an adapter needs four more operations. Outside, the model is unchanged:
    its W is never written.

    The object holds copies of all matrices with adapters, in their dtype.
    """

    @torch.no_grad()
    def __init__(self, model):
        self.layers = []  # (parent, its name for the layer, layer, what is under it, W, merged W)
        for parent, name, layer in adapted_layers(model):
            base, (adapter,) = layer.base_layer, layer.active_adapters
            a, b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
            merged = torch.nn.Parameter(merged_weight(base, a, b), requires_grad=False)
            self.layers.append((parent, name, layer, base, base.weight, merged))

    def __enter__(self):
        for parent, name, _, base, _, merged in self.layers:
            base.weight = merged
            setattr(parent, name, base)

    def __exit__(self, *_):
        for parent, name, layer, base, weight, _ in self.layers:
            base.weight = weight
            setattr(parent, name, layer)
