"""The policy: a model, its tokenizer, and the tokens and strings that end a completion."""

import contextlib
import functools
from dataclasses import dataclass

import torch

from grpo.devices import out_of_memory_names
from grpo.log import announced, say
from grpo.logp_checks import NOISE
from grpo.models import as_umask, check_context, load_model, stop_ids, vocab_size_of
from grpo.sampler import completion_text, make_decoder, stream_groups


@dataclass
class Policy:
    name: str
    model: torch.nn.Module
    tokenizer: object
    eos_ids: set[int]
    vocab_size: int  # V: ids of the tokenizer; the embedding may be padded beyond them
    dtype: str
    noise: float  # the largest mean k3, between trainer and sampler, that counts as rounding
    stop_strings: object = None  # StopStrings, or None
    lora: bool = False  # whether adapters are trained, and the model itself is frozen
    contexts: tuple = ()  # functions, called before sampling: each returns a context for it

    def stream(self, prompts, *, seed, **settings):
        """Samples groups with the current weights; see sampler.stream_groups.

        Adapters are merged only while tokens are sampled. When a group is yielded they are separate
        again, as the caller may save the model or stop reading.
        """
        contexts = [make() for make in self.contexts]
        groups = stream_groups(
            self.model,
            prompts,
            eos_ids=self.eos_ids,
            vocab_size=self.vocab_size,
            generator=self.generator(seed),
            stop_strings=self.stop_strings,
            **settings,
        )
        while True:
            with contextlib.ExitStack() as stack:
                stack.enter_context(out_of_memory_names("SAMPLE_BATCH", settings["max_sequences"]))
                list(map(stack.enter_context, contexts))
                group = next(groups, None)
            if group is None:
                return
            yield group

    def describe(self, c):
        """Returns what samples, as a text."""
        return f"torch, {type(make_decoder(self.model)).__name__}"

    @contextlib.contextmanager
    def as_sampler(self):
        """In the block the model is as it is while tokens are sampled."""
        with contextlib.ExitStack() as stack:
            for make in self.contexts:
                stack.enter_context(make())
            yield

    def generator(self, seed):
        return torch.Generator(device=self.model.device).manual_seed(seed)

    def text(self, completion):
        return completion_text(self.tokenizer, completion, self.eos_ids)

    def follow(self, step):
        """Returns an empty context: this policy samples with the weights that are trained."""
        return contextlib.nullcontext()

    def close(self):
        """Does nothing: there is no engine to stop."""

    def save(self, folder, trial=False):
        """Writes the model (with LoRA the adapter alone) and tokenizer in Hugging Face format. A
        `trial` writes the smallest trained weight alone: all that may fail, without the gigabytes.
        """
        state = self.model.state_dict(keep_vars=True)
        trained = {name: x for name, x in state.items() if x.requires_grad}
        if trial:
            state = dict([min(trained.items(), key=lambda item: item[1].numel())])
        elif self.lora:
            state = trained
        # DeepSpeed makes all weights views of one storage, and save_pretrained would copy them all,
        # on the GPU. So each gets a separate storage: in RAM, where the file is made of it, or on
        # a CPU, by DLPack, in the same memory. Tied weights stay one
        alone = {}
        for x in state.values():
            on_cpu = x.device.type == "cpu"
            alone[id(x)] = torch.from_dlpack(x.detach()) if on_cpu else x.detach().cpu()
        weights = {name: alone[id(x)] for name, x in state.items()}
        self.model.save_pretrained(folder, state_dict=weights)
        as_umask(folder)
        self.tokenizer.save_pretrained(folder)


def make_policy(c, tokenizer):
    """Returns the Policy of the constants `c`. Raises SystemExit if they do not fit the model."""
    torch.manual_seed(c.SEED)  # adapters are initialized at random
    more = c.STOP_TOKENS, c.LORA_RANK, c.STOP_STRINGS, c.BASE_BITS
    policy = load_policy(c.MODEL, tokenizer, c.DTYPE, *more)
    check_context(c, policy.model.config)
    stops = [*tokenizer.convert_ids_to_tokens(sorted(policy.eos_ids)), *map(repr, c.STOP_STRINGS)]
    say(f"completions end at {', '.join(stops)}")
    return policy


def make_sampler(c, policy):
    """Collective: returns this rank's sampler (SAMPLER): the policy itself, or vLLM."""
    if c.SAMPLER == "torch":
        return policy
    from grpo.options.vllm_policy import VLLMPolicy

    with announced("vLLM to start"):
        return VLLMPolicy(c, policy.tokenizer, policy.model)


def load_policy(name, tokenizer, dtype, stop_tokens=(), lora_rank=0, stop_strings=(), bits=16):
    """Returns the Policy of a model (hub name or folder); see load_model for `dtype` and `bits`."""
    vocab_size, contexts = vocab_size_of(tokenizer), []
    model, dtype = load_model(name, dtype, vocab_size, bits)
    if dtype != "float32":
        from grpo.options.sampling.float32_head import ConvertedHead, give_float32_head

        give_float32_head(model)
        contexts.append(functools.partial(ConvertedHead, model))
    if lora_rank:
        from grpo.options.lora import MergedAdapters, add_adapters

        add_adapters(model, lora_rank)
        if bits == 16:
            contexts.append(functools.partial(MergedAdapters, model))
    vocab_size = min(vocab_size, len(model.get_input_embeddings().weight))
    eos_ids = stop_ids(name, tokenizer, stop_tokens, vocab_size)
    model.generation_config.eos_token_id = sorted(eos_ids)  # a checkpoint ends where the run did
    stops = None
    if stop_strings:
        from grpo.options.stop_strings import StopStrings

        stops = StopStrings(tokenizer, stop_strings)
    more = dtype, NOISE[dtype], stops, bool(lora_rank), contexts
    return Policy(name, model, tokenizer, eos_ids, vocab_size, *more)
