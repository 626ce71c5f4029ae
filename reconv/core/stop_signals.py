"""The signals that ask a run to save a checkpoint and end.

Schedulers announce the end of a job by different ones: Kubernetes by SIGTERM, Slurm by the one in `--signal` (often
SIGUSR1), others by SIGUSR2 or SIGXCPU; a terminal that closes sends SIGHUP. A further one can be named in the
environment, which reaches every process of a run.

Data workers ignore them: the rank that started the workers ends them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping

from reconv.core.errors import UsageError

STOP_SIGNAL_VARIABLE = "RECONV_STOP_SIGNAL"  # names of further signals, separated by commas
_USUAL = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
# They cannot be caught, or the process cannot continue after them, or they mean something else.
_UNSUITABLE = frozenset({"KILL", "STOP", "SEGV", "BUS", "FPE", "ILL", "ABRT", "TRAP", "SYS", "CHLD", "PIPE", "CONT"})


def stop_signals(environment: Mapping[str, str] | None = None) -> tuple[int, ...]:
    """The numbers of all stop signals; raises `UsageError` if the environment names one that cannot be used."""
    names = (os.environ if environment is None else environment).get(STOP_SIGNAL_VARIABLE, "")
    further = [_number(name.strip()) for name in names.split(",") if name.strip()]
    return tuple(dict.fromkeys([*(int(number) for number in _USUAL), *further]))


def handled_stop_signals() -> tuple[int, ...]:
    """The stop signals, without those that were ignored when this process started, as by `nohup`."""
    always = (signal.SIGTERM, signal.SIGINT)  # a shell script starts background jobs with SIGINT ignored
    return tuple(n for n in stop_signals() if n in always or signal.getsignal(n) is not signal.SIG_IGN)


def ignore_stop_signals() -> None:
    """Ignore the stop signals, in a process that is about to end or whose parent decides."""
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)


def signal_name(number: int) -> str:
    """The name of a signal, as in SIGUSR1 or SIGRTMIN+3."""
    try:
        return signal.Signals(number).name
    except ValueError:  # only the first and the last of the real-time signals have names
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"


def _number(name: str) -> int:
    short = name.upper().removeprefix("SIG")
    base, plus, offset = short.partition("+")
    number = getattr(signal, f"SIG{base}", None)
    if plus and base == "RTMIN" and offset.isdecimal() and int(offset) <= signal.SIGRTMAX - signal.SIGRTMIN:
        return int(signal.SIGRTMIN) + int(offset)
    if plus or not isinstance(number, signal.Signals) or base in _UNSUITABLE:
        raise UsageError(
            f"{name} cannot be a stop signal",
            where=STOP_SIGNAL_VARIABLE,
            why="it cannot be caught, or has another meaning" if base in _UNSUITABLE else "there is no such signal",
            hint=f"name one such as {STOP_SIGNAL_VARIABLE}=SIGQUIT or SIGRTMIN+3; several are separated by commas",
        )
    return int(number)
