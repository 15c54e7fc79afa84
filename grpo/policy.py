"""The policy: a model, its tokenizer, and the tokens and strings that end a completion."""

import contextlib
from dataclasses import dataclass

import torch

from grpo.devices import out_of_memory_names
from grpo.models import as_umask
from grpo.sampler import CachedDecoder, stream_groups

# Largest mean k3 = exp(d) - d - 1 that counts as rounding, where d is the difference between two
# computations of a token's log-prob. A higher limit misses small errors. Published: 1.5e-3 (sd of d
# 0.055) in bfloat16, for Qwen2.5-0.5B, a trainer against vLLM or against itself at another batch
# size (trl #6789); about 4e-3 (mean |d| 0.067) in FP8, for a mixture of experts (miles #2722).
# Measured with the demo's models (986c616:benchmarks/results/noise.md): bfloat16 4e-5, float32
# 6e-14; with a layer that is 100 updates old 0.012 to 0.06
NOISE = {"float32": 1e-6, "bfloat16": 1e-2}
# The same for float32 with products in TF32, which have 10 bits. A guess: |d| of 0.01 gives 5e-5
TF32_NOISE = 1e-4


def check_gap(gap, limit, what):
    if not gap <= limit:  # also if it is NaN
        raise RuntimeError(
            f"{what}: the KL estimate k3 of their log-probs is {gap:.2g} (limit {limit}); see"
            " docs/troubleshooting.md"
        )


@dataclass
class Policy:
    model: torch.nn.Module
    tokenizer: object
    eos_ids: set[int]
    vocab_size: int  # V: ids of the tokenizer; the embedding may be padded beyond them
    dtype: str
    noise: float  # the largest mean k3, between trainer and sampler, that counts as rounding
    decoder: type = CachedDecoder  # or a slower one, without a KV cache
    stop_strings: object = None  # StopStrings, or None
    lora: bool = False  # whether adapters are trained, and the model itself is frozen
    contexts: list = ()  # functions, called before sampling: each returns a context for it

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
            decoder=self.decoder,
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

    def describe(self):
        """Returns what samples, as a text."""
        return f"torch, {self.decoder.__name__}"

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
        """Returns a completion's text, without the EOS if one ended it."""
        ids = completion.ids[:-1] if completion.ids[-1] in self.eos_ids else completion.ids
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)

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
