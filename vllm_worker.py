"""A worker that samples with vLLM, for a trainer on this or another machine.

    .vllm/bin/python vllm_worker.py    # in a venv with requirements-vllm.txt

Its constants are those below and those of grpo_ref_split.py, which must be the trainer's. One
worker is one model, on one GPU or as many as TENSOR_PARALLEL says; for more GPUs, run more workers.
"""

from grpo import constants

VLLM_MEMORY_GB = 20.0  # of a GPU's memory; on a CPU that of the KV cache, where 1 is plenty
VLLM_SEQUENCES = 256  # completions sampled at once, in place of SAMPLE_BATCH
VLLM_SLEEP = False  # True: gives a GPU's memory back, to a trainer on it, while there is no work
TENSOR_PARALLEL = 1  # GPUs that share the model: for one too large for a single GPU, 14B and more

known = frozenset(filter(str.isupper, globals()))  # a preset that sets another has misspelt it


def check_constants(now, group_size):
    """Raises SystemExit with a line for each constant, by name in `now`, that can't be."""
    kinds = [
        (constants.WHOLE, "VLLM_SEQUENCES TENSOR_PARALLEL"),
        (constants.NUMBER, "VLLM_MEMORY_GB"),
        (constants.FLAG, "VLLM_SLEEP"),
    ]
    enough = f"GROUP_SIZE = {group_size} or more"
    relations = [
        ("VLLM_MEMORY_GB", "above 0", lambda c: c.VLLM_MEMORY_GB > 0),
        ("VLLM_SEQUENCES", enough, lambda c: c.VLLM_SEQUENCES >= group_size),
    ]
    constants.check("vllm_worker.py", now, kinds, relations)


def main(**preset):
    """Sets the constants of `preset`, this file's and the trainer's, and samples."""
    from grpo.sampling.vllm_policy import VLLMPolicy, set_environment

    set_environment()
    import grpo_ref_split as trainer
    from grpo.models import choose_dtype, own_device, stop_ids
    from grpo.sampling.task import prepare
    from grpo.sampling.worker import run_worker
    from grpo.wire import vocab_size_of

    constants.check_names(preset, known | trainer.known)
    own = {name: preset.pop(name) for name in known & preset.keys()}
    c = trainer.constants(**preset)
    check_constants(constants.settle(globals(), known, own), c.GROUP_SIZE)
    tokenizer, recipe, _ = prepare(c, needs_server=False)
    policy = VLLMPolicy(
        c.MODEL,
        tokenizer,
        dtype=choose_dtype(c.DTYPE, own_device()),
        eos_ids=stop_ids(c.MODEL, tokenizer, c.STOP_TOKENS),
        vocab_size=vocab_size_of(tokenizer),
        max_tokens=c.MAX_PROMPT_TOKENS + c.MAX_COMPLETION_TOKENS,
        max_sequences=VLLM_SEQUENCES,
        seed=c.SEED,
        memory=VLLM_MEMORY_GB,
        tensor_parallel=TENSOR_PARALLEL,
        sleep=VLLM_SLEEP,
        stop_strings=c.STOP_STRINGS,
    )
    run_worker(policy, recipe.others(SAMPLE_BATCH=VLLM_SEQUENCES))


if __name__ == "__main__":
    given = constants.command_line("vllm_worker.py", __doc__)[1]
    from grpo.stop import TooLong

    try:
        main(**given)
    except TooLong as error:
        raise SystemExit(str(error)) from None
