"""Samples to batches: sources, order, decoding, augmentation, mixing, loading, download."""
