"""The policy in vLLM: what policy.Policy is in transformers, for vllm_worker.py.

vLLM runs in this process, so new weights reach it by a call: no NCCL, nothing pickled. (With
TENSOR_PARALLEL it has other processes, which read them from a file.) The distribution is
sampler.py's. By itself vLLM inherits the model's stops, reports log-probs from
before the temperature, and has the embedding's padding in its softmax; each is undone below.
"""

import functools
import itertools
import math
import os
import random
import tempfile

import safetensors.torch
import torch

from grpo.devices import accelerator
from grpo.sampling.policy import completion_text
from grpo.sampling.sampler import Completion, next_prompts
from grpo.sampling.stop_strings import StopStrings
from grpo.weights import check_shapes, merge_adapters

# The whole distribution (top_k 0 is off), with our stops instead of the model's
PLAIN = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": True}
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class VLLMPolicy:
    """Samples, takes new weights without a restart, and scores. Not for two threads at once."""

    def __init__(
        self,
        model,
        tokenizer,
        *,
        dtype,
        eos_ids,
        vocab_size,
        max_tokens,
        max_sequences,
        seed,
        memory,
        tensor_parallel,
        sleep,
        stop_strings=(),
    ):
        """Loads `model`, a hub name or folder, in `dtype`, "float32" or "bfloat16". `max_tokens`
        bounds prompt plus completion, `max_sequences` the completions sampled at once; the last
        three are VLLM_MEMORY_GB, TENSOR_PARALLEL and VLLM_SLEEP. Raises SystemExit if the device
        does not offer what they ask for."""
        set_environment()
        check_device(memory, tensor_parallel, sleep)
        from transformers import AutoConfig, AutoModelForCausalLM
        from vllm import LLM

        self.name, self.tokenizer, self.numbers = model, tokenizer, itertools.count()
        self.eos_ids, self.dtype, self.max_tokens = sorted(eos_ids), dtype, max_tokens
        self.stop_strings = StopStrings(tokenizer, stop_strings) if stop_strings else None
        self.parallel = tensor_parallel > 1
        self.sleeps, self.asleep = sleep, False  # whether it may, whether it does
        with torch.device("meta"):  # names and shapes of what load() takes, without memory
            trained = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
        self.parameters = dict(trained.named_parameters())
        self.gpu = accelerator() is not None
        budget = {"kv_cache_memory_bytes": int(memory * 1e9)}
        if self.gpu:
            budget = {
                "gpu_memory_utilization": memory * 1e9 / torch.accelerator.get_memory_info()[1]
            }
        self.llm = LLM(
            model,
            dtype=dtype,
            seed=random.SystemRandom().getrandbits(31) if self.gpu else seed,  # see stream
            tensor_parallel_size=tensor_parallel,
            max_model_len=max_tokens,
            max_num_seqs=max_sequences,
            enforce_eager=not self.gpu,  # compile on a GPU only
            enable_chunked_prefill=self.gpu,  # on a CPU a seeded request cut in two crashes
            enable_prefix_caching=True,  # a group's prompt runs once
            enable_sleep_mode=sleep,
            logprobs_mode="processed_logprobs",  # of what is sampled: after temperature and mask
            generation_config="vllm",  # nothing of the model's own
            skip_tokenizer_init=not stop_strings,  # ids in, ids out; it looks for them in the text
            **budget,
        )
        self.llm.apply_model(functools.partial(mask_padding, vocab_size=vocab_size))

    def stream(self, prompts, *, group_size, max_sequences, seed, longest_prompt=None, **settings):
        """Yields (key, completions) as sampler.stream_groups does, each group as soon as its last
        completion has ended, while others begin in the place of those that have ended. Of the
        `settings`, temperature must be above 0. On a CPU the same `seed` draws the same; on a GPU
        vLLM would then draw row by row, a launch each. Raises ValueError if a prompt leaves no room
        within max_tokens, RuntimeError if the weights are broken."""
        engine, draw, keys = self.llm.llm_engine, random.Random(seed), {}  # keys by request
        stops = None if "eos_ids" in settings else self.stop_strings
        self._wake()
        try:
            while True:
                room = (max_sequences - engine.get_num_unfinished_requests()) // group_size
                for key, ids in next_prompts(prompts, room):
                    # completion i is drawn with own + i
                    own = None if self.gpu else draw.getrandbits(62)
                    keys[self._begin(ids, n=group_size, seed=own, **settings)] = key
                if not keys:
                    return
                for output in engine.step():
                    completions = [read_completion(c, stops) for c in output.outputs]
                    yield keys.pop(output.request_id), completions
        finally:  # of a stream that fails, or is not read to its end
            engine.abort_request(list(keys))

    def _begin(self, ids, *, n, seed, max_new_tokens, temperature, eos_ids=None):
        """Adds a prompt to what vLLM samples; returns the request's id."""
        if len(ids) >= self.max_tokens:
            raise ValueError(f"a prompt fills the {self.max_tokens} tokens of max_tokens")
        request = str(next(self.numbers))
        params = self._params(
            n=n,
            seed=seed,
            temperature=temperature,
            max_tokens=max_new_tokens,
            stop_token_ids=self.eos_ids if eos_ids is None else eos_ids,
            logprobs=0,
            **(stops_at(self.stop_strings) if eos_ids is None else {}),
        )
        self.llm.llm_engine.add_request(request, {"prompt_token_ids": ids}, params)
        return request

    def sample(self, prompts, *, group_size, **settings):
        """Returns `group_size` Completions for each of the prompts (lists of ids), the same for the
        same `seed` on a CPU; the rest as in stream."""
        settings |= {"group_size": group_size, "max_sequences": len(prompts) * group_size}
        groups = dict(self.stream(enumerate(prompts), **settings))
        return [groups[i] for i in range(len(prompts))]

    def continuation(self, prompt, size):
        """Returns a Completion of `size` ids, drawn after the prompt at temperature 1, which
        nothing ends before."""
        settings = {"max_new_tokens": size, "temperature": 1.0, "eos_ids": [], "seed": 0}
        return self.sample([prompt], group_size=1, **settings)[0][0]

    def text(self, completion):
        return completion_text(self.tokenizer, completion, self.eos_ids)

    def load(self, tensors):
        """Replaces the weights by another process's trained_weights, in any float dtype; adapters
        are merged first. Raises ValueError, and changes nothing, if they do not fit."""
        if any(".lora_A." in name for name in tensors):
            tensors = merge_adapters(self.base, tensors)
        check_shapes(tensors, self.parameters)  # vLLM would keep what is missing, silently
        tensors = {name: tensors[name].contiguous() for name in self.parameters}
        self._wake()
        if self.parallel:  # to other processes, through a file: all ranks read what they need of it
            with tempfile.TemporaryDirectory(prefix="grpo-vllm-") as folder:
                safetensors.torch.save_file(tensors, f"{folder}/policy")
                self.llm.collective_rpc(reload, args=(f"{folder}/policy", self.dtype))
        else:
            self.llm.collective_rpc(reload, args=(tensors, self.dtype))
        self.llm.apply_model(refresh_head)
        if not self.llm.reset_prefix_cache():  # keys and values of the old weights
            raise RuntimeError("vLLM did not empty its prefix cache: is it sampling meanwhile?")

    def logps(self, prompt, completion):
        """Returns the log-probs (floats, temperature 1) of the completion's ids. The last id is
        scored as the next one: vLLM wants room for one more, and there may be none."""
        self._wake()
        ids, last = prompt + completion[:-1], completion[-1:]
        params = self._params(max_tokens=1, prompt_logprobs=0, logprob_token_ids=last)
        (output,) = self.llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
        scored = [*output.prompt_logprobs[len(prompt) :], output.outputs[0].logprobs[0]]
        return [found[id].logprob for id, found in zip(completion, scored, strict=True)]

    def rest(self):
        """With VLLM_SLEEP: frees the GPU's memory until the next call; the weights wait in the
        CPU's."""
        if self.sleeps and not self.asleep:
            self.llm.sleep(level=1)
            self.asleep = True

    def _wake(self):
        if not self.asleep:
            return
        try:
            self.llm.wake_up()
        except RuntimeError as error:
            raise RuntimeError(
                "vLLM slept, and its memory is taken: lower VLLM_MEMORY_GB, or the"
                f" MICRO_BATCH_TOKENS of the trainer on this GPU ({error})"
            ) from error
        self.asleep = False

    @functools.cached_property
    def base(self):  # the model under LoRA's adapters, on the CPU
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.name, dtype=self.dtype)

    def _params(self, **params):
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        whole = RequestOutputKind.FINAL_ONLY  # one answer, when all completions have ended
        return SamplingParams(**{"detokenize": False} | PLAIN | params, output_kind=whole)


def set_environment():
    """Tells vLLM, before it is imported, that this process is not one of several ranks, and leaves
    it the allocator that it was made for: its sleep and its all-reduce need segments that do not
    grow (vLLM #11743, #40812), which grpo_ref_split.py would choose."""
    for name in LAUNCHER:
        os.environ.pop(name, None)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process
    own = os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    if own in (None, "expandable_segments:True"):  # a preset may have imported that file
        allocator = os.environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:False")
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = allocator
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # it would report to its makers


def check_device(memory, tensor_parallel, sleep):
    """Raises SystemExit with a sentence if the device does not offer these: VLLM_MEMORY_GB,
    TENSOR_PARALLEL, VLLM_SLEEP."""
    gpus = torch.accelerator.device_count()
    if sleep and not gpus:
        raise SystemExit("VLLM_SLEEP = True needs a GPU: on a CPU vLLM has no memory to give back")
    if gpus and tensor_parallel > gpus:  # on a CPU vLLM shares out the cores
        raise SystemExit(
            f"TENSOR_PARALLEL = {tensor_parallel} needs as many GPUs, and there are {gpus}"
            " (CUDA_VISIBLE_DEVICES)"
        )
    if gpus:
        free, total = (size / 1e9 for size in torch.accelerator.get_memory_info())
        if memory > free:
            raise SystemExit(
                f"VLLM_MEMORY_GB = {memory}, but of this GPU's {total:.1f} GB {free:.1f} are free:"
                " lower it, or start the worker before the trainer"
            )


# --- What runs in vLLM's own processes, where there are several -------------------------
def reload(worker, weights, dtype):
    """Replaces the weights by tensors, or those of a safetensors file."""
    if isinstance(weights, str):
        weights = safetensors.torch.load_file(weights)
    # Cast here, as vLLM warns for each tensor that it casts; a generator, to hold one copy
    cast = ((name, tensor.to(getattr(torch, dtype))) for name, tensor in weights.items())
    worker.reload_weights(weights_iterator=cast)


def mask_padding(model, vocab_size):
    """Gives ids from `vocab_size` on the probability 0. vLLM's `allowed_token_ids` would send
    151 665 ids with every request, and does not apply to a prompt's scores."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    def mask(layer, inputs, logits):
        logits[..., vocab_size:] = -math.inf

    heads = [layer for layer in model.modules() if isinstance(layer, LogitsProcessor)]
    assert len(heads) == 1, f"{type(model).__name__}: {len(heads)} LogitsProcessors"
    heads[0].register_forward_hook(mask)


def refresh_head(model):
    """On a CPU vLLM multiplies by packed copies of the weights, and its reload forgets the copy of
    a head that is tied to the embedding. On a GPU this does nothing."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)


def stops_at(stop_strings):
    """Returns the sampling parameters with which vLLM looks for the strings, in all of the text."""
    if not stop_strings:
        return {}
    stops = {"stop": list(stop_strings.strings), "include_stop_str_in_output": True}
    return stops | {"detokenize": True, "skip_special_tokens": False}


def read_completion(output, stop_strings=None):
    """Returns the Completion of vLLM's output. It looks for strings in text that is whole, and may
    end it an id later than StopStrings, after half a character: what is behind the string goes."""
    assert output.finish_reason in ("stop", "length"), output.finish_reason
    logps = [found[id].logprob for id, found in zip(output.token_ids, output.logprobs, strict=True)]
    if not all(map(math.isfinite, logps)):
        raise RuntimeError("the model's log-probs are not finite: its weights are broken")
    ids, truncated = list(output.token_ids), output.finish_reason == "length"
    if stop_strings and (length := stop_strings.length(ids)):
        return Completion(ids[:length], logps[:length], truncated=False)
    return Completion(ids, logps, truncated)
