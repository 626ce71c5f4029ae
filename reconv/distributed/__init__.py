"""The process_group of processes; the sole importer of torch.distributed."""

from __future__ import annotations

from reconv.distributed.process_group import ProcessGroup, open_process_group

__all__ = ["ProcessGroup", "open_process_group"]
