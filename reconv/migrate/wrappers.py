"""Commands that start other commands: nohup, env, numactl, docker run, ssh, bash -c and the like."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

_BEFORE = "write it before the new command"
_CONTAINER = "see docs/how-to/container.md for Reconv's own container"
_WRAPPERS = {
    **dict.fromkeys(("sudo", "nohup", "time", "exec", "env", "command", "stdbuf", "unbuffer", "setsid"), _BEFORE),
    **dict.fromkeys(("nice", "ionice", "chrt", "timeout", "taskset", "numactl", "xvfb-run"), _BEFORE),
    **dict.fromkeys(("screen", "tmux", "ssh", "script", "caffeinate", "eval", "ipython", "%run"), _BEFORE),
    **dict.fromkeys(("conda", "mamba", "micromamba", "poetry", "pipenv", "pdm", "uv"), _BEFORE),
    **dict.fromkeys(("docker", "nvidia-docker", "podman", "singularity", "apptainer", "kubectl", "enroot"), _CONTAINER),
    "sbatch": "reconv submit writes and submits the batch script",
}
_SHELLS = ("bash", "sh", "zsh", "dash")
_PROGRAM = re.compile(
    r"(?:[^:=]*/)?(?:python[0-9.]*|torchrun|mpirun|mpiexec|horovodrun|poprun|srun|bash|sh|zsh|[\w.-]+\.(?:py|sh))"
    r"|\$\{?\w*PYTHON\w*\}?"
)


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A command inside another one: `words`, or `text` that a shell would split again."""

    prefix: tuple[str, ...]
    why: str  # what becomes of the prefix
    words: tuple[str, ...] = ()
    text: str | None = None


def unwrap(words: Sequence[str]) -> Wrapped | None:
    """The command that another one starts; None if the words start no other, or none that could be migrated."""
    name = PurePosixPath(words[0]).name
    if name in _SHELLS:
        return _shell_text(words)
    if name not in _WRAPPERS:
        return None
    for index, word in enumerate(words[1:], start=1):
        prefix = tuple(words[:index])
        if " " in word.strip() and any(_PROGRAM.fullmatch(part) for part in word.split()):
            return Wrapped(prefix, _WRAPPERS[name], text=word)
        if _PROGRAM.fullmatch(word):
            return Wrapped(prefix, _WRAPPERS[name], tuple(words[index:]))
    return None


def _shell_text(words: Sequence[str]) -> Wrapped | None:
    """The text of `bash -c TEXT`."""
    for index, word in enumerate(words[1:], start=1):
        if re.fullmatch(r"-[a-z]*c[a-z]*", word) and index + 1 < len(words):
            return Wrapped(tuple(words[: index + 1]), "its text is read as a command", text=words[index + 1])
        if not word.startswith("-"):
            return None
    return None
