"""Limits on what clients may send and how long they may take, and the errors they get."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from starlette.requests import ClientDisconnect, Request

from reconv.serve.fairness import Shares

MIB = 1 << 20
_MAX_DIGITS = 15  # of a length; Python refuses to convert very long numbers
_DISCARD_S = 2.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one client, and of all clients together."""

    max_body_bytes: int = 32 * MIB  # of one request
    max_json_bytes: int = 8 * MIB  # of the JSON of one request
    max_buffered_bytes: int = 256 * MIB  # of the bodies of all requests, until they are answered
    max_images: int = 64  # of one request
    max_pixels: int = 50_000_000  # of one image
    max_decoding_bytes: int = 1024 * MIB  # of all images that are being decoded
    max_queue: int = 256  # images of one model that are being read, queued or computed
    max_connections: int = 512
    header_timeout_s: float = 10.0  # from the connection to the end of the request's header
    body_timeout_s: float = 30.0  # from the header to the end of the body
    request_timeout_s: float = 30.0  # from the end of the body to the prediction
    keep_alive_s: float = 30.0  # an idle connection
    drain_timeout_s: float = 30.0  # from SIGTERM to the end of the process

    @property
    def max_request_pixels(self) -> int:
        """Pixels of all images of one request."""
        return 4 * self.max_pixels


class ApiError(Exception):
    """An error that a client gets: a status, a code for programs and a message for people."""

    def __init__(self, status: int, code: str, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message
        self.headers = headers or {}


def overloaded(message: str, retry_after_s: float = 1.0) -> ApiError:
    """The error of a request that there is no room for now."""
    return ApiError(503, "overloaded", message, {"Retry-After": str(max(1, round(retry_after_s)))})


@dataclass(slots=True)
class BodyReader:
    """Reads the bodies of requests: none beyond its limit, and all together within one."""

    limits: Limits
    buffered: Shares = field(init=False)  # bytes of all bodies in memory

    def __post_init__(self) -> None:
        self.buffered = Shares(self.limits.max_buffered_bytes)

    async def read(self, request: Request, client: str, limit: int) -> bytearray:
        """The body of a request of at most `limit` bytes; the caller calls `release` with its length."""
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and (len(declared) > _MAX_DIGITS or int(declared) > limit):
            raise _too_large(limit)
        body = bytearray()
        try:
            async with asyncio.timeout(self.limits.body_timeout_s):
                async for chunk in request.stream():
                    if len(body) + len(chunk) > limit:
                        raise _too_large(limit)
                    if not self.buffered.has_room(client, len(chunk)):
                        raise overloaded("too many request bodies are in memory")
                    body += chunk
                    self.buffered.take(client, len(chunk))
        except TimeoutError as error:
            self.release(client, len(body))
            message = f"the body did not arrive within {self.limits.body_timeout_s:g} s"
            raise ApiError(408, "body_timeout", message, {"Connection": "close"}) from error
        except (ApiError, ClientDisconnect, asyncio.CancelledError):
            self.release(client, len(body))
            raise
        return body

    async def discard(self, request: Request) -> bool:
        """Read and drop what is left of a refused body, so that the client gets the response; False: it is too much."""
        if "expect" in request.headers:  # the client waits for leave to send it
            return False
        num_bytes = 0
        try:
            async with asyncio.timeout(_DISCARD_S):
                async for chunk in request.stream():
                    num_bytes += len(chunk)
                    if num_bytes > self.limits.max_body_bytes:
                        return False
        except RuntimeError:  # it was read to its end before
            return True
        except (TimeoutError, ClientDisconnect):
            return False
        return True

    def release(self, client: str, num_bytes: int) -> None:
        """Say that a body and its images are not in memory any more."""
        self.buffered.give(client, num_bytes)


def _too_large(limit: int) -> ApiError:
    message = f"the body is larger than {limit:,} bytes"
    # The rest of the body is not read, so the connection cannot be used again.
    return ApiError(413, "body_too_large", message, {"Connection": "close"})
