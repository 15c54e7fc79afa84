"""Loads models and tokenizers (any AutoModelForCausalLM), and handles how families differ: the EOS
token and chat roles (forward.py: what forward accepts, and what a cache holds)."""

import contextlib
import functools
import json
import math
import os
import sys
from pathlib import Path

import jinja2
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.utils import cached_file, logging

from grpo.constants import fault_of
from grpo.devices import accelerator, check_driver, is_out_of_memory, keep_freed_memory
from grpo.log import announced, say

OWN_CODE = "has code of its own, which we never run: choose a model that transformers has"


def load_tokenizer(name, constant="MODEL"):
    """Returns the model's tokenizer. Raises SystemExit, with the `constant` that names the model,
    if there is no such model."""
    try:
        if fault := fault_of(name):
            raise OSError(fault)
        with announced("the model hub"):
            return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        why = f"it {OWN_CODE}" if "trust_remote_code" in str(error) else error
        raise SystemExit(
            f"{constant} = {name!r} can't be loaded from a folder or from the hub: {why}"
        ) from error


def own_device():
    """Returns "cuda:N", or "xpu:N" and the like, N this process's LOCAL_RANK; "cpu" where there is
    no accelerator.

    Turns off cuDNN's attention: masked, its backward can give NaN (pytorch #196678, trl #7181), and
    on B200 it decodes wrongly (pytorch #193893). Raises SystemExit if torch can't use the GPU.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    if kind := accelerator():
        device = f"{kind}:{os.environ.get('LOCAL_RANK', '0')}"
        torch.accelerator.set_device_index(device)
        return device
    if torch.version.cuda:
        check_driver()
    keep_freed_memory()
    return "cpu"


def has_bfloat16(device):
    if device.startswith("cuda"):
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device != "cpu"  # Intel's and Ascend's GPUs have it


def choose_dtype(dtype, device):
    """Returns the name of the dtype that DTYPE stands for: "auto" is bfloat16 on a GPU that has it
    (not T4 and older), and float32 elsewhere."""
    native = has_bfloat16(device)
    if device != "cpu" and not native and dtype != "float32":
        say("this GPU only emulates bfloat16, which is slow: DTYPE = 'auto' is float32 here")
    if dtype == "auto":
        return "bfloat16" if native else "float32"
    return dtype


def whole_model(name, **options):
    """Returns from_pretrained's model, with an empty generation config: the file's top_p and the
    like are not what is trained, and transformers refuses to save some of them. Raises SystemExit
    if the model can't be loaded, or if the files lack weights of config.json's model or have other
    shapes: transformers would fill these weights with random numbers."""
    if settings_in(name, "config.json").get("quantization_config"):
        raise SystemExit(
            f"the model {name!r} is quantized (quantization_config in config.json): take the model"
            " that it was made from; if memory is short, set LORA_RANK = 16 and BASE_BITS = 4"
        )
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    options |= {"generation_config": GenerationConfig(), "trust_remote_code": False}
    try:
        model, info = AutoModelForCausalLM.from_pretrained(name, **options)
    except Exception as error:
        why = OWN_CODE if "trust_remote_code" in str(error) else "can't be loaded"
        if is_out_of_memory(error):
            why = "does not fit into memory (docs/memory.md has what fits, and what takes less)"
        raise SystemExit(f"the model {name!r} {why}: {error!r}") from error
    wrong = [f"{key} is missing" for key in sorted(info["missing_keys"])]
    for key, found, due in sorted(info["mismatched_keys"]):
        wrong.append(f"{key} has the shape {tuple(found)} instead of {tuple(due)}")
    if wrong:
        raise SystemExit(
            f"the files of the model {name!r} do not have the weights that its config.json asks"
            f" for: {', '.join(wrong[:3])}{f' and {len(wrong) - 3} more' * (len(wrong) > 3)}."
            " Download the model again, or correct its config.json (tie_word_embeddings?)"
        )
    return model


def as_umask(folder):
    """Gives a folder's weights the mode of its other files, as safetensors 0.8 makes it 600: no
    other user, and no container with another one, could read them."""
    (new := Path(folder, ".new")).touch()
    with contextlib.suppress(OSError):  # a disk without modes
        for path in Path(folder).glob("*.safetensors"):
            path.chmod(new.stat().st_mode)
    new.unlink()


FOREIGN_IDS = 8  # so many ids of a tokenizer may have no embedding: in Gemma 3 1B one has none


def token_ids(*values):
    """Returns the ids in values that are an id or a list of ids; what is no id is left out."""
    flat = [x for value in values for x in (value if isinstance(value, list) else [value])]
    return {x for x in flat if type(x) is int and x >= 0}


def settings_in(name, file="generation_config.json"):
    """Returns the contents of a JSON file of the model; {} if it is missing or broken."""
    try:
        found = json.loads(Path(cached_file(name, file)).read_text("utf-8"))
    except (OSError, ValueError, TypeError):  # cached_file may return None
        return {}
    return found if isinstance(found, dict) else {}


def load_model(name, dtype, vocab_size, load=whole_model):
    """Returns the model, on this process's GPU or the CPU, and the dtype's name (choose_dtype).
    `load` loads it: prepare.loader_of.

    The model is in eval mode, as GPT-2's dropout of 0.1 would make the ratio noise. Raises
    SystemExit for the reasons of whole_model, if the embedding has fewer rows than the tokenizer
    has ids, or for a LoRA adapter.
    """
    device = own_device()
    dtype = choose_dtype(dtype, device)
    if not sys.stderr.isatty():  # a `| tee` may also end before the run
        logging.disable_progress_bar()
    # Loads straight to the GPU, else each rank would hold a whole model in RAM
    place = {} if device == "cpu" else {"device_map": {"": device}}
    model = load(name, dtype=getattr(torch, dtype), **place)
    if has_softcap(model.config):
        model.set_attn_implementation("eager")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise SystemExit(
            f"the model {name!r} is a LoRA adapter: merge it first"
            f" (python -m grpo.commands.merge {name} OUT)"
        )
    rows = model.get_input_embeddings().weight.shape[0]
    if rows < vocab_size - FOREIGN_IDS:
        raise SystemExit(
            f"the model {name!r} has {rows} embeddings, but its tokenizer has {vocab_size} ids: put"
            " the tokenizer that belongs to the model into its folder"
        )
    return model.to(device).eval(), dtype


def config_of(name):
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False).get_text_config()
    except (OSError, ValueError) as error:  # an adapter has none: load_model refuses it
        if "trust_remote_code" in str(error):
            raise SystemExit(f"the model {name!r} can't be loaded: it {OWN_CODE}") from error


def check_context(c, config=None, constant="MODEL"):
    """Raises SystemExit if MAX_PROMPT_TOKENS and MAX_COMPLETION_TOKENS exceed the context of the
    model that the constant names. Reads the model's configuration if `config` is None."""
    context = context_of(config or config_of(getattr(c, constant))) or math.inf
    prompt, completion = c.MAX_PROMPT_TOKENS, c.MAX_COMPLETION_TOKENS
    if prompt + completion > context:
        raise SystemExit(
            f"MAX_PROMPT_TOKENS = {prompt} and MAX_COMPLETION_TOKENS = {completion} exceed the"
            f" context of {constant} = {getattr(c, constant)!r}: their sum must be {context}"
            " tokens at most"
        )


def context_of(config):
    """Returns how many tokens a model can read at most, or None if its configuration has no number.
    LongRoPE (Phi-3, Phi-4-mini) has other positions for a whole batch once a sequence is longer
    than the original limit, so that one is taken."""
    config = config and config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return rope["original_max_position_embeddings"]
    return getattr(config, "max_position_embeddings", None)


def has_softcap(config):
    """Returns whether attention caps its scores (Gemma 2). In transformers 5.17 to 5.19 only the
    "eager" attention does."""
    return getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None


def vocab_size_of(tokenizer):
    """Returns V, the number of ids that the tokenizer has.

    A model's embedding may have more rows than that, as padding (Qwen2.5: 151 936 or 152 064 rows
    for 151 665 ids). Only the tokenizer's ids are sampled and counted in the softmax, on both
    sides, so that policy and reference have the same support whatever their padding.
    """
    return max(tokenizer.get_vocab().values()) + 1


def stop_ids(name, tokenizer, stop_tokens, vocab_size=math.inf):
    """Returns the ids that end a completion: EOS of tokenizer, generation config and model config,
    and the `stop_tokens` that the tokenizer knows; no EOS is ordinary text. SystemExit if none is
    below `vocab_size`."""
    config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    stops = [tokenizer.eos_token_id, getattr(config, "eos_token_id", None)]
    stops.append(settings_in(name).get("eos_token_id"))
    vocab, eos_ids = tokenizer.get_vocab(), token_ids(*stops)
    plain = eos_ids - {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    if plain := plain & set(vocab.values()):
        say(f"{name}: its EOS {tokenizer.batch_decode(sorted(plain))} are ordinary text: left out")
    if lacking := [token for token in stop_tokens if token not in vocab]:
        say(f"the tokenizer of {name} has no {', '.join(lacking)} (STOP_TOKENS)")
    eos_ids = eos_ids - plain | {vocab[token] for token in stop_tokens if token in vocab}
    eos_ids = {id for id in eos_ids & set(vocab.values()) if id < vocab_size}
    if not eos_ids:
        raise SystemExit(
            f"the model {name!r} has no EOS token, so its completions would never end: add the"
            " token that ends its answers to STOP_TOKENS"
        )
    return eos_ids


def prompt_ids(tokenizer, messages, /, **options):
    """Returns the ids of a chat up to the start of the answer, or within it, if the last message is
    the assistant's. `options` are those of the chat template (CHAT_TEMPLATE)."""
    goes_on = options.get("continue_final_message", messages[-1]["role"] == "assistant")  # as TRL
    if not tokenizer.chat_template:  # GPT-2 and other plain models
        joined = "\n\n".join(message["content"] for message in messages)
        return without_eos(tokenizer, tokenizer(joined + "\n" * (not goes_on))["input_ids"])
    options = {"add_generation_prompt": not goes_on, "continue_final_message": goes_on} | options
    template = functools.partial(tokenizer.apply_chat_template, **options)
    try:
        text = template(messages, tokenize=False)
    except jinja2.TemplateError:  # Gemma has no system role: the text goes into the user's message
        if len(messages) < 2 or messages[0]["role"] != "system":
            raise
        system, first, *rest = messages
        joined = f"{system['content']}\n\n{first['content']}"
        text = template([first | {"content": joined}, *rest], tokenize=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]  # the template has them
    return without_eos(tokenizer, ids)


def without_eos(tokenizer, ids):
    """Returns a prompt's ids without EOS at the end, which some tokenizers append, and templates
    without a part for the answer's start write: after it the model begins another text."""
    while len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:
        ids = ids[:-1]
    return ids
