"""Continuing a checkpoint of another program or another run (`model.resume_from`): its epoch as a step, its tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from reconv.build.model import build_meta_model
from reconv.build.saved_model import recipe_of_state
from reconv.checkpoint.interop.torch_programs import TrainingState, read_training_state
from reconv.checkpoint.load_weights import load_weights, named_as
from reconv.checkpoint.locate import locate
from reconv.checkpoint.manifest import check_state
from reconv.checkpoint.store import CheckpointStore, open_store
from reconv.core.errors import CheckpointError
from reconv.core.message import message
from reconv.recipe.parts.schedule import learning_rate
from reconv.recipe.plan import Plan, steps_per_epoch
from reconv.recipe.schema import Recipe

_SCALE, _GROWTH_STEPS = "loss_scale", "growth_steps"  # of the loss scaler
_SCALER = "precision"  # the kind of its tensors in a checkpoint of ours
_LR_TOLERANCE = 1e-6
_RATE_IN_MOMENTUM = "lars"  # buffers here contain the learning rate, and those of torch's programs do not


@message
@dataclass(frozen=True, slots=True)
class ImportedState:
    """The training state of another program's checkpoint, and the step that it continues at."""

    state: TrainingState
    step: int
    notes: tuple[str, ...]

    def parts(self, own: Mapping[str, Mapping[str, Tensor]], scaler_prefix: str) -> dict[str, dict[str, Tensor]]:
        """The tensors of a checkpoint of ours; what the file lacks is as it is in `own`, at the start of a run."""
        weights = _onto(own["model"], self.state.weights)
        optimizer = dict(own["optimizer"])
        for kind, by_name in self.state.optimizer.items():
            for name, tensor in by_name.items():
                if f"{kind}.{name}" in optimizer:
                    optimizer[f"{kind}.{name}"] = tensor
        if self.state.loss_scale is not None and scaler_prefix + _SCALE in optimizer:
            for name, value in zip((_SCALE, _GROWTH_STEPS), self.state.loss_scale, strict=True):
                old = optimizer[scaler_prefix + name]
                optimizer[scaler_prefix + name] = torch.full_like(old, value)
        parts = {"model": weights, "optimizer": optimizer}
        if "ema" in own:
            parts["ema"] = weights if self.state.ema is None else _onto(own["ema"], self.state.ema)
        if "loss" in own:
            parts["loss"] = _onto(own["loss"], self.state.loss or {})
        return parts


def _onto(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensors.get(name, tensor) for name, tensor in own.items()}


def import_state(path: Path, recipe: Recipe, plan: Plan) -> ImportedState:
    """The state in the checkpoint that `model.resume_from` names."""
    state = _read_own(path, plan.num_train) if path.is_dir() else read_training_state(path)
    model = build_meta_model(recipe, plan.num_classes)
    _check_weights(model, state)
    state = _named_as(model, state)
    if recipe.optimizer.name == _RATE_IN_MOMENTUM and state.optimizer:
        state = _without_momentum(state)
    step = round(state.epochs * plan.steps_per_epoch)
    if step > plan.total_steps or (path.is_dir() and step == plan.total_steps):
        raise CheckpointError(
            f"the checkpoint has {state.epochs:g} epochs, and the run has only {recipe.length}",
            where=str(path),
            hint=f"--epochs {math.floor(state.epochs) + 1} or more",
        )
    return ImportedState(state, step, tuple(_notes(recipe, plan, model, state, step)))


def _read_own(path: Path, num_train: int) -> TrainingState:
    """The training state in a checkpoint of a run of ours; of a run, in its newest one."""
    located = locate(path)
    folder = located.checkpoint
    assert folder is not None, "a directory is a run or a checkpoint"
    store = open_store(located.run) if located.run is not None else CheckpointStore(folder.parent)
    loaded = store.load(folder)
    check_state(loaded.state, folder)
    optimizer: dict[str, dict[str, Tensor]] = {}
    for name, tensor in loaded.parts["optimizer"].items():
        kind, _, parameter = name.partition(".")
        optimizer.setdefault(kind, {})[parameter] = tensor
    scaler = {name: tensor.item() for name, tensor in optimizer.pop(_SCALER, {}).items()}
    per_epoch = steps_per_epoch(recipe_of_state(loaded.state, folder), num_train)
    return TrainingState(
        folder,
        "Reconv",
        loaded.step / per_epoch,
        loaded.parts["model"],
        loaded.parts.get("ema"),
        optimizer,
        (scaler[_SCALE], int(scaler[_GROWTH_STEPS])) if {_SCALE, _GROWTH_STEPS} <= scaler.keys() else None,
        loss=loaded.parts.get("loss"),
    )


def _check_weights(model: nn.Module, state: TrainingState) -> None:
    """Raise unless the file has the weights of this network, all of them."""
    empty = {name: torch.empty_like(tensor, device="meta") for name, tensor in state.weights.items()}
    load_weights(model, empty, strict=True, source=str(state.path))


def _named_as(model: nn.Module, state: TrainingState) -> TrainingState:
    """The state under the model's names."""
    return replace(
        state,
        weights=named_as(model, state.weights),
        ema=None if state.ema is None else named_as(model, state.ema),
        optimizer={kind: named_as(model, tensors, state.weights) for kind, tensors in state.optimizer.items()},
    )


def _without_momentum(state: TrainingState) -> TrainingState:
    lost = "momentum of LARS contains the learning rate of its run: it starts at zero"
    return replace(state, optimizer={}, lost=(*state.lost, lost))


def _notes(recipe: Recipe, plan: Plan, model: nn.Module, state: TrainingState, step: int) -> list[str]:
    """Notes on what is continued, and what is lost."""
    num_parameters = len(list(model.parameters()))
    taken = [f"{len(state.weights)} tensors"]
    taken += [f"{kind} of {len(by_name)} parameters" for kind, by_name in state.optimizer.items()]
    taken += ["the average of weights"] if state.ema is not None and recipe.ema.decay > 0 else []
    taken += [f"loss scale {state.loss_scale[0]:g}"] if state.loss_scale and recipe.precision.uses_loss_scale else []
    source = state.path if state.path.is_dir() else state.path.name
    notes = [
        f"continues {source}, a checkpoint of {state.program} after epoch {state.epochs:g} = step {step:,}: "
        + ", ".join(taken)
    ]
    lost = list(state.lost)
    for kind, by_name in state.optimizer.items():
        if len(by_name) < num_parameters:
            lost.append(f"{kind} of {num_parameters - len(by_name)} of {num_parameters} parameters")
    if recipe.ema.decay > 0 and state.ema is None:
        lost.append("the file has no average of weights: it starts from the weights")
    if recipe.precision.loss_scale == "dynamic" and recipe.precision.uses_loss_scale and state.loss_scale is None:
        lost.append("the file has no loss scale: it is searched again")
    notes += [f"lost: {text}" for text in lost]
    rates = [learning_rate(plan.schedule, at) for at in (max(0, step - 1), min(step, plan.total_steps - 1))]
    if state.lr is not None and all(abs(state.lr - rate) > _LR_TOLERANCE * abs(rate) for rate in rates):
        notes.append(f"the learning rate of the file is {state.lr:g}; this recipe has {rates[1]:g} from here on")
    return notes
