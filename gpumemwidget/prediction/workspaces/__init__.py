"""Plan what operators allocate inside: temporaries, workspaces and copies of their inputs.

A fake tensor shows the outputs of an operator and nothing else. ``WorkspacePlanner`` adds the rest.
Operators that decide a step's peak have rules: split reductions, convolutions, recurrent networks
and attention. For others the size of an argument decides, by a table.

The rules follow the public source of the kernels (``aten/src/ATen/native/cuda``,
``native/cudnn``) as of PyTorch 2.11 and were checked on an H200. Sizes are those requested, before
the caching allocator rounds them.
"""
