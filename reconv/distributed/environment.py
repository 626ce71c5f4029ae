"""A process's place among others, as its launcher tells it in the environment.

Owns the variables of torchrun, Open MPI, PMI and Slurm. Refuses to know torch: it is read before anything is loaded.
Invariant: torchrun's variables win, and a shell inside an allocation is not one of several processes.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from reconv.errors import UsageError

_FIRST_PORT, _NUM_PORTS = 20000, 20000  # of jobs that name none: below what systems hand out on their own
_LAST_PORT = 65535
_SHELLS = ("bash", "sh", "zsh", "fish", "tcsh", "interactive")  # what an interactive Slurm job is called
_LOCAL = "127.0.0.1"
WORDS_VARIABLE = "RECONV_WORDS"  # set for the processes of --devices: the folder their last words go to


@dataclass(frozen=True, slots=True)
class LaunchEnv:
    """`rank` of `size` processes, `local_rank` of the `local_size` on this machine, and where rank 0 is met."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: str = ""  # empty: started alone
    address: str = _LOCAL
    port: int = 0
    restart: int = 0  # how often an elastic agent has started the processes anew
    store_is_served: bool = False  # by the agent: rank 0 must not open the port itself
    words: str = ""  # of --devices: the folder in which a process says why it ends, instead of printing it

    @property
    def num_machines(self) -> int:
        """As many as there would be if each had as many processes as this one."""
        return -(-self.size // self.local_size)


def read_launch_env(environment: Mapping[str, str] | None = None) -> LaunchEnv:
    """The place that a launcher gave this process; alone where there was none, or only one process."""
    environment = os.environ if environment is None else environment
    for read in (_torchrun, _open_mpi, _pmi, _slurm):
        place = read(environment)
        if place is not None:
            return place if place.size > 1 else LaunchEnv(restart=place.restart)
    return LaunchEnv()


def must_launch(devices: int | None, place: LaunchEnv) -> bool:
    """Whether the processes of `--devices` are still to be started; refused where a launcher has started others."""
    if devices is not None and place.size > 1:
        raise UsageError(
            f"--devices {devices} starts processes, and {place.launcher} has started {place.size} processes already",
            then="leave --devices out, or start without a launcher",
        )
    return devices is not None and devices > 1


def _refuse_impossible(place: LaunchEnv) -> None:
    """Refuse a place that is none, where the others would be waited for in vain."""
    is_possible = place.rank < place.size and place.local_rank < place.local_size <= place.size
    if place.size != 1 and not is_possible:
        raise UsageError(
            f"rank {place.rank} of {place.size} processes, {place.local_rank} of {place.local_size} on this machine: "
            "there is no such place",
            where="environment",
            why=f"read as what {place.launcher} sets; ranks count from 0",
            then="unset what an earlier job left there, or start with torchrun, mpirun, srun or --devices",
        )


def _torchrun(environment: Mapping[str, str]) -> LaunchEnv | None:
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    number = _numbers(environment, "torchrun")
    place = LaunchEnv(
        rank=number("RANK"),
        size=number("WORLD_SIZE"),
        local_rank=number("LOCAL_RANK", "RANK"),
        local_size=number("LOCAL_WORLD_SIZE", "WORLD_SIZE"),
        launcher="--devices" if WORDS_VARIABLE in environment else "torchrun",
        address=environment.get("MASTER_ADDR", _LOCAL),
        port=_port(environment, "torchrun"),
        restart=number("TORCHELASTIC_RESTART_COUNT") if "TORCHELASTIC_RESTART_COUNT" in environment else 0,
        store_is_served=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        words=environment.get(WORDS_VARIABLE, ""),
    )
    _refuse_impossible(place)
    return place


def _open_mpi(environment: Mapping[str, str]) -> LaunchEnv | None:
    if "OMPI_COMM_WORLD_RANK" not in environment:
        return None
    number = _numbers(environment, "Open MPI")
    place = LaunchEnv(
        rank=number("OMPI_COMM_WORLD_RANK"),
        size=number("OMPI_COMM_WORLD_SIZE"),
        local_rank=number("OMPI_COMM_WORLD_LOCAL_RANK"),
        local_size=number("OMPI_COMM_WORLD_LOCAL_SIZE"),
        launcher="Open MPI",
        port=_port(environment, environment.get("PMIX_NAMESPACE", environment.get("OMPI_MCA_ess_base_jobid", ""))),
    )
    return _with_address(place, environment, "mpirun -x MASTER_ADDR=<a machine's address> ...")


def _pmi(environment: Mapping[str, str]) -> LaunchEnv | None:
    if "PMI_RANK" not in environment or "PMI_SIZE" not in environment:
        return None
    number = _numbers(environment, "PMI")
    local = {"MPI_LOCALRANKID": "MPI_LOCALNRANKS", "PMI_LOCAL_RANK": "PMI_LOCAL_SIZE", "SLURM_LOCALID": ""}
    local_rank = next((name for name in local if name in environment), "PMI_RANK")
    on_node = _slurm_tasks_here(environment) if local_rank == "SLURM_LOCALID" else None
    place = LaunchEnv(
        rank=number("PMI_RANK"),
        size=number("PMI_SIZE"),
        local_rank=number(local_rank),
        local_size=on_node or number(local.get(local_rank) or "PMI_SIZE", "PMI_SIZE"),
        launcher="an MPI launcher",
        port=_port(environment, environment.get("PMI_JOBID", environment.get("SLURM_JOB_ID", ""))),
    )
    return _with_address(place, environment, "mpiexec -env MASTER_ADDR <a machine's address> ...")


def _slurm(environment: Mapping[str, str]) -> LaunchEnv | None:
    is_shell = environment.get("SLURM_JOB_NAME") in _SHELLS or "SLURM_PTY_PORT" in environment
    if "SLURM_PROCID" not in environment or "SLURM_STEP_NUM_TASKS" not in environment or is_shell:
        return None
    number = _numbers(environment, "Slurm")
    place = LaunchEnv(
        rank=number("SLURM_PROCID"),
        size=number("SLURM_STEP_NUM_TASKS"),
        local_rank=number("SLURM_LOCALID"),
        local_size=_slurm_tasks_here(environment) or number("SLURM_STEP_NUM_TASKS"),
        launcher="Slurm",
        port=_port(environment, f"{environment.get('SLURM_JOB_ID', '')}.{environment.get('SLURM_STEP_ID', '')}"),
    )
    return _with_address(place, environment, "export MASTER_ADDR=<the first machine's address> before srun")


def _with_address(place: LaunchEnv, environment: Mapping[str, str], how: str) -> LaunchEnv:
    """The place with the address of rank 0, which launchers other than torchrun may leave out."""
    _refuse_impossible(place)
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    address = environment.get("MASTER_ADDR") or (first_node(nodes) if nodes and place.num_machines > 1 else None)
    if address is None and place.num_machines > 1:
        raise UsageError(
            f"{place.size} processes on several machines, and none knows where rank 0 is",
            where=f"{place.launcher}, rank {place.rank}",
            why="MASTER_ADDR is not set",
            then=how,
        )
    return LaunchEnv(
        place.rank, place.size, place.local_rank, place.local_size, place.launcher, address or _LOCAL, place.port
    )


def first_node(node_list: str) -> str:
    """The first host of Slurm's short form, `node[03-07,12],other` -> `node03`."""
    name = re.split(r",(?![^\[]*\])", node_list)[0]
    match = re.fullmatch(r"(.*?)\[([^\]]*)\](.*)", name)
    return name if match is None else match[1] + re.split(r"[-,]", match[2])[0] + match[3]


def _slurm_tasks_here(environment: Mapping[str, str]) -> int | None:
    """How many tasks this machine has, from the short form `4(x2),3`, one entry a machine."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE")
    if not text:
        return None
    counts: list[int] = []
    for word in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", word)
        counts += [int(match[1])] * int(match[2] or 1) if match else []
    node = int(environment.get("SLURM_NODEID", "0"))
    return counts[node] if node < len(counts) else None


def _port(environment: Mapping[str, str], job: str) -> int:
    """The port that was named, or one that follows from the job's name, so that two jobs do not meet."""
    named = environment.get("MASTER_PORT")
    if named and not (named.isdecimal() and 0 < int(named) <= _LAST_PORT):
        raise UsageError(
            f"MASTER_PORT is {named!r}, not a port",
            where="environment",
            then=f"a number from 1 to {_LAST_PORT}, the same for all processes, or none at all",
        )
    return int(named) if named else _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS


def _numbers(environment: Mapping[str, str], launcher: str) -> Callable[..., int]:
    """Reads whole numbers of a launcher's variables, the first that is there."""

    def number(*names: str) -> int:
        for name in names:
            if name in environment:
                if not environment[name].isdecimal():
                    raise UsageError(
                        f"{name} is {environment[name]!r}, not a number", where="environment", why=f"set by {launcher}"
                    )
                return int(environment[name])
        raise UsageError(f"{names[0]} is not set", where="environment", why=f"{launcher} sets it for each process")

    return number
