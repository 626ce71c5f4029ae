"""Callbacks of the training loop: what observes it, and what may stop or change it."""
