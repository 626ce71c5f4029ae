"""Chooses the network interface of gloo, NCCL and HCCL, by its name or by an address in its network."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct

from reconv.core.errors import UsageError

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")
_SIOCGIFADDR = 0x8915


def choose_nic(requested: str | None) -> None:
    """Make all backends use the interface of this name, or the one with an address in this network."""
    if requested is None:
        return
    name = find_nic(requested, interface_addresses())
    for variable in VARIABLES:
        os.environ[variable] = name


def find_nic(requested: str, interfaces: dict[str, str | None]) -> str:
    """The name of the requested interface, given the names and addresses of all interfaces."""
    try:
        network = ipaddress.ip_network(requested, strict=False) if "/" in requested or "." in requested else None
    except ValueError:
        network = None
    if network is None and requested in interfaces:
        return requested
    for name, address in interfaces.items():
        if network and address and ipaddress.ip_address(address) in network:
            return name
    listed = ", ".join(f"{name} ({address or 'no address'})" for name, address in interfaces.items())
    raise UsageError(f"--nic {requested}: no such network interface", why=f"this machine has {listed}")


def interface_addresses() -> dict[str, str | None]:
    """The interfaces of this machine and their IPv4 addresses."""
    addresses: dict[str, str | None] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no address
                addresses[name] = None
            else:
                addresses[name] = socket.inet_ntoa(reply[20:24])
    return addresses
