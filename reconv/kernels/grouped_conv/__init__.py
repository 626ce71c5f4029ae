"""Grouped 3x3 convolutions of few channels per group."""
