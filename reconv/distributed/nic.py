"""Network interfaces of this machine: that of gloo, NCCL and HCCL, by its name or by an address in its network."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct

from reconv.core.errors import UsageError

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")
_SIOCGIFADDR = 0x8915


def choose_nic(requested: str) -> None:
    """Make all backends use the interface of this name, or the one with an address in this network."""
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


def nic_variables(address: str) -> dict[str, str]:
    """The interface of an address, for gloo, NCCL and HCCL, where the user has chosen none."""
    name = next((name for name, found in interface_addresses().items() if found == address), None)
    return {} if name is None else {variable: os.environ.get(variable, name) for variable in VARIABLES}


def address_towards(family: int, host: str, port: int) -> str:
    """The address of this machine in the network of another one; nothing is sent."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def free_port(address: str) -> int:
    """A port of this machine that is free now."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
