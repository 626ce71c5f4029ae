"""Training from and to Azure Blob Storage and Google Cloud Storage, on their emulators, through a proxy that fails.

Needs the packages (`pip install 'reconv[azure,gcs]'`) and the servers: Azurite, `npm install -g azurite`, and
`pip install gcp-storage-emulator`. Azurite checks signatures and conditions. The emulator of Google Cloud Storage
checks neither: the proxy responds to wrong credentials and generations as Google's servers do.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from store_proxy import ProxyRules, store_proxy
from store_training import (
    LIMIT_S,
    WEIGHTS,
    objects,
    read_object,
    run_reconv,
    start_reconv,
    train,
    upload,
    wait_for,
    write_object,
)

from reconv.checkpoint import manifest
from reconv.storage.object_stores.errors import AccessDeniedError, ChangedObjectError, MissingObjectError
from reconv.storage.object_stores.store import open_object_store

FAULTS = {"503": 0.1, "cut": 0.1, "truncated": 0.1, "slow": 0.05}
# Azurite's own account, which is published in its documentation.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
SHARD = "train-00001-of-00005.packed"


@dataclass
class Cloud:
    """A server, and how a process finds it."""

    scheme: str
    server: str

    def environ(self, url: str, key: str = KEY) -> dict[str, str]:
        if self.scheme == "gs":
            return {"STORAGE_EMULATOR_HOST": url, "FSSPEC_GS_TOKEN": "anon"}
        fields = {"DefaultEndpointsProtocol": "http", "AccountName": ACCOUNT, "AccountKey": key}
        fields["BlobEndpoint"] = f"{url}/{ACCOUNT}"
        return {"AZURE_STORAGE_CONNECTION_STRING": ";".join(f"{name}={value}" for name, value in fields.items())}


@contextmanager
def server(command: list[str], url: str) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: _responds(url))
        yield
    finally:
        process.terminate()
        process.wait()


def _responds(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except urllib.error.HTTPError as error:
        error.close()
        return True
    except OSError:
        return False


@pytest.fixture(scope="module", params=["az", "gs"])
def cloud(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    """A server with the buckets `data` and `runs`."""
    if request.param == "az":
        pytest.importorskip("adlfs", reason="pip install 'reconv[azure]'")
        if shutil.which("azurite-blob") is None:
            pytest.skip("npm install -g azurite")
        from azure.storage.blob import BlobServiceClient

        found = Cloud("az", "http://127.0.0.1:18310")
        words = ["--blobPort", "18310", "--silent", "--disableTelemetry", "--skipApiVersionCheck", "--location"]
        with server(["azurite-blob", *words, str(tmp_path_factory.mktemp("azurite"))], found.server):
            text = found.environ(found.server)["AZURE_STORAGE_CONNECTION_STRING"]
            with BlobServiceClient.from_connection_string(text) as client:
                for name in ("data", "runs"):
                    client.create_container(name)
            yield found
        return
    pytest.importorskip("gcsfs", reason="pip install 'reconv[gcs]'")
    if shutil.which("gcp-storage-emulator") is None:
        pytest.skip("pip install gcp-storage-emulator")
    found = Cloud("gs", "http://127.0.0.1:18320")
    words = ["start", "--host", "127.0.0.1", "--port", "18320", "--default-bucket", "data", "--in-memory", "-q"]
    with server(["gcp-storage-emulator", *words], found.server):
        headers = {"Content-Type": "application/json"}
        create = urllib.request.Request(f"{found.server}/storage/v1/b", b'{"name": "runs"}', headers, method="POST")
        with urllib.request.urlopen(create):
            pass
        yield found


@pytest.fixture
def rules(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProxyRules]:
    """The rules of a proxy in front of the server, which everything in a test uses."""
    rules = ProxyRules(cloud.server)
    with store_proxy(rules) as url:
        for name, value in cloud.environ(url).items():
            monkeypatch.setenv(name, value)
        yield rules


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packed digits on this machine."""
    folder = tmp_path_factory.mktemp("data") / "packed"
    run_reconv(folder.parent, "data", "convert", "digits", str(folder), "--to", "packed", "--per-shard", "300")
    return folder


@pytest.fixture(scope="module")
def expected(packed: Path) -> bytes:
    """The weights after training on local data, in a local folder."""
    out = packed.parent / "local"
    run_reconv(packed.parent, *train(str(packed), str(out)))
    return (out / WEIGHTS).read_bytes()


@pytest.fixture
def data(cloud: Cloud, rules: ProxyRules, packed: Path) -> str:
    """The address of the packed digits."""
    url = f"{cloud.scheme}://data/packed"
    upload(packed, open_object_store(url))
    return url


def test_weights_under_faults_equal_those_of_local_data(
    tmp_path: Path, cloud: Cloud, rules: ProxyRules, data: str, expected: bytes
) -> None:
    rules.faults = FAULTS
    out = f"{cloud.scheme}://runs/faults"
    done = run_reconv(tmp_path, *train(data, out))
    assert done.returncode == 0, done.stderr
    assert all(rules.counts[name] for name in FAULTS)
    assert (tmp_path / f"runs/{cloud.scheme}/runs/faults" / WEIGHTS).read_bytes() == expected
    rules.faults = {}
    store = open_object_store(out)
    assert read_object(store, WEIGHTS) == expected
    assert not any(item.name == "lease.json" for item in store.list())


def test_a_killed_run_continues_on_another_machine_bitwise(
    tmp_path: Path, cloud: Cloud, rules: ProxyRules, data: str, expected: bytes
) -> None:
    out = f"{cloud.scheme}://runs/killed"
    with start_reconv(tmp_path / "first", *train(data, out)):
        store = open_object_store(out)
        wait_for(lambda: any(item.name.endswith(manifest.NAME) for item in objects(store)))
    done = run_reconv(tmp_path / "second", *train(data, out, "--resume"))
    assert done.returncode == 0, done.stderr
    assert "resuming from step" in done.stdout
    assert (tmp_path / f"second/runs/{cloud.scheme}/runs/killed" / WEIGHTS).read_bytes() == expected


def test_an_object_that_is_replaced_during_training_ends_it(
    tmp_path: Path, cloud: Cloud, rules: ProxyRules, packed: Path
) -> None:
    url = f"{cloud.scheme}://data/replaced"
    store = open_object_store(url)
    upload(packed, store)
    command = train(url, str(tmp_path / "out"), length="100000step", **{"save.every": "off"})
    with start_reconv(tmp_path, *command, RECONV_CACHE_LIMIT="1B") as process:
        wait_for((tmp_path / "out" / "events.jsonl").is_file)
        write_object(store, SHARD, (packed / SHARD).read_bytes()[::-1])
        _, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 3, stderr
    assert f"{url}/{SHARD}" in stderr


def test_missing_objects_and_buckets_are_named(tmp_path: Path, cloud: Cloud, rules: ProxyRules) -> None:
    for path, text in (("absent/packed", "no such object or bucket"), ("data/absent", "no objects at")):
        done = run_reconv(tmp_path, *train(f"{cloud.scheme}://{path}", str(tmp_path / "out")))
        assert done.returncode == 3, done.stderr
        assert text in done.stderr
        assert not (tmp_path / "out").exists()


def test_refused_credentials_end_before_training(
    tmp_path: Path, cloud: Cloud, rules: ProxyRules, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cloud.scheme == "az":
        wrong = cloud.environ(cloud.server, key=KEY[::-1].strip("=") + "==")
        for name, value in wrong.items():
            monkeypatch.setenv(name, value)
    else:
        rules.refusal = _GOOGLE_403
    done = run_reconv(tmp_path, *train(data, str(tmp_path / "out")))
    assert done.returncode == 6, done.stderr
    assert "hint:  set the credentials of the store" in done.stderr
    with pytest.raises(AccessDeniedError):
        open_object_store(data).write("new", b"1")
    assert not (tmp_path / "out").exists()


_GOOGLE_403 = (403, b'{"error": {"code": 403, "message": "me@x.com does not have storage.objects.get access."}}')
_GOOGLE_412 = (412, b'{"error": {"code": 412, "message": "At least one of the pre-conditions did not hold."}}')


def test_a_range_of_another_version_is_refused_and_names_may_be_strange(cloud: Cloud, rules: ProxyRules) -> None:
    store = open_object_store(f"{cloud.scheme}://data/names")
    names = ["a b.bin", "c#d.bin", "e?versionid=1.bin", "f%41.bin", "g/ü.bin"]
    for number, name in enumerate(names):
        store.write(name, bytes([number]) * 100)
    assert [item.name for item in store.list()] == names
    for number, item in enumerate(store.list()):
        assert store.info(item.name).etag == item.etag
        assert store.read(item, 40, 30) == bytes([number]) * 30
        assert store.read(item, 0, 0) == b""
    old = store.info(names[0])
    store.write(names[0], b"x" * 100)
    with pytest.raises(ChangedObjectError):
        store.read(old, 0, 10)
    if cloud.scheme == "gs":
        now = store.info(names[0])
        rules.refusal = _GOOGLE_412
        with pytest.raises(ChangedObjectError):
            store.read(now, 0, 10)
        rules.refusal = None
    for name in names:
        store.delete(name)
        store.delete(name)  # one that is missing is no error
    with pytest.raises(MissingObjectError):
        store.info(names[0])
    assert store.list() == []


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # by aiohttp, of a part of the file
def test_large_files_are_uploaded_in_parts(tmp_path: Path, cloud: Cloud, rules: ProxyRules) -> None:
    content = os.urandom(1 << 20) * 70
    (tmp_path / "large").write_bytes(content)
    store = open_object_store(f"{cloud.scheme}://data/large")
    store.write("large", tmp_path / "large")
    item = store.info("large")
    assert item.num_bytes == len(content)
    assert all(store.read(item, start, 1 << 20) == content[: 1 << 20] for start in range(0, len(content), 10 << 20))
    store.delete("large")
