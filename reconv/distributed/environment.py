"""Rank, world size and rendezvous address, read from the variables that torchrun, Open MPI, PMI and Slurm set.

Torch is not imported here: the environment is read before anything else is loaded.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from reconv.core.errors import UsageError

_FIRST_PORT, _NUM_PORTS = 20000, 20000  # for jobs without MASTER_PORT: below the ephemeral range
_LAST_PORT = 65535
_MAX_RANKS_PER_NODE = 256
_SHELLS = ("bash", "sh", "zsh", "fish", "tcsh", "interactive")  # job names of interactive Slurm jobs
_LOCALHOST = "127.0.0.1"
SECRET_VARIABLE = "RECONV_SECRET"  # the same for all ranks; without it rank 0 makes one, and nobody proves it
FAILURE_DIR_VARIABLE = "RECONV_FAILURE_DIR"  # set for the processes of --devices and --elastic
ROUND_VARIABLE = "RECONV_ELASTIC_ROUND"  # set for those of --elastic: 1 for the first round


@dataclass(frozen=True, slots=True)
class LaunchEnv:
    """The rank and world size of this process, and the address of rank 0, as set by the launcher."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launcher: str = ""  # empty: started without one
    master_addr: str = _LOCALHOST
    master_port: int = 0  # 0: rank 0 chooses one, and leaves it in the failure_dir
    restart_count: int = 0  # how often an elastic agent has restarted the processes
    uses_agent_store: bool = False  # the elastic agent serves the store: rank 0 must not open the port itself
    failure_dir: str = ""  # with --devices and --elastic: the launching process reads and prints the errors left here

    @property
    def num_nodes(self) -> int:
        """The number of machines, if each runs as many processes as this one."""
        return -(-self.world_size // self.local_world_size)


SINGLE_PROCESS = LaunchEnv()


@dataclass(frozen=True, slots=True)
class NodeEnv:
    """The place of this node among several, as set by what starts one process on each: Kubeflow Trainer, Ray."""

    node_rank: int
    num_nodes: int
    ranks_per_node: int
    master_addr: str
    master_port: int

    @property
    def world_size(self) -> int:
        """The number of ranks on all nodes."""
        return self.num_nodes * self.ranks_per_node


BACKEND_VARIABLE = "RECONV_DIST_BACKEND"


def read_launch_env(environment: Mapping[str, str] | None = None) -> LaunchEnv:
    """The launcher's settings for this process; rank 0 of 1 without a launcher. torchrun's variables win.

    The only rank of a launcher is a single process, unless a backend is asked for.
    """
    environment = os.environ if environment is None else environment
    for read in (_torchrun, _open_mpi, _pmi, _slurm):
        launch_env = read(environment)
        if launch_env is not None:
            is_group = launch_env.world_size > 1 or requested_backend(environment) is not None
            return launch_env if is_group else LaunchEnv(restart_count=launch_env.restart_count)
    return SINGLE_PROCESS


def read_node_env(environment: Mapping[str, str] | None = None) -> NodeEnv | None:
    """The nodes over which this process spreads its ranks, from torchrun's own PET_* variables; None for one rank.

    Processes that already are ranks ignore them: torchrun passes them on.
    """
    environment = os.environ if environment is None else environment
    if "PET_NNODES" not in environment or "RANK" in environment:
        return None
    number = _number_reader(environment, "the launcher of this node")
    node = NodeEnv(
        node_rank=number("PET_NODE_RANK") if "PET_NODE_RANK" in environment else 0,
        num_nodes=number("PET_NNODES"),
        ranks_per_node=_ranks_per_node(environment.get("PET_NPROC_PER_NODE", "1")),
        master_addr=environment.get("PET_MASTER_ADDR", _LOCALHOST),
        master_port=_port(environment, "PET", "PET_MASTER_PORT"),
    )
    if node.num_nodes < 1 or node.node_rank >= node.num_nodes:
        raise UsageError(
            f"inconsistent nodes: node {node.node_rank} of {node.num_nodes}",
            where="environment",
            why="read from PET_NODE_RANK and PET_NNODES; nodes count from 0",
            hint="set both, the same number of nodes on each, or unset them",
        )
    return node if node.world_size > 1 else None


def _ranks_per_node(text: str) -> int:
    if text in ("auto", "gpu"):  # as torchrun reads them, except that one rank uses all cores of a CPU
        import torch

        return max(1, torch.cuda.device_count())
    if not text.isdecimal() or not 0 < int(text) <= _MAX_RANKS_PER_NODE:
        raise UsageError(
            f"PET_NPROC_PER_NODE is {text!r}, not a number of ranks",
            where="environment",
            hint="set the number of devices of each node, or `auto`",
        )
    return int(text)


def planned_world_size(devices: int | None) -> int:
    """The number of ranks that a command with `--devices` trains with."""
    node = read_node_env()
    return node.world_size if node is not None else devices or read_launch_env().world_size


def requested_backend(environment: Mapping[str, str] | None = None) -> str | None:
    """The backend of torch.distributed that the environment asks for: nccl or gloo; None: that of the device.

    With gloo several processes may share a GPU, slowly.
    """
    backend = (os.environ if environment is None else environment).get(BACKEND_VARIABLE) or None
    if backend not in (None, "nccl", "gloo"):
        raise UsageError(f"{BACKEND_VARIABLE}={backend}: it is nccl or gloo", hint=f"unset {BACKEND_VARIABLE}")
    return backend


def num_local_ranks(devices: int | None, launch_env: LaunchEnv) -> int | None:
    """The number of ranks to start on this machine; None if this process is one itself.

    Raises `UsageError` if a launcher has already started them.
    """
    node = read_node_env()
    if node is None:
        return devices if must_launch(devices, launch_env) else None
    if devices not in (None, node.ranks_per_node):
        raise UsageError(
            f"--devices {devices} contradicts PET_NPROC_PER_NODE={node.ranks_per_node}",
            why="what has started this process gives each node a number of ranks",
            hint="drop --devices",
        )
    return node.ranks_per_node


def must_launch(devices: int | None, launch_env: LaunchEnv) -> bool:
    """True if `--devices` asks this process to start others. Raises an error if a launcher has already done so."""
    if devices is not None and launch_env.world_size > 1:
        raise UsageError(
            f"--devices {devices} cannot be combined with {launch_env.launcher}, "
            f"which has already started {launch_env.world_size} processes",
            hint="drop --devices, or run without the launcher",
        )
    return devices is not None and devices > 1


def _check_ranks(launch_env: LaunchEnv) -> None:
    """Reject ranks that cannot exist: the other processes would wait for this one until the timeout."""
    is_possible = (
        launch_env.rank < launch_env.world_size
        and launch_env.local_rank < launch_env.local_world_size <= launch_env.world_size
    )
    if launch_env.world_size != 1 and not is_possible:
        raise UsageError(
            f"inconsistent ranks: rank {launch_env.rank} of {launch_env.world_size}, "
            f"local rank {launch_env.local_rank} of {launch_env.local_world_size}",
            where="environment",
            why=f"read from the variables of {launch_env.launcher}; ranks count from 0",
            hint="unset variables left over from an earlier job, or start with torchrun, mpirun, srun or --devices",
        )


def _torchrun(environment: Mapping[str, str]) -> LaunchEnv | None:
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    number = _number_reader(environment, "torchrun")
    failure_dir = environment.get(FAILURE_DIR_VARIABLE, "")
    is_elastic = ROUND_VARIABLE in environment
    launch_env = LaunchEnv(
        rank=number("RANK"),
        world_size=number("WORLD_SIZE"),
        local_rank=number("LOCAL_RANK", "RANK"),
        local_world_size=number("LOCAL_WORLD_SIZE", "WORLD_SIZE"),
        launcher=_launcher_name(environment),
        master_addr=environment.get("MASTER_ADDR", _LOCALHOST),
        master_port=0 if failure_dir and not environment.get("MASTER_PORT") else _port(environment, "torchrun"),
        restart_count=number(ROUND_VARIABLE) - 1 if is_elastic else _restart_count(environment, number),
        uses_agent_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        failure_dir=failure_dir,
    )
    _check_ranks(launch_env)
    return launch_env


def _launcher_name(environment: Mapping[str, str]) -> str:
    if ROUND_VARIABLE in environment:
        return "Ray" if "RAY_JOB_ID" in environment else "--elastic"
    return "--devices" if environment.get(FAILURE_DIR_VARIABLE) else "torchrun"


def _restart_count(environment: Mapping[str, str], number: Callable[..., int]) -> int:
    return number("TORCHELASTIC_RESTART_COUNT") if "TORCHELASTIC_RESTART_COUNT" in environment else 0


def _open_mpi(environment: Mapping[str, str]) -> LaunchEnv | None:
    if "OMPI_COMM_WORLD_RANK" not in environment:
        return None
    number = _number_reader(environment, "Open MPI")
    launch_env = LaunchEnv(
        rank=number("OMPI_COMM_WORLD_RANK"),
        world_size=number("OMPI_COMM_WORLD_SIZE"),
        local_rank=number("OMPI_COMM_WORLD_LOCAL_RANK"),
        local_world_size=number("OMPI_COMM_WORLD_LOCAL_SIZE"),
        launcher="Open MPI",
        master_port=_port(
            environment, environment.get("PMIX_NAMESPACE", environment.get("OMPI_MCA_ess_base_jobid", ""))
        ),
    )
    return _with_master_addr(launch_env, environment, "mpirun -x MASTER_ADDR=<address of rank 0's machine> ...")


def _pmi(environment: Mapping[str, str]) -> LaunchEnv | None:
    if "PMI_RANK" not in environment or "PMI_SIZE" not in environment:
        return None
    number = _number_reader(environment, "PMI")
    local = {"MPI_LOCALRANKID": "MPI_LOCALNRANKS", "PMI_LOCAL_RANK": "PMI_LOCAL_SIZE", "SLURM_LOCALID": ""}
    local_rank = next((name for name in local if name in environment), "PMI_RANK")
    on_node = _slurm_tasks_on_node(environment) if local_rank == "SLURM_LOCALID" else None
    launch_env = LaunchEnv(
        rank=number("PMI_RANK"),
        world_size=number("PMI_SIZE"),
        local_rank=number(local_rank),
        local_world_size=on_node or number(local.get(local_rank) or "PMI_SIZE", "PMI_SIZE"),
        launcher="an MPI launcher",
        master_port=_port(environment, environment.get("PMI_JOBID", environment.get("SLURM_JOB_ID", ""))),
    )
    return _with_master_addr(launch_env, environment, "mpiexec -env MASTER_ADDR <address of rank 0's machine> ...")


def _slurm(environment: Mapping[str, str]) -> LaunchEnv | None:
    is_shell = environment.get("SLURM_JOB_NAME") in _SHELLS or "SLURM_PTY_PORT" in environment
    if "SLURM_PROCID" not in environment or "SLURM_STEP_NUM_TASKS" not in environment or is_shell:
        return None
    number = _number_reader(environment, "Slurm")
    launch_env = LaunchEnv(
        rank=number("SLURM_PROCID"),
        world_size=number("SLURM_STEP_NUM_TASKS"),
        local_rank=number("SLURM_LOCALID"),
        local_world_size=_slurm_tasks_on_node(environment) or number("SLURM_STEP_NUM_TASKS"),
        launcher="Slurm",
        master_port=_port(environment, f"{environment.get('SLURM_JOB_ID', '')}.{environment.get('SLURM_STEP_ID', '')}"),
    )
    return _with_master_addr(launch_env, environment, "export MASTER_ADDR=<address of the first node> before srun")


def _with_master_addr(launch_env: LaunchEnv, environment: Mapping[str, str], example: str) -> LaunchEnv:
    """Fill in the address of rank 0, which launchers other than torchrun may not set."""
    _check_ranks(launch_env)
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    address = environment.get("MASTER_ADDR") or (first_node(nodes) if nodes and launch_env.num_nodes > 1 else None)
    if address is None and launch_env.num_nodes > 1:
        raise UsageError(
            f"the address of rank 0 is unknown to the {launch_env.world_size} processes on several machines",
            where=f"{launch_env.launcher}, rank {launch_env.rank}",
            why="MASTER_ADDR is not set",
            hint=example,
        )
    return replace(launch_env, master_addr=address or _LOCALHOST)


def first_node(node_list: str) -> str:
    """The first host of a Slurm node list: `node[03-07,12],other` -> `node03`."""
    name = re.split(r",(?![^\[]*\])", node_list)[0]
    match = re.fullmatch(r"(.*?)\[([^\]]*)\](.*)", name)
    return name if match is None else match[1] + re.split(r"[-,]", match[2])[0] + match[3]


def _slurm_tasks_on_node(environment: Mapping[str, str]) -> int | None:
    """The number of tasks on this node, from a list such as `4(x2),3`."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE")
    if not text:
        return None
    counts: list[int] = []
    for entry in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry)
        counts += [int(match[1])] * int(match[2] or 1) if match else []
    node = int(environment.get("SLURM_NODEID", "0"))
    return counts[node] if node < len(counts) else None


def _port(environment: Mapping[str, str], job: str, name: str = "MASTER_PORT") -> int:
    """The port of a variable, or one derived from the job's id, as two jobs on a machine must not collide."""
    given = environment.get(name)
    if given and not (given.isdecimal() and 0 < int(given) <= _LAST_PORT):
        raise UsageError(
            f"{name} is {given!r}, not a port",
            where="environment",
            hint=f"set it to a number from 1 to {_LAST_PORT}, the same for all processes, or unset it",
        )
    return int(given) if given else _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS


def _number_reader(environment: Mapping[str, str], launcher: str) -> Callable[..., int]:
    """A function that returns the first of the given variables that is set, as an integer."""

    def number(*names: str) -> int:
        for name in names:
            if name in environment:
                if not environment[name].isdecimal():
                    raise UsageError(
                        f"{name} is {environment[name]!r}, not a number", where="environment", why=f"set by {launcher}"
                    )
                return int(environment[name])
        raise UsageError(
            f"{names[0]} is not set", where="environment", why=f"{launcher} sets it for each process it starts"
        )

    return number
