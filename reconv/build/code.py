"""Your own code in a run: importing what the recipe names, and the record of its source files."""

from __future__ import annotations

from collections.abc import Mapping

from reconv.core.custom_code import FROM_PYTHON, load_object, source_digests
from reconv.recipe.parts.code import add_code_path, code_references
from reconv.recipe.schema import Recipe


def import_code(recipe: Recipe) -> None:
    """Import everything that the recipe names, so that mistakes show before anything is written."""
    add_code_path(recipe)
    for _, path in code_references(recipe):
        load_object(path)


def describe_python_objects(recipe: Recipe) -> list[str]:
    """A note on objects from Python that cannot be imported again, so that a resume needs them."""
    fields = [field for field, path in code_references(recipe) if path.startswith(f"{FROM_PYTHON}:")]
    if not fields:
        return []
    return [
        f"{', '.join(fields)}: objects from Python, which are not stored with the run; to resume, call reconv.train "
        "with the same objects and resume=True"
    ]


def code_digests(recipe: Recipe) -> dict[str, str]:
    """The sha256 of the source files of the recipe's own code, which has been imported."""
    return source_digests([path for _, path in code_references(recipe)])


def describe_changed_code(saved: Mapping[str, str], recipe: Recipe) -> list[str]:
    """A warning for each source file that has changed since a checkpoint was saved."""
    now = code_digests(recipe)
    changed = [name for name, digest in saved.items() if now.get(name, digest) != digest]
    return [f"your code {name} has changed since the checkpoint: the run may differ from here on" for name in changed]
