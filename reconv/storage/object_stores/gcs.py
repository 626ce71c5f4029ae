"""Google Cloud Storage through gcsfs: ranged reads of one generation."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

from reconv.storage.object_stores.errors import ChangedObjectError
from reconv.storage.object_stores.fsspec import TIMEOUT_S, VersionedStore, sorted_objects
from reconv.storage.object_stores.store import ObjectInfo, join_url

_GENERATION_HEADER = "X-Goog-Generation"


class GcsStore(VersionedStore):
    """The objects below gs://BUCKET/PREFIX. Credentials are those of google.auth; STORAGE_EMULATOR_HOST is another
    server. An object's version is its generation, which changes with its bytes alone."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self._bucket, _, prefix = self._path.partition("/")
        self._prefix = f"{prefix}/" if prefix else ""

    def open_file_system(self, scheme: str, options: Mapping[str, Any]) -> Any:
        import aiohttp

        # Not gcsfs.GCSFileSystem, which asks for the type of the bucket by gRPC before each request: without the right
        # to know it, each takes a minute.
        from gcsfs.core import GCSFileSystem

        logging.getLogger("gcsfs").addHandler(logging.NullHandler())  # our own lines say what fails
        timeout = aiohttp.ClientTimeout(sock_connect=TIMEOUT_S, sock_read=TIMEOUT_S)
        fs = GCSFileSystem(requests_timeout=timeout, **options)
        # Our own retries know whether a request may be repeated and say so.
        fs._request = partial(GCSFileSystem._request.__wrapped__, fs)
        return fs

    def list(self) -> list[ObjectInfo]:
        with self.errors(self.root):
            found = self.run(self._list, timeout_s=None)
        return sorted_objects(self._object_info(entry["name"][len(self._prefix) :], entry) for entry in found)

    async def _list(self) -> Sequence[dict[str, Any]]:
        fields = "nextPageToken,items(name,size,generation,updated)"
        found: list[dict[str, Any]] = []
        token = None
        while True:
            page = await self.fs._call(
                "GET", "b/{}/o", self._bucket, prefix=self._prefix, pageToken=token, fields=fields, json_out=True
            )
            found += page.get("items", [])
            token = page.get("nextPageToken")
            if not token:
                return found

    def info(self, name: str) -> ObjectInfo:
        with self.errors(join_url(self.root, name)):
            return self._object_info(name, self.run(self._info, name))

    async def _info(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = await self.fs._call(
            "GET", "b/{}/o/{}", self._bucket, self._prefix + name, json_out=True
        )
        return found

    async def read_version(self, item: ObjectInfo, start: int, length: int) -> bytes:
        url = join_url(self.root, item.name)
        try:
            headers, data = await self.fs._call(
                "GET",
                self.fs._location + "/download/storage/v1/b/{}/o/{}",
                self._bucket,
                self._prefix + item.name,
                headers={"Range": f"bytes={start}-{start + length - 1}"},
                alt="media",
                ifGenerationMatch=item.etag or None,
            )
        except FileExistsError as error:  # what gcsfs makes of a 412
            raise ChangedObjectError(url, f"it is no longer generation {item.etag}") from error
        if item.etag:
            # Google's own servers have refused by now; others may know no conditions.
            now = headers.get(_GENERATION_HEADER) or str((await self._info(item.name))["generation"])
            if now != item.etag:
                raise ChangedObjectError(url, f"it is now generation {now}, and was {item.etag}")
        return bytes(data)

    def delete(self, name: str) -> None:
        with self.errors(join_url(self.root, name)):
            self.run(self._delete, name)

    async def _delete(self, name: str) -> None:
        try:
            await self.fs._call("DELETE", "b/{}/o/{}", self._bucket, self._prefix + name)
        except FileNotFoundError:
            return

    @staticmethod
    def _object_info(name: str, entry: Mapping[str, Any]) -> ObjectInfo:
        modified_s = datetime.fromisoformat(entry["updated"]).timestamp() if entry.get("updated") else 0.0
        return ObjectInfo(name, int(entry["size"]), str(entry["generation"]), modified_s=modified_s)
