"""The interface of the targets of `reconv submit`, and the list of them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from reconv.core.errors import UsageError

if TYPE_CHECKING:
    from reconv.recipe.load.resolved import Resolved
    from reconv.recipe.loader import Override

# The modules are imported for the target that is asked for: none needs the packages of another one.
_CLASSES = {
    "slurm": "reconv.cluster.submit.slurm:SlurmTarget",
    "kubernetes": "reconv.cluster.submit.kubernetes:KubernetesTarget",
    "trainjob": "reconv.cluster.submit.trainjob:TrainJobTarget",
    "skypilot": "reconv.cluster.submit.skypilot:SkyPilotTarget",
    "ray": "reconv.cluster.submit.ray:RayTarget",
}
TARGETS = tuple(_CLASSES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A recipe to train on a cluster, and the options of `reconv submit` by their names in Python."""

    recipe: str
    overrides: Sequence[Override]
    train_words: Sequence[str]  # the options of `reconv train`, as typed
    options: Mapping[str, Any]
    train: Callable[..., Any]  # (run options, launch, run directory), for targets that wait for the run

    @property
    def num_nodes(self) -> int:
        """The number of machines; the largest one if it may change."""
        return int(str(self.options["nodes"]).rpartition(":")[2])

    @property
    def num_devices(self) -> int:
        """The number of ranks on all machines."""
        return int(self.num_nodes * self.options["devices_per_node"])

    def program(self, default: Sequence[str] = ("reconv",)) -> list[str]:
        """The words that start reconv there: those of --command, or the default."""
        text = self.options["program"]
        if text is None:
            return list(default)
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise UsageError(f"--command {text!r} is not a command", why=str(error)) from error
        if not words:
            raise UsageError("--command is empty", hint="for example --command reconv")
        return words

    def check(self) -> Resolved:
        """The recipe on so many devices; raises `UsageError` if its batch cannot be split over them."""
        from reconv.cluster.submit.preflight import check_recipe

        return check_recipe(self.recipe, self.overrides, self.options["data"], self.num_devices)


HERE = (sys.executable, "-m", "reconv")  # the program of nodes that share this machine's folders


@dataclass(frozen=True, slots=True)
class Submitted:
    """Result of a submission for --json, and its lines for people."""

    result: Mapping[str, Any]
    lines: Sequence[str]
    notes: Sequence[str] = ()
    exit_code: int = 0


class Target(Protocol):
    """A scheduler or an engine that starts the ranks of a run."""

    options: frozenset[str]  # those that other targets may refuse

    def text(self, request: Request) -> str:
        """The script or manifests, for --dry-run."""
        ...

    def submit(self, request: Request) -> Submitted:
        """Submit the run, or write what a scheduler's own command submits."""
        ...


def find_target(name: str) -> Target:
    """The target of --to."""
    module, _, class_name = _CLASSES[name].partition(":")
    target: Target = getattr(import_module(module), class_name)()
    return target
