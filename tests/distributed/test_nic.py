"""Which network a person means."""

from __future__ import annotations

import os

import pytest

from reconv.distributed.nic import VARIABLES, addresses, choose_nic, find_nic
from reconv.errors import UsageError

PRESENT = {"lo": "127.0.0.1", "eth0": "10.1.2.3", "ib0": "192.168.7.9", "down0": None}


@pytest.mark.parametrize(
    ("wish", "name"), [("ib0", "ib0"), ("10.1.0.0/16", "eth0"), ("192.168.7.9", "ib0"), ("down0", "down0")]
)
def test_a_network_is_found_by_name_or_by_address(wish: str, name: str) -> None:
    assert find_nic(wish, PRESENT) == name


@pytest.mark.parametrize("wish", ["eth9", "10.9.0.0/16", "not/one"])
def test_a_network_that_is_not_here_is_refused_with_those_that_are(wish: str) -> None:
    with pytest.raises(UsageError, match="no such network") as caught:
        find_nic(wish, PRESENT)
    assert "ib0 (192.168.7.9)" in caught.value.why and "down0 (no address)" in caught.value.why


def test_the_loopback_of_this_machine_is_chosen_for_all_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    loopback = next(name for name, address in addresses().items() if address == "127.0.0.1")
    choose_nic("127.0.0.0/8")
    assert [os.environ[variable] for variable in VARIABLES] == [loopback] * 3
