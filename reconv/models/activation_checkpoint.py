"""Activation checkpointing by stages: which stages to recompute, how much memory that saves, and the forward pass.

Outputs, gradients and batch norm statistics equal those of the plain pass: random layers depend on keys alone, so a
recomputed mask is the same.

Batch norm overwrites its record when it is computed again, so a step counts once (tests/laws/test_law_recompute.py).
"""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from reconv.core.errors import RecipeError
from reconv.models.architecture import ReconvModel
from reconv.models.pipeline_split import split_stages

Stages = Sequence[tuple[str, nn.Module]]


@dataclass(frozen=True, slots=True)
class ActivationCheckpointing:
    """Stages of a model to recompute in the backward pass, and the memory that saves."""

    segments: tuple[tuple[str, ...], ...]  # consecutive stages, of which only the first one's input is saved
    num_stages: int
    kept_bytes: int  # saved activations of one image
    plain_bytes: int  # the same without checkpointing

    @property
    def names(self) -> tuple[str, ...]:
        """All stages that are recomputed."""
        return tuple(name for segment in self.segments for name in segment)

    def describe(self, num_images: int) -> str:
        """One line for the log."""
        kept, plain = (num_images * size / 1e6 for size in (self.kept_bytes, self.plain_bytes))
        return (
            f"activation checkpointing: {len(self.names)} of {self.num_stages} stages ({', '.join(self.names)}) in "
            f"{len(self.segments)} segments; a micro-batch of {num_images} keeps {kept:,.1f} MB of activations "
            f"instead of {plain:,.1f} MB"
        )


def checkpointed_forward(
    model: nn.Module,
    segments: Sequence[Sequence[str]],
    recompute_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Callable[..., Any]:
    """The model's forward pass; each segment saves its input only and is recomputed inside `recompute_context`."""
    assert isinstance(model, ReconvModel)
    stages = dict(model.stages())
    segment_of = {name: tuple(segment) for segment in segments for name in segment}
    pieces = list(dict.fromkeys(segment_of.get(name, (name,)) for name in stages))
    run = {piece: nn.Sequential(*(stages[name] for name in piece)) for piece in pieces}

    def forward(images: Tensor) -> Any:
        value: Any = images
        for piece in pieces:
            if piece[0] in segment_of:
                # No generator is used, so its state need not be saved; reading it would also break CUDA-graph capture.
                value = checkpoint(
                    run[piece],
                    value,
                    use_reentrant=False,
                    preserve_rng_state=False,
                    context_fn=lambda: (nullcontext(), recompute_context()),
                )
            else:
                value = run[piece](value)
        return value

    return forward


def choose_stages(
    model: nn.Module, requested: Sequence[str] | Literal["auto", "all"], image: Sequence[int], dtype: torch.dtype
) -> ActivationCheckpointing:
    """The stages that a recipe wants recomputed, for images [channels, height, width] of a dtype."""
    if not isinstance(model, ReconvModel):
        raise RecipeError(
            "memory.activation_checkpointing: models of other packages have one stage",
            why="recomputing a whole model saves nothing",
            hint="--set memory.activation_checkpointing=off, or a smaller batch.micro",
        )
    stages = [*_trace_stages(model, image, dtype)]
    names = [stage.name for stage in stages]
    if requested == "all":
        chosen = tuple(names[:-1])  # the last one's activations are needed at once anyway
    elif requested == "auto":
        chosen = _heaviest(stages)
    else:
        chosen = tuple(_matching(names, requested))
    return _plan_checkpointing(stages, tuple((name,) for name in chosen))


def segment_stages(
    model: nn.Module, splits: Sequence[str], image: Sequence[int], dtype: torch.dtype
) -> ActivationCheckpointing:
    """The model split at the given stages; all segments but the last are recomputed."""
    assert isinstance(model, ReconvModel)
    pieces = [tuple(name for name, _ in part) for part in split_stages(model, splits)]
    return _plan_checkpointing([*_trace_stages(model, image, dtype)], tuple(pieces[:-1]))


def activation_bytes_per_image(model: nn.Module, image: Sequence[int], dtype: torch.dtype) -> int | None:
    """Bytes that one image saves for the backward pass; None for an external model, which has no stages."""
    return _kept_bytes([*_trace_stages(model, image, dtype)], ()) if isinstance(model, ReconvModel) else None


def _plan_checkpointing(
    stages: Sequence[_StageMemory], segments: tuple[tuple[str, ...], ...]
) -> ActivationCheckpointing:
    return ActivationCheckpointing(segments, len(stages), _kept_bytes(stages, segments), _kept_bytes(stages, ()))


def _heaviest(stages: Sequence[_StageMemory]) -> tuple[str, ...]:
    """The stages that save the most memory until half is saved, in the model's order, without the last."""
    names, plain = [stage.name for stage in stages[:-1]], _kept_bytes(stages, ())
    chosen: list[str] = []
    for name in sorted(names, key=lambda name: _kept_bytes(stages, ((name,),))):
        if _kept_bytes(stages, [(name,) for name in chosen]) <= plain / 2:
            break
        chosen.append(name)
    return tuple(name for name in names if name in chosen)


def _matching(names: Sequence[str], requested: Sequence[str]) -> Iterator[str]:
    """The stages given by name, by the first part of the name, or by a pattern."""

    def matches(name: str, pattern: str) -> bool:
        return name == pattern or name.startswith(pattern + ".") or fnmatch.fnmatchcase(name, pattern)

    for pattern in requested:
        if not any(matches(name, pattern) for name in names):
            raise RecipeError(
                f"memory.activation_checkpointing: there is no stage {pattern!r}",
                hint=f"the stages are: {', '.join(names)}",
            )
    return (name for name in names if any(matches(name, pattern) for pattern in requested))


@dataclass(frozen=True, slots=True)
class _StageMemory:
    """Bytes of one image by storage: saved for the backward pass of a stage, and of its input."""

    name: str
    kept: Mapping[int, int]
    inputs: Mapping[int, int]


def _kept_bytes(stages: Sequence[_StageMemory], segments: Sequence[Sequence[str]]) -> int:
    """Bytes that a forward pass saves if each segment saves its input only; shared storage counts once."""
    firsts, every = {segment[0] for segment in segments}, {name for segment in segments for name in segment}
    kept: dict[int, int] = {}
    for stage in stages:
        if stage.name in firsts:
            kept |= stage.inputs
        elif stage.name not in every:
            kept |= stage.kept
    return sum(kept.values())


def _trace_stages(model: ReconvModel, image: Sequence[int], dtype: torch.dtype) -> Iterator[_StageMemory]:
    """The memory of each stage, from a forward pass on the meta device."""
    num_images = 2  # batch norm in training needs more than one value per channel
    network = copy.deepcopy(model).to("meta").train()
    weights = {storage_id(tensor) for tensor in (*network.parameters(), *network.buffers())}
    held: list[Tensor] = []  # so that no storage is freed and its id reused

    def sizes(tensors: Iterable[Tensor]) -> dict[int, int]:
        held.extend(counted := [tensor for tensor in tensors if storage_id(tensor) not in weights])
        return {storage_id(tensor): _size(tensor, dtype) // num_images for tensor in counted}

    value: Any = torch.empty(num_images, *image, device="meta", dtype=next(network.parameters()).dtype)
    for name, stage in network.stages():
        saved: list[Tensor] = []
        inputs = sizes(_tensors(value))
        with torch.autograd.graph.saved_tensors_hooks(_saving_to(saved), lambda tensor: tensor):
            value = stage(value)
        yield _StageMemory(name, sizes(saved), inputs)


def _saving_to(saved: list[Tensor]) -> Callable[[Tensor], Tensor]:
    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    return keep


def _size(tensor: Tensor, dtype: torch.dtype) -> int:
    """Bytes of a tensor, with floats in the run's compute dtype."""
    return tensor.numel() * (dtype.itemsize if tensor.is_floating_point() else tensor.element_size())


def storage_id(tensor: Tensor) -> int:
    """An id of the tensor's storage, also on the meta device."""
    return int(tensor.untyped_storage()._cdata)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for item in value:
            yield from _tensors(item)
