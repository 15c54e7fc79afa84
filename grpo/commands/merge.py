"""Merges a LoRA adapter, such as a checkpoint of a run with LORA_RANK, into its base model.

    python -m grpo.commands.merge ADAPTER OUT

OUT becomes a model in Hugging Face format, in the base model's dtype, with the adapter's tokenizer.
MODEL may name OUT. After a run with BASE_BITS = 4 the base is the model before it was rounded, so
OUT is not quite what was trained: `python evaluate.py ADAPTER OUT` compares their answers.
"""

import json
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

from grpo.bfloat16 import rounded_to
from grpo.checkpoint import CONSTANTS
from grpo.constants import fault_of
from grpo.log import say
from grpo.models import (
    as_umask,
    load_tokenizer,
    settings_in,
    stop_ids,
    token_ids,
    whole_model,
)
from grpo.options.four_bits import is_in_4_bits

CONFIG = "adapter_config.json"


def base_of(model):
    """Returns the name of an adapter's base model, or `model` itself if it is no adapter."""
    config = Path(model, CONFIG)
    return json.loads(config.read_text())["base_model_name_or_path"] if config.is_file() else model


def load_base_tokenizer(model):
    """Returns the tokenizer of base_of(model). Raises SystemExit, with the file that names the
    base, if there is no such model, or if a file of the adapter can't be read."""
    if fault := fault_of(model):
        raise SystemExit(f"the model {model!r} can't be loaded: {fault}")
    config = Path(model, CONFIG)
    named = f"base_model_name_or_path in {config} (a relative path begins in the current folder)"
    return load_tokenizer(base_of(model), named if config.is_file() else "MODEL")


def merge_into(model, folder):
    """Adds the adapter in `folder`, if there is one, to its base `model`, in place. The sum is made
    in float32 and rounded once, in bfloat16 at random (bfloat16.py). A `model` in 4 bits keeps the
    adapter beside its layers. Raises SystemExit if the two do not match."""
    if not Path(folder, CONFIG).is_file():
        return
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Found missing adapter keys")
            place = {"torch_device": str(model.device)}
            adapted = PeftModel.from_pretrained(model, folder, **place)
            # Only a second call returns what it left out
            if other := adapted.load_adapter(folder, "default", **place).unexpected_keys:
                raise ValueError(f"the base has no place for {other[0]}")
    except (ValueError, RuntimeError, UserWarning) as error:
        raise SystemExit(
            f"the adapter {folder} does not fit the base model named in its {CONFIG}: {error}"
        ) from error
    if is_in_4_bits(model):
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.data = parameter.data.to(model.dtype)  # as it was trained
        return
    uses = Counter(id(x) for _, x in model.named_parameters(remove_duplicate=False))
    for name, layer in adapted.named_modules():
        if isinstance(layer, BaseTunerLayer):
            weight = layer.get_base_layer().weight
            if uses[id(weight)] > 1:  # the sum would change the other layer, too
                raise SystemExit(
                    f"the adapter {folder} can't be merged: the base ties the weight of {name} to "
                    f"another layer. Train it without this layer in target_modules ({CONFIG}), or "
                    "on a base with tie_word_embeddings = False"
                )
            dtype, weight.data = weight.dtype, weight.data.float()
            layer.merge()  # PEFT loads adapters in float32
            weight.data = rounded_to(dtype, weight.data)
    adapted.unload()


def bits_of(model):
    """Returns BASE_BITS of the run that trained the adapter in the folder `model`; 16 for any other
    model."""
    trained = settings_in(model, CONSTANTS) if Path(model, CONFIG).is_file() else {}
    return trained.get("BASE_BITS", 16)


def merge(adapter, out):
    """Writes the merged model and its tokenizer to the folder `out`. Raises SystemExit if `out` has
    files, or if `adapter` is no adapter."""
    if Path(out).exists() and not (Path(out).is_dir() and not any(Path(out).iterdir())):
        raise SystemExit(f"OUT = {out!r} exists and is not an empty folder: choose another")
    if not Path(adapter, CONFIG).is_file():
        raise SystemExit(f"{adapter} has no {CONFIG}: name the folder of a LoRA adapter")
    base, has_tokenizer = base_of(adapter), Path(adapter, "tokenizer_config.json").exists()
    tokenizer = load_base_tokenizer(adapter)
    tokenizer = load_tokenizer(adapter) if has_tokenizer else tokenizer
    ends = token_ids(settings_in(adapter).get("eos_token_id")) or stop_ids(base, tokenizer, ())
    model = whole_model(base, dtype="auto")
    model.generation_config.eos_token_id = sorted(ends)
    merge_into(model, adapter)
    final = Path(out).resolve()
    final.parent.mkdir(parents=True, exist_ok=True)
    # A half of a model must not look like one
    with tempfile.TemporaryDirectory(dir=final.parent, prefix=f".{final.name}_") as work:
        draft = Path(work, "model")
        model.save_pretrained(draft)
        as_umask(draft)
        tokenizer.save_pretrained(draft)
        if (constants := Path(adapter, CONSTANTS)).exists():
            shutil.copy(constants, draft)
        draft.replace(final)
    say(f"merged {adapter} and {base} into {out}")
    if bits_of(adapter) == 4:
        say(f"OUT is not quite what was trained, beside 4 bits: evaluate.py {adapter} {out}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    merge(*sys.argv[1:])
