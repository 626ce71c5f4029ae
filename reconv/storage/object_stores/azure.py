"""Azure Blob Storage: ranged reads of one version by If-Match. adlfs finds the credentials and makes the client."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reconv.storage.object_stores.errors import MissingObjectError
from reconv.storage.object_stores.fsspec import TIMEOUT_S, VersionedStore, sorted_objects
from reconv.storage.object_stores.store import ObjectInfo, join_url

_TIMEOUTS = {"connection_timeout": TIMEOUT_S, "read_timeout": TIMEOUT_S}


class AzureStore(VersionedStore):
    """The blobs below az://CONTAINER/PREFIX, of the account in AZURE_STORAGE_ACCOUNT_NAME or
    AZURE_STORAGE_CONNECTION_STRING. Requests go to the client itself: adlfs takes a part of some names for a version,
    and cannot ask for one."""

    options: Mapping[str, Any] = {"assume_container_exists": True}

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self._container, _, prefix = root.partition("://")[2].partition("/")
        self._prefix = f"{prefix}/" if prefix else ""
        logging.getLogger("azure").addHandler(logging.NullHandler())  # our own lines say what fails
        # Our own retries know whether a request may be repeated and say so.
        self.fs.service_client._config.retry_policy.total_retries = 0

    def list(self) -> list[ObjectInfo]:
        with self.errors(self.root):
            return sorted_objects(self.run(self._list, timeout_s=None))

    async def _list(self) -> Sequence[ObjectInfo]:
        async with self.fs.service_client.get_container_client(self._container) as client:
            blobs = client.list_blobs(name_starts_with=self._prefix, include=["metadata"])
            return [self._object_info(blob) async for blob in blobs if not _is_folder(blob)]

    def info(self, name: str) -> ObjectInfo:
        url = join_url(self.root, name)
        with self.errors(url):
            blob = self.run(self._info, name)
            if _is_folder(blob):
                raise MissingObjectError(url, "there is no such object")
            return self._object_info(blob)

    async def _info(self, name: str) -> Any:
        async with self._blob_client(name) as client:
            return await client.get_blob_properties(**_TIMEOUTS)

    async def read_version(self, item: ObjectInfo, start: int, length: int) -> bytes:
        from azure.core import MatchConditions

        condition = {"etag": item.etag, "match_condition": MatchConditions.IfNotModified} if item.etag else {}
        async with self._blob_client(item.name) as client:
            stream = await client.download_blob(
                offset=start, length=length, max_concurrency=1, **condition, **_TIMEOUTS
            )
            data: bytes = await stream.readall()
        return data

    def write(self, name: str, content: bytes | Path) -> None:
        with self.errors(join_url(self.root, name)):
            self.run(self._write, name, content, timeout_s=None)

    async def _write(self, name: str, content: bytes | Path) -> None:
        async with self._blob_client(name) as client:
            if isinstance(content, bytes):
                await client.upload_blob(content, overwrite=True, **_TIMEOUTS)
                return
            with open(content, "rb") as file:
                await client.upload_blob(file, overwrite=True, max_concurrency=4, **_TIMEOUTS)

    def delete(self, name: str) -> None:
        with self.errors(join_url(self.root, name)):
            self.run(self._delete, name)

    async def _delete(self, name: str) -> None:
        from azure.core.exceptions import ResourceNotFoundError

        async with self._blob_client(name) as client:
            try:
                await client.delete_blob(**_TIMEOUTS)
            except ResourceNotFoundError:
                return

    def _blob_client(self, name: str) -> Any:
        return self.fs.service_client.get_blob_client(self._container, self._prefix + name)

    def _object_info(self, blob: Any) -> ObjectInfo:
        # A list has no quotation marks around ETags; the properties of a blob have them.
        etag = '"{}"'.format(blob.etag.strip('"'))
        return ObjectInfo(blob.name[len(self._prefix) :], blob.size, etag, modified_s=blob.last_modified.timestamp())


def _is_folder(blob: Any) -> bool:
    """True if a blob only marks a folder, as in accounts with a hierarchical namespace."""
    metadata = {key.lower(): value for key, value in (blob.metadata or {}).items()}
    return "true" in (metadata.get("hdi_isfolder"), metadata.get("is_directory"))
