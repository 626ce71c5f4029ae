"""Run directories, crash-safe checkpoints, and loading of weights from our own and other programs' files."""
