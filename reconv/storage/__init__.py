"""Bytes and their names: files, atomic writes, bounded reads, object stores and their cache."""
