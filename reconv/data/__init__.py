"""From samples to batches on the device: readers, decoding, transforms, sampling and loading."""
