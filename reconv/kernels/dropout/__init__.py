"""Dropout whose masks are hashes."""
