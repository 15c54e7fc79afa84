"""Copies and loads trained weights."""

import torch


def trained_weights(model):
    """Returns {name: CPU tensor} of the trained weights: all, or the adapters of a LoRA policy."""
    trained = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    # copied even on a CPU: the next step must not change them
    return {name: parameter.to("cpu", copy=True) for name, parameter in trained.items()}


def check_shapes(tensors, expected):
    """Raises ValueError unless the names and shapes in both dicts {name: tensor} are equal."""
    shapes = [{name: tuple(x.shape) for name, x in xs.items()} for xs in (tensors, expected)]
    if shapes[0] != shapes[1]:
        name = min(shapes[0].items() ^ shapes[1].items())[0]
        got, due = (side.get(name, "missing") for side in shapes)
        raise ValueError(
            f"the weights are from another MODEL or LORA_RANK: {name} is {got}, expected {due}"
        )


@torch.no_grad()
def load_weights(model, tensors):
    """Copies `tensors` into the trained parameters, or into all parameters of a frozen model.
    Raises ValueError, and changes nothing, if they do not match."""
    parameters = dict(model.named_parameters())
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    check_shapes(tensors, trained or parameters)
    for name, tensor in tensors.items():
        parameters[name].copy_(tensor)
