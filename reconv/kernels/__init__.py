"""The plain reference and the fused form of each hot operation of training on a GPU.

Owns the Triton kernels, their autograd functions and the plain references they are proven equal to. Refuses to know
networks and training. Invariant: `available` says which tensors a fused form takes; a module here that ends in
`_triton` is imported only after it said yes, so nothing of this room is needed on a CPU.
"""
