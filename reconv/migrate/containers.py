"""Paths inside a container, and the paths of this machine that `docker run -v HOST:INSIDE` and the like mount there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

_CONTAINERS = ("docker", "nvidia-docker", "podman", "singularity", "apptainer", "kubectl", "enroot")
_MOUNTS = ("-v", "--volume", "-B", "--bind", "--container-mounts")
_HERE = re.compile(r"^(?:\$\(pwd\)|`pwd`|\$PWD|\$\{PWD\})(?=/|$)")


@dataclass(slots=True)
class Container:
    """The mounts of a container and its working directory; `is_used`: the command runs in one."""

    is_used: bool = False
    mounts: list[tuple[str, str]] = field(default_factory=list)  # the path inside, the path of this machine
    folder: str = ""  # relative paths inside begin here

    def enter(self, prefix: Sequence[str]) -> None:
        """Add what the words before a command inside say: `docker run -v /host:/inside -w /inside image`."""
        if not prefix or PurePosixPath(prefix[0]).name not in _CONTAINERS:
            return
        self.is_used = True
        for name, value in _options(prefix):
            if name in ("-w", "--workdir", "--pwd"):
                self.folder = value
            elif name == "--mount":
                self._mount_by_names(value)
            elif name in _MOUNTS:
                self.mount(value)

    def mount(self, text: str) -> None:
        """Add `HOST:INSIDE[:ro]`, or several of them with commas."""
        for part in text.split(","):
            host, _, inside = part.partition(":")
            inside = inside.partition(":")[0] or host
            if inside.startswith("/"):
                self.mounts.append((inside.rstrip("/") or "/", _HERE.sub(".", host)))

    def _mount_by_names(self, text: str) -> None:
        """Add `type=bind,source=/host,target=/inside`."""
        values = dict(part.partition("=")[::2] for part in text.split(","))
        host = values.get("source") or values.get("src") or ""
        inside = values.get("target") or values.get("dst") or values.get("destination") or ""
        if host and inside:
            self.mounts.append((inside.rstrip("/") or "/", _HERE.sub(".", host)))

    def on_host(self, path: str, ask: Callable[[str, str], None]) -> str:
        """The path of this machine; `ask` is called with a path that no mount gives, and why."""
        whole = path if path.startswith("/") else f"{self.folder.rstrip('/')}/{path}"
        for inside, host in sorted(self.mounts, key=lambda mount: -len(mount[0])):
            if whole == inside or whole.startswith(inside.rstrip("/") + "/"):
                if not host.startswith(("/", ".", "~", "$", "<")):
                    ask(path, f"is the volume {host} of the container: `docker volume inspect {host}` shows its folder")
                    return path
                rest = whole[len(inside) :].lstrip("/")
                return f"{host.rstrip('/')}/{rest}" if rest else host
        if path.startswith("/"):
            ask(path, "is a path inside the container, and nothing is mounted there: write this machine's path")
        return path


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The options among words with their values, attached or not."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if word.startswith("-"):
            yield (name, value) if equals and name.startswith("--") else (word, following)
