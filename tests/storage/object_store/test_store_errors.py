"""Errors of stores: which may pass, and which say that something is wrong."""

from __future__ import annotations

import json
import pickle

import pytest

from reconv.storage.object_stores.errors import (
    AccessDeniedError,
    ChangedObjectError,
    MissingObjectError,
    StoreError,
    StoreUnavailableError,
)
from reconv.storage.object_stores.fsspec import store_error
from reconv.storage.object_stores.store import as_url, is_url


class ClientError(Exception):
    """Like botocore's."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.response = {"ResponseMetadata": {"HTTPStatusCode": status}}


class ContentLengthError(Exception):
    """Like aiohttp's for a body that was cut, which has a status that no server has sent."""

    status = 400


class NoCredentialsError(Exception):
    """Like botocore's."""


class RequestException(OSError):
    """Like that of requests."""


class ProxyError(RequestException):
    """What gcsfs makes of a 502."""


def _raised_from(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ClientError(503), StoreUnavailableError),
        (_raised_from(OSError(16, "busy"), ClientError(503)), StoreUnavailableError),
        (_raised_from(Exception("payload"), ContentLengthError()), StoreUnavailableError),
        (ConnectionResetError("reset"), StoreUnavailableError),
        (TimeoutError(), StoreUnavailableError),
        (_raised_from(OSError(22, "precondition"), ClientError(412)), ChangedObjectError),
        (FileNotFoundError("x"), MissingObjectError),
        (ClientError(403), AccessDeniedError),
        (NoCredentialsError("none"), AccessDeniedError),
        (OSError("Forbidden: https://x\nme@x.com does not have storage.objects.get access"), AccessDeniedError),
        (ProxyError(), StoreUnavailableError),
        (json.JSONDecodeError("Unterminated string", "", 0), StoreUnavailableError),
        (ClientError(501), StoreError),
        (ClientError(400), StoreError),
        (ValueError("strange"), StoreError),
    ],
)
def test_an_error_of_a_package_gets_its_kind(error: Exception, kind: type[StoreError]) -> None:
    found = store_error("s3://bucket/a", error)
    assert type(found) is kind
    assert found.filename == "s3://bucket/a"
    assert found.strerror
    assert "\n" not in found.strerror
    assert found.hint
    assert str(pickle.loads(pickle.dumps(found))) == str(found)


def test_addresses_are_recognized_also_after_a_path_has_cut_a_slash() -> None:
    assert as_url("s3:/bucket/a/") == as_url("s3://bucket/a") == "s3://bucket/a"
    assert as_url("file:/tmp/a") == as_url("file:///tmp/a") == "file:///tmp/a"
    assert not any(map(is_url, ("/data", "data", "C:/x", "torchvision:resnet50", "runs/s3/bucket", "ftp://x")))
