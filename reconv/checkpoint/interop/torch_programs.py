"""Checkpoints of other PyTorch programs, as far as training can be continued from them.

torchvision's train.py (and Habana's), NVIDIA's main.py, PyTorch's ImageNet example and timm's train.py save weights,
the epoch and torch's state of the optimizer, which numbers the parameters in the order of its groups. Nothing in a file
can run code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reconv.checkpoint.load_weights import EMA_KEYS, find_tensors, strip_wrappers, unpickle
from reconv.core.errors import CheckpointError
from reconv.core.message import message

# Names of optimizer state in torch and timm, and here.
_STATE_NAMES = {
    "momentum_buffer": "momentum",
    "square_avg": "square",
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
    "step": "step",
}
_COUNTER = "n_averaged"  # of torchvision's average


@message
@dataclass(frozen=True, slots=True)
class TrainingState:
    """Training state from a checkpoint of another program."""

    path: Path
    program: str
    epochs: float  # finished
    weights: Mapping[str, Tensor]
    ema: Mapping[str, Tensor] | None = None
    optimizer: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)  # by kind of state, by parameter
    loss_scale: tuple[float, int] | None = None  # the scale, and the steps since it changed
    lr: float | None = None
    lost: tuple[str, ...] = ()  # what the file does not have, or what could not be read
    loss: Mapping[str, Tensor] | None = None  # of a custom loss with parameters


def read_training_state(path: Path) -> TrainingState:
    """Read a checkpoint; raises CheckpointError for a file without an epoch, and for one that would run code."""
    payload = unpickle(path)
    epochs = payload.get("epoch") if isinstance(payload, Mapping) else None
    if not isinstance(epochs, int) or isinstance(epochs, bool) or epochs < 0:
        raise CheckpointError(
            "training cannot be continued from this file",
            where=str(path),
            why="it has no epoch: it holds weights, or is not a checkpoint of torchvision, NVIDIA, PyTorch's ImageNet "
            "example or timm",
            hint="start from its weights instead: --init FILE; a run of Reconv continues with reconv resume RUN",
        )
    program, is_last_epoch = _program_of(payload)
    weights = strip_wrappers(find_tensors(payload, path, prefer_ema=False), path)
    optimizer, lr, lost = _optimizer_state(payload, weights)
    scale = _loss_scale(payload)
    return TrainingState(
        path,
        program,
        epochs + is_last_epoch,
        weights,
        _ema(payload, path),
        optimizer,
        scale,
        lr,
        tuple(lost),
    )


def _program_of(payload: Mapping[str, Any]) -> tuple[str, bool]:
    """The program that wrote a checkpoint, and whether its `epoch` is the last one that is finished, counted from 0."""
    if "model" in payload:
        return "torchvision", True
    version = payload.get("version")
    if isinstance(version, int):
        return "timm", version > 1
    if "best_prec1" in payload:
        return "NVIDIA", False
    return "PyTorch's ImageNet example", False


def _ema(payload: Mapping[str, Any], path: Path) -> dict[str, Tensor] | None:
    """The averaged weights."""
    for key in EMA_KEYS:
        found = payload.get(key)
        if isinstance(found, Mapping) and found:
            named = {str(name): value for name, value in found.items() if isinstance(value, Tensor)}
            return {name: value for name, value in strip_wrappers(named, path).items() if name != _COUNTER}
    return None


def _loss_scale(payload: Mapping[str, Any]) -> tuple[float, int] | None:
    """The state of torch's GradScaler."""
    state = next((payload[key] for key in ("scaler", "amp_scaler", "amp") if key in payload), None)
    if not isinstance(state, Mapping) or not isinstance(state.get("scale"), (int, float)):
        return None
    return float(state["scale"]), int(state.get("_growth_tracker", 0))


def _optimizer_state(
    payload: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> tuple[dict[str, dict[str, Tensor]], float | None, list[str]]:
    """The state by kind and parameter, the learning rate, and what is lost."""
    saved = payload.get("optimizer")
    if not isinstance(saved, Mapping) or not isinstance(saved.get("param_groups"), list):
        return {}, None, ["the file has no state of the optimizer: momentum starts at zero"]
    groups, state = saved["param_groups"], saved.get("state")
    rates = [group.get("lr") for group in groups if isinstance(group, Mapping)]
    lr = float(rates[0]) if rates and isinstance(rates[0], (int, float)) else None
    if not isinstance(state, Mapping) or not any(isinstance(entry, Mapping) for entry in state.values()):
        return {}, lr, ["the optimizer in the file has no state: momentum starts at zero"]
    names = _names(groups, state, weights)
    if names is None:
        return {}, lr, ["the parameters of the optimizer in the file cannot be told apart: momentum starts at zero"]
    by_kind: dict[str, dict[str, Tensor]] = {}
    for number, entry in state.items():
        for kind, value in entry.items():
            if kind in _STATE_NAMES and value is not None:
                tensor = value if isinstance(value, Tensor) else torch.tensor(float(value))
                by_kind.setdefault(_STATE_NAMES[kind], {})[names[number]] = tensor
    for group in groups:  # timm's LAMB counts steps by group
        for number in group["params"] if isinstance(group.get("step"), (int, float)) else ():
            by_kind.setdefault("step", {}).setdefault(names[number], torch.tensor(float(group["step"])))
    return by_kind, lr, []


def _names(
    groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Mapping[str, Any]], weights: Mapping[str, Tensor]
) -> dict[Any, str] | None:
    """The name of each parameter by its number; None if no known way of grouping has the shapes of its state."""
    numbers = [list(group["params"]) for group in groups]
    for partition in _partitions(weights):
        if [len(names) for names in partition] != [len(group) for group in numbers]:
            continue
        found = {
            n: name
            for group, names in zip(numbers, partition, strict=True)
            for n, name in zip(group, names, strict=True)
        }
        if all(n in found and _fits(entry, weights[found[n]]) for n, entry in state.items()):
            return found
    return None


def _fits(entry: Mapping[str, Any], parameter: Tensor) -> bool:
    tensors = [value for value in entry.values() if isinstance(value, Tensor) and value.dim() > 0]
    return all(tensor.shape == parameter.shape for tensor in tensors)


def _partitions(weights: Mapping[str, Tensor]) -> Iterator[list[list[str]]]:
    """The ways in which the programs group parameters, which keep the order of the model in each group."""
    names = [name for name in weights if not name.endswith(("running_mean", "running_var", "num_batches_tracked"))]
    norms = {name for name in names if f"{name.rpartition('.')[0]}.running_mean" in weights}

    def split(*tests: Callable[[str], bool]) -> list[list[str]]:
        rest, parts = names, []
        for test in tests:
            parts.append([name for name in rest if test(name)])
            rest = [name for name in rest if not test(name)]
        return [part for part in (*parts, rest) if part]

    def is_bias(name: str) -> bool:
        return name.endswith(".bias") or name == "bias"

    yield [names]
    yield split(lambda name: "bn" in name)  # NVIDIA
    yield split(lambda name: weights[name].dim() <= 1 or is_bias(name))  # timm
    yield split(lambda name: name not in norms)  # torchvision, --norm-weight-decay
    *others, biases = split(lambda name: name not in norms and not is_bias(name), lambda name: not is_bias(name))
    yield [*others, biases]  # and --bias-weight-decay
    yield split(lambda name: not is_bias(name))
