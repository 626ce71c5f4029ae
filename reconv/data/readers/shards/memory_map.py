"""Apply a function to every shard with threads, and report all damaged shards in one error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from reconv.core.errors import DataError

T = TypeVar("T")

_MAX_NAMED = 5


class GroupedDataError(DataError):
    """Errors of several files as one: the first in full, and where the others are."""

    def __init__(self, errors: Sequence[DataError]) -> None:
        first, others = errors[0], [error.where for error in errors[1:]]
        named = ", ".join(others[:_MAX_NAMED]) + (
            f" and {len(others) - _MAX_NAMED:,} more" if len(others) > _MAX_NAMED else ""
        )
        also = f"; {len(others):,} more: {named}" if others else ""
        super().__init__(first.what, where=first.where, why=first.why + also, hint=first.hint)
        self.errors = tuple(errors)
        self.code = first.code


def map_shards(function: Callable[[Path], T], paths: Sequence[Path], num_threads: int = 1) -> list[T]:
    """The results of a function of each path, in order; errors are collected and raised together."""

    def result_or_error(path: Path) -> T | DataError:
        try:
            return function(path)
        except DataError as error:
            return error

    with ThreadPoolExecutor(num_threads) as pool:
        results = list(pool.map(result_or_error, paths))
    errors = [result for result in results if isinstance(result, DataError)]
    if errors:
        raise GroupedDataError(errors) from errors[0].__cause__
    return [result for result in results if not isinstance(result, DataError)]
