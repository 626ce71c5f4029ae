"""Box mathematics of single-shot detectors, on batches of tensors."""
