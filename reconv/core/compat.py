"""Versions of other packages: the releases that are tested with Reconv, and the differences between them.

Nothing else asks for a version of torch, torchvision, timm or Triton. A difference names the release that
ends it: its code goes once that is the oldest supported one.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from typing import Any

from reconv.core.version import __version__


@dataclass(frozen=True, slots=True)
class ReleaseRange:
    """Oldest and newest release of a package that the tests have passed with; patches of the newest are included."""

    package: str
    oldest: str
    newest: str
    use: str = ""  # if a package is tested in different releases for different uses

    def __str__(self) -> str:
        releases = self.oldest if self.oldest == self.newest else f"{self.oldest} to {self.newest}"
        return f"{releases} {self.use}".rstrip()

    def __contains__(self, version: str) -> bool:
        newest = release_numbers(self.newest)
        found = release_numbers(version)
        return release_numbers(self.oldest) <= found and found[: len(newest)] <= newest


ON_GPUS, IN_THE_INTERPRETER = "on GPUs", "in the interpreter"

# `make matrix` runs the suite on CPUs; on GPUs it was run with torch 2.11 alone, hence with that Triton.
TESTED = (
    ReleaseRange("torch", "2.11", "2.15"),
    ReleaseRange("torchvision", "0.26", "0.29"),
    ReleaseRange("timm", "1.0.20", "1.0.31"),
    ReleaseRange("triton", "3.6", "3.6", ON_GPUS),
    ReleaseRange("triton", "3.6", "3.9", IN_THE_INTERPRETER),
)


def release_numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version's release: (2, 13, 0) of 2.13.0+cpu."""
    match = re.match(r"\d+(\.\d+)*", version.strip())
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def installed_version(package: str) -> str | None:
    """The version of an installed package, without importing it; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def ranges_of(package: str) -> tuple[ReleaseRange, ...]:
    """The tested releases of a package, one range for each use."""
    return tuple(tested for tested in TESTED if tested.package == package)


def untested_packages(*, is_gpu: bool) -> list[tuple[str, str, ReleaseRange]]:
    """Name, version and tested range of each package that every run uses and whose release is not tested."""
    uses = {"torch": "", "triton": ON_GPUS} if is_gpu else {"torch": ""}
    ranges = [tested for tested in TESTED if uses.get(tested.package) == tested.use]
    found = [(tested.package, installed_version(tested.package), tested) for tested in ranges]
    return [(name, version, tested) for name, version, tested in found if version is not None and version not in tested]


def semantic_tensor(semantic: Any, handle: Any, block_type: Any) -> Any:
    """A tensor of Triton's language. Until Triton 3.9: before, `make_tensor` was called `tensor`."""
    make = getattr(semantic, "make_tensor", None) or semantic.tensor
    return make(handle, block_type)


def complete_interpreter(interpreter: Any) -> None:
    """Give the module of Triton's interpreter what newer releases have."""
    builder = interpreter.InterpreterBuilder
    if not hasattr(builder, "get_bf16"):  # until Triton 3.9
        bfloat16 = interpreter.tl.bfloat16
        builder.get_bf16 = lambda self, value: self.create_fp_trunc(self.get_fp32(value), bfloat16)
    # Until Triton 3.7. NumPy 2.4 refuses to make a number of an array with one element.
    if release_numbers(installed_version("triton") or "") < (3, 7):
        patch_tensor = interpreter._patch_lang_tensor

        def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
            patch_tensor(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

        interpreter._patch_lang_tensor = patch_tensor_and_index


def untested_note(*, is_gpu: bool = False) -> str:
    """A line that names releases outside the tested ones, of what every run uses; empty if there are none."""
    found = [f"{name} {version} (tested: {tested})" for name, version, tested in untested_packages(is_gpu=is_gpu)]
    return f"Reconv {__version__} is not tested with {', '.join(found)}" if found else ""


def name_in_graphs(kind: type) -> None:
    """Let the code of fx graphs return a named tuple. Until torch 2.13: before, that code does not know its name."""
    if hasattr(kind, "_fields") and release_numbers(installed_version("torch") or "") < (2, 13):
        graph: Any = importlib.import_module("torch.fx.graph")
        graph._register_custom_builtin(kind.__name__, f"from {kind.__module__} import {kind.__name__}", kind)
