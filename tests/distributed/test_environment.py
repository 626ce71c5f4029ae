"""Rank and world size from the variables of torchrun, Open MPI, PMI and Slurm."""

from __future__ import annotations

import pytest

from reconv.core.errors import UsageError
from reconv.distributed.environment import (
    LaunchEnv,
    NodeEnv,
    first_node,
    num_local_ranks,
    planned_world_size,
    read_launch_env,
    read_node_env,
    requested_backend,
)
from reconv.distributed.process_group import ProcessGroup

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "job-1",
}
SLURM = {
    "SLURM_PROCID": "6",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NAME": "train.sh",
}


def test_torchrun_sets_everything() -> None:
    assert read_launch_env(TORCHRUN) == LaunchEnv(
        5, 8, 1, 4, "torchrun", "node1", 29400, restart_count=2, uses_agent_store=True
    )
    assert read_launch_env(TORCHRUN).num_nodes == 2


def test_the_only_rank_of_a_launcher_is_a_group_if_a_backend_is_asked_for() -> None:
    one = {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert read_launch_env(one) == LaunchEnv(restart_count=2)
    assert read_launch_env({**one, "RECONV_DIST_BACKEND": "nccl"}).master_addr == "node1"
    assert [requested_backend({"RECONV_DIST_BACKEND": name}) for name in ("", "gloo")] == [None, "gloo"]
    with pytest.raises(UsageError, match="it is nccl or gloo"):
        requested_backend({"RECONV_DIST_BACKEND": "mpi"})


def test_torchruns_variables_take_precedence() -> None:
    assert read_launch_env({**SLURM, **OPEN_MPI, **TORCHRUN}).launcher == "torchrun"
    alone = {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}
    assert read_launch_env({**SLURM, **OPEN_MPI, **alone}) == LaunchEnv(restart_count=2)


def test_open_mpi_needs_master_addr_on_several_machines() -> None:
    launch_env = read_launch_env({**OPEN_MPI, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "6000"})
    assert launch_env == LaunchEnv(3, 4, 1, 2, "Open MPI", "10.0.0.1", 6000)
    with pytest.raises(UsageError, match="address of rank 0") as exc_info:
        read_launch_env(OPEN_MPI)
    assert "MASTER_ADDR" in exc_info.value.hint
    on_one_machine = read_launch_env({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
    assert on_one_machine.master_addr == "127.0.0.1"


def test_jobs_without_a_port_get_different_ones() -> None:
    one = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    ports = {read_launch_env({**one, "PMIX_NAMESPACE": f"job-{job}"}).master_port for job in range(8)}
    assert len(ports) == 8 and all(20000 <= port < 40000 for port in ports)
    assert read_launch_env(one).master_port == read_launch_env({**one, "OMPI_COMM_WORLD_RANK": "0"}).master_port


def test_rank_and_world_size_are_read_from_pmi() -> None:
    launch_env = read_launch_env({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"})
    assert (launch_env.rank, launch_env.world_size, launch_env.local_rank, launch_env.local_world_size) == (1, 2, 1, 2)


def test_slurm_uses_the_first_node() -> None:
    launch_env = read_launch_env(SLURM)
    assert (launch_env.rank, launch_env.world_size, launch_env.local_rank, launch_env.local_world_size) == (6, 7, 2, 3)
    assert (launch_env.master_addr, launch_env.num_nodes) == ("gpu07", 3)


@pytest.mark.parametrize(
    "shell",
    [
        {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "gpu[07-08]"},  # salloc
        {**SLURM, "SLURM_JOB_NAME": "bash"},  # srun --pty bash
        {**SLURM, "SLURM_PTY_PORT": "41122"},
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_an_interactive_slurm_shell_is_a_single_process(shell: dict[str, str]) -> None:
    assert read_launch_env(shell) == LaunchEnv()


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[07-08,12]", "gpu07"), ("a1,b[2-3]", "a1"), ("login", "login"), ("r[1,3]-x,y", "r1-x"), ("n[09],m", "n09")],
)
def test_first_node_of_a_slurm_node_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_missing_or_malformed_variables_are_errors() -> None:
    with pytest.raises(UsageError, match="OMPI_COMM_WORLD_SIZE is not set"):
        read_launch_env({"OMPI_COMM_WORLD_RANK": "0"})
    with pytest.raises(UsageError, match="not a number"):
        read_launch_env({**TORCHRUN, "RANK": "one"})


def test_a_single_process_reduces_and_gathers_its_own_values() -> None:
    process_group = ProcessGroup.single()
    assert (process_group.rank, process_group.world_size, process_group.is_rank0) == (0, 1, True)
    assert process_group.all_reduce(2.5) == 2.5
    assert process_group.all_gather("here") == ["here"]
    assert process_group.on_rank0(lambda: 3) == 3
    assert process_group.all_reduce_max([2, 0]) == (2, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {**TORCHRUN, "RANK": "8"},
        {**TORCHRUN, "WORLD_SIZE": "0"},
        {**TORCHRUN, "LOCAL_WORLD_SIZE": "0"},
        {**TORCHRUN, "LOCAL_RANK": "4"},
        {**TORCHRUN, "LOCAL_WORLD_SIZE": "9"},
        {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "0"},
    ],
)
def test_impossible_ranks_are_errors(changes: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="inconsistent ranks"):
        read_launch_env(changes)


@pytest.mark.parametrize("port", ["abc", "0", "99999", "-1"])
def test_an_invalid_port_is_an_error(port: str) -> None:
    for launcher in (TORCHRUN, OPEN_MPI, SLURM):
        with pytest.raises(UsageError, match="MASTER_PORT"):
            read_launch_env({**launcher, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": port})


PET = {
    "PET_NNODES": "3",
    "PET_NODE_RANK": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_MASTER_ADDR": "node0",
    "PET_MASTER_PORT": "29400",
}


def test_a_node_among_several_is_read_from_torchruns_own_variables() -> None:
    node = read_node_env(PET)
    assert node == NodeEnv(2, 3, 4, "node0", 29400)
    assert node is not None and node.world_size == 12
    assert read_node_env({**PET, "PET_NPROC_PER_NODE": "auto"}) == NodeEnv(2, 3, 1, "node0", 29400)


def test_ranks_and_single_processes_have_no_nodes_to_start() -> None:
    assert read_node_env({**PET, **TORCHRUN}) is None  # torchrun has been configured by them
    assert read_node_env({"PET_NNODES": "1"}) is None
    assert read_node_env({}) is None


@pytest.mark.parametrize(
    "changes", [{"PET_NODE_RANK": "3"}, {"PET_NNODES": "many"}, {"PET_NPROC_PER_NODE": "0"}, {"PET_MASTER_PORT": "0"}]
)
def test_impossible_nodes_are_errors(changes: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(changes))}|inconsistent nodes"):
        read_node_env({**PET, **changes})


def test_a_node_starts_its_own_ranks_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PET.items():
        monkeypatch.setenv(name, value)
    assert num_local_ranks(None, LaunchEnv()) == num_local_ranks(4, LaunchEnv()) == 4
    assert planned_world_size(None) == 12
    with pytest.raises(UsageError, match="--devices 2 contradicts PET_NPROC_PER_NODE=4"):
        num_local_ranks(2, LaunchEnv())
