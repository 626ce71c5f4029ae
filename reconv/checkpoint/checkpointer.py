"""`reconv.Checkpointer`: checkpoints of anybody's training loop, in the files that runs have.

What has a `state_dict` is saved: its tensors in a safetensors file, everything else as JSON. A checkpoint appears under
its name only when it is complete and synced, and is used only if every byte has its checksum; nothing is unpickled.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from reconv.checkpoint.async_writer import AsyncWriter
from reconv.checkpoint.store import CheckpointStore
from reconv.core.errors import CheckpointError, UsageError

_RANDOM = "random"  # torch's generators, beside the objects
_OBJECTS = "objects"  # in state.json: what is no tensor
_SCALARS = (bool, int, str, type(None))


class Stateful(Protocol):
    """An object whose state can be saved: modules, optimizers, schedulers, gradient scalers, loaders, averages."""

    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state_dict: Any) -> object: ...


class Checkpointer:
    """Saves and restores a training loop's objects, in the background and atomically.

    Args:
        folder: where checkpoints are, one folder each; it is made when the first one is saved
        keep: how many are kept, the newest ones
        rank: this process's; None: as torch.distributed says. Rank 0 alone writes, all ranks restore
        random: save and restore torch's random state, too; with several processes each keeps its own
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, keep: int = 2, rank: int | None = None, random: bool = True
    ) -> None:
        if keep < 1:
            raise UsageError(f"keep is {keep}, and one checkpoint is the least that can be kept")
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.rank = rank if rank is not None else torch.distributed.get_rank() if distributed else 0
        self._random = random and not (distributed and torch.distributed.get_world_size() > 1)
        self._keep = keep
        self._store = CheckpointStore(Path(folder))
        self._writer = AsyncWriter()

    def save(self, step: int, *, wait: bool = False, **objects: Stateful) -> None:
        """Save objects after a step, under the names of the arguments.

        Their state is copied at once and written in the background, unless `wait`; of saves that come faster than the
        disk takes them the newest is written. An error is raised by a later call, or by `close`.
        """
        if self.rank != 0:
            return
        parts: dict[str, dict[str, Tensor]] = {}
        structures: dict[str, Any] = {}
        states = {name: thing.state_dict() for name, thing in objects.items()}
        if self._random:
            states[_RANDOM] = _random_state()
        for name, state in states.items():
            parts[name] = {}
            structures[name] = _flattened(state, name, parts[name])
        self._writer.submit(
            step,
            lambda: self._write(step, {name: part for name, part in parts.items() if part}, {_OBJECTS: structures}),
            lambda result, blocked_s, replaced: None,
            is_needed=lambda number: False,
        )
        if wait:
            self._writer.wait()

    def restore(self, **objects: Stateful) -> int:
        """Load the newest valid checkpoint into objects; returns its step, 0 if there is none."""
        self._writer.wait()
        newest = self._store.newest()
        if newest.path is None:
            if newest.skipped:
                path, why = newest.skipped[0]
                raise CheckpointError("no checkpoint is valid", where=str(path), why=why)
            return 0
        loaded = self._store.load(newest.path)
        structures = loaded.state.get(_OBJECTS)
        if not isinstance(structures, dict):
            raise CheckpointError(
                f"{newest.path.name} is not a checkpoint of a Checkpointer",
                where=str(newest.path),
                hint="reconv.load and reconv.train(resume=True) read checkpoints of runs",
            )
        names = set(structures) - {_RANDOM}
        if names != set(objects):
            raise CheckpointError(
                f"{newest.path.name} has other objects",
                where=str(newest.path),
                why=f"saved: {', '.join(sorted(names))}; to restore: {', '.join(sorted(objects))}",
            )
        for name, thing in objects.items():
            thing.load_state_dict(_unflattened(structures[name], loaded.parts.get(name, {})))
        if self._random and _RANDOM in structures:
            _set_random_state(_unflattened(structures[_RANDOM], loaded.parts.get(_RANDOM, {})))
        return loaded.step

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, ascending."""
        return self._store.steps()

    def close(self) -> None:
        """Wait until everything is written; raises the error of a save that failed."""
        self._writer.wait()

    def _write(self, step: int, parts: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
        self._store.save(step, parts, state)
        self._store.prune(self._keep)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.__exit__(kind, error, trace)


def _flattened(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON, with its tensors copied to the host and added to `tensors` under the path that leads to them."""
    if isinstance(value, Tensor):
        if hasattr(value, "placements"):
            raise UsageError(
                f"{name} is sharded", why="a checkpoint has whole tensors", hint="use torch.distributed.checkpoint"
            )
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return ["tensor", name]
    if isinstance(value, float) and not math.isfinite(value):
        return ["float", str(value)]
    if isinstance(value, (*_SCALARS, float)):
        return value
    if isinstance(value, Mapping):
        pairs = [[_flattened(key, name, tensors), _flattened(v, f"{name}.{key}", tensors)] for key, v in value.items()]
        return ["dict", pairs]
    if isinstance(value, list | tuple):
        items = [_flattened(item, f"{name}.{number}", tensors) for number, item in enumerate(value)]
        return ["tuple" if isinstance(value, tuple) else "list", items]
    raise UsageError(
        f"{name} cannot be saved",
        why=f"it is a {type(value).__name__}, and a state has tensors, numbers, text, lists, tuples and dicts",
    )


def _unflattened(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that `_flattened` was given; its tensors are on the host."""
    if not isinstance(value, list):
        return value
    try:
        kind, content = value
        if kind == "tensor":
            return tensors[content]
        if kind == "float":
            return float(content)
        if kind == "dict":
            return {_unflattened(key, tensors): _unflattened(item, tensors) for key, item in content}
        if kind in ("list", "tuple"):
            return (tuple if kind == "tuple" else list)(_unflattened(item, tensors) for item in content)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError("the state in a checkpoint is malformed", why=repr(error)) from error
    raise CheckpointError("the state in a checkpoint is malformed", why=f"a value of the kind {kind!r}")


def _random_state() -> dict[str, Any]:
    devices = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state() if devices else None}


def _set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
