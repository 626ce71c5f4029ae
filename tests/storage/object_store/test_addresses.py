"""Addresses of stores and names of objects: what is refused, and how."""

from __future__ import annotations

from pathlib import Path

import pytest

from reconv.core.errors import ResourceError, UsageError
from reconv.storage.object_stores.fsspec import FsspecStore
from reconv.storage.object_stores.store import as_url, check_name, is_url, local_folder, open_object_store, quoted_url


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("s3://", "no bucket"),
        ("s3:", "no bucket"),
        ("s3:///path", "no bucket"),
        ("az:// data/path", "no bucket"),
        ("gs://my bucket/path", "no bucket"),
        ("s3://bucket/a/../../b", "'..'"),
        ("s3://bucket/./a", "'.'"),
        ("s3://bucket//a", "empty"),
        ("s3://bucket/a\nb", "control character"),
        ("s3://bucket/" + "a" * 2000, "1024 bytes"),
        ("https://", "no host"),
        ("https:///data", "no host"),
        ("https://host/data#part", "'#'"),
    ],
)
def test_addresses_that_name_nothing_or_something_else_are_refused(url: str, why: str) -> None:
    assert is_url(url)
    with pytest.raises(UsageError) as error:
        open_object_store(url)
    assert why in error.value.why
    assert error.value.hint
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    "url", ["https://me:secret@host/data", "https://host/data?sig=secret", "az://c/data?sig=secret"]
)
def test_secrets_in_an_address_are_refused_and_not_printed(url: str) -> None:
    with pytest.raises(UsageError) as error:
        as_url(url)
    assert "secret" not in str(error.value)


def test_ordinary_addresses_are_taken_as_they_are() -> None:
    for url in ("s3://bucket", "s3://my.bucket-1/a b/ü=1", "gs://under_score/x", "az://$web/x", "https://[::1]:8443/d"):
        assert as_url(url) == as_url(f"{url}/") == url
    arn = "s3://arn:aws:s3:us-west-2:123456789012:accesspoint/mine/data"
    assert as_url(arn) == arn
    assert local_folder("s3://bucket/a/b", Path("runs")) == Path("runs/s3/bucket/a/b")
    assert quoted_url("https://h/a b%20c", "d e#f?.jpg") == "https://h/a%20b%20c/d%20e%23f%3F.jpg"


@pytest.mark.parametrize("name", ["", "/a", "a/", "a//b", "../a", "a/..", "a/./b", "a\0b", "ü" * 128, "a/" * 600 + "b"])
def test_names_that_cannot_be_files_below_a_folder_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="name that cannot be read"):
        check_name("s3://bucket", name)


def test_other_names_are_files() -> None:
    for name in ("a", "a b/c#d?.jpg", "a\\b", "line\nbreak", "..a/b..", "ü" * 127, "\udcff.jpg"):
        check_name("s3://bucket", name)


class _StoreWithoutCredentials(FsspecStore):
    def open_file_system(self, scheme: str, options: object) -> object:
        raise ValueError("unable to connect\nto the account")


def test_a_package_that_finds_no_credentials_is_no_bug_of_ours() -> None:
    with pytest.raises(ResourceError) as error:
        _StoreWithoutCredentials("memory://x")
    assert error.value.why == "unable to connect"
    assert "credentials" in error.value.hint
