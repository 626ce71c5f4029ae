"""S3 and what speaks its protocol, through s3fs: ranged reads of one version by If-Match."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reconv.storage.object_stores.fsspec import TIMEOUT_S, VersionedStore
from reconv.storage.object_stores.store import ObjectInfo

MAX_CONNECTIONS = 64


class S3Store(VersionedStore):
    """The objects below s3://BUCKET/PREFIX. Credentials and endpoint are those of botocore: AWS_ACCESS_KEY_ID,
    AWS_ENDPOINT_URL, a profile, or the role of the machine."""

    options: Mapping[str, Any] = {
        "config_kwargs": {
            # Our own retries know whether a request may be repeated and say so.
            "retries": {"total_max_attempts": 1},
            "connect_timeout": TIMEOUT_S,
            "read_timeout": TIMEOUT_S,
            "max_pool_connections": MAX_CONNECTIONS,
            # Other servers than Amazon's reject the checksums that botocore adds by default since 1.36.
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
        },
    }

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.fs.retries = 1
        # Of the root alone: s3fs takes what follows ?versionId= in a name for a version.
        self._bucket, prefix, _ = self.fs.split_path(self._path)
        self._prefix = f"{prefix}/" if prefix else ""

    async def read_version(self, item: ObjectInfo, start: int, length: int) -> bytes:
        version = {"IfMatch": item.etag} if item.etag else {}
        response = await self.fs._call_s3(
            "get_object",
            Bucket=self._bucket,
            Key=self._prefix + item.name,
            Range=f"bytes={start}-{start + length - 1}",
            **version,
        )
        try:
            data: bytes = await response["Body"].read()
        finally:
            response["Body"].close()
        return data
