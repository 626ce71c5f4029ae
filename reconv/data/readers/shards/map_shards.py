"""The same done to every shard of a set, and one error for all that are refused.

Owns the gathering of errors. Refuses to know what is done. Invariant: results come in the order of the shards, and who
has ten damaged files is told of ten at once, the same ones for any number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from reconv.errors import DataError

T = TypeVar("T")

_NAMED = 5  # of those after the first


class GroupedDataError(DataError):
    """What is wrong with the first of several shards, and where others are wrong too."""

    def __init__(self, errors: Sequence[DataError]) -> None:
        first, others = errors[0], [error.where for error in errors[1:]]
        named = ", ".join(others[:_NAMED]) + (f" and {len(others) - _NAMED:,} more" if len(others) > _NAMED else "")
        also = f"; and {len(others):,} more of them: {named}" if others else ""
        super().__init__(first.what, where=first.where, why=first.why + also, then=first.then)
        self.errors = tuple(errors)


def map_shards(make: Callable[[Path], T], paths: Sequence[Path], at_once: int = 1) -> list[T]:
    """What is made of each path, by so many threads."""

    def tried(path: Path) -> T | DataError:
        try:
            return make(path)
        except DataError as error:
            return error

    with ThreadPoolExecutor(at_once) as pool:
        results = list(pool.map(tried, paths))
    errors = [result for result in results if isinstance(result, DataError)]
    if errors:
        raise GroupedDataError(errors) from errors[0].__cause__
    return [result for result in results if not isinstance(result, DataError)]
