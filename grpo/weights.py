"""Weights that travel: of what is trained, between processes."""

import torch
from transformers.pytorch_utils import Conv1D


# --- Weights that travel ------------------------------------------------------------
def trained_weights(model):
    """-> {name: CPU tensor} of what is trained: all, or a LoRA policy's adapters alone."""
    # cloned even where to() would give the parameter itself: the next step must not change it
    parameters = model.named_parameters()
    return {n: p.detach().to("cpu", copy=True) for n, p in parameters if p.requires_grad}


@torch.no_grad()
def load_weights(model, tensors):
    """Writes `tensors` over the parameters of the same names. ValueError if any does not fit, or
    if one that is trained is missing: then nothing has changed."""
    parameters = dict(model.named_parameters())
    expected = {n for n, p in parameters.items() if p.requires_grad} or parameters.keys()
    names = sorted(expected ^ tensors.keys())
    if names:
        raise ValueError(f"the weights are of another model, or another LORA_RANK: {names[:3]} ...")
    for name, tensor in tensors.items():
        if tensor.shape != parameters[name].shape:
            shapes = f"{tuple(tensor.shape)}, not {tuple(parameters[name].shape)}"
            raise ValueError(f"the weights are of another model: {name} is {shapes}")
    for name, tensor in tensors.items():
        parameters[name].copy_(tensor)


def merge_adapters(model, tensors):
    """-> the whole model's weights, from trained_weights of a LoRA policy and the `model` that it
    is frozen on: W + 2 B A. ValueError if an adapter's layer is none of the model's."""
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
            merged[f"{path}.weight"] = (weight.float() + update).to(weight.dtype).detach()
    return merged
