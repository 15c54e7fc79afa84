"""The model that is trained, and its tokenizer: loading, prompts to ids, ids to text, saving.

Any AutoModelForCausalLM will do. What differs between families is settled here: where EOS is named,
whether there is a chat template and what roles it knows, dropout, the padding of the embedding.
"""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import jinja2
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.pytorch_utils import Conv1D

from grpo.forward import CompletionModel
from grpo.sampling.sampler import stream_groups
from grpo.training.liveness import announced
from grpo.wire import tokenizer_facts
from grpo_loss_triton import linear_logps

ALL = "all-linear"  # PEFT's name for every linear layer but the LM head
GPU_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")  # NVIDIA's driver; the same under WSL


@dataclass
class Policy:
    name: str
    model: torch.nn.Module
    tokenizer: object
    eos_ids: set[int]
    vocab_size: int  # ids of the tokenizer; the embedding may be padded beyond them
    dtype: str

    def text(self, completion):
        return completion_text(self.tokenizer, completion)

    def stream(self, take, *, seed, **settings):
        """Samples groups with the weights as they are; see sampler.stream_groups."""
        generator = torch.Generator(device=self.model.device)
        generator.manual_seed(seed)
        own = {"eos_ids": self.eos_ids, "vocab_size": self.vocab_size, "generator": generator}
        return stream_groups(self.model, take, **own | settings)

    def continuation(self, prompt, size):
        """Returns `size` ids that the policy draws after the prompt, at temperature 1; where it
        would end a completion it goes on."""
        settings = {"group_size": 1, "max_rows": 1, "longest_prompt": len(prompt), "seed": 0}
        settings |= {"max_new_tokens": size, "temperature": 1.0, "eos_ids": {-1}}
        prompts = [(0, prompt)]
        ((_, (completion,)),) = self.stream(
            lambda _: [prompts.pop()] if prompts else [], **settings
        )
        return completion.ids

    @torch.no_grad()
    def logps(self, prompt, completion):
        """-> log-probs of the completion's ids after the prompt, from a plain forward."""
        model = CompletionModel(self.model, share_prompts=False)
        hidden, ids = model([prompt], [completion])
        return linear_logps(hidden, model.head, ids, vocab_size=self.vocab_size).tolist()

    def load(self, tensors):
        """Takes trained_weights of another process. ValueError if they are another model's."""
        load_weights(self.model, tensors)

    def stops(self):
        """-> the tokens that end a completion, as text."""
        return ", ".join(self.tokenizer.convert_ids_to_tokens(sorted(self.eos_ids)))

    def check_context(self, prompt_tokens, completion_tokens):
        """Raises SystemExit if the two together exceed the model's context."""
        context = getattr(self.model.config, "max_position_embeddings", None)
        if context is not None and prompt_tokens + completion_tokens > context:
            raise SystemExit(
                f"MAX_PROMPT_TOKENS + MAX_COMPLETION_TOKENS = {prompt_tokens + completion_tokens}"
                f" exceeds the context of {context} tokens of {self.name}: lower one of them"
            )

    def save(self, folder):
        """Writes model and tokenizer in Hugging Face format."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


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


def load_policy(name, tokenizer, dtype, stop_tokens=(), lora_rank=0):
    """-> the Policy; see load_model for `dtype`.

    With a `lora_rank` the model is frozen, and every linear layer but the LM head gets an adapter,
    which starts as 0: W x + 2 B A x (LoRA, 2106.09685). Saved, a folder then holds the adapter.
    Raises SystemExit as load_model does, or if no EOS is named.
    """
    vocab_size = tokenizer_facts(tokenizer)["vocab_size"]
    model, dtype = load_model(name, dtype, vocab_size)
    if lora_rank:
        from peft import LoraConfig

        # without a task_type PEFT's Auto classes do not load what is saved
        size = {"r": lora_rank, "lora_alpha": 2 * lora_rank}
        model.add_adapter(LoraConfig(task_type="CAUSAL_LM", target_modules=ALL, **size))
    eos_ids = stop_ids(name, tokenizer, stop_tokens)
    return Policy(name, model, tokenizer, eos_ids, vocab_size, dtype)


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


def completion_text(tokenizer, completion):
    """-> a sampled completion's text, without the EOS that ended it."""
    ids = completion.ids if completion.truncated else completion.ids[:-1]
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


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
