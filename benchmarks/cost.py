"""What a card does in a second: its data sheet, what was fitted, and what was counted.

Fitted to published figures (published.py): `python benchmarks/simulate.py --calibrate` shows the
error that is left. Units: seconds, bytes, FLOP.

Symbols: the trainer's, and L layers.
"""

from dataclasses import dataclass

from memory import BF16


# --- Cards ----------------------------------------------------------------------------
@dataclass(frozen=True)
class Card:
    bandwidth: float  # of its memory
    flops: float  # dense bfloat16, summed in float32
    efficiency: float  # share of that in training: fitted, --calibrate
    link: float  # of an all-reduce: 3/4 of NVLink in one direction
    room: float  # GB that a program gets, as in memory.CARDS


# NVIDIA's data sheets of A100 80 GB SXM (NVLink 600 GB/s in both directions), A800 (the same, with
# 400), H100 SXM (900, and without sparsity); Ada's architecture white paper
CARDS = {
    "A800": Card(2.039e12, 312e12, 0.5, 150e9, 79.1),
    "A100": Card(2.039e12, 312e12, 0.5, 225e9, 79.1),
    "H100": Card(3.35e12, 989e12, 0.34, 337e9, 79.1),
    # No peer-to-peer: gradients go through the host's memory, at a guess. The share of the peak is
    # the A100's; LLMQ (arXiv 2512.15306) reports around 50 % on 4090s, with an 8-bit pipeline
    "4090": Card(1.008e12, 165.2e12, 0.5, 10e9, 23.5),
}

# --- What is fitted, and what is counted ------------------------------------------------
LAUNCH = 21e-6  # one operation called from Python: fitted to transformers' generate
BANDWIDTH = 0.81  # share of the memory's bandwidth; and ...
LARGE = 9.3e-6  # ... what a matrix product or attention takes beside its bytes: fitted to vLLM
SMALL = 2e-6  # any other kernel of a recorded graph: assumed, from 1.5 to 2.5
NODE = 5e-6  # to record one kernel, beside its launch: assumed
FUSED_KERNELS = 12  # of a layer of vLLM, all of them large
LARGE_KERNELS = 9  # of ours: seven projections, attention to the prompt's keys and to the others
# Counted on a pretended GPU (results/rehearsal.md, at 606e125): a + b L
OUTSIDE, KERNELS = 19, 31  # kernels of the recorded graph: a, b
EAGER = 38  # LlamaDecoder's a, of launches; its b is the graph's
GENERATE = (65, 40)  # transformers' generate
PREFILL = (44, 40)
SCORING = (139, 88)  # a micro-batch's forward, prompts shared
MICRO_BATCH = (221 + 73, 88 + 272)  # forward and loss, backward; prompts shared, checkpointing
PER_MATRIX = (3.8, 17)  # DeepSpeed's launches for each parameter tensor: backward, optimiser
DRAW = 40  # bytes that drawing a token moves for each id: softmax, sums in float64, search
REPLAY = 3  # launches between the wait for a token and the next replay: not hidden
OPTIMISER = 30  # bytes of a parameter: four float32 read and three written, a bfloat16 copy
TO_HOST = 2.5e9  # bytes a second of publishing, pageable memory


def count(pair, layers):
    """Returns the launches of a pair (19, 31), 19 and 31 a layer: 1135 with 36 layers."""
    return pair[0] + pair[1] * layers


def matrices(m):
    """Returns a Qwen2's parameter tensors: 12 a layer, embedding, last norm, head."""
    return 12 * m.layers + 3 - m.tied


# --- Seconds ----------------------------------------------------------------------------
def read_seconds(m, card, keys, extra=0):
    """Of one token of each sequence: all weights are read but the embedding's, and `keys`."""
    size = BF16 * (m.body + m.vocab * m.hidden) + BF16 * 2 * m.layers * m.kv * keys + extra
    return size / (card.bandwidth * BANDWIDTH)


def column_seconds(m, card, rows, keys, large, small, extra=0):
    """Of a recorded graph: bytes or FLOP, and the kernels, one after the other."""
    flop = 2 * rows * (m.body + m.vocab * m.hidden) / (card.flops * card.efficiency)
    return max(read_seconds(m, card, keys, extra), flop) + LARGE * large + SMALL * small


def work(m, card, tokens, head_tokens, keys, launches, passes):
    """Of passes through the layers over `tokens` and through the head over `head_tokens`, each
    token attending to `keys`: FLOP at the card's efficiency, or launches from Python. A pass is 2
    FLOP a weight (2001.08361, sec. 2.1), and 4 H a key of a layer: its score, its value."""
    layers = 2 * m.body + 4 * m.layers * m.hidden * keys
    flop = passes[0] * tokens * layers + passes[1] * head_tokens * 2 * m.vocab * m.hidden
    return max(flop / (card.flops * card.efficiency), launches * LAUNCH)
