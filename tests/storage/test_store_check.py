"""What `reconv doctor --store` says."""

from __future__ import annotations

from pathlib import Path

from web_folder import WebFolder

from reconv.cluster.store_check import check_store
from reconv.storage.remote_index import write_index


def test_a_store_that_can_be_read_and_written(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"12345678")
    found = {result.name: result for result in check_store(tmp_path.as_uri())}
    assert [result.level for result in found.values()] == ["ok"] * 4
    assert found["access"].value == 1
    assert found["write"].value is True
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("reconv-doctor")] == []


def test_a_web_server_is_read_only_and_needs_an_index(web: WebFolder) -> None:
    (web.folder / "a.tar").write_bytes(b"12345678")
    [failed] = check_store(web.url)
    assert failed.level == "missing"
    assert "reconv data index" in failed.advice
    write_index(web.folder)
    found = {result.name: result for result in check_store(web.url)}
    assert found["access"].value == 1
    assert found["write"].level == "note"


def test_a_refused_or_unknown_address_is_named(web: WebFolder) -> None:
    web.is_down = True
    [failed] = check_store(web.url)
    assert "503" in failed.text
    [failed] = check_store("ftp://somewhere")
    assert "not the address of a store" in failed.text
