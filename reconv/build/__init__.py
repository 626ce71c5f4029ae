"""Builders of what a run consists of, each from its recipe: datasets, loaders, network, task and optimizer."""
