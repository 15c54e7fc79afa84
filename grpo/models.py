"""The model that is trained, and its tokenizer: loading, prompts to ids, ids to text, saving.

Any AutoModelForCausalLM will do. What differs between families is settled here: where EOS is named,
whether there is a chat template and what roles it knows, dropout, the padding of the embedding.
"""

import contextlib
import functools
import inspect
import os
from pathlib import Path

import jinja2
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
)

from grpo.log import announced

GPU_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")  # NVIDIA's driver; the same under WSL


def load_tokenizer(name):
    """-> the model's tokenizer. Raises SystemExit with a sentence if there is no such model."""
    check_folder(name)
    try:
        with announced("the model hub"):
            return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise SystemExit(f"MODEL = {name!r} can't be loaded: {error}") from error


def own_device():
    """Returns "cuda:N", N this process's LOCAL_RANK, or "cpu" where there is no GPU.

    Turns off cuDNN's attention, PyTorch's first choice on H100, H200 and B200: with a mask its
    backward gives NaN at key lengths of 64 modulo 128 (pytorch #196678, trl #7181), on B200 it
    decodes wrongly (pytorch #193893), and it plans anew for every shape. Raises SystemExit where
    there is a GPU that torch, built for CUDA, can't use: the CPU would train for weeks, unsaid.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    if torch.cuda.is_available():
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
        return device
    wants_cpu = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if torch.version.cuda and any(map(os.path.exists, GPU_FILES)) and not wants_cpu:
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
            raise SystemExit(
                f"there is a GPU, but torch {torch.__version__} can't use it: {error} Install a"
                " newer driver, or a torch built for yours; CUDA_VISIBLE_DEVICES, which is"
                f" {visible}, may name a GPU that is not there; -1 takes the CPU"
            ) from error
    return "cpu"


def choose_dtype(dtype, device):
    """Returns the name of the dtype that DTYPE stands for: "auto" is bfloat16 on a GPU that has it,
    and float32 elsewhere. Cards before Ampere (T4, V100) emulate bfloat16, at a crawl."""
    has_bfloat16 = device != "cpu" and torch.cuda.is_bf16_supported(including_emulation=False)
    if dtype == "auto":
        dtype = "bfloat16" if has_bfloat16 else "float32"
        if device != "cpu" and not has_bfloat16:
            print("this GPU has no bfloat16: float32 is taken, which needs twice the memory")
    elif dtype == "bfloat16" and device != "cpu" and not has_bfloat16:
        print("this GPU has no bfloat16 and only emulates it, at a crawl: take DTYPE = 'float32'")
    return dtype


def check_folder(name):
    """Raises SystemExit where `name`, a text or Path, can be no hub's or begins with a folder that
    is here, and is no model's folder: asking the hub takes a minute where there is no network."""
    text = str(name)
    local = text.startswith((".", "/", "~")) or text.count("/") > 1
    local = local or Path(text.partition("/")[0]).is_dir()
    if local and not any(Path(name, f"{part}config.json").exists() for part in ("", "adapter_")):
        raise SystemExit(
            f"MODEL = {name!r} is no folder with a model: there is no"
            f" {Path(name, 'config.json').absolute()} (and where {text.partition('/')[0]!r} is a"
            " folder here, the hub is not asked)"
        )


def load_model(name, dtype, vocab_size):
    """-> (model, dtype) on this process's GPU or the CPU; `dtype` as in choose_dtype.

    It stays in eval mode: GPT-2 ships dropout 0.1, with which the ratio would be noise. Raises
    SystemExit if its embedding has no room for the tokenizer's ids, or it is a LoRA adapter.
    """
    device = own_device()
    dtype = choose_dtype(dtype, device)
    # straight to the GPU, tensor by tensor: else every rank holds the whole model in RAM at once
    place = {} if device == "cpu" else {"device_map": {"": device}}
    model = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype), **place)
    if getattr(model, "_hf_peft_config_loaded", False):
        base = next(iter(model.peft_config.values())).base_model_name_or_path
        raise SystemExit(
            f"MODEL = {name!r} is a LoRA adapter. Merge it first, in Python:\n"
            "  from peft import PeftModel\n"
            "  from transformers import AutoModelForCausalLM, AutoTokenizer\n"
            f"  model = AutoModelForCausalLM.from_pretrained({base!r})\n"
            f"  model = PeftModel.from_pretrained(model, {name!r}).merge_and_unload()\n"
            "  model.save_pretrained('merged')\n"
            f"  AutoTokenizer.from_pretrained({name!r}).save_pretrained('merged')"
        )
    rows = model.get_input_embeddings().weight.shape[0]
    if rows < vocab_size:
        raise SystemExit(f"{name} embeds {rows} ids, its tokenizer has {vocab_size}: a wrong pair")
    return model.to(device).eval(), dtype


def stop_ids(name, tokenizer, stop_tokens):
    """-> the ids that end a completion: what tokenizer, generation config and model config call
    EOS, and `stop_tokens` that the tokenizer knows. SystemExit if there is none."""
    config = AutoConfig.from_pretrained(name)
    stops = [tokenizer.eos_token_id, getattr(config, "eos_token_id", None)]
    with contextlib.suppress(OSError):  # not every model has one
        stops.append(GenerationConfig.from_pretrained(name).eos_token_id)
    vocab = tokenizer.get_vocab()
    stops += [vocab.get(token) for token in stop_tokens]
    eos_ids = {i for ids in stops for i in (ids if isinstance(ids, list) else [ids])} - {None}
    if not eos_ids:
        raise SystemExit(f"{name} names no EOS token: its completions would never end")
    return eos_ids


def prompt_ids(tokenizer, messages):
    """-> the ids of a chat, up to where the answer begins."""
    if not tokenizer.chat_template:  # GPT-2 and other plain models
        return tokenizer("\n\n".join(m["content"] for m in messages) + "\n")["input_ids"]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except jinja2.TemplateError:  # Gemma knows no system role: the user says it
        content = "\n\n".join(m["content"] for m in messages)
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
    return tokenizer(text, add_special_tokens=False)["input_ids"]  # the template has them


def can_cache(model):
    """Whether the model's past is a key-value cache that can be repeated and thinned by rows.

    Recurrent and linear-attention models (Mamba, RWKV, Qwen3-Next) keep a state instead; some do so
    in a few layers and don't say it (LFM2), but their cache's layers tell. GPT-1 keeps nothing.
    """
    if getattr(model, "_is_stateful", False) or not accepts(model, "past_key_values"):
        return False
    layers = DynamicCache(config=model.config).layers
    return not any(hasattr(layer, "conv_states") for layer in layers)


def smallest_window(model):
    """-> tokens that a layer with sliding or chunked attention sees, the fewest; None: no such."""
    layers = DynamicCache(config=model.config).layers
    windows = [layer.sliding_window for layer in layers if hasattr(layer, "sliding_window")]
    return min(windows, default=None)


def accepts(model, name):
    """Whether the model's forward takes the argument `name` (not every architecture takes all)."""
    model = getattr(model, "module", model)  # DeepSpeed wraps the model
    return name in forward_arguments(type(model))


@functools.cache
def forward_arguments(architecture):
    return inspect.signature(architecture.forward).parameters.keys()
