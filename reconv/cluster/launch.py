"""`Launch`: which processes train, on this machine and on others. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from reconv.core.errors import UsageError
from reconv.distributed.environment import num_local_ranks, planned_world_size, read_launch_env

if TYPE_CHECKING:
    from reconv.logging.events import Event
    from reconv.trainer.options import RunOptions
    from reconv.trainer.run import RunOutcome

OnEvent = Callable[["Event"], None]
Train = Callable[["RunOptions", OnEvent | None], "RunOutcome"]


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
        limits = parse_nodes(nodes)
        if limits is None:
            raise UsageError(
                f"--elastic takes the smallest and the largest number of nodes, not {nodes!r}",
                hint="for example --elastic 1:4",
            )
        if rendezvous is None and limits[0] > 1:
            raise UsageError(
                f"--elastic {nodes} waits for {limits[0]} nodes, and this one knows no other",
                why="without --rendezvous only this machine takes part",
                hint="start `reconv rendezvous HOST:PORT` on a machine, and name it with --rendezvous HOST:PORT",
            )
        return cls(*limits, num_ranks, None if rendezvous is None else parse_endpoint(rendezvous))


def parse_nodes(text: str) -> tuple[int, int] | None:
    """The smallest and the largest number of nodes in `4` or `1:4`; None if that is no range."""
    match = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", text.strip(), re.ASCII)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    return (least, most) if 1 <= least <= most <= _MAX_NODES else None


def parse_endpoint(text: str) -> tuple[str, int]:
    """`HOST:PORT`, `[IPV6]:PORT` or `HOST` as host and port."""
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.%]+)\]|([^\s:\[\]]+))(?::(\d{1,5}))?", text.strip(), re.ASCII)
    port = int(match[3] or DEFAULT_PORT) if match else 0
    if match is None or not 0 < port <= 65535:
        raise UsageError(
            f"{text!r} is not the address of a rendezvous", hint=f"name HOST:PORT, as in 10.0.0.1:{DEFAULT_PORT}"
        )
    return match[1] or match[2], port


@dataclass(frozen=True, slots=True)
class Launch:
    """Way in which `reconv.train` starts the processes of a run; a subclass may start them elsewhere.

    `devices` processes run on this machine, one per device. With `elastic="1:4"` the run goes on when nodes leave or
    join, and `rendezvous="HOST:PORT"` is where `reconv rendezvous` listens. `nic` is the network interface between
    machines.
    """

    devices: int | None = None
    elastic: str | None = None
    rendezvous: str | None = None
    nic: str | None = None

    @property
    def num_ranks(self) -> int:
        """The number of ranks that train, which a batch size per device is multiplied by."""
        return planned_world_size(self.devices)

    def start(self, train: Train, options: RunOptions, on_event: OnEvent | None = None) -> RunOutcome:
        """Call `train(options, on_event)` in every process of the run; returns what it returns on rank 0.

        With several processes `train` must be importable, options and result picklable, and `on_event` None.
        """
        options = replace(options, nic=self.nic)
        config = self._elastic_config()
        if on_event is not None and (config or num_local_ranks(self.devices, read_launch_env()) is not None):
            raise UsageError(
                "on_event cannot observe several processes", hint="read events.jsonl in the run directory instead"
            )
        if config is not None:
            from reconv.cluster.rounds import train_elastic

            return train_elastic(config, train, options)
        from reconv.trainer.prepare import run_on_devices

        return run_on_devices(self.devices, train, options, on_event)

    def _elastic_config(self) -> ElasticConfig | None:
        if self.elastic is not None:
            return ElasticConfig.parse(self.elastic, self.rendezvous, self.devices or 1)
        if self.rendezvous is not None:
            raise UsageError("--rendezvous is for elastic runs", hint="add --elastic MIN:MAX, as in --elastic 1:4")
        return None
