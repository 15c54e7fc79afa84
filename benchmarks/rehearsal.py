"""Kernel launches and synchronisations, counted on a simulated GPU backend (tests/rehearsal).

    python benchmarks/rehearsal.py                   # prints the tables; needs g++, and no GPU
    python benchmarks/rehearsal.py out.md            # and writes them to a file

No time is measured, and no GPU is needed: the program counts the kernels that PyTorch would launch
and how often the host would wait for them. Models are tiny and random, in bfloat16; the counts are
linear in the number of layers L. A decoded token is one of 2 prompts x 4 sequences in which no
sequence ends, the sampler's work included; "recorded" are the kernels of the CUDA graph, which is
launched as one. A micro-batch has 8 sequences of two groups; its loss is in torch's operations (the
Triton kernel needs a GPU), without DeepSpeed. tests/rehearsal/__init__.py says what the counts
leave out.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [
    str(ROOT / "tests"),
    str(ROOT),
]  # before this folder, where `rehearsal` is this file
from rehearsal import build

LAYERS = 2, 4  # of the models whose difference is a layer's part
SHOWN = 36  # layers, as Qwen2.5-3B has


def line_of(numbers):
    """Returns two cells: a + b L for {layers: number}, and what that is for SHOWN layers."""
    from rehearsal.measured import line

    fixed, each = line(numbers)
    return [f"{fixed:.0f} + {each:.0f} L", f"{fixed + each * SHOWN:.0f}"]


def places(waits):
    """Returns how often the host waits in which line; of generate's, in which of transformers'.

    Example: "1 at `sampler.py:140`"
    """
    named = {}
    for place, times in sorted(waits.items()):
        ours, *theirs = place.split(" at ")[-1].split(", ")
        line = theirs[0] if "measured.py" in ours else ", ".join([Path(ours).name, *theirs])
        named[line] = named.get(line, 0) + times
    return ", ".join(f"{times:.0f} at `{line}`" for line, times in named.items())


def decoding():
    """Yields the rows of the table of decoders."""
    from rehearsal.measured import EVEN, PADDED, decoder_cost, generate_cost, model_of

    from grpo.sampling.decoders.cached import CachedDecoder, PlainDecoder
    from grpo.sampling.decoders.cuda_graph import GraphedDecoder, GraphedSharedDecoder
    from grpo.sampling.decoders.shared_prompt import LlamaDecoder, SharedDecoder

    simple, own = [CachedDecoder, SharedDecoder], [LlamaDecoder, GraphedDecoder]
    kinds = {"qwen2": [PlainDecoder, *simple, *own], "llama": [*simple, *own]}
    kinds |= {"qwen3": [*simple, *own], "gemma2 wide": [*simple, GraphedSharedDecoder]}
    kinds |= {"opt": [*simple, GraphedSharedDecoder], "gpt2": simple}
    for family, decoders in kinds.items():
        models = [model_of(family, layers) for layers in LAYERS]
        for kind in decoders:
            for name, prompts in {"even": EVEN, "padded": PADDED}.items():
                costs = [decoder_cost(model, kind, prompts) for model in models]
                yield [family, kind.__name__, name, *cells_of(costs)]
        yield [family, "generate", "even", *cells_of([generate_cost(m, EVEN) for m in models])]


def cells_of(costs):
    """Returns the cells of a row, from the Costs of models of LAYERS."""
    launches = line_of(dict(zip(LAYERS, [cost.launches for cost in costs], strict=True)))
    recorded = line_of(dict(zip(LAYERS, [cost.recorded for cost in costs], strict=True)))
    waits = costs[-1].waits
    last = [f"{waits.total():.0f}", places(waits)]
    return [*launches, recorded[0] if costs[-1].recorded else "no", *last]


def training():
    """Yields the rows of the table of micro-batches."""
    from rehearsal.measured import micro_batch_cost, model_of

    ways = [(True, True, True), (True, False, True), (False, True, True), (False, False, True)]
    for share, checkpointing, fused in [*ways, (True, True, False)]:
        way = {"share": share, "checkpointing": checkpointing, "fused": fused}
        costs = [micro_batch_cost(model_of("qwen2", layers), **way) for layers in LAYERS]
        cells = ["shared" if share else "separate", "yes" if checkpointing else "no"]
        cells.append("fused" if fused else "plain")
        for part in zip(*costs, strict=True):
            cells += line_of(dict(zip(LAYERS, [cost.launches for cost in part], strict=True)))
        yield [*cells, *(str(cost.waits.total()) for cost in costs[-1])]


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for cells in rows:
        lines.append("| " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


def main(out):
    build.load()
    from rehearsal import cuda

    from benchmarks.measure import facts  # before a GPU is simulated: it names the machine

    beginning = facts("torch", "transformers")
    cuda.pretend()
    decoders = table(
        ["model", "decoder", "prompts", "launches a token", f"L = {SHOWN}", "recorded"]
        + ["waits", "where the host waits"],
        decoding(),
    )
    batches = table(
        ["prompts", "checkpointing", "loss", "forward and loss", f"L = {SHOWN}", "backward"]
        + [f"L = {SHOWN}", "waits forward", "waits backward"],
        training(),
    )
    text = f"""{beginning}
**Counted on a simulated GPU: no time was measured, and there was no GPU** (tests/rehearsal). These
are launches as PyTorch would dispatch them, and waits of the host, for L layers, in bfloat16.

A decoded token of 2 prompts x 4 sequences, the sampler's turn included; "recorded": kernels of the
CUDA graph, which is launched as one:

{decoders}

An entry "1 at `cached.py:16, masking_utils.py:307`": the host waits once a token in transformers'
line, called by ours. gpt2 has a padding token here, unlike the real one: transformers looks for it
in the ids of each call without a mask (modeling_utils.py:4692).

A micro-batch of 8 sequences, Qwen2, the loss in torch's operations, without DeepSpeed and without
what the trainer brings to the GPU itself; the launches of the backward pass are the least sure:

{batches}
"""
    if out:
        Path(out).write_text(text)


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv):
        sys.exit(__doc__)
    if reason := build.why_not():
        sys.exit(reason)
    main(sys.argv[1] if len(sys.argv) > 1 else None)
