"""From dataset indices to batches on the device: sample pipelines, workers, buffers and loaders."""
