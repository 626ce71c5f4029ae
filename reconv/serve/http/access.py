"""Access to the server: bearer tokens, names of the host, and the headers that protect its pages."""

from __future__ import annotations

import hmac
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request

from reconv.core.errors import UsageError
from reconv.serve.limits import ApiError
from reconv.storage.bounded import read_bytes

# Without a token: probes have none, and the pages hold no data and ask for it.
OPEN_ROUTES = ("/", "/docs", "/openapi.json", "/static/{name}", "/health", "/v2/health/live", "/v2/health/ready")
_MAX_TOKEN_FILE_BYTES = 1 << 20
LOOPBACK = ("127.0.0.1", "localhost", "::1")
SECURITY_HEADERS = (
    (
        "Content-Security-Policy",
        "default-src 'self'; img-src 'self' data: blob:; media-src 'self' blob:; base-uri 'none'; form-action 'self'; "
        "frame-ancestors 'none'; object-src 'none'",
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Permissions-Policy", "camera=(self), microphone=(), geolocation=()"),
)


@dataclass(frozen=True, slots=True)
class Access:
    """The tokens that clients need, if any, and the host names they may use, if not all."""

    tokens: tuple[bytes, ...] = ()
    hosts: tuple[str, ...] = ()

    def check(self, request: Request, route: str) -> None:
        """Raise the error of a request that is not allowed."""
        if self.hosts and host_name(request.headers.get("host", "")) not in self.hosts:
            # A page of another site could otherwise reach a server on this machine by a name of its own.
            message = "this server listens on the loopback interface and accepts only the host localhost; see --host"
            raise ApiError(421, "wrong_host", message)
        if self.tokens and route not in OPEN_ROUTES and not self._has_token(request):
            message = "this server needs a token: Authorization: Bearer TOKEN"
            raise ApiError(401, "unauthorized", message, {"WWW-Authenticate": "Bearer"})

    def client_of(self, request: Request) -> str:
        """Whose request it is, for fairness: the token, else the address it comes from."""
        token = self._token_number(request)
        return peer_client(request.client.host if request.client else "") if token is None else f"token {token}"

    def _has_token(self, request: Request) -> bool:
        return self._token_number(request) is not None

    def _token_number(self, request: Request) -> int | None:
        """Number of the request's token; None: none of ours."""
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        given_bytes = given.strip().encode("utf-8", "surrogateescape")
        # All are compared, so that the time does not tell which one was close.
        matches = [hmac.compare_digest(token, given_bytes) for token in self.tokens]
        return matches.index(True) if scheme.lower() == "bearer" and any(matches) else None


def peer_client(address: str) -> str:
    """The client of an address: an IPv4 address, or the network of 64 bits that one IPv6 host may choose from."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ipaddress.IPv6Network((found, 64), strict=False))
    return str(found)


def host_name(header: str) -> str:
    """The name in a Host header, without its port."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.rpartition(":")[0] if ":" in header else header


def read_tokens(file: Path) -> tuple[bytes, ...]:
    """The tokens of a file, one per line."""
    try:
        content = read_bytes(file, _MAX_TOKEN_FILE_BYTES)
    except OSError as error:
        hint = "write the tokens into a regular file"
        raise UsageError(
            "the token file cannot be read", where=str(file), why=str(error.strerror), hint=hint
        ) from error
    tokens = tuple(line.strip() for line in content.splitlines() if line.strip())
    if not tokens:
        hint = f"write one: openssl rand -hex 32 > {file}"
        raise UsageError("the token file has no token", where=str(file), why="all its lines are empty", hint=hint)
    return tokens
