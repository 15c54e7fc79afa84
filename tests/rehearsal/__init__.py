"""A rehearsal: the GPU's code paths run on a machine without a GPU, with real values.

A tensor of the pretended GPU is a tensor subclass (device.py) whose device is cuda:0 for Python and
C++ alike, so that every branch of ours, of transformers and of DeepSpeed takes the GPU's side; it
holds a tensor of the CPU, on which each operation is computed. On the way there

  - what CUDA would refuse raises (rules.py): tensors of two devices, an operation that has no CUDA
    kernel, a product of integers, another device's generator, and in a collective, as NCCL does,
    tensors of the CPU;
  - waits are counted, by the source line that makes them (events.py): item(), tolist(), cpu(),
    nonzero(), masks as indices, synchronize(); and, easily forgotten, each blocking copy to the
    GPU: torch.tensor(numbers, device="cuda") waits for all that was launched before it;
  - a CUDA graph (cuda.py) keeps what is launched while it records, raises for what waits, and
    computes the same again on the same memory when it is replayed. Until then its output is NaN.

A CPU build of PyTorch can't do this by itself: autograd asks the device for streams, a generator
is made in C++, and a tensor of a device without a guard ends the process. device.cpp has what is
missing, in 40 lines; build.py compiles it, and loads it before `import torch` looks for it.

The process pretends until it ends. So the tests here run in another one (inside.py), which
conftest.py starts and sends the tests to, one at a time; pytest shows them as all others.

What a rehearsal can't see: time; memory; the kernels' errors, rounding and limits of shapes and
alignment; Triton; races between streams, and what a copy that does not wait reads too late; what
libraries do only where a real GPU is. An index out of range is an IndexError here, there a
device-side assert that breaks the process. It uses private parts of PyTorch 2.13; another version
may need other ones.
"""
