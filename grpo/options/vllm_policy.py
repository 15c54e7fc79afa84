"""The policy in vLLM (SAMPLER = "vllm"), with the methods of policy.Policy.

vLLM runs in this process, so a call gives it new weights: no NCCL, nothing pickled. A rank of the
trainer has an engine in addition to the model that it trains, and copies that model's weights to
the engine before it samples (follow); a worker copies the weights that it has fetched (load).

It samples the same distribution as sampler.py. By default vLLM uses the model's stop tokens,
reports log-probs from before the temperature, and includes the embedding's padding in its softmax;
each is changed below. The code for GPUs follows vLLM's source and was never run on one.
"""

import contextlib
import functools
import importlib
import itertools
import math
import os
import random
import warnings

import torch

from grpo.devices import accelerator
from grpo.log import in_background
from grpo.models import choose_dtype, has_bfloat16, own_device, stop_ids, vocab_size_of, whole_model
from grpo.options.lora import adapters_off, merge_adapters
from grpo.options.stop_strings import StopStrings
from grpo.options.worker_weights import check_shapes
from grpo.policy import NOISE, TF32_NOISE, Policy
from grpo.sample import Sample

# The whole distribution (top_k 0 is off), with our stops instead of the model's
PLAIN = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": True}


class VLLMPolicy:
    """Samples, scores, and takes new weights without a restart. It is not thread-safe."""

    text = Policy.text

    def __init__(self, c, tokenizer, model=None):
        """Loads MODEL; `c` has the constants as attributes. A rank passes the `model` that it
        trains, and then all ranks must call this together: vLLM makes process groups of them."""
        self.tokenizer, self.model, self.numbers = tokenizer, model, itertools.count()
        device = own_device()
        self.name, self.dtype = c.MODEL, choose_dtype(c.DTYPE, device)
        # vLLM's attention for float32, in Triton, has TF32 products if the GPU has them: since the
        # generation that brought bfloat16
        tf32 = self.dtype == "float32" and has_bfloat16(device)
        self.noise = TF32_NOISE if tf32 else NOISE[self.dtype]
        self.eos_ids = sorted(stop_ids(c.MODEL, tokenizer, c.STOP_TOKENS))
        self.vocab_size = vocab_size_of(tokenizer)
        self.stop_strings = StopStrings(tokenizer, c.STOP_STRINGS) if c.STOP_STRINGS else None
        self.max_tokens = c.MAX_PROMPT_TOKENS + c.MAX_COMPLETION_TOKENS
        # It leaves a trainer's GPU to it meanwhile; a worker has its own, and on a CPU vLLM can't
        self.sleeps, self.asleep = bool(model is not None and accelerator()), False
        self.step = None  # the steps made when it took its weights
        self.loaded = {}  # a worker's weights, by name
        with quiet_and_undone():
            self.llm = start(c, self, accelerator() is not None)
        self.llm.apply_model(functools.partial(mask_padding, vocab_size=self.vocab_size))
        self._rest()

    def describe(self):
        import vllm

        return f"vLLM {vllm.__version__}"

    # --- Sampling ---------------------------------------------------------------------
    def stream(
        self, prompts, *, group_size, max_sequences, seed, max_new_tokens, temperature
    ):  # fmt: skip
        """Yields (key, completions) as sampler.stream_groups does, each group as soon as its last
        completion has ended, while others begin in the place of those that have ended. The same
        `seed` draws the same on a CPU. Raises ValueError if a prompt leaves no room within
        max_tokens, RuntimeError if the weights are broken."""
        engine, draw, keys = self.llm.llm_engine, random.Random(seed), {}  # keys by request
        self._wake()
        try:
            while True:
                room = (max_sequences - engine.get_num_unfinished_requests()) // group_size
                for key, ids, limit in itertools.islice(prompts, room):
                    # Completion i is drawn with seed + i
                    most, bits = limit or max_new_tokens, draw.getrandbits(62)
                    keys[self._begin(ids, group_size, bits, most, temperature)] = key
                if not keys:
                    return
                for output in engine.step():
                    completions = [read_completion(c, self.stop_strings) for c in output.outputs]
                    yield keys.pop(output.request_id), completions
        finally:  # also if the stream fails, or is not read to its end
            engine.abort_request(list(keys))

    def _begin(self, ids, n, seed, max_tokens, temperature):
        """Adds a prompt to what vLLM samples; returns the request's id."""
        if len(ids) >= self.max_tokens:
            raise ValueError(f"a prompt leaves no room within max_tokens = {self.max_tokens}")
        request = str(next(self.numbers))
        params = self._params(
            n=n,
            seed=seed,
            temperature=temperature,
            max_tokens=max_tokens,
            stop_token_ids=self.eos_ids,
            logprobs=0,
            **stops_at(self.stop_strings),
        )
        self.llm.llm_engine.add_request(request, {"prompt_token_ids": list(ids)}, params)
        return request

    def logps(self, prompt, completion):
        """Returns the log-probs (floats, temperature 1) of the completion's ids. The last id is
        scored as the next token, as vLLM needs room for a token after the prompt it scores."""
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
        """Within the block the policy has the weights of the model that this rank trains, after
        `step` steps. After the block it sleeps, on the trainer's GPU."""
        if self.step != step:
            self._take_weights()
            self.step = step
        try:
            yield
        finally:
            self._rest()

    def load(self, tensors):
        """Takes another process's trained_weights, in any float dtype. Raises ValueError, and
        changes nothing, if they do not fit."""
        if any(".lora_A." in name for name in tensors):
            tensors = dict(merge_adapters(self._base, tensors))
        check_shapes(tensors, self._shapes)  # vLLM would silently keep its old tensors
        self.loaded = {name: tensors[name] for name in self._shapes}
        self._take_weights()

    def _rest(self):
        """Frees the trainer's GPU until the next call. Level 2 drops the weights, as this process
        has another copy of them."""
        if self.sleeps and not self.asleep:
            self.llm.sleep(level=2)
            self.asleep = True

    def close(self):
        """Stops the engine, but keeps the trainer's process group, which vLLM would destroy with
        its groups; at exit it would do that after the trainer, and print a traceback. vLLM has no
        setting for that, so torch's function destroys no group but a given one meanwhile."""
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
        """Copies the trained model's weights, or a worker's loaded ones, to vLLM. Wakes it if it
        sleeps, part by part, as there may be no room for all at once."""
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
            raise RuntimeError("vLLM did not empty its prefix cache: is it still sampling?")

    def _wake_up(self, part):
        if self.asleep:
            self.llm.wake_up(tags=[part])

    def _reload(self, pairs):
        self.llm.collective_rpc(reload, args=(pairs, self.dtype))

    @functools.cached_property
    def _shapes(self):  # {name: tensor without memory} of what load() takes
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(self.name, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        return dict(model.named_parameters())

    @functools.cached_property
    def _base(self):  # the model under LoRA's adapters, on the CPU
        return whole_model(self.name, dtype=self.dtype)


# --- The start ------------------------------------------------------------------------
def start(c, policy, on_gpu):
    """Returns vLLM's engine."""
    # In a thread: an error that vLLM catches here keeps the frames of its stack, also main()'s
    in_background(importlib.import_module, "vllm.entrypoints.llm").join()
    from vllm import LLM

    return LLM(
        c.MODEL,
        dtype=policy.dtype,
        hf_overrides={"head_dtype": "float32"} if on_gpu else {},  # as the trainer's
        seed=c.SEED,
        # A rank runs on the GPU of LOCAL_RANK, in the trainer's process group; by default all ranks
        # would use the first GPU
        distributed_executor_backend="external_launcher" if policy.model is not None else None,
        max_model_len=policy.max_tokens,
        max_num_seqs=c.SAMPLE_BATCH,
        kv_cache_memory_bytes=int(c.VLLM_CACHE_GB * 1e9),  # set, so that vLLM does not profile
        gpu_memory_utilization=0.01,  # vLLM only checks that this share is free
        enforce_eager=not on_gpu,  # compile on a GPU only
        enable_chunked_prefill=on_gpu,  # on a CPU a seeded request that is split crashes
        enable_prefix_caching=True,  # a group's prompt runs once
        enable_sleep_mode=policy.sleeps,
        logprobs_mode="processed_logprobs",  # after temperature and mask
        generation_config="vllm",  # ignores the model's defaults
        skip_tokenizer_init=not c.STOP_STRINGS,  # ids in, ids out; stop strings need text
        use_tqdm_on_load=False,
    )


@contextlib.contextmanager
def quiet_and_undone():
    """Within the block vLLM starts, without its log. Afterwards its changes to this process are
    undone: torch's threads, on a CPU even the function that sets them, and environment variables,
    of which LOCAL_WORLD_SIZE and LD_PRELOAD would mislead other libraries."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # no usage reports
    environment, threads = dict(os.environ), torch.get_num_threads()
    set_threads = torch.set_num_threads
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        for name in os.environ.keys() - environment:  # other threads never see it empty
            del os.environ[name]
        os.environ.update(environment)


# --- Functions that vLLM calls with its model -------------------------------------------
def reload(worker, weights, dtype):
    """Replaces the weights by (name, tensor) pairs."""
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
    """Packs the LM head again. On a CPU vLLM multiplies by packed copies of the weights, and its
    reload forgets the copy of a head that is tied to the embedding. Does nothing on a GPU."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)


def stops_at(stop_strings):
    """Returns the sampling parameters that make vLLM look for the strings in the whole text."""
    if not stop_strings:
        return {}
    stops = {"stop": list(stop_strings.strings), "include_stop_str_in_output": True}
    return stops | {"detokenize": True, "skip_special_tokens": False}


def read_completion(output, stop_strings=None):
    """Returns the Sample of vLLM's output. vLLM looks for stop strings in complete characters
    only, so it may stop one id later than StopStrings; we remove the ids after the string."""
    assert output.finish_reason in ("stop", "length"), output.finish_reason
    logps = [found[id].logprob for id, found in zip(output.token_ids, output.logprobs, strict=True)]
    if not all(map(math.isfinite, logps)):
        raise RuntimeError("the model's log-probs are not finite: its weights are broken")
    ids, truncated = list(output.token_ids), output.finish_reason == "length"
    if stop_strings and (length := stop_strings.length(ids)):
        return Sample(ids[:length], logps[:length], truncated=False)
    return Sample(ids, logps, truncated)
