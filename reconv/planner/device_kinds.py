"""Devices that `reconv plan` knows, and the links within and between their machines.

Peaks, memory and links are the vendor's specifications; speeds relative to an H200 and prices are what somebody
measured or charged, with the source.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from reconv.core.errors import UsageError
from reconv.planner.tables import read_table
from reconv.recipe.presets import nearest

_GBPS = 1e9 / 8  # bytes per second
_LATENCY_S = {"infiniband": 5e-6, "ethernet": 25e-6}  # of one message between two machines, through the library
_MAX_GBPS = 100_000
_NETWORK = re.compile(r"(?:([\d.]+)\s*g(?:b|bit)?(?:ps|/s))?[\s,+-]*(infiniband|ib|ethernet|roce)?")


@dataclass(frozen=True, slots=True)
class Link:
    """A link of one device: bandwidth in one direction, and the latency of a message."""

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """One kind of accelerator and the machines it is usually in."""

    name: str
    description: str
    peak_tflops: float | None  # half precision, dense; None: not published
    memory_gb_per_s: float
    devices_per_node: int
    cores_per_node: int  # physical cores
    link: Link  # to the other devices of the machine
    network: Link  # to other machines
    relative_speed: float | None  # of a training step, an H200 being 1, with the same software; None: not known
    speed_source: str
    price_per_hour: float | None = None  # in US dollars, of one device
    price_source: str = ""
    overlaps: bool = True  # gradients are reduced beside the backward pass


def _number(text: str) -> float | None:
    return float(text) if text else None


def _read_kind(row: Mapping[str, str]) -> DeviceKind:
    return DeviceKind(
        row["name"],
        row["description"],
        _number(row["peak_tflops"]),
        float(row["memory_gb_per_s"]),
        int(row["devices_per_node"]),
        int(row["cores_per_node"]),
        Link(1e9 * float(row["link_gb_per_s"]), 1e-6 * float(row["link_latency_us"])),
        Link(_GBPS * float(row["network_gbps"]), _LATENCY_S[row["network_type"]]),
        _number(row["relative_speed"]),
        row["speed_source"],
        _number(row["price_per_hour"]),
        row["price_source"],
        row["overlaps"] == "yes",
    )


DEVICE_KINDS = {row["name"]: _read_kind(row) for row in read_table("device_kinds.csv")}
_ALIASES = {"a100-80gb": "a100", "v100-16gb": "v100", "v100-32gb": "v100"}


def find_device_kind(name: str) -> DeviceKind:
    """The kind of this name, in any case."""
    key = name.strip().lower()
    key = _ALIASES.get(key, key)
    if key not in DEVICE_KINDS:
        close = nearest(key, list(DEVICE_KINDS))
        raise UsageError(
            f"unknown device kind {name!r}",
            why=f"the known ones are {', '.join(DEVICE_KINDS)}",
            hint=f"--device-kind {close or 'h100'}",
        )
    return DEVICE_KINDS[key]


def with_network(kind: DeviceKind, text: str | None) -> DeviceKind:
    """The kind with another network between machines, such as `400gbps`, `100gbps-ethernet` or `infiniband`.

    The rate is that of one device. Without a rate or a type, the usual one of the device stays.
    """
    if text is None:
        return kind
    match = _NETWORK.fullmatch(text.strip().lower())
    if match is None or not any(match.groups()) or not _is_rate(match[1]):
        raise UsageError(
            f"--network {text!r} is not a network",
            why="it is the rate of one device in Gbit/s, the type (infiniband or ethernet), or both",
            hint="for example --network 400gbps or --network 100gbps-ethernet",
        )
    bytes_per_s = kind.network.bytes_per_s if match[1] is None else float(match[1]) * _GBPS
    latency_s = kind.network.latency_s
    if match[2] is not None:
        latency_s = _LATENCY_S["infiniband" if match[2] in ("infiniband", "ib", "roce") else "ethernet"]
    return replace(kind, network=Link(bytes_per_s, latency_s))


def _is_rate(text: str | None) -> bool:
    if text is None:
        return True
    return re.fullmatch(r"\d+(\.\d+)?", text) is not None and 0 < float(text) <= _MAX_GBPS
