"""Which network processes talk over, by its name or by the addresses in it.

Owns the variables that gloo, nccl and hccl read. Refuses to know who talks. Invariant: what a person names is found on
this machine, or refused with what there is; nothing is chosen for a person who names nothing.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct

from reconv.errors import UsageError

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")
_GET_ADDRESS = 0x8915  # SIOCGIFADDR


def choose_nic(wish: str | None) -> None:
    """Have all three libraries use the interface of this name, or the one with an address in this network."""
    if wish is None:
        return
    name = find_nic(wish, addresses())
    for variable in VARIABLES:
        os.environ[variable] = name


def find_nic(wish: str, present: dict[str, str | None]) -> str:
    """The name of the interface a person means, out of names and addresses."""
    try:
        network = ipaddress.ip_network(wish, strict=False) if "/" in wish or "." in wish else None
    except ValueError:
        network = None
    if network is None and wish in present:
        return wish
    found = [
        name for name, address in present.items() if network and address and ipaddress.ip_address(address) in network
    ]
    if found:
        return found[0]
    listed = ", ".join(f"{name} ({address or 'no address'})" for name, address in present.items())
    raise UsageError(f"--nic {wish}: there is no such network here", why=f"this machine has {listed}")


def addresses() -> dict[str, str | None]:
    """The interfaces of this machine with their IPv4 addresses."""
    found: dict[str, str | None] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none
                found[name] = None
            else:
                found[name] = socket.inet_ntoa(answer[20:24])
    return found
