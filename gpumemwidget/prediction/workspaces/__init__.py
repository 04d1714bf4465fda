"""Plan what operators allocate inside: temporaries, workspaces and copies of their inputs.

A fake tensor shows the outputs of an operator and nothing else. ``WorkspacePlanner`` adds the rest,
operator by operator, by the rules of this package.

Each rule follows the public source of the kernels (``aten/src/ATen/native/cuda``, ``native/cudnn``,
CUB's dispatch layer) as of PyTorch 2.11 and was checked on an H200. Sizes are those requested,
before the caching allocator rounds them.
"""
