"""Tests against real third-party programs: run by `make external`, never by `make test`.

A test whose package or program is missing is skipped, and its reason names what to install.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_training import s3_variables


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.external)


@pytest.fixture(scope="session")
def swift(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an S3 server, OpenStack Swift, with the buckets `data` and `runs`."""
    fsspec = pytest.importorskip("fsspec")
    pytest.importorskip("s3fs", reason="pip install 'reconv[s3]'")
    if shutil.which("swift-proxy-server") is None or shutil.which("memcached") is None:
        pytest.skip("apt-get install --no-install-recommends swift-{proxy,account,container,object} memcached")
    script, folder = Path(__file__).with_name("swift_server"), tmp_path_factory.mktemp("swift")
    started = subprocess.run(
        [script, "start", folder], env={**os.environ, "PORT": "18180"}, stdout=subprocess.PIPE, text=True, check=True
    )
    url = started.stdout.strip()
    try:
        keys = s3_variables(url)
        options = {"key": keys["AWS_ACCESS_KEY_ID"], "secret": keys["AWS_SECRET_ACCESS_KEY"], "endpoint_url": url}
        for bucket in ("data", "runs"):
            fsspec.filesystem("s3", **options).mkdir(bucket)
        yield url
    finally:
        subprocess.run([script, "stop", folder], check=False)
