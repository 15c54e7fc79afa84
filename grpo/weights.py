"""Weights that travel between processes: those that are trained."""

import torch
from transformers.pytorch_utils import Conv1D


def trained_weights(model):
    """Returns {name: CPU tensor} of what is trained: all, or the adapters of a LoRA policy."""
    trained = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    # copied even on a CPU: the next step must not change them
    return {name: parameter.to("cpu", copy=True) for name, parameter in trained.items()}


def check_shapes(tensors, model):
    """Raises ValueError unless `tensors` has the same names and shapes as `model`; both are
    {name: tensor}."""
    shapes = [{name: tuple(x.shape) for name, x in xs.items()} for xs in (tensors, model)]
    if shapes[0] != shapes[1]:
        name = min(shapes[0].items() ^ shapes[1].items())[0]
        got, due = (side.get(name, "missing") for side in shapes)
        raise ValueError(
            f"the weights are of another model, or another LORA_RANK: {name} is {got}, not {due}"
        )


@torch.no_grad()
def load_weights(model, tensors):
    """Writes `tensors` over the trained parameters, or all of a frozen model. Raises ValueError,
    and changes nothing, if they do not fit."""
    parameters = dict(model.named_parameters())
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    check_shapes(tensors, trained or parameters)
    for name, tensor in tensors.items():
        parameters[name].copy_(tensor)


@torch.no_grad()
def merge_adapters(model, tensors):
    """Returns the weights of a LoRA policy, W + 2 B A, from its adapters and the `model` under
    them. Raises ValueError if that lacks such a layer."""
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
