"""The processes of a run: one, so far.

Owns how a process learns its place among others. Refuses to know gradients' meaning. Invariant: a run never starts
as one of several processes that believe they are alone and write into the same folder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from reconv.errors import UsageError

_SIZES = {
    "WORLD_SIZE": "torchrun",
    "OMPI_COMM_WORLD_SIZE": "Open MPI",
    "PMI_SIZE": "an MPI launcher",
    "SLURM_STEP_NUM_TASKS": "srun",
}


Summable = TypeVar("Summable", bound=Tensor | float)


@dataclass(frozen=True, slots=True)
class World:
    """This process's place: `rank` of `size`."""

    rank: int = 0
    size: int = 1

    @classmethod
    def single(cls) -> World:
        """One process, alone."""
        return cls()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> World:
        """The world a launcher describes; more than one process is refused."""
        environment = os.environ if environment is None else environment
        for variable, launcher in _SIZES.items():
            size = environment.get(variable, "1")
            if size != "1":
                raise UsageError(
                    "several processes are not built yet",
                    where=f"{variable}={size}, set by {launcher}",
                    then="start one process, without the launcher",
                )
        return cls.single()

    def sum(self, value: Summable) -> Summable:
        """The sum over all processes."""
        return value

    def reduce_gradients(self, grads: Sequence[Tensor]) -> None:
        """Add the gradients of all processes, in place."""
