"""Malicious inputs: small files that hang or end a careless parser or exhaust the memory, with the command to try."""

from __future__ import annotations

import malicious_annotations
import malicious_commands
import malicious_images
import malicious_labels
import malicious_runs
import malicious_shards
from malicious_cases import CASES, Context

__all__ = ["CASES", "Context"]

# Importing a module adds its cases.
MODULES = (
    malicious_annotations,
    malicious_commands,
    malicious_images,
    malicious_labels,
    malicious_runs,
    malicious_shards,
)
