"""The world of processes; the sole importer of torch.distributed."""

from __future__ import annotations

from reconv.distributed.process_group import World, open_world

__all__ = ["World", "open_world"]
