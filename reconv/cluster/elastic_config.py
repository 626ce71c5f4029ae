"""The options of an elastic run: how many nodes may take part, and where they find each other. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from reconv.core.errors import UsageError

DEFAULT_PORT = 29400  # torchrun's
_MAX_NODES = 4096


@dataclass(frozen=True, slots=True)
class ElasticConfig:
    """Limits on the nodes that take part, the ranks of this one, and the address of the rendezvous."""

    min_nodes: int = 1
    max_nodes: int = 1
    num_ranks: int = 1
    rendezvous: tuple[str, int] | None = None  # None: this machine alone

    @classmethod
    def parse(cls, nodes: str, rendezvous: str | None, num_ranks: int) -> ElasticConfig:
        """The values of --elastic MIN:MAX and --rendezvous HOST:PORT."""
        match = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", nodes.strip(), re.ASCII)
        least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= least <= most <= _MAX_NODES:
            raise UsageError(
                f"--elastic takes the smallest and the largest number of nodes, not {nodes!r}",
                hint="for example --elastic 1:4",
            )
        if rendezvous is None and least > 1:
            raise UsageError(
                f"--elastic {nodes} waits for {least} nodes, and this one knows no other",
                why="without --rendezvous only this machine takes part",
                hint="start `reconv rendezvous HOST:PORT` on a machine, and name it with --rendezvous HOST:PORT",
            )
        return cls(least, most, num_ranks, None if rendezvous is None else parse_endpoint(rendezvous))


def parse_endpoint(text: str) -> tuple[str, int]:
    """`HOST:PORT`, `[IPV6]:PORT` or `HOST` as host and port."""
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.%]+)\]|([^\s:\[\]]+))(?::(\d{1,5}))?", text.strip(), re.ASCII)
    port = int(match[3] or DEFAULT_PORT) if match else 0
    if match is None or not 0 < port <= 65535:
        raise UsageError(
            f"{text!r} is not the address of a rendezvous", hint=f"name HOST:PORT, as in 10.0.0.1:{DEFAULT_PORT}"
        )
    return match[1] or match[2], port
