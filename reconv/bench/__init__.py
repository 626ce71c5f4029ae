"""Benchmarks: a training step, inference and the data loader, each on the code path that users run."""
