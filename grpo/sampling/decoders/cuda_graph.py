"""A decoder's step on a GPU, recorded once as a CUDA graph and replayed: for decode.py.

A step of a small model launches hundreds of kernels, a few microseconds of Python and driver each,
and that is what it takes: the GPU waits. A graph launches them all in one call. It reads and writes
the memory that it was recorded with, so all that changes from step to step must stay in its place
and keep its shape: tokens and ages are copied into tensors that stay, a row attends to all the room
that it has, and what is not written yet is masked. When rows leave or join, or their room is
doubled, it is recorded anew, which takes as long as several steps: so that is done by halves.
"""

import functools

import torch

from grpo.sampling.decoders.shared_prompt import LlamaDecoder


def can_record(model):
    """Whether nothing in a step waits for the GPU. Not merely tried: a recording that fails leaves
    PyTorch's allocator in the belief that it goes on. Dynamic RoPE looks at the positions."""
    rope = getattr(model.model.rotary_emb, "rope_type", "default")
    return model.device.type == "cuda" and rope in ("default", "linear", "yarn", "llama3")


class GraphedDecoder(LlamaDecoder):
    """LlamaDecoder with its step recorded. What step() returns is overwritten by the next step."""

    bunch = 2

    def _arrange(self):
        super()._arrange()
        self.steps = 0  # since the memory was another

    def _widen(self):
        super()._widen()
        self.steps = 0

    def _count(self):
        super()._count()
        self.even = False  # the column that is written would be a number, the same in every replay

    def _next(self, tokens):
        self.steps += 1
        if self.steps == 1:  # it may be the only one; and what is set up at a first use is then
            self.replay = self.logits = None
            return self._whole(tokens, self.at)
        if self.steps == 2:
            self.inputs = tokens.clone(), self.at.clone()
            self.replay, self.logits = record(lambda: self._whole(*self.inputs))
        for still, new in zip(self.inputs, (tokens, self.at), strict=True):
            still.copy_(new)
        self.replay()
        return self.logits

    def _whole(self, tokens, at):
        """-> logits (S, V'); the ages `at` (S,) of the rows say where and what they are."""
        self.at, self.seen = at, self.layers[0].keys.shape[2]
        columns = torch.arange(self.seen, device=at.device)
        self.unwritten = self._hidden(columns > at[:, None, None, None])
        return self._run(tokens, self.first + at)


@functools.cache
def recorder():
    """Returns the stream and the memory pool of all recordings. Pools of their own would stay
    reserved when the recordings are gone, and cuBLAS keeps a workspace for each stream: gigabytes.
    """
    return torch.cuda.Stream(), torch.cuda.MemPool()


def record(function):
    """-> (replay, what the function returned, which each replay() writes again). Nothing runs yet.

    Other threads may use the GPU meanwhile. Raises RuntimeError where the function waits for it.
    Recordings share memory: they may be replayed in turns, but not at the same time.
    """
    # Not `with torch.cuda.graph(...)`, which first gives all free memory back to the driver, and
    # stays on its own stream where the recording fails
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
