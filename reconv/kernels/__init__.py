"""Fused GPU operations for training and inference, and the pass that puts them into a model.

`fuse.fuse(model)` swaps a model's layers and blocks for fused ones. `ops/` has the functions of each operation and its
`supports`, `triton/` the kernels, which are imported only on devices that run them. `reference.py` has the plain
operations that the kernels are tested against.
"""
