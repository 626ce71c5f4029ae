"""Checkpoints: what is written, how it survives a crash, and how weights come back in.

Owns the run folder, its lock, the checkpoint folders and the import of others' weights. Refuses to know what the
tensors mean. Invariant: nothing written here is a pickle, and once a checkpoint was saved a valid one can be found.
"""
