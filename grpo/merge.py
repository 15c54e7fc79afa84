"""Merges a LoRA adapter, such as a checkpoint of a run with LORA_RANK, into the model under it.

    python -m grpo.merge ADAPTER OUT

OUT is then a model in Hugging Face format with the adapter's tokenizer, which MODEL may name: W + s
B A with s = lora_alpha / r (LoRA, 2106.09685, sec. 4.1), added in float32 and rounded once to the
base model's own dtype.
"""

import json
import sys
from pathlib import Path

import safetensors.torch
import transformers

from grpo.log import say
from grpo.models import load_tokenizer
from grpo.weights import load_weights, merge_adapters

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # PEFT's, before the names of the model's own layers
AB = (".lora_A.weight", ".lora_B.weight")
OTHER = ("rank_pattern", "alpha_pattern", "use_dora", "modules_to_save", "use_rslora")


def is_adapter(folder):
    return Path(folder, CONFIG).is_file()


def base_of(model):
    """Returns the name of the model under an adapter, or `model` itself where that is none."""
    return read_config(model)["base_model_name_or_path"] if is_adapter(model) else model


def read_config(folder):
    """Returns the configuration of a LoRA adapter, a dict. Raises SystemExit if the folder has
    none, or one of another kind."""
    for name in (CONFIG, WEIGHTS):
        if not Path(folder, name).is_file():
            raise SystemExit(f"{folder} holds no {name}: it must be the folder of a LoRA adapter")
    config = json.loads(Path(folder, CONFIG).read_text())
    kind = config.get("peft_type")
    check_plain(folder, ([] if kind == "LORA" else [kind]) + [n for n in OTHER if config.get(n)])
    return config


def check_plain(folder, others):
    """Raises SystemExit if an adapter has `others` than the A and B of LoRA."""
    if others:
        raise SystemExit(f"{folder} is not a plain LoRA adapter ({others[0]}): merge it with PEFT")


def read_adapter(folder):
    """Returns (name of the base model, {name: tensor}, scale s) of a LoRA adapter, for
    merge_adapters. Raises SystemExit as read_config does."""
    config, tensors = read_config(folder), safetensors.torch.load_file(Path(folder, WEIGHTS))
    check_plain(folder, [n for n in tensors if not n.endswith(AB)] if tensors else ["no tensors"])
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    return config["base_model_name_or_path"], tensors, config["lora_alpha"] / config["r"]


def merge_into(model, folder):
    """Adds the adapter in `folder`, if it is one, to the `model` under it, in place. Raises
    SystemExit if it is of another model."""
    if not is_adapter(folder):
        return
    _, tensors, scale = read_adapter(folder)
    try:
        load_weights(model, merge_adapters(model, tensors, scale))
    except (ValueError, RuntimeError) as error:
        raise SystemExit(f"the adapter {folder} does not fit its base model: {error}") from error


def tokenizer_of(folder, base):
    """Returns the tokenizer saved with an adapter, or its base model's."""
    own = Path(folder, "tokenizer_config.json").exists()
    return load_tokenizer(str(folder) if own else base)


def merge(adapter, out):
    """Writes the merged model and its tokenizer to the folder `out`. Raises SystemExit if that has
    files, if `adapter` is none, or if its base model is not there."""
    if Path(out).exists() and not (Path(out).is_dir() and not any(Path(out).iterdir())):
        raise SystemExit(f"OUT = {out!r} exists and is not an empty folder: choose another")
    base, *_ = read_adapter(adapter)
    tokenizer = tokenizer_of(adapter, base)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    except (OSError, ValueError) as error:
        raise SystemExit(
            f"{base!r}, the base model in {Path(adapter, CONFIG)}, can't be loaded, neither as a"
            f" folder nor from the hub: {error}"
        ) from error
    merge_into(model, adapter)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    say(f"{adapter} and {base} are merged in {out}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    merge(*sys.argv[1:])
