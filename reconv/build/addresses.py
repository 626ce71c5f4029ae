"""The addresses that a recipe reads from: those of a saved recipe need to be given by the user first."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from reconv.core.errors import UsageError
from reconv.recipe.load.extends import PATH_FIELDS
from reconv.recipe.schema import Recipe
from reconv.storage.given_addresses import is_given, remember_address
from reconv.storage.object_stores.store import is_address

_OPTIONS = {"data.path": "--data"}


def remember_addresses(recipe: Recipe, fields: Collection[str] | None = None) -> None:
    """Note that the user has given the addresses in these fields, by default in all."""
    for field, address in _addresses(recipe):
        if fields is None or field in fields:
            remember_address(address)


def check_addresses(recipe: Recipe, where: str, fields: Collection[str] | None = None) -> None:
    """Raise unless the user has given the addresses in these fields of a saved recipe, by default in all."""
    for field, address in _addresses(recipe):
        if (fields is None or field in fields) and not is_given(address):
            option = f"{_OPTIONS[field]} '{address}'" if field in _OPTIONS else f"--set '{field}={address}'"
            raise UsageError(
                f"this recipe reads from {address}, an address that you have not given",
                where=f"{field} in {where}",
                why="whoever made it would see that you use it, and could send other data",
                hint=f"if you trust the address, give it: {option}",
            )


def _addresses(recipe: Recipe) -> Iterator[tuple[str, str]]:
    for section, name in PATH_FIELDS:
        value = getattr(getattr(recipe, section), name)
        if isinstance(value, str) and is_address(value):
            yield f"{section}.{name}", value
