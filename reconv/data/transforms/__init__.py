"""Augmentation parameters, and transforms on the host and on the device."""
