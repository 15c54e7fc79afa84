"""The policy in vLLM (SAMPLER = "vllm"): what policy.Policy is in transformers.

vLLM runs in this process, so new weights reach it by a call: no NCCL, nothing pickled. A rank of
the trainer has one beside the model that it trains, and gives it that model's weights before it
samples (follow); a worker gives it those that it has fetched (load). With TENSOR_PARALLEL it has
other processes, which read them from a file.

The distribution is sampler.py's. By itself vLLM inherits the model's stops, reports log-probs from
before the temperature, and has the embedding's padding in its softmax; each is undone below. On a
GPU all of this was read in vLLM's source, and never run.
"""

import contextlib
import functools
import importlib
import itertools
import math
import os
import random
import tempfile
import warnings

import safetensors.torch
import torch

from grpo.constants import set_for_run
from grpo.devices import accelerator
from grpo.log import in_background
from grpo.models import choose_dtype, own_device, stop_ids
from grpo.sampling.sampler import Completion, completion_text, next_prompts
from grpo.sampling.stop_strings import StopStrings
from grpo.weights import adapters_off, check_shapes, merge_adapters
from grpo.wire import vocab_size_of

SEQUENCES = 256  # SAMPLE_BATCH and EVAL_BATCH where they are "auto"
# The whole distribution (top_k 0 is off), with our stops instead of the model's
PLAIN = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": True}


class VLLMPolicy:
    """Samples, takes new weights without a restart, and scores. Not for two threads at once."""

    def __init__(self, c, tokenizer, model=None):
        """Loads MODEL; `c` has the constants as attributes. A rank gives the `model` that it
        trains, and the call is then collective: vLLM makes groups of the ranks. Raises SystemExit
        if the device does not offer what the constants ask for."""
        check_device(c, in_rank=model is not None)
        for name in ("SAMPLE_BATCH", "EVAL_BATCH"):
            if getattr(c, name) == "auto":
                set_for_run(vars(c), {name: max(SEQUENCES, c.GROUP_SIZE)})
        self.tokenizer, self.model, self.numbers = tokenizer, model, itertools.count()
        self.name, self.dtype = c.MODEL, choose_dtype(c.DTYPE, own_device())
        self.eos_ids = sorted(stop_ids(c.MODEL, tokenizer, c.STOP_TOKENS))
        self.vocab_size = vocab_size_of(tokenizer)
        self.stop_strings = StopStrings(tokenizer, c.STOP_STRINGS) if c.STOP_STRINGS else None
        self.max_tokens = c.MAX_PROMPT_TOKENS + c.MAX_COMPLETION_TOKENS
        self.parallel, self.sleeps = c.TENSOR_PARALLEL > 1, c.VLLM_SLEEP
        self.asleep, self.step = False, None  # after how many updates the weights were taken
        self.loaded = {}  # a worker's weights, by name
        with quiet_and_undone(self.parallel):
            self.llm = start(c, self, accelerator() is not None)
        self.llm.apply_model(functools.partial(mask_padding, vocab_size=self.vocab_size))
        self.rest()

    # --- Sampling ---------------------------------------------------------------------
    def stream(
        self, prompts, *, group_size, max_sequences, seed, max_new_tokens=0, longest_prompt=None,
        **settings,
    ):  # fmt: skip
        """Yields (key, completions) as sampler.stream_groups does, each group as soon as its last
        completion has ended, while others begin in the place of those that have ended. The same
        `seed` draws the same on a CPU. Raises ValueError if a prompt leaves no room within
        max_tokens, RuntimeError if the weights are broken."""
        engine, draw, keys = self.llm.llm_engine, random.Random(seed), {}  # keys by request
        stops = None if "eos_ids" in settings else self.stop_strings
        self._wake()
        try:
            while True:
                room = (max_sequences - engine.get_num_unfinished_requests()) // group_size
                for key, ids, *own in next_prompts(prompts, room):
                    number, limit = own or (1, max_new_tokens)
                    for _ in range(number):
                        # completion i is drawn with seed + i
                        parts = {"n": group_size, "seed": draw.getrandbits(62)} | settings
                        keys[self._begin(ids, max_new_tokens=limit, **parts)] = key
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

    def logps(self, prompt, completion):
        """Returns the log-probs (floats, temperature 1) of the completion's ids. The last id is
        scored as the next one: vLLM wants room for one more, and there may be none."""
        self._wake()
        ids, last = prompt + completion[:-1], completion[-1:]
        params = self._params(max_tokens=1, prompt_logprobs=0, logprob_token_ids=last)
        (output,) = self.llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
        scored = [*output.prompt_logprobs[len(prompt) :], output.outputs[0].logprobs[0]]
        return [found[id].logprob for id, found in zip(completion, scored, strict=True)]

    def _params(self, **params):
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        whole = RequestOutputKind.FINAL_ONLY  # one answer, when all completions have ended
        return SamplingParams(**{"detokenize": False} | PLAIN | params, output_kind=whole)

    # --- Weights ----------------------------------------------------------------------
    @contextlib.contextmanager
    def follow(self, step):
        """In the block the policy has the weights of the model that this rank trains, as they are
        after `step` updates. It rests after it."""
        if self.step != step:
            self._take_weights()
            self.step = step
        try:
            yield
        finally:
            self.rest()

    def load(self, tensors):
        """Takes another process's trained_weights, in any float dtype. Raises ValueError, and
        changes nothing, if they do not fit."""
        if any(".lora_A." in name for name in tensors):
            tensors = dict(merge_adapters(self._base, tensors))
        check_shapes(tensors, self._shapes)  # vLLM would keep what is missing, silently
        self.loaded = {name: tensors[name].contiguous() for name in self._shapes}
        self._take_weights()

    def rest(self):
        """With VLLM_SLEEP: frees the GPU's memory until the next call. The weights are dropped
        (level 2), as whoever is in this process still has them."""
        if self.sleeps and not self.asleep:
            self.llm.sleep(level=2)
            self.asleep = True

    def close(self):
        """Ends the engine, but not the trainer's process group, which vLLM would destroy with its
        own; at exit it would do so after the trainer, and print a traceback."""
        destroy = torch.distributed.destroy_process_group
        torch.distributed.destroy_process_group = lambda group=None: group and destroy(group)
        try:
            self.llm.llm_engine.engine_core.shutdown()
        finally:
            torch.distributed.destroy_process_group = destroy

    def _wake(self):
        if self.asleep:
            self._take_weights()

    def _take_weights(self):
        """Gives vLLM the living weights, or those that were loaded; wakes it, if it sleeps, one
        part after the other: there may be no room for all at once."""
        self._wake_up("weights")
        if self.model is None:
            self._reload(self.loaded.items())
        else:
            trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
            with adapters_off(self.model):
                self._reload(merge_adapters(self.model, trained))
        self.llm.apply_model(refresh_head)
        self._wake_up("kv_cache")
        self.asleep = False
        if not self.llm.reset_prefix_cache():  # keys and values of the old weights
            raise RuntimeError("vLLM did not empty its prefix cache: is it sampling meanwhile?")

    def _wake_up(self, part):
        if not self.asleep:
            return
        try:
            self.llm.wake_up(tags=[part])
        except RuntimeError as error:
            raise RuntimeError(
                "vLLM slept, and its memory is taken: lower VLLM_CACHE_GB, or the"
                f" MICRO_BATCH_TOKENS of the trainer on this GPU ({error})"
            ) from error

    def _reload(self, pairs):
        if not self.parallel:
            self.llm.collective_rpc(reload, args=(pairs, self.dtype))
            return
        # to other processes, through a file: all of them read what they need of it
        with tempfile.TemporaryDirectory(prefix="grpo-vllm-") as folder:
            safetensors.torch.save_file(dict(pairs), f"{folder}/policy")
            self.llm.collective_rpc(reload, args=(f"{folder}/policy", self.dtype))

    @functools.cached_property
    def _shapes(self):  # {name: tensor without memory} of what load() takes
        from transformers import AutoConfig, AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self.name))
        return dict(model.named_parameters())

    @functools.cached_property
    def _base(self):  # the model under LoRA's adapters, on the CPU
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.name, dtype=self.dtype)


# --- The start ------------------------------------------------------------------------
def start(c, policy, on_gpu):
    """Returns vLLM's engine."""
    # In a thread, as an error that vLLM catches here keeps the frames of its stack, main()'s too
    in_background(importlib.import_module, "vllm.entrypoints.llm").join()
    from vllm import LLM

    return LLM(
        c.MODEL,
        dtype=policy.dtype,
        hf_overrides={"head_dtype": "float32"} if on_gpu else {},  # logits as the trainer has them
        seed=c.SEED,
        # A rank is on the GPU that LOCAL_RANK names, and in the trainer's process group: with the
        # default all ranks would be on the first. A worker has processes of its own
        distributed_executor_backend="external_launcher" if policy.model is not None else None,
        tensor_parallel_size=c.TENSOR_PARALLEL,
        max_model_len=policy.max_tokens,
        max_num_seqs=c.SAMPLE_BATCH,
        kv_cache_memory_bytes=int(c.VLLM_CACHE_GB * 1e9),  # given, so that nothing is profiled
        gpu_memory_utilization=0.01,  # of which vLLM asks only whether so much is free
        enforce_eager=not on_gpu,  # compile on a GPU only
        enable_chunked_prefill=on_gpu,  # on a CPU a seeded request cut in two crashes
        enable_prefix_caching=True,  # a group's prompt runs once
        enable_sleep_mode=c.VLLM_SLEEP,
        logprobs_mode="processed_logprobs",  # of what is sampled: after temperature and mask
        generation_config="vllm",  # nothing of the model's own
        skip_tokenizer_init=not c.STOP_STRINGS,  # ids in, ids out; strings it finds in the text
        use_tqdm_on_load=False,
    )


@contextlib.contextmanager
def quiet_and_undone(parallel):
    """In the block vLLM starts, without chatter. What it changes in this process is undone: torch's
    threads, on a CPU even the function that sets them, and variables, of which LOCAL_WORLD_SIZE
    and LD_PRELOAD would mislead others."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # it would report to its makers
    environment, threads = dict(os.environ), torch.get_num_threads()
    set_threads = torch.set_num_threads
    if parallel:  # the all-reduce of its processes needs segments that do not grow (vLLM #40812)
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:False"
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        os.environ.clear()
        os.environ.update(environment)


def check_device(c, in_rank):
    """Raises SystemExit with a sentence if the device does not offer what the constants say."""
    gpus = torch.accelerator.device_count()
    if c.VLLM_SLEEP and not gpus:
        raise SystemExit("VLLM_SLEEP = True needs a GPU: on a CPU vLLM has no memory to give back")
    if c.TENSOR_PARALLEL > 1 and in_rank:
        raise SystemExit(
            f"TENSOR_PARALLEL = {c.TENSOR_PARALLEL} is for workers: each rank has the whole model"
        )
    if gpus and c.TENSOR_PARALLEL > gpus:  # on a CPU vLLM shares out the cores
        raise SystemExit(
            f"TENSOR_PARALLEL = {c.TENSOR_PARALLEL} needs as many GPUs, and there are {gpus}"
            " (CUDA_VISIBLE_DEVICES)"
        )
    if gpus and c.VLLM_CACHE_GB * 1e9 > (free := torch.accelerator.get_memory_info()[0]):
        raise SystemExit(
            f"VLLM_CACHE_GB = {c.VLLM_CACHE_GB}, but {free / 1e9:.1f} GB of this GPU are free:"
            " lower it"
        )


# --- What runs in vLLM's own processes, where there are several -------------------------
def reload(worker, weights, dtype):
    """Replaces the weights by (name, tensor) pairs, or by those of a safetensors file."""
    if isinstance(weights, str):
        weights = safetensors.torch.load_file(weights).items()
    # Cast here, as vLLM warns for each tensor that it casts; a generator, to hold one copy
    cast = ((name, tensor.to(getattr(torch, dtype))) for name, tensor in weights)
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
