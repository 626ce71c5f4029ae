"""Inference: single operations, backends, and predictions from files."""
