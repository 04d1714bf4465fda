"""Plan what operators allocate inside: temporaries, workspaces and copies of their inputs.

The rules follow the public source of the kernels (``aten/src/ATen/native/cuda``,
``native/cudnn``) as of PyTorch 2.11 and were checked on an H200.
"""
