"""`Launch`: which processes train, on this machine and on others. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from reconv.cluster.elastic_config import ElasticConfig
from reconv.core.errors import UsageError
from reconv.distributed.environment import num_local_ranks, planned_world_size, read_launch_env

if TYPE_CHECKING:
    from reconv.logging.events import Event
    from reconv.trainer.options import RunOptions
    from reconv.trainer.run import RunOutcome

OnEvent = Callable[["Event"], None]
Train = Callable[["RunOptions", OnEvent | None], "RunOutcome"]


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
            from reconv.cluster.elastic_run import train_elastic  # imports torch's launcher

            return train_elastic(config, train, options)
        from reconv.trainer.prepare import run_on_devices

        return run_on_devices(self.devices, train, options, on_event)

    def _elastic_config(self) -> ElasticConfig | None:
        if self.elastic is not None:
            return ElasticConfig.parse(self.elastic, self.rendezvous, self.devices or 1)
        if self.rendezvous is not None:
            raise UsageError("--rendezvous is for elastic runs", hint="add --elastic MIN:MAX, as in --elastic 1:4")
        return None
