"""The training kernels one by one, on a CUDA GPU: `python -m benchmarks.kernels`."""
