"""Downloads of weights from an HTTP server on this machine."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from file_server import FileServer, serve

from reconv.checkpoint import download_weights as room
from reconv.checkpoint.download_weights import TORCHVISION, DownloadedWeights, download_weights
from reconv.checkpoint.locate import is_remote
from reconv.core.errors import CheckpointError, ExitCode, ResourceError, UsageError
from reconv.models import model_names
from reconv.storage.cache import cache_dir

BODY = os.urandom(200_000)
SHA256 = hashlib.sha256(BODY).hexdigest()
FILE = f"tiny-{SHA256[:8]}.pth"


@pytest.fixture
def server() -> Iterator[FileServer]:
    with serve(FileServer(BODY, "/models")) as running:
        yield running


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECONV_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("RECONV_WEIGHTS_URL", raising=False)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> str:
    """A published file small enough to serve."""
    monkeypatch.setattr(room, "TORCHVISION", {**TORCHVISION, "tiny": FILE})
    return "torchvision:tiny"


def test_published_weights_are_downloaded_once_and_then_cached(server: FileServer, tiny: str) -> None:
    first = download_weights(tiny, base_url=server.url)
    assert first.path.read_bytes() == BODY
    assert first.path.parent == cache_dir() / "weights"
    assert f"sha256 {SHA256[:8]} as published" in first.note
    second = download_weights(tiny, base_url=server.url)
    assert second == DownloadedWeights(first.path, f"from the cache, sha256 {SHA256[:8]}")
    assert server.asked == [(f"/models/{FILE}", None)]


def test_a_mirror_can_be_set_in_the_environment(server: FileServer, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECONV_WEIGHTS_URL", server.url + "/")
    assert download_weights(tiny).path.read_bytes() == BODY


def test_an_interrupted_download_is_continued(server: FileServer, tiny: str) -> None:
    server.cut_after_bytes = [70_000]
    seen: list[tuple[int, int | None]] = []
    path = download_weights(tiny, base_url=server.url, progress=lambda there, total: seen.append((there, total))).path
    assert path.read_bytes() == BODY
    assert [asked for _, asked in server.asked] == [None, "bytes=70000-"]
    assert seen[-1] == (len(BODY), len(BODY))


def test_a_file_with_another_hash_is_an_error_and_deleted(server: FileServer, tiny: str) -> None:
    server.body = BODY[:-1] + b"?"
    with pytest.raises(CheckpointError, match=f"not {SHA256[:8]}") as exc_info:
        download_weights(tiny, base_url=server.url)
    assert exc_info.value.code == ExitCode.CHECKPOINT
    assert [p.suffix for p in (cache_dir() / "weights").iterdir()] == [".lock"]
    server.body = BODY
    assert download_weights(tiny, base_url=server.url).path.read_bytes() == BODY


def test_a_damaged_cached_file_is_an_error(server: FileServer, tiny: str) -> None:
    path = download_weights(tiny, base_url=server.url).path
    path.write_bytes(BODY[:-1] + b"?")
    with pytest.raises(CheckpointError, match=r"(?s)not the file that was downloaded.*rm '"):
        download_weights(tiny, base_url=server.url)
    path.unlink()
    assert download_weights(tiny, base_url=server.url).path.read_bytes() == BODY


def test_a_url_is_checked_by_its_name_its_fragment_or_its_first_download(server: FileServer) -> None:
    assert "as published" in download_weights(f"{server.url}/{FILE}").note
    assert "as published" in download_weights(f"{server.url}/plain.pth#sha256={SHA256.upper()}").note
    with pytest.raises(CheckpointError, match="not 00000000"):
        download_weights(f"{server.url}/other.pth#sha256=00000000")
    with pytest.raises(CheckpointError, match="not 00000000"):
        download_weights(f"{server.url}/plain.pth#sha256=00000000")  # in the cache, but another one was meant
    with pytest.raises(UsageError, match="#md5=1"):
        download_weights(f"{server.url}/other.pth#md5=1")
    unknown = download_weights(f"{server.url}/unknown.pth")
    assert "not published" in unknown.note
    unknown.path.write_bytes(b"changed")
    with pytest.raises(CheckpointError, match="not the file that was downloaded"):
        download_weights(f"{server.url}/unknown.pth")


def test_equal_file_names_of_two_urls_are_two_files(server: FileServer) -> None:
    one = download_weights(f"{server.url}/a/model.pth").path
    server.body = b"other"
    two = download_weights(f"{server.url}/b/model.pth").path
    assert (one.read_bytes(), two.read_bytes()) == (BODY, b"other")


def test_concurrent_processes_download_once(server: FileServer, tiny: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: download_weights(tiny, base_url=server.url).path, range(4)))
    assert len(found) == 4 and set(found) == {found[0]}
    assert len(server.asked) == 1


def test_an_unreachable_server_is_an_error_with_a_next_step(tiny: str) -> None:
    with pytest.raises(CheckpointError) as exc_info:
        download_weights(tiny, base_url="http://127.0.0.1:9/closed")
    assert exc_info.value.code == ExitCode.CHECKPOINT
    assert "cannot be reached" in exc_info.value.why
    assert "use the file" in exc_info.value.hint and "RECONV_WEIGHTS_URL" in exc_info.value.hint


def test_a_missing_file_is_not_retried(server: FileServer) -> None:
    with pytest.raises(CheckpointError, match="404"):
        download_weights(f"{server.url}/absent.pth")
    assert len(server.asked) == 1


def test_an_unwritable_cache_exits_with_code_6(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ResourceError, match="RECONV_CACHE"):
        download_weights(f"{server.url}/{FILE}", cache=tmp_path / "file")


def test_every_published_file_is_of_a_model_we_have_and_has_its_hash() -> None:
    names = set(model_names())
    for name, file in TORCHVISION.items():
        assert name.partition(".")[0] in names
        assert re.fullmatch(r"\w+-[0-9a-f]{8}\.pth", file)
    assert len(TORCHVISION) == len(set(TORCHVISION.values())) == 28


def test_a_mistyped_name_suggests_the_nearest_one() -> None:
    with pytest.raises(UsageError, match="torchvision:resnet50") as exc_info:
        download_weights("torchvision:resnt50")
    assert exc_info.value.code == ExitCode.USAGE


def test_file_names_are_not_remote() -> None:
    assert [is_remote(n) for n in ("torchvision:resnet50", "timm:a", "https://a/b.pth", "runs/a", "w.pth")] == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_timm_weights_without_timm_are_an_error_with_a_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UsageError, match=r"(?s)timm is not installed.*pip install 'reconv\[timm\]'"):
        download_weights("timm:resnet50")


def test_timm_gives_the_urls_of_its_weights(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package with timm's interface: its own is large, and is not needed to run."""
    (tmp_path / "timm.py").write_text(
        "from types import SimpleNamespace as Config\n"
        f"known = {{'a.in1k': Config(url='{server.url}/{FILE}', hf_hub_id=None),\n"
        "         'b.in1k': Config(url='', hf_hub_id='hub/b.in1k'), 'c': Config(url='', hf_hub_id=None)}\n"
        "def get_pretrained_cfg(name, allow_unregistered=True):\n"
        "    if name not in known:\n"
        "        raise RuntimeError('Invalid pretrained tag')\n"
        "    return known[name]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    monkeypatch.setattr(room, "HUB_URL", server.url + "/")
    assert download_weights("timm:a.in1k").path.read_bytes() == BODY
    assert download_weights("timm:b.in1k").path.read_bytes() == BODY
    assert server.asked[1][0] == "/models/hub/b.in1k/resolve/main/model.safetensors"
    for name in ("c", "d.in1k"):
        with pytest.raises(UsageError, match=f"timm has no weights '{name}'"):
            download_weights(f"timm:{name}")
    monkeypatch.delitem(sys.modules, "timm")
