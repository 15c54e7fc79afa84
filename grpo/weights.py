"""Weights that travel between processes: those that are trained."""

import torch
from transformers.pytorch_utils import Conv1D


def trained_weights(model):
    """Returns {name: CPU tensor} of what is trained: all, or the adapters of a LoRA policy."""
    trained = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    # copied even on a CPU: the next step must not change them
    return {name: parameter.to("cpu", copy=True) for name, parameter in trained.items()}


@torch.no_grad()
def load_weights(model, tensors):
    """Writes `tensors` over the trained parameters, or all of a frozen model. Raises ValueError, and
    changes nothing, if one is missing, unknown or of another shape."""
    parameters = dict(model.named_parameters())
    expected = {n for n, p in parameters.items() if p.requires_grad} or parameters.keys()
    if names := sorted(expected ^ tensors.keys()):
        raise ValueError(f"the weights are of another model, or another LORA_RANK: {names[:3]} ...")
    for name, tensor in tensors.items():
        if tensor.shape != parameters[name].shape:
            shapes = f"{tuple(tensor.shape)}, not {tuple(parameters[name].shape)}"
            raise ValueError(f"the weights are of another model: {name} is {shapes}")
    for name, tensor in tensors.items():
        parameters[name].copy_(tensor)


@torch.no_grad()
def merge_adapters(model, tensors):
    """Returns all weights of a LoRA policy, W + 2 B A, from its adapters and the `model` under them.
    Raises ValueError if that lacks such a layer."""
    merged = dict(model.named_parameters())
    for name, a in tensors.items():
        if ".lora_A." in name:
            path = name.split(".lora_A.")[0]
            if f"{path}.weight" not in merged:
                raise ValueError(f"there is no layer {path} for the adapter {name}")
            weight, b = merged[f"{path}.weight"], tensors[name.replace("lora_A", "lora_B")]
            update = 2 * (b.float() @ a.float()).to(weight.device)
            if isinstance(model.get_submodule(path), Conv1D):  # GPT-2 keeps matrices transposed
                update = update.T
            merged[f"{path}.weight"] = (weight.float() + update).to(weight.dtype)
    return merged
