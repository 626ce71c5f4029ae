"""Reading local files, and that every reader goes through the storage module."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

import reconv.data
from reconv.core.errors import DataError
from reconv.storage.local import read, read_file_or_pipe

_DATA = Path(reconv.data.__file__).parent
_OPENING = {"open", "read_bytes", "read_text", "fromfile", "memmap", "genfromtxt", "loadtxt"}
# Files of the package itself, files written by a conversion, our index, a download that is unpacked.
_OWN_FILES = {
    "readers/digits.py",
    "convert/dataset.py",
    "convert/staging.py",
    "convert/writers.py",
    "readers/shards/index.py",
    "download_dataset.py",
}
_LIBRARIES = {"Image", "tarfile"}  # must get bytes or a ReadStream, which is checked below


def _calls(tree: ast.AST) -> list[tuple[str, ast.Call]]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _OPENING:
            found.append((node.func.id, node))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _OPENING:
            found.append((f"{ast.unparse(node.func.value)}.{node.func.attr}", node))
    return found


def test_no_reader_opens_a_file_by_itself() -> None:
    found, num_files = [], 0
    for path in sorted(_DATA.rglob("*.py")):
        name = path.relative_to(_DATA).as_posix()
        num_files += 1
        if name in _OWN_FILES:
            continue
        for what, call in _calls(ast.parse(path.read_text(encoding="utf-8"))):
            given = ast.unparse(call)
            if what == "Prefetcher.open":  # opens no file
                continue
            if what.split(".")[0] in _LIBRARIES and (
                "ReadStream(" in given or "BytesIO(" in given or "fileobj=file" in given
            ):
                continue
            found.append(f"{name}: {given}")
    assert found == []
    assert num_files > 40
    assert all((_DATA / name).exists() for name in _OWN_FILES)


def test_a_pipe_given_by_the_user_is_read_to_its_end() -> None:
    readable, writable = os.pipe()
    with os.fdopen(readable):
        with os.fdopen(writable, "wb") as pipe:
            pipe.write(b"image" * 1000)
        assert read_file_or_pipe(f"/dev/fd/{readable}") == b"image" * 1000


def test_a_file_given_by_the_user_must_exist(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"image")
    assert read_file_or_pipe(tmp_path / "file") == b"image"
    with pytest.raises(DataError, match="cannot read"):
        read_file_or_pipe(tmp_path / "none")


def test_an_empty_file_has_no_bytes_and_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert read(tmp_path / "empty") == b""
    with pytest.raises(DataError, match="cannot read"):
        read(tmp_path)


def test_an_absurd_length_is_reported_as_a_truncated_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"image")
    with pytest.raises(DataError, match=f"ends early: 4 of {2**62} bytes from offset 1"):
        read(tmp_path / "file", 1, 2**62)
