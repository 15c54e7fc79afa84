"""GraphedDecoder: a decoder's step on a GPU, recorded once as a CUDA graph and replayed.

A token of a small model launches hundreds of kernels, and the GPU waits during each launch, a few
microseconds in Python and driver. A graph launches all kernels in one call. It always uses the
memory that it was recorded with: we copy tokens and columns into its tensors, and a sequence
attends to all columns it has room for, masked where nothing is written yet. We record a new graph
when sequences leave or join, or when their room is doubled. That takes the time of several tokens,
so sequences leave only when half of them have ended.
"""

import functools

import torch

from grpo.devices import is_nvidia, is_out_of_memory
from grpo.shared_prompt import SharedDecoder


# --- What may be recorded -----------------------------------------------------------
# Checked beforehand: after a recording that fails PyTorch's allocator acts as if it still recorded.
def can_record(model):
    """Returns whether a decoder takes a token without waiting for the GPU, as dynamic RoPE
    does, which reads the positions. It is tried once, with PyTorch set to raise whenever the host
    waits."""
    if not is_nvidia(model.device):
        return False
    try:
        return never_waits(SharedDecoder(model, 2))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return False


@torch.no_grad()
def never_waits(decoder):
    tokens = decoder.admit([[7]], [1]).argmax(-1)
    decoder.next_logits(tokens)  # sets up what kernels need at first use
    slots, before = decoder.slots_for(decoder.columns, 2), torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        decoder.forward(tokens, slots)
    except RuntimeError:
        return False
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return True


# --- The decoders -------------------------------------------------------------------
class GraphedDecoder:
    """Records a step and replays it. Each call of next_logits overwrites the last call's result."""

    feature = "CUDA graphs"
    joins, compaction = True, 2

    def __init__(self, model, max_new_tokens):
        self.decoder = SharedDecoder(model, max_new_tokens)
        self.admit, self.keep = self.decoder.admit, self.decoder.keep
        self.graph = self.memory = None

    def next_logits(self, tokens):
        self.decoder.make_room()
        memory, columns = (self.decoder.layout, self.decoder.room), self.decoder.columns
        # The first token is not recorded: it may be the only one, and sets up what kernels need
        if memory != self.memory:
            self.memory, self.graph = memory, None
            logits = self._forward(tokens, columns)
        else:
            self.graph = self.graph or Graph(self._forward, tokens, columns)
            logits = self.graph.replay(tokens, columns)
        self.decoder.advance()
        return logits

    def _forward(self, tokens, columns):
        """Returns logits (S, V'); no Python number in here may change from token to token."""
        return self.decoder.forward(tokens, self.decoder.slots_for(columns, self.decoder.room))


class Graph:
    """A function of tensors, recorded for inputs of one shape."""

    def __init__(self, function, *inputs):
        self.inputs = [x.clone() for x in inputs]
        self.run, self.output = record(lambda: function(*self.inputs))

    def replay(self, *inputs):
        for own, new in zip(self.inputs, inputs, strict=True):
            own.copy_(new)
        self.run()
        return self.output


def record(function):
    """Returns (replay, the function's output, which each replay() overwrites). Nothing runs yet.

    Other threads may use the GPU meanwhile. Raises RuntimeError if the function waits for the GPU.
    Recordings share memory: they may be replayed one after the other, but not at the same time.
    """
    # Not `with torch.cuda.graph(...)`, which first gives all free memory back to the driver, and
    # stays on another stream if the recording fails
    graph, (stream, pool) = torch.cuda.CUDAGraph(), recorder()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool.id, capture_error_mode="thread_local")
        try:
            out = function()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph.replay, out


@functools.cache
def recorder():
    """Returns the stream and the memory pool of all recordings. A pool for each recording would
    stay reserved after it, and cuBLAS keeps a workspace for each stream: gigabytes."""
    return torch.cuda.Stream(), torch.cuda.MemPool()
