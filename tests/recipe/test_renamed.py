"""Fields and values of version 0.1 are errors that name their successors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reconv.core.errors import RecipeError
from reconv.recipe.fields import schema_fields
from reconv.recipe.load import document as yaml_document
from reconv.recipe.load.renamed import RENAMED_FIELDS, RENAMED_VALUES
from reconv.recipe.loader import load


def message(path: Path, field: str, value: Any, *, as_override: bool) -> str:
    tree: dict[str, Any] = {"seed": 1}
    if not as_override:
        node = tree
        *sections, leaf = field.split(".")
        for section in sections:
            node = node.setdefault(section, {})
        node[leaf] = value
    path.write_text(yaml_document.write(tree))
    with pytest.raises(RecipeError) as caught:
        load(str(path), [(field, value, "--set")] if as_override else [])
    return caught.value.what


def test_successors_exist_and_old_names_do_not() -> None:
    fields = schema_fields()
    assert len(RENAMED_FIELDS) > 80
    assert [old for old in RENAMED_FIELDS if old in fields] == []
    assert [new for new in RENAMED_FIELDS.values() if new not in fields] == []
    assert [old for old in RENAMED_VALUES if old not in RENAMED_FIELDS and old not in fields] == []


@pytest.mark.parametrize("as_override", [False, True], ids=["file", "override"])
def test_an_old_field_names_its_successor(tmp_path: Path, as_override: bool) -> None:
    for old, new in RENAMED_FIELDS.items():
        found = message(tmp_path / "my.yaml", old, "x", as_override=as_override)
        assert f"{new.rpartition('.')[2]}" in found and "renamed to" in found, (old, found)
        assert f"{old}: renamed to {new}" in found or f"{old} to {new}" in found, (old, found)


@pytest.mark.parametrize("as_override", [False, True], ids=["file", "override"])
def test_an_old_value_names_its_successor(tmp_path: Path, as_override: bool) -> None:
    for field, values in RENAMED_VALUES.items():
        for old, new in values.items():
            found = message(tmp_path / "my.yaml", field, old, as_override=as_override)
            if field in RENAMED_FIELDS:
                assert f"{field}: renamed to {RENAMED_FIELDS[field]}: for {old} write {new}" in found
            else:
                assert f"{old} was renamed to {new}" in found
            renamed = RENAMED_FIELDS.get(field, field)
            if new not in ("true", "false"):  # those were words, and the successor is a switch
                assert f"{old} was renamed to {new}" in message(
                    tmp_path / "my.yaml", renamed, old, as_override=as_override
                )


def test_pipeline_splits_of_one_device_are_checkpoint_segments(tmp_path: Path) -> None:
    found = message(tmp_path / "my.yaml", "parallel.splits", ["layer2.0"], as_override=False)
    assert "on one device: memory.checkpoint_segments" in found
