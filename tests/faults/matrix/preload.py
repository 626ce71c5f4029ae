"""The compiled layer that strikes, records and kills at chosen calls of the C library."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("preload.c")
CALLS = ("open", "create", "read", "write", "fsync", "rename", "unlink", "mkdir", "flock", "stat", "listdir")
CALLS += ("truncate", "utime", "close", "statvfs", "socket")
CHANGES = ("create", "write", "fsync", "rename", "unlink", "mkdir", "truncate")  # what a kill can fall between
ACTIONS = ("nothing", "fail", "kill", "signal", "tear_and_kill", "tear_and_fail", "short")
FOREVER = 10**9


def compile_layer(folder: Path) -> Path:
    """Compile the layer into a folder, and return the library."""
    library = folder / "preload.so"
    flags = ["-shared", "-fPIC", "-O2", "-Wno-nonnull-compare", "-Wno-unused-result"]
    subprocess.run(
        [os.environ.get("CC", "cc"), *flags, "-o", str(library), str(SOURCE), "-ldl", "-lpthread"], check=True
    )
    return library


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to which calls on the files of a run."""

    calls: tuple[str, ...]
    action: str
    first: int = 1  # the number of the first call that is struck
    last: int = 0  # 0: only the first one
    code: int = 0  # the errno, or the number of the signal
    text: str = ""  # only paths that contain this

    @property
    def mask(self) -> int:
        """The kinds of calls as a set of bits."""
        return sum(1 << CALLS.index(call) for call in self.calls)


class Layer:
    """The layer in this process, which must have been started with it."""

    def __init__(self) -> None:
        if "preload.so" not in os.environ.get("LD_PRELOAD", ""):
            sys.exit("this process was started without the layer")
        self._library = ctypes.CDLL(os.environ["LD_PRELOAD"])
        self._library.fault_seen.restype = self._library.fault_struck.restype = ctypes.c_long
        self._library.fault_count.restype = ctypes.c_long

    def arm(self, folder: Path, fault: Fault) -> None:
        """Strike calls on files below a folder from now on."""
        self._library.fault_arm(
            os.fsencode(folder),
            os.fsencode(fault.text),
            fault.mask,
            ctypes.c_long(fault.first),
            ctypes.c_long(fault.last or fault.first),
            ACTIONS.index(fault.action),
            fault.code,
        )

    def record(self, folder: Path, file: Path) -> None:
        """Record every change below a folder from now on."""
        self._library.fault_record(os.fsencode(folder), os.fsencode(file))

    def set_clock(self, jump_s: float, at: int = 1) -> None:
        """Let the wall clock jump when it is read for the `at`-th time from now."""
        self._library.fault_clock(ctypes.c_double(jump_s), ctypes.c_long(at))

    def num_struck(self) -> int:
        """How many calls were struck."""
        return int(self._library.fault_struck())

    def counts(self) -> dict[str, int]:
        """How many calls of each kind there were on the files of the folder."""
        return {call: int(self._library.fault_count(number)) for number, call in enumerate(CALLS)}
