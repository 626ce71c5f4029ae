"""The tables of this package: devices, networks and step times."""

from __future__ import annotations

import csv
from importlib import resources


def read_table(name: str) -> list[dict[str, str]]:
    """The rows of a CSV file of this package."""
    text = (resources.files("reconv.planner") / name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))
