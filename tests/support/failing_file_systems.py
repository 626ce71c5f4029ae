"""File systems that crash, lose power, refuse or are full at a chosen operation."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

from reconv.storage.files import FileSystem


class Crash(BaseException):
    """The process ends here; nothing after this line runs."""


class CountingFileSystem(FileSystem):
    """Counts the calls that change the disk and lets `strike` act on each, with the call's half-done effect."""

    def __init__(self) -> None:
        self.num_calls = 0

    def strike(self, half: Callable[[], object]) -> None:
        self.num_calls += 1

    def makedirs(self, path: Path) -> None:
        self.strike(lambda: None)
        super().makedirs(path)

    def mkdir(self, path: Path) -> None:
        self.strike(lambda: None)
        super().mkdir(path)

    def create(self, path: Path) -> io.FileIO:
        self.strike(lambda: path.touch())
        return super().create(path)

    def write(self, file: io.FileIO, data: memoryview) -> int:
        self.strike(lambda: file.write(data[: len(data) // 2]))
        return super().write(file, data)

    def fsync(self, file: io.FileIO) -> None:
        self.strike(lambda: None)
        super().fsync(file)

    def fsync_dir(self, path: Path) -> None:
        self.strike(lambda: None)
        super().fsync_dir(path)

    def replace(self, source: Path, target: Path) -> None:
        self.strike(lambda: None)
        super().replace(source, target)

    def remove(self, path: Path) -> None:
        self.strike(lambda: None)
        super().remove(path)

    def rmtree(self, path: Path) -> None:
        self.strike(lambda: self._remove_every_second_file(path))
        super().rmtree(path)

    def _remove_every_second_file(self, path: Path) -> None:
        for name in os.listdir(path)[::2]:
            (path / name).unlink()


class CrashingFileSystem(CountingFileSystem):
    """Ends the process at call k, with that call half done."""

    def __init__(self, crash_at: int) -> None:
        super().__init__()
        self.crash_at = crash_at

    def strike(self, half: Callable[[], object]) -> None:
        super().strike(half)
        if self.num_calls == self.crash_at:
            half()
        if self.num_calls >= self.crash_at:  # a dead process does not clean up either
            raise Crash


class PowerCutFileSystem(CrashingFileSystem):
    """As a crash, and whatever was not synced is lost: file contents by half, renames altogether."""

    def __init__(self, crash_at: int) -> None:
        super().__init__(crash_at)
        self.unsynced_files: list[Path] = []
        self.unsynced_renames: list[tuple[Path, Path]] = []

    def create(self, path: Path) -> io.FileIO:
        file = super().create(path)
        self.unsynced_files.append(path)
        return file

    def fsync(self, file: io.FileIO) -> None:
        super().fsync(file)
        self.unsynced_files.clear()

    def replace(self, source: Path, target: Path) -> None:
        super().replace(source, target)
        self.unsynced_renames.append((source, target))

    def fsync_dir(self, path: Path) -> None:
        super().fsync_dir(path)
        self.unsynced_renames = [pair for pair in self.unsynced_renames if pair[0].parent != path]

    def cut(self) -> None:
        for path in self.unsynced_files:
            os.truncate(path, path.stat().st_size // 2)
        for source, target in reversed(self.unsynced_renames):
            target.rename(source)


class RefusingFileSystem(CountingFileSystem):
    """The system refuses call k, and works again afterwards."""

    def __init__(self, refuse_at: int, code: int) -> None:
        super().__init__()
        self.refuse_at, self.code = refuse_at, code

    def strike(self, half: Callable[[], object]) -> None:
        super().strike(half)
        if self.num_calls == self.refuse_at:
            half()
            raise OSError(self.code, os.strerror(self.code))


class FullFileSystem(FileSystem):
    """Writes to a device that is really full."""

    def create(self, path: Path) -> io.FileIO:
        return super().create(Path("/dev/full"))
