"""Reads weights files (safetensors, torch pickles, TensorFlow checkpoints) and loads them into a model.

No file can run code. A loaded tensor keeps the strides, dtype and device of its parameter; fused optimizers on the CPU
would compute garbage otherwise.
"""

from __future__ import annotations

import argparse
import re
import zipfile
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from reconv.checkpoint.interop.nvidia_names import to_torchvision
from reconv.checkpoint.locate import is_tensorflow
from reconv.core.errors import CheckpointError
from reconv.storage.bounded import open_file

EMA_KEYS = ("state_dict_ema", "model_ema", "ema_state_dict", "ema")
_RAW_KEYS = ("state_dict", "model_state_dict", "model", "net", "network", "weights", "checkpoint", "ckpt")
_WRAPPERS = ("module.", "_orig_mod.", "model.")
# Names in a popular family of CIFAR ResNets, and torchvision's names of the same layers.
_SYNONYMS = ((re.compile(r"^linear\."), "fc."), (re.compile(r"\.shortcut\."), ".downsample."))
_BLOCKED = re.compile(r"(?:GLOBAL|class|callable|instance of class)\s+['\"<]*([A-Za-z_][\w.]*\.\w+)")
_NUM_LISTED = 5
_MAX_NESTING = 4

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Match between the tensors of a file and those of a model."""

    loaded: tuple[str, ...]  # in both, with equal shapes
    missing: tuple[str, ...]  # in the model only
    unexpected: tuple[str, ...]  # in the file only
    reshaped: tuple[tuple[str, Shape, Shape], ...]  # in both; shape in the file, shape in the model
    is_mostly_new: bool = False  # fewer than half of the model's tensors were loaded, without the head

    @property
    def is_exact(self) -> bool:
        """True if all names and shapes match."""
        return not (self.missing or self.unexpected or self.reshaped)

    def check_any(self, source: str) -> None:
        """Raise if no tensor matches."""
        if all(_is_counter(name) for name in self.loaded):
            raise _mismatch(self, source, "use weights of a model with the same backbone, or omit --init")

    def __str__(self) -> str:
        noun = "tensor" if len(self.loaded) == 1 else "tensors"
        lines = [f"{len(self.loaded)} {noun} loaded"]
        if self.is_mostly_new:
            lines = [f"WARNING: only {lines[0]}, less than half of the model; the rest is newly initialized"]
        changed = [f"{name} {list(there)} -> {list(here)}" for name, there, here in self.reshaped]
        for what, names in (
            ("missing from the file", self.missing),
            ("unexpected", self.unexpected),
            ("with another shape", changed),
        ):
            lines += [f"{len(names)} {what}: {first_few(names)}"] if names else []
        return "; ".join(lines)


def read_weights(path: Path, *, prefer_ema: bool = True, num_classes: int | None = None) -> dict[str, Tensor]:
    """Read named tensors from a safetensors file, a torch pickle or a TensorFlow checkpoint of a ResNet.

    TensorFlow models often have a background class in front of the others: it is dropped if the head has one class
    more than `num_classes`.
    """
    if is_tensorflow(path):
        from reconv.checkpoint.interop.tensorflow import read_tensorflow
        from reconv.checkpoint.interop.tensorflow_names import HEAD, to_resnet

        tensors = read_tensorflow(path)
        state = to_resnet(tensors)
        has_background = num_classes is not None and HEAD in state and len(state[HEAD]) == num_classes + 1
        return to_resnet(tensors, drop_background=True) if has_background else state
    try:
        with open_file(path) as file:
            is_safetensors = file.read(9)[8:] == b"{"  # eight bytes of length, then a JSON header
        payload: Any = safetensors.torch.load_file(path) if is_safetensors else unpickle(path)
    except FileNotFoundError as error:
        raise CheckpointError("no such weights file", where=str(path), hint=f"ls '{path.parent}'") from error
    except (OSError, safetensors.SafetensorError) as error:
        raise _unreadable(path, getattr(error, "strerror", None) or str(error)) from error
    tensors = payload if is_safetensors else find_tensors(payload, path, prefer_ema)
    return strip_wrappers(tensors, path)


def compare_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> LoadReport:
    """Compare named tensors with a model, without loading them."""
    return _compare(model, model.state_dict(), _rename_for(model, tensors))


def load_weights(model: nn.Module, tensors: Mapping[str, Tensor], *, strict: bool, source: str = "") -> LoadReport:
    """Copy tensors into a model in place; strict: all names and shapes must match, else at least one."""
    tensors = _rename_for(model, tensors)
    state = model.state_dict()
    report = _compare(model, state, tensors)
    if strict and not report.is_exact:
        advice = "use the recipe and the number of classes they were trained with, or fine-tune them with --init"
        raise _mismatch(report, source, advice)
    report.check_any(source)
    with torch.no_grad():
        for name in state.keys() & tensors.keys():
            if state[name].shape == tensors[name].shape:
                state[name].copy_(tensors[name])
    return report


def _mismatch(report: LoadReport, source: str, hint: str) -> CheckpointError:
    return CheckpointError("the weights do not match the model", where=source, why=str(report), hint=hint)


def _compare(model: nn.Module, state: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> LoadReport:
    both = [name for name in state if name in tensors]
    last_layer = list(state)[-1].rpartition(".")[0] if state else ""
    head = getattr(model, "head_patterns", ()) or (f"{last_layer}.*",)
    body = [name for name in state if not any(fnmatchcase(name, p) for p in head) and not _is_counter(name)]
    num_loaded = sum(name in tensors and state[name].shape == tensors[name].shape for name in body)
    return LoadReport(
        is_mostly_new=2 * num_loaded < len(body),
        loaded=tuple(n for n in both if state[n].shape == tensors[n].shape),
        missing=tuple(n for n in state if n not in tensors and not _is_counter(n)),
        unexpected=tuple(n for n in tensors if n not in state and not _is_counter(n)),
        reshaped=tuple(
            (n, tuple(tensors[n].shape), tuple(state[n].shape)) for n in both if state[n].shape != tensors[n].shape
        ),
    )


def _is_counter(name: str) -> bool:
    """num_batches_tracked is missing in files before torch 0.4.1, and does not affect the outputs."""
    return name.endswith("num_batches_tracked")


def _rename_for(model: nn.Module, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The tensors under the model's own names: synonyms renamed, and a common prefix removed.

    A prefix (such as `backbone.`) is removed if more of the model's tensors are found under it than without it. Tensors
    without the prefix, such as a new head, are used where there is none with it.
    """
    names = model.state_dict().keys()
    tensors = named_as(model, tensors)
    known = {_torchvision_name(name, names): tensor for name, tensor in tensors.items()}
    unprefixed = {name: tensor for name, tensor in known.items() if name in names}
    prefix, num_prefixed = _common_prefix(names, known)
    if num_prefixed <= len(unprefixed) or 2 * (num_prefixed + len(unprefixed)) < len(names):
        return known
    prefixed = {n.removeprefix(prefix): t for n, t in known.items() if n.startswith(prefix)}
    return {**unprefixed, **prefixed}


def named_as(
    model: nn.Module, tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor] | None = None
) -> Mapping[str, Tensor]:
    """Tensors of NVIDIA's networks under the model's names; others, and those of a model with such names, as they are.

    `weights` are those of the network, by default the tensors themselves.
    """
    names = model.state_dict().keys()
    if names <= tensors.keys():  # checkpoints of our own
        return tensors
    renamed = to_torchvision(tensors, tensors if weights is None else weights)
    return renamed if len(names & renamed.keys()) > len(names & tensors.keys()) else tensors


def _torchvision_name(name: str, names: Collection[str]) -> str:
    """torchvision's name of a layer, if the model has that one and not the given one."""
    other = name
    for pattern, replacement in _SYNONYMS:
        other = pattern.sub(replacement, other)
    return other if name not in names and other in names else name


def _common_prefix(names: Collection[str], tensors: Mapping[str, Tensor]) -> tuple[str, int]:
    """The most frequent prefix of the model's names (`backbone.`, `net.`), and how many tensors have it."""
    first = {name.partition(".")[0] for name in names}
    counts: Counter[str] = Counter()
    for tensor_name in tensors:
        parts = tensor_name.split(".")
        for i in range(1, len(parts)):
            if parts[i] in first and ".".join(parts[i:]) in names:
                counts[".".join(parts[:i]) + "."] += 1
    return max(counts.items(), key=lambda item: item[1], default=("", 0))


def _check_not_compressed(path: Path) -> None:
    """Raise for a zip archive with compressed members: torch writes none, and a small one can fill the memory."""
    try:
        with open_file(path) as file, zipfile.ZipFile(file) as archive:
            compressed = next((m for m in archive.infolist() if m.compress_type != zipfile.ZIP_STORED), None)
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError):
        return  # torch has an older format, and its own message for damaged files
    if compressed is not None:
        raise _unreadable(path, f"its member {compressed.filename} is compressed, which torch's files never are")


def unpickle(path: Path) -> Any:
    _check_not_compressed(path)
    try:
        # Checkpoints of torchvision and timm contain their command line as a Namespace, which runs no code.
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises nearly any type on a damaged file
        text = str(error)
        if blocked := _BLOCKED.search(text):
            raise CheckpointError(
                f"the file would run {blocked[1]} when loaded, so it was not loaded",
                where=str(path),
                why="a pickle can run any code; only tensors and plain containers are allowed",
                hint="save only model.state_dict(), preferably as .safetensors",
            ) from error
        raise _unreadable(path, _reason(path, error)) from error


def _reason(path: Path, error: Exception) -> str:
    """Torch's reason for not reading a file, without its advice to disable weights_only."""
    text = str(error).partition("\n")[0]
    if not any(phrase in text for phrase in ("weights_only", "Weights only", "magic number")):
        return text or type(error).__name__
    with path.open("rb") as file:
        is_plain_pickle = file.read(1) == b"\x80"
    return "a pickle not written by torch, or incomplete" if is_plain_pickle else "not a torch file"


def find_tensors(payload: Any, path: Path, prefer_ema: bool) -> dict[str, Tensor]:
    """Unwrap the nested dictionaries that training programs save until there are tensors."""
    keys = (*EMA_KEYS, *_RAW_KEYS) if prefer_ema else (*_RAW_KEYS, *EMA_KEYS)
    node = payload
    for _ in range(_MAX_NESTING):
        if not isinstance(node, Mapping):
            break
        inner = next((node[key] for key in keys if isinstance(node.get(key), Mapping) and node[key]), None)
        if inner is None:
            tensors = {str(name): value for name, value in node.items() if isinstance(value, Tensor)}
            if tensors:
                return tensors
            break
        node = inner
    found = f"keys {first_few([str(key) for key in node])}" if isinstance(node, Mapping) else f"a {type(node).__name__}"
    raise CheckpointError(
        "the file has no weights",
        where=str(path),
        why=f"found {found}, but no tensors at the top level or under {', '.join(keys)}",
        hint="save model.state_dict() and use that file",
    )


def strip_wrappers(tensors: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Remove the prefixes that DataParallel, torch.compile and Lightning add, however nested."""
    stripped: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        short = name.replace("._orig_mod.", ".")
        while wrapper := next((w for w in _WRAPPERS if short.startswith(w)), None):
            short = short.removeprefix(wrapper)
        if short in stripped:
            raise CheckpointError(
                f"the file has two tensors for {short}",
                where=str(path),
                why=f"{name} and another name differ only in the prefixes {', '.join(_WRAPPERS)}",
                hint="save the state_dict() of a single model and use that file",
            )
        stripped[short] = tensor
    return stripped


def _unreadable(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        "the weights file cannot be read",
        where=str(path),
        why=f"it is damaged, incomplete, or not a weights file: {reason}",
        hint="copy it again, or use a .safetensors, .pth, .pt or .th file, or a TensorFlow checkpoint",
    )


def first_few(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - _NUM_LISTED} more" if len(names) > _NUM_LISTED else ""
    return ", ".join(names[:_NUM_LISTED]) + more
