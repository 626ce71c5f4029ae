"""Splitting a model into consecutive, non-empty parts of whole stages with about equal FLOPs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import combinations, pairwise

import torch
from torch import nn

from reconv.core.errors import RecipeError
from reconv.models.architecture import ReconvModel

_MAX_CHOICES = 20_000  # splits that are tried; with more, each split is chosen by itself at an equal share


def stage_flops(model: nn.Module, image: Sequence[int]) -> dict[str, int]:
    """FLOPs of each stage's forward pass over one image, counted on the meta device."""
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton

    assert isinstance(model, ReconvModel)
    num_images = 2  # batch norm in training needs more than one value per channel
    network = copy.deepcopy(model).to("meta").train()
    value = torch.empty(num_images, *image, device="meta", dtype=next(network.parameters()).dtype)
    work = {}
    for name, stage in network.stages():
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            value = stage(value)
        work[name] = counter.get_total_flops() // num_images
    return work


def balance(work: dict[str, int], num_parts: int) -> tuple[str, ...]:
    """The first stages of all parts but the first, such that the largest part has as few FLOPs as possible."""
    names, loads = list(work), list(work.values())
    total = sum(loads)
    if num_parts == 2 or len(names) ** (num_parts - 1) <= _MAX_CHOICES:
        choices = combinations(range(1, len(names)), num_parts - 1)
        best = min(choices, key=lambda cuts: max(sum(loads[a:b]) for a, b in pairwise((0, *cuts, len(names)))))
        return tuple(names[cut] for cut in best)
    cuts: list[int] = []
    for part in range(1, num_parts):
        reached = [i for i in range(1, len(names)) if sum(loads[:i]) >= total * part / num_parts and i not in cuts]
        cuts.append(min(reached, default=len(names) - num_parts + part))
    return tuple(names[cut] for cut in sorted(cuts))


def check_splits(
    model: nn.Module,
    splits: Sequence[str],
    num_parts: int,
    image: Sequence[int],
    field: str = "parallel.pipeline_splits",
) -> None:
    """Raise RecipeError, with a balanced proposal, if splits are too few, too many, unknown or out of order."""
    if not isinstance(model, ReconvModel):
        raise RecipeError(f"{field}: models of other packages have one stage and cannot be split")
    work = stage_flops(model, image)
    possible = list(work)[1:]
    if len(splits) == num_parts - 1 and set(splits) <= set(possible) and _in_order(possible, splits):
        return
    if num_parts > len(work):
        raise RecipeError(f"{field}: {num_parts} parts for a model of {len(work)} stages")
    proposal = balance(work, num_parts)
    raise RecipeError(
        f"{field}: {num_parts} parts need {num_parts - 1} of the model's stages, in order, not "
        f"{list(splits) or 'none'}",
        why=f"each part begins at one of: {', '.join(possible)}",
        hint=f"for parts of about equal FLOPs: --set '{field}=[{', '.join(proposal)}]'",
    )


def _in_order(names: Sequence[str], chosen: Sequence[str]) -> bool:
    places = [names.index(name) for name in chosen]
    return all(a < b for a, b in pairwise(places))


def split_stages(model: nn.Module, splits: Sequence[str]) -> list[list[tuple[str, nn.Module]]]:
    """The named stages of each part of a model."""
    assert isinstance(model, ReconvModel)
    parts: list[list[tuple[str, nn.Module]]] = [[]]
    for name, stage in model.stages():
        if name in splits:
            parts.append([])
        parts[-1].append((name, stage))
    return parts
