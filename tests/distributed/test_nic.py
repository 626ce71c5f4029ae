"""The network interface that --nic selects."""

from __future__ import annotations

import os

import pytest

from reconv.core.errors import UsageError
from reconv.distributed.nic import VARIABLES, choose_nic, find_nic, interface_addresses

INTERFACES = {"lo": "127.0.0.1", "eth0": "10.1.2.3", "ib0": "192.168.7.9", "down0": None}


@pytest.mark.parametrize(
    ("requested", "name"), [("ib0", "ib0"), ("10.1.0.0/16", "eth0"), ("192.168.7.9", "ib0"), ("down0", "down0")]
)
def test_an_interface_is_found_by_name_or_network(requested: str, name: str) -> None:
    assert find_nic(requested, INTERFACES) == name


@pytest.mark.parametrize("requested", ["eth9", "10.9.0.0/16", "not/one"])
def test_an_unknown_interface_error_lists_the_existing_ones(requested: str) -> None:
    with pytest.raises(UsageError, match="no such network interface") as exc_info:
        find_nic(requested, INTERFACES)
    assert "ib0 (192.168.7.9)" in exc_info.value.why and "down0 (no address)" in exc_info.value.why


def test_all_backends_use_the_chosen_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    loopback = next(name for name, address in interface_addresses().items() if address == "127.0.0.1")
    choose_nic("127.0.0.0/8")
    assert [os.environ[variable] for variable in VARIABLES] == [loopback] * 3
