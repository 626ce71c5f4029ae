"""Several processes that train one model: launching them, collectives, parallel strategies and failures of ranks."""

from __future__ import annotations

from reconv.distributed.process_group import ProcessGroup, open_process_group

__all__ = ["ProcessGroup", "open_process_group"]
