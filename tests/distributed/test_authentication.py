"""Ranks prove the secret of the run before any object is read; an impostor is refused on 127.0.0.1."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import start
from torch._C._distributed_c10d import PrefixStore

from reconv.core.errors import RankLostError, ReconvError, UsageError
from reconv.distributed import authentication, rank_store
from reconv.distributed.environment import SECRET_VARIABLE, read_launch_env
from reconv.distributed.liveness import ConnectingRanks
from reconv.distributed.process_group import open_process_group
from reconv.distributed.torch_group import DistributedProcessGroup
from reconv.recipe.loader import load
from reconv.trainer.options import RunOptions
from reconv.trainer.prepare import check_code_of_rank0


class _RunsCode:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("executed"),)


def in_roles(*roles: Callable[[], Any]) -> list[Any]:
    """What each rank returns, or its error; rank i plays role i."""
    started = start(len(roles), _play, roles)
    try:
        results = []
        for process, pipe in started:
            assert pipe.poll(60), "a rank is stuck"
            has_succeeded, value = pipe.recv()
            assert has_succeeded, value
            results.append(value)
            process.join(20)
        return results
    finally:
        for process, _ in started:
            process.kill()


def _play(roles: tuple[Callable[[], Any], ...]) -> Any:
    try:
        return roles[int(os.environ["RANK"])]()
    except ReconvError as error:
        return error


def honest(secret: str = "the secret of this run") -> Any:
    """A rank that joins, exchanges an object and leaves."""
    os.environ[SECRET_VARIABLE] = secret
    sys.stderr = Path(f"stderr-{os.environ['RANK']}").open("w", buffering=1)  # noqa: SIM115 (until the process exits)
    group = open_process_group()
    try:
        return group.is_authenticated, group.all_gather(group.rank)
    finally:
        group.close()


def without_secret() -> Any:
    return honest("")


def on_another_machine() -> Any:
    """Without a secret, one rank per machine."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return honest("")


def with_other_secret() -> Any:
    return honest("a guess")


def signing() -> Any:
    """A rank that joins, and signs a heartbeat."""
    os.environ[SECRET_VARIABLE] = "the secret of this run"
    group = open_process_group()
    assert isinstance(group, DistributedProcessGroup)
    signed = group.monitor._heartbeat._signer.sign("0", {"count": 500})
    group.close()
    return signed


def stranger() -> Any:
    """A process without the secret that takes the place of a rank and sends a pickle as soon as it can."""
    os.environ.pop(SECRET_VARIABLE, None)
    return _connect_as_a_rank(_send_pickle)


def _connect_as_a_rank(hint: Callable[[], None]) -> str:
    """A rank that goes on with torch alone as soon as it is connected."""
    env = read_launch_env()
    store, env = rank_store.open_store(env)

    def connect() -> None:
        dist.init_process_group("gloo", store=PrefixStore("reconv/0", store), rank=env.rank, world_size=env.world_size)

    with ConnectingRanks(env) as connecting:
        connecting.wait_for_all()
        connecting.run(connect)
    try:
        hint()
    except Exception as error:
        return type(error).__name__
    finally:
        dist.destroy_process_group()
    return "was not refused"


def _send_pickle() -> None:
    received: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(received, _RunsCode())


def impostor_behind_the_store() -> str:
    """One that has redirected the connections of a real rank: right in the store, and without the secret over gloo."""
    os.environ[SECRET_VARIABLE] = "the secret of this run"

    def send() -> None:
        hello = torch.zeros(33, dtype=torch.uint8)
        hello[0] = 1
        hellos = [torch.zeros_like(hello) for _ in range(dist.get_world_size())]
        dist.all_gather(hellos, hello)
        answers = [torch.zeros(32, dtype=torch.uint8) for _ in range(dist.get_world_size())]
        dist.all_gather(answers, answers[dist.get_rank()])

    return _connect_as_a_rank(send)


def test_ranks_with_the_secret_are_authenticated_and_say_nothing() -> None:
    assert in_roles(honest, honest) == [(True, [0, 1])] * 2
    assert [Path(f"stderr-{rank}").read_text() for rank in (0, 1)] == ["", ""]


def test_what_was_signed_in_an_earlier_round_cannot_be_repeated() -> None:
    rounds = [in_roles(signing, signing) for _ in range(2)]
    assert [len(set(signed)) for signed in rounds] == [1, 1]
    assert rounds[0] != rounds[1]


def test_without_a_secret_rank_0_says_once_that_nobody_is_authenticated() -> None:
    assert in_roles(on_another_machine, on_another_machine) == [(False, [0, 1])] * 2
    assert Path("stderr-0").read_text().strip() == authentication.NOT_AUTHENTICATED
    assert Path("stderr-1").read_text() == ""


@pytest.mark.parametrize("impostor", [stranger, impostor_behind_the_store])
def test_an_impostor_is_refused_and_its_pickle_is_not_loaded(impostor: Callable[[], Any]) -> None:
    error, _ = in_roles(honest, impostor)
    assert isinstance(error, RankLostError)
    assert "rank 1 did not prove that it knows the secret" in error.what
    assert not Path("executed").exists()


@pytest.mark.parametrize("impostor", [stranger, impostor_behind_the_store])
def test_an_impostor_as_rank_0_is_refused_by_the_others(impostor: Callable[[], Any]) -> None:
    *_, error = in_roles(impostor, honest)
    assert isinstance(error, RankLostError) and "rank 0 did not prove" in error.what


@pytest.mark.parametrize("other", [without_secret, with_other_secret])
def test_every_rank_names_the_one_with_another_secret(other: Callable[[], Any]) -> None:
    first, second, third = in_roles(honest, honest, other)
    assert all(isinstance(error, RankLostError) and "rank 2 did not prove" in error.what for error in (first, second))
    assert isinstance(third, RankLostError) and "RECONV_SECRET" in str(third)


def _take_recipe_of_rank_0() -> Any:
    """Rank 0 names code that rank 1 did not; with rank 1's own recipe it is the same."""
    os.environ.pop(SECRET_VARIABLE, None)
    theirs = [("model.name", str(Path("theirs.py:make").absolute()), "--model")]
    ours = [("model.name", str(Path("ours.py:make").absolute()), "--model")]
    group = open_process_group()
    try:
        results = []
        for own in (theirs, ours, []):
            recipe = group.on_rank0(lambda: load("quickstart", theirs).recipe)
            try:
                check_code_of_rank0(group, recipe, RunOptions("quickstart", tuple(own)))
                results.append("taken")
            except UsageError as error:
                results.append(error.what)
        return results
    finally:
        group.close()


def test_code_that_only_an_unauthenticated_rank_0_names_is_refused() -> None:
    Path("theirs.py").write_text("")
    Path("ours.py").write_text("")
    at_rank0, at_rank1 = in_roles(_take_recipe_of_rank_0, _take_recipe_of_rank_0)
    assert at_rank0 == ["taken"] * 3
    refused = "rank 0 names code that the recipe of rank 1 does not"
    assert at_rank1 == ["taken", refused, refused]
