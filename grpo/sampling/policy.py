"""The policy that samples: its model, its tokenizer, and what ends a completion."""

from dataclasses import dataclass

import torch

from grpo.forward import CompletionModel
from grpo.models import load_model, stop_ids
from grpo.sampling.sampler import stream_groups
from grpo.weights import load_weights
from grpo.wire import tokenizer_facts
from grpo_loss_triton import linear_logps

ALL = "all-linear"  # PEFT's name for every linear layer but the LM head


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


def completion_text(tokenizer, completion):
    """-> a sampled completion's text, without the EOS that ended it."""
    ids = completion.ids if completion.truncated else completion.ids[:-1]
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)
