"""The options of elastic runs."""

from __future__ import annotations

import pytest

from reconv.cluster.launch import ElasticConfig, parse_endpoint
from reconv.core.errors import UsageError


def test_nodes_and_rendezvous_are_parsed() -> None:
    assert ElasticConfig.parse("1:4", "node1:1234", 8) == ElasticConfig(1, 4, 8, ("node1", 1234))
    assert ElasticConfig.parse("2", "10.0.0.1", 1) == ElasticConfig(2, 2, 1, ("10.0.0.1", 29400))
    assert ElasticConfig.parse("1:1", None, 2) == ElasticConfig(1, 1, 2, None)


@pytest.mark.parametrize("nodes", ["", "4:1", "0:2", "1:", ":4", "1:4:8", "a:b", "-1:2", "1:99999999", "١:٤"])
def test_other_numbers_of_nodes_are_refused(nodes: str) -> None:
    with pytest.raises(UsageError, match="smallest and the largest number of nodes") as error:
        ElasticConfig.parse(nodes, None, 1)
    assert error.value.hint == "for example --elastic 1:4"


def test_one_machine_alone_cannot_wait_for_others() -> None:
    with pytest.raises(UsageError, match="waits for 2 nodes") as error:
        ElasticConfig.parse("2:4", None, 1)
    assert "reconv rendezvous HOST:PORT" in error.value.hint


@pytest.mark.parametrize("text", ["", ":29400", "host:0", "host:65536", "host:port", "a b:1", "::1:29400", "[::1"])
def test_other_addresses_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not the address of a rendezvous"):
        parse_endpoint(text)


def test_ipv6_addresses_have_brackets() -> None:
    assert parse_endpoint("[::1]:29401") == ("::1", 29401)
