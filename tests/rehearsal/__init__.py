"""A rehearsal: the GPU's code paths run on a machine without a GPU, with real values.

A tensor of the simulated GPU is a tensor subclass (device.py) whose device is cuda:0 for Python and
C++ alike, so that our code, transformers and DeepSpeed take the GPU's side of every branch. It
holds a tensor of the CPU, on which each operation is computed.

  - What CUDA would refuse raises (rules.py).
  - Waits of the host are counted by the source line that makes them (events.py).
  - A CUDA graph (cuda.py) keeps what is launched while it records, raises for what waits, and
    computes the same again on the same memory when it is replayed.

device.cpp has what a CPU build of PyTorch lacks, in 40 lines; build.py compiles it, and loads it
before `import torch` looks for it. A rehearsal can't show time, memory, the kernels' rounding and
limits of shapes, Triton, or races between streams. It uses private parts of PyTorch 2.13.
"""
