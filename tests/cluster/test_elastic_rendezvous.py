"""Nodes that agree on the rounds of an elastic run, over a real store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace

import pytest
from torch._C._distributed_c10d import PrefixStore, TCPStore

from reconv.cluster import elastic as module
from reconv.cluster.elastic import Node, Rendezvous, Roster
from reconv.cluster.launch import ElasticConfig
from reconv.cluster.rounds import assign_ranks
from reconv.core.errors import DataError, ExitCode, RemoteRankError, UsageError
from reconv.distributed.rank_store import Signer, serve_rendezvous

LIMIT_S = 30


def at_most(limit: int) -> Callable[[int], int]:
    return lambda number: min(number, limit)


ANY = at_most(1000)


JOINED: list[Rendezvous] = []


@pytest.fixture(autouse=True)
def _fast_beats(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "BEAT_S", 0.05)
    monkeypatch.setattr(module, "DEAD_S", 2.0)
    yield
    while JOINED:
        kill(JOINED.pop())


@pytest.fixture
def store() -> TCPStore:
    return serve_rendezvous("127.0.0.1", 0)


def join(store: TCPStore, nodes: str = "1:4", secret: str = "secret", run_id: str = "", job: str = "job") -> Rendezvous:
    config = ElasticConfig.parse(nodes, f"127.0.0.1:{store.port}", 2)
    JOINED.append(Rendezvous(config, secret, job, lambda: run_id, settle_s=(0.2, 0.2)))
    return JOINED[-1]


def kill(node: Rendezvous) -> None:
    """From now on the node's record does not change."""
    node._renewal.abandon()


def rosters(nodes: list[Rendezvous], usable: Callable[[int], int] = ANY) -> list[Roster]:
    """The next roster of each node."""
    found: dict[int, Roster] = {}
    deadline_s = time.monotonic() + LIMIT_S
    while len(found) < len(nodes):
        assert time.monotonic() < deadline_s, [node.waits_for() for node in nodes]
        for number, node in enumerate(nodes):
            roster = None if number in found else node.poll_roster(usable)
            if roster is not None:
                found[number] = roster
        time.sleep(0.01)
    return [found[number] for number in range(len(nodes))]


def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_ranks_are_assigned_in_order_up_to_what_the_batch_allows() -> None:
    assert assign_ranks([2, 2, 2], ANY) == (2, 2, 2)
    assert assign_ranks([2, 2, 2], at_most(5)) == (2, 2, 1)
    assert assign_ranks([2, 2, 2], at_most(3)) == (2, 1, 0)


def test_all_nodes_get_the_same_roster_and_the_oldest_has_rank_0(store: TCPStore) -> None:
    nodes = [join(store), join(store), join(store)]
    found = rosters(nodes, at_most(5))
    assert found[0] == found[1] == found[2]
    assert [node.id for node in found[0].nodes] == [1, 2, 3]
    assert (found[0].num_ranks, found[0].world_size, found[0].round) == ((2, 2, 1), 5, 1)
    assert [found[0].first_rank(number) for number in (1, 2, 3)] == [0, 2, 4]
    assert found[0].master_port > 0


def test_a_lost_node_stops_the_round_and_is_not_in_the_next(store: TCPStore) -> None:
    nodes = [join(store), join(store), join(store)]
    (first, *_) = rosters(nodes)
    assert nodes[1].why_stop(first, ANY) == ""
    kill(nodes[0])
    until(lambda: "is lost" in nodes[1].why_stop(first, ANY))
    for node in nodes[1:]:
        node.set_ready()
    (second, _) = rosters(nodes[1:])
    assert ([node.id for node in second.nodes], second.round) == ([2, 3], 2)


def test_a_node_that_joins_stops_the_round_unless_it_would_be_idle(store: TCPStore) -> None:
    first = join(store)
    (roster,) = rosters([first])
    assert (roster.world_size, roster.master_port) == (2, 0)
    second = join(store)
    until(lambda: first.why_stop(roster, ANY) != "")
    assert "joins" in first.why_stop(roster, ANY)
    assert first.why_stop(roster, at_most(3)) != ""
    assert first.why_stop(roster, at_most(2)) == ""  # two ranks are all that can share the batch
    assert second.poll_roster(ANY) is None and second.waits_for() is None
    first.set_ready()
    assert rosters([first, second])[1].world_size == 4


def test_of_two_nodes_with_one_number_the_one_that_trains_keeps_it(store: TCPStore) -> None:
    first = join(store)
    (roster,) = rosters([first])
    second = join(store)
    with second._lock:  # the number that a store gives which was started again, while `first` is not back yet
        second.node = replace(second.node, id=first.node.id)
    until(lambda: second.node.id != first.node.id)
    assert first.node.id == 1 and second.poll_roster(ANY) is None
    until(lambda: "joins" in first.why_stop(roster, ANY))
    first.set_ready()
    assert [found.num_ranks for found in rosters([first, second])] == [(2, 2), (2, 2)]


def test_nodes_of_another_version_are_not_met(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    first = join(store)
    monkeypatch.setattr(module, "__version__", "99.0")
    second = join(store)
    assert (first.node.id, second.node.id) == (1, 1)
    assert [[node.id for node in roster.nodes] for roster in rosters([first, second])] == [[1], [1]]


def test_a_node_beyond_the_largest_number_waits_and_replaces_one_that_leaves(store: TCPStore) -> None:
    nodes = [join(store, "1:2"), join(store, "1:2")]
    (roster, _) = rosters(nodes)
    spare = join(store, "1:2")
    time.sleep(0.6)
    assert nodes[0].why_stop(roster, ANY) == "" and spare.poll_roster(ANY) is None
    nodes[1].leave()
    until(lambda: "leaves" in nodes[0].why_stop(roster, ANY))
    nodes[0].set_ready()
    assert [node.id for node in rosters([nodes[0], spare])[1].nodes] == [1, 3]


def test_the_others_go_on_without_a_node_that_leaves(store: TCPStore) -> None:
    nodes = [join(store), join(store), join(store)]
    rosters(nodes)
    nodes[1].leave()
    for node in (nodes[0], nodes[2]):
        node.set_ready()
    assert [node.id for node in rosters([nodes[0], nodes[2]])[0].nodes] == [1, 3]


def test_fewer_nodes_than_the_smallest_number_are_waited_for(store: TCPStore) -> None:
    first = join(store, "2:4")
    until(lambda: first.waits_for() is not None)
    assert first.waits_for() == "1 more nodes (1 of at least 2)"
    assert rosters([first, join(store, "2:4")])[0].world_size == 4


def test_a_node_that_sees_another_run_directory_is_left_out(store: TCPStore) -> None:
    nodes = [join(store, run_id="abc"), join(store, run_id="")]
    (roster,) = rosters(nodes[:1])
    assert [node.id for node in roster.nodes] == [1]
    until(lambda: nodes[1].waits_for() is not None)
    assert "to appear in --out (run abc there, none here)" in (nodes[1].waits_for() or "")
    assert nodes[0].why_stop(roster, ANY) == ""


def test_what_a_stranger_writes_is_ignored(store: TCPStore) -> None:
    stranger = join(store, secret="a guess")
    first = join(store)
    prefixed = PrefixStore(first.prefix, store)
    forged = Roster(1, (Node(9, "x", "192.0.2.1", 1),), (1,))
    prefixed.set("round/1", Signer("a guess").sign("round/1", asdict(forged)))
    prefixed.set("node/7", b"\x80\x04not json")
    (roster,) = rosters([first])
    assert [node.id for node in roster.nodes] == [first.node.id]
    prefixed.set(f"ended/{roster.round}", Signer("a guess").sign(f"ended/{roster.round}", {"error": None}))
    stranger.end(None)
    time.sleep(0.3)
    assert first.ended() is False


def test_the_end_of_one_run_cannot_be_repeated_as_that_of_another(store: TCPStore) -> None:
    first, other = join(store), join(store, job="another job")
    assert [roster.round for roster in (*rosters([first]), *rosters([other]))] == [1, 1]
    other.end(None)
    until(other.ended)
    PrefixStore(first.prefix, store).set("ended/1", PrefixStore(other.prefix, store).get("ended/1"))
    time.sleep(0.3)
    assert first.ended() is False


def test_the_end_of_a_run_reaches_nodes_that_wait(store: TCPStore) -> None:
    first, spare = join(store, "1:1"), join(store, "1:1")
    rosters([first])
    assert spare.ended() is False
    first.end(DataError("no such image", where="here"))
    until(spare.ended)
    error = spare.ended()
    assert isinstance(error, RemoteRankError) and (error.code, error.what) == (ExitCode.DATA, "no such image")
    first.leave()
    spare.leave()
    later = join(store, "1:1")  # the next run over the same rendezvous
    time.sleep(0.2)
    assert later.ended() is False
    assert rosters([later])[0].round == 2


@pytest.mark.slow
def test_a_rendezvous_that_starts_anew_is_joined_again() -> None:
    store = serve_rendezvous("127.0.0.1", 0)
    port = store.port
    first = join(store)
    (roster,) = rosters([first])
    del store
    until(lambda: first.silent_s() > 2.0)
    assert first.why_stop(roster, ANY) == ""  # training does not need it
    store = serve_rendezvous("127.0.0.1", port)
    until(lambda: first.silent_s() < 0.5)
    second = join(store)
    until(lambda: "joins" in first.why_stop(roster, ANY))
    first.set_ready()
    assert [found.world_size for found in rosters([first, second])] == [4, 4]


def test_an_address_of_another_machine_cannot_be_served() -> None:
    with pytest.raises(UsageError, match="the rendezvous cannot listen"):
        serve_rendezvous("192.0.2.1", 29400)  # an address for documentation


def test_a_count_that_a_stranger_has_raised_does_not_stop_the_nodes(store: TCPStore) -> None:
    first, second = join(store, "2:4"), join(store, "2:4")
    PrefixStore(first.prefix, store).add("count", 10**8)
    assert [roster.world_size for roster in rosters([first, second])] == [4, 4]
    with pytest.raises(UsageError, match="100,000,002 nodes have joined"):
        join(store)
