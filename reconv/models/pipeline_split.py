"""Where a network may be cut into parts of equal work.

Owns the count of a stage's work and the choice of cuts. Refuses to know devices. Invariant: parts are runs of whole
stages, in order, and none is empty.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import combinations, pairwise

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from reconv.errors import RecipeError
from reconv.models.architecture import ReconvModel

_MOST_CHOICES = 20_000  # of cuts that are tried; beyond that, cuts come one by one at equal shares


def work_of_stages(model: nn.Module, image: Sequence[int]) -> dict[str, int]:
    """Operations of each stage's forward pass over one image, as torch counts them; counted without computing."""
    assert isinstance(model, ReconvModel)
    num_images = 2  # batch norm in training refuses one value a channel
    network = copy.deepcopy(model).to("meta").train()
    value = torch.empty(num_images, *image, device="meta", dtype=next(network.parameters()).dtype)
    work = {}
    for name, stage in network.stages():
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            value = stage(value)
        work[name] = counter.get_total_flops() // num_images
    return work


def balanced(work: dict[str, int], num_parts: int) -> tuple[str, ...]:
    """The stages at which parts begin so that the heaviest part is as light as can be; the first part is not named."""
    names, loads = list(work), list(work.values())
    total = sum(loads)
    if num_parts == 2 or len(names) ** (num_parts - 1) <= _MOST_CHOICES:
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
    """Refuse splits that are too few, too many or unknown, with those there are and a balanced choice."""
    if not isinstance(model, ReconvModel):
        raise RecipeError(f"{field}: networks of other packages have one stage and cannot be cut")
    work = work_of_stages(model, image)
    possible = list(work)[1:]
    if len(splits) == num_parts - 1 and set(splits) <= set(possible) and _in_order(possible, splits):
        return
    if num_parts > len(work):
        raise RecipeError(f"{field}: {num_parts} parts for a network of {len(work)} stages")
    proposal = balanced(work, num_parts)
    raise RecipeError(
        f"{field}: {num_parts} parts need {num_parts - 1} of the network's stages, in order, not "
        f"{list(splits) or 'none'}",
        why=f"a part begins at each; possible are {', '.join(possible)}",
        then=f"parts of about equal work: --set '{field}=[{', '.join(proposal)}]'",
    )


def _in_order(names: Sequence[str], chosen: Sequence[str]) -> bool:
    places = [names.index(name) for name in chosen]
    return all(a < b for a, b in pairwise(places))


def parts_of(model: nn.Module, splits: Sequence[str]) -> list[list[tuple[str, nn.Module]]]:
    """The stages of a network, part by part."""
    assert isinstance(model, ReconvModel)
    parts: list[list[tuple[str, nn.Module]]] = [[]]
    for name, stage in model.stages():
        if name in splits:
            parts.append([])
        parts[-1].append((name, stage))
    return parts
