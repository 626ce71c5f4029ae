"""A forward pass whose chosen stages keep only their input: the rest is computed again when gradients are.

Owns the choice of stages and the count of what a pass keeps. Refuses to know precision and steps. Invariant: outputs,
gradients and recorded statistics are those of the plain pass; a layer that draws draws from its keys, so that the
second time is the first.
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

from reconv.errors import RecipeError
from reconv.models.architecture import ReconvModel
from reconv.models.pipeline_split import parts_of

Stages = Sequence[tuple[str, nn.Module]]


@dataclass(frozen=True, slots=True)
class ActivationCheckpointing:
    """Which stages of a network are computed again, and what that saves."""

    segments: tuple[tuple[str, ...], ...]  # stages in a row that keep the input of the first alone
    num_stages: int
    kept_bytes: int  # of one image, after the forward pass
    plain_bytes: int  # the same if nothing were computed again

    @property
    def names(self) -> tuple[str, ...]:
        """All stages that are computed again."""
        return tuple(name for segment in self.segments for name in segment)

    def words(self, num_images: int) -> str:
        """What a person wants to know of it."""
        kept, plain = (num_images * size / 1e6 for size in (self.kept_bytes, self.plain_bytes))
        return (
            f"{len(self.names)} of {self.num_stages} stages ({', '.join(self.names)}) are computed again, in "
            f"{len(self.segments)} pieces: a micro-batch of {num_images} keeps {kept:,.1f} MB of activations "
            f"in place of {plain:,.1f} MB"
        )


def recomputing(
    model: nn.Module, segments: Sequence[Sequence[str]], again: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Callable[..., Any]:
    """The network's forward pass; each segment keeps its input alone, and is computed again inside `again`."""
    assert isinstance(model, ReconvModel)
    stages = dict(model.stages())
    segment_of = {name: tuple(segment) for segment in segments for name in segment}
    pieces = list(dict.fromkeys(segment_of.get(name, (name,)) for name in stages))
    run = {piece: nn.Sequential(*(stages[name] for name in piece)) for piece in pieces}

    def forward(images: Tensor) -> Any:
        value: Any = images
        for piece in pieces:
            if piece[0] in segment_of:
                # No generator is drawn from, so its state need not be kept; reading it would also end a recording.
                value = checkpoint(
                    run[piece],
                    value,
                    use_reentrant=False,
                    preserve_rng_state=False,
                    context_fn=lambda: (nullcontext(), again()),
                )
            else:
                value = run[piece](value)
        return value

    return forward


def choose_stages(
    model: nn.Module, wish: Sequence[str] | Literal["auto", "all"], image: Sequence[int], dtype: torch.dtype
) -> ActivationCheckpointing:
    """The stages that a recipe wants computed again, for images [channels, height, width] of a type."""
    if not isinstance(model, ReconvModel):
        raise RecipeError(
            "memory.activation_checkpointing: networks of other packages have one stage",
            why="computing all of a network again saves nothing",
            then="--set memory.activation_checkpointing=off, or a smaller batch.micro",
        )
    stages = [*_watched(model, image, dtype)]
    names = [stage.name for stage in stages]
    if wish == "all":
        chosen = tuple(names[:-1])  # the last one's activations are needed at once
    elif wish == "auto":
        chosen = _heaviest(stages)
    else:
        chosen = tuple(_matching(names, wish))
    return _recomputed(stages, tuple((name,) for name in chosen))


def cut_stages(
    model: nn.Module, splits: Sequence[str], image: Sequence[int], dtype: torch.dtype
) -> ActivationCheckpointing:
    """The pieces between the stages at which a person cuts the network; all but the last are computed again."""
    assert isinstance(model, ReconvModel)
    pieces = [tuple(name for name, _ in part) for part in parts_of(model, splits)]
    return _recomputed([*_watched(model, image, dtype)], tuple(pieces[:-1]))


def kept_of_image(model: nn.Module, image: Sequence[int], dtype: torch.dtype) -> int | None:
    """Bytes that one image keeps for the gradients of all stages; None for a network that does not tell its stages."""
    return _kept_bytes([*_watched(model, image, dtype)], ()) if isinstance(model, ReconvModel) else None


def _recomputed(stages: Sequence[_Stage], segments: tuple[tuple[str, ...], ...]) -> ActivationCheckpointing:
    return ActivationCheckpointing(segments, len(stages), _kept_bytes(stages, segments), _kept_bytes(stages, ()))


def _heaviest(stages: Sequence[_Stage]) -> tuple[str, ...]:
    """The stages that save most, the last left out, until half is saved; in the network's order."""
    names, plain = [stage.name for stage in stages[:-1]], _kept_bytes(stages, ())
    chosen: list[str] = []
    for name in sorted(names, key=lambda name: _kept_bytes(stages, ((name,),))):
        if _kept_bytes(stages, [(name,) for name in chosen]) <= plain / 2:
            break
        chosen.append(name)
    return tuple(name for name in names if name in chosen)


def _matching(names: Sequence[str], wish: Sequence[str]) -> Iterator[str]:
    """The stages a person named: whole, by their first part, or by a pattern."""

    def matches(name: str, pattern: str) -> bool:
        return name == pattern or name.startswith(pattern + ".") or fnmatch.fnmatchcase(name, pattern)

    for pattern in wish:
        if not any(matches(name, pattern) for name in names):
            raise RecipeError(
                f"memory.activation_checkpointing: there is no stage {pattern!r}",
                then=f"the stages are: {', '.join(names)}",
            )
    return (name for name in names if any(matches(name, pattern) for pattern in wish))


@dataclass(frozen=True, slots=True)
class _Stage:
    """Bytes of one image by what identifies their memory: kept for the gradients of a stage, and of its input."""

    name: str
    kept: Mapping[int, int]
    inputs: Mapping[int, int]


def _kept_bytes(stages: Sequence[_Stage], segments: Sequence[Sequence[str]]) -> int:
    """What a forward pass keeps if each segment keeps its input alone; memory that is shared counts once."""
    firsts, every = {segment[0] for segment in segments}, {name for segment in segments for name in segment}
    kept: dict[int, int] = {}
    for stage in stages:
        if stage.name in firsts:
            kept |= stage.inputs
        elif stage.name not in every:
            kept |= stage.kept
    return sum(kept.values())


def _watched(model: ReconvModel, image: Sequence[int], dtype: torch.dtype) -> Iterator[_Stage]:
    """Each stage of a forward pass on tensors without memory, so that nothing is computed."""
    num_images = 2  # batch norm in training refuses one value a channel
    network = copy.deepcopy(model).to("meta").train()
    weights = {id_of(tensor) for tensor in (*network.parameters(), *network.buffers())}
    held: list[Tensor] = []  # so that no other tensor takes the place of one that was counted

    def sizes(tensors: Iterable[Tensor]) -> dict[int, int]:
        held.extend(counted := [tensor for tensor in tensors if id_of(tensor) not in weights])
        return {id_of(tensor): _size(tensor, dtype) // num_images for tensor in counted}

    value: Any = torch.empty(num_images, *image, device="meta", dtype=next(network.parameters()).dtype)
    for name, stage in network.stages():
        saved: list[Tensor] = []
        inputs = sizes(_tensors(value))
        with torch.autograd.graph.saved_tensors_hooks(_keeping(saved), lambda tensor: tensor):
            value = stage(value)
        yield _Stage(name, sizes(saved), inputs)


def _keeping(saved: list[Tensor]) -> Callable[[Tensor], Tensor]:
    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    return keep


def _size(tensor: Tensor, dtype: torch.dtype) -> int:
    """Bytes of a tensor, floats in the type that the run computes in."""
    return tensor.numel() * (dtype.itemsize if tensor.is_floating_point() else tensor.element_size())


def id_of(tensor: Tensor) -> int:
    """What identifies the memory of a tensor, also where there is none."""
    return int(tensor.untyped_storage()._cdata)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for item in value:
            yield from _tensors(item)
