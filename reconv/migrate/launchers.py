"""Programs that start others: mpirun, horovodrun, poprun, torchrun, srun, multiproc.py, distributed_train.sh, wrappers.

Each gives a number of processes and hosts, a row for each of its flags, and the words of the program it starts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import PurePosixPath
from typing import Any

from reconv.core.errors import UsageError
from reconv.migrate.command_line import split_commands, unfilled
from reconv.migrate.flag_tables import read_flags
from reconv.migrate.flags import Flag, FlagParser, Typed
from reconv.migrate.translation import Row
from reconv.migrate.wrappers import unwrap


@dataclass(slots=True)
class ProgramLaunch:
    """Launch of a program."""

    num_processes: int = 1
    num_hosts: int = 1
    names: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    to_fill: list[tuple[str, str]] = field(default_factory=list)
    mounts: list[str] = field(default_factory=list)  # HOST:INSIDE


@dataclass(frozen=True, slots=True)
class Launcher:
    """A launcher's flags; `counts` names those that give the number of processes and hosts."""

    name: str
    flags: tuple[Flag, ...]
    counts: Callable[[Mapping[str, Any]], tuple[int, int]]
    is_exact: bool = False  # flags cannot be shortened


def _number(value: Any, default: int = 1) -> int:
    """The number in a flag's text, as in 8, 1:4 or 2-4 (the largest)."""
    numbers = [int(found) for found in re.findall(r"\d+", str(value))]
    return max(numbers) if numbers else default


def _hosts(value: Any) -> list[str]:
    text = ",".join(value) if isinstance(value, list) else value or ""
    return [name for name in re.split(r"[,\s]+", text) if name]


def _mpi_counts(values: Mapping[str, Any]) -> tuple[int, int]:
    hosts = _hosts(values["host"])
    slots = sum(_number(host.rpartition(":")[2]) if ":" in host else 1 for host in hosts)
    per_host = values["npernode"]
    return values["np"] or (per_host * max(1, len(hosts)) if per_host else slots), max(1, len(hosts))


def _torchrun_counts(values: Mapping[str, Any]) -> tuple[int, int]:
    nodes = _number(values["nnodes"])
    return nodes * _number(values["nproc_per_node"]), nodes


def _horovod_counts(values: Mapping[str, Any]) -> tuple[int, int]:
    return values["num_proc"], max(1, len(_hosts(values["hosts"])))


def _poprun_counts(values: Mapping[str, Any]) -> tuple[int, int]:
    return values["num_replicas"], max(1, len(_hosts(values["host"])))


def _srun_counts(values: Mapping[str, Any]) -> tuple[int, int]:
    nodes = _number(values["nodes"])
    tasks = values["ntasks"] or nodes * (values["ntasks_per_node"] or 1)
    return tasks, nodes


LAUNCHERS: Mapping[str, Launcher] = {
    **dict.fromkeys(
        ("mpirun", "mpiexec", "orterun", "prun"),
        Launcher("mpirun", read_flags("launchers", "mpirun"), _mpi_counts, True),
    ),
    "horovodrun": Launcher("horovodrun", read_flags("launchers", "horovodrun"), _horovod_counts),
    "poprun": Launcher("poprun", read_flags("launchers", "poprun"), _poprun_counts),
    "srun": Launcher("srun", read_flags("launchers", "srun"), _srun_counts),
    "torchrun": Launcher("torchrun", read_flags("launchers", "torchrun"), _torchrun_counts),
    "multiproc.py": Launcher("multiproc.py", read_flags("launchers", "multiproc"), _torchrun_counts),
}
_COUNTS = (
    "np",
    "npernode",
    "num_proc",
    "nproc_per_node",
    "nnodes",
    "num_replicas",
    "ntasks",
    "nodes",
    "ntasks_per_node",
)
_TORCH_MODULES = ("torch.distributed.launch", "torch.distributed.run")
_PYTHON = re.compile(r"(?:.*/)?(?:python[0-9.]*|\$\{?PYTHON\}?|\$\{?\w*PYTHON\w*\}?|pypy3?)")
_PYTHON_VALUE = ("-W", "-X", "-c")


def strip_launchers(words: Sequence[str], launch: ProgramLaunch) -> list[str]:
    """The words of the program that a command starts; what started it is added to `launch`."""
    queue = list(words)
    while queue:
        head = PurePosixPath(queue[0]).name
        if _PYTHON.fullmatch(queue[0]):
            queue = _strip_python(queue, launch)
            if queue and queue[0].startswith("-"):
                return queue  # the script was left out
        elif head in LAUNCHERS:
            queue = _strip_launcher(LAUNCHERS[head], queue[1:], launch)
        elif head == "distributed_train.sh" and len(queue) > 1:
            launch.num_processes *= _number(queue[1])
            launch.rows.append(Row(head, queue[1], "renamed", "--devices on a machine that has as many"))
            launch.names.append(head)
            queue = ["train.py", *queue[2:]]
        elif (wrapped := unwrap(queue)) is not None:
            launch.rows.append(Row("shell", " ".join(wrapped.prefix), "no effect", wrapped.why))
            queue = list(wrapped.words) if wrapped.text is None else _only_command(wrapped.text)
        elif head in ("bash", "sh", "source", ".") and len(queue) > 1:
            options = list(takewhile(lambda word: re.fullmatch(r"-[a-z]+", word), queue[1:]))
            queue = queue[1 + len(options) :] or queue[1:]
        else:
            return queue
    return queue


def _only_command(text: str) -> list[str]:
    """The words of a text that is one command, as in `mpirun -np 8 bash -c TEXT`."""
    commands = split_commands(text)
    if len(commands) != 1 or commands[0].assignments or commands[0].redirections:
        raise UsageError(
            "a launcher starts a text of several commands",
            why=text,
            hint="migrate the command that trains on its own, with the launcher before it",
        )
    return commands[0].words


def _strip_python(words: list[str], launch: ProgramLaunch) -> list[str]:
    """The words after the interpreter and its own options; `-m MODULE` becomes MODULE.py."""
    taken, rest = [words[0]], words[1:]
    while rest and rest[0].startswith("-") and not rest[0].startswith("--"):
        option = rest.pop(0)
        taken.append(option)
        if option == "-m" and rest:
            module = rest.pop(0)
            if module in _TORCH_MODULES:
                return ["torchrun", *rest]
            rest.insert(0, module.replace(".", "/") + ("" if module.endswith(".py") else ".py"))
            break
        if option in _PYTHON_VALUE and rest:
            taken.append(rest.pop(0))
        elif option not in ("-u", "-O", "-OO", "-B", "-E", "-s", "-S", "-I", "-b", "-v", "-q"):
            rest.insert(0, option)  # a flag of a program whose script was left out
            taken.pop()
            break
    launch.rows.append(Row("python", " ".join(taken), "renamed", "reconv"))
    return rest


def _strip_launcher(launcher: Launcher, words: Sequence[str], launch: ProgramLaunch) -> list[str]:
    parser = FlagParser(launcher.name, launcher.flags, "exact" if launcher.is_exact else "argparse")
    words, hosts = _join_hosts(words) if launcher.name == "poprun" else (list(words), [])
    parsed = parser.parse(words, stops=True)
    values = {item.key: item.default for item in launcher.flags} | {item.flag.key: item.value for item in parsed.typed}
    if hosts:
        values["host"] = hosts
    processes, num_hosts = launcher.counts(values)
    if values.get("hostfile") and processes <= 1:
        launch.to_fill.append(
            (values["hostfile"], f"give {launcher.name} the number of processes: the batch follows it")
        )
    launch.num_processes *= max(1, processes)
    launch.num_hosts = max(launch.num_hosts, num_hosts)
    launch.names.append(launcher.name)
    launch.mounts += [item.value for item in parsed.typed if item.text.startswith("--container-mounts")]
    launch.rows += [_row(launcher.name, item, values) for item in parsed.typed]
    for item in parsed.typed:
        part = item.unfilled or (unfilled(item.value) if isinstance(item.value, str) else None)
        if item.flag.key in _COUNTS and (part or not re.search(r"\d", str(item.value))):
            text = f"{item.flag.name} of {launcher.name}; until then 1, and the global batch is that of 1"
            launch.to_fill.append((part or str(item.value), text))
        elif part and item.flag.key not in ("mpi_global_args", "mpi_local_args"):
            launch.to_fill.append((part, f"{item.flag.name} of {launcher.name}, which is not started here"))
    return [*parsed.positional, *parsed.rest]


def _join_hosts(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """poprun's words with a list of hosts that was typed with spaces made one word, and the hosts."""
    joined: list[str] = []
    parts: list[str] | None = None  # of the list of hosts, while it is being read
    for word in words:
        if parts is not None and (
            not parts or (not word.startswith("-") and re.fullmatch(r"[\w.:-]+(,[\w.:-]*)+,?", word))
        ):
            parts.append(word.strip(","))
            continue
        if parts:
            joined.append(",".join(parts))
            parts = None
        joined.append(word)
        if word in ("--host", "--hosts", "-H"):
            parts = []
    hosts = [
        name
        for index, word in enumerate(joined)
        if word in ("--host", "--hosts", "-H")
        for name in _hosts(joined[index + 1])
    ]
    return joined, hosts


def _row(name: str, item: Typed, values: Mapping[str, Any]) -> Row:
    if item.flag.none:
        return Row(name, item.text, "no effect", item.flag.none)
    if item.flag.missing:
        return Row(name, item.text, "not supported", item.flag.missing)
    if item.flag.key in ("host", "hosts", "hostfile", "nnodes", "nodes"):
        text = "on several machines, start the new command by torchrun, mpirun or srun: their variables are read"
        return Row(name, item.text, "derived", text)
    return Row(name, item.text, "derived", "the global batch; --devices on a machine that has as many")


def launcher_rows(name: str, words: Sequence[str]) -> list[Row] | None:
    """The rows of flags that are all a launcher's, without a program; None: it does not have them."""
    launcher = LAUNCHERS[name]
    parser = FlagParser(launcher.name, launcher.flags, "exact" if launcher.is_exact else "argparse")
    try:
        parsed = parser.parse(words)
    except UsageError:
        return None
    if parsed.positional:
        return None
    values = {item.key: item.default for item in launcher.flags}
    return [_row(launcher.name, item, values) for item in parsed.typed]
