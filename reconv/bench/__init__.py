"""Benchmarks: a training step, an answer and the loader, measured by the parts that do the real work."""
