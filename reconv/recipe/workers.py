"""Choices of `auto` for decoding: decoder, number of workers, threads or processes.

Only the decoder changes pixels, so a run keeps it; the rest is about speed.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from reconv.core.errors import ResourceError
from reconv.recipe.parts.data import Decoder, why_not_native
from reconv.recipe.schema import Recipe

if TYPE_CHECKING:
    from reconv.recipe.plan import Facts, Plan

AUTO_THREADS = 8  # more would wait for the GIL, which each holds for a tenth of the time
MAX_WORKERS = 32
WORKER_BYTES = 200_000_000  # of a decoding process, measured
MANY_IMAGES = 10_000  # per epoch; with fewer, starting processes costs more than they save
IN_MEMORY = ("digits", "scattered-digits", "cifar10", "cifar100", "synthetic", "synthetic-device")  # nothing to decode


def _is_in_memory(recipe: Recipe, facts: Facts) -> bool:
    return (facts.source or recipe.data.source) in IN_MEMORY


def decoder(recipe: Recipe, facts: Facts) -> Decoder:
    """The decoder of cropped JPEG files; pillow where there are none or the native decoder does not support them."""
    if _is_in_memory(recipe, facts) or why_not_native(recipe.augment, recipe.data.preprocess) is not None:
        return "pillow"
    return facts.decoder if recipe.augment.decoder == "auto" else recipe.augment.decoder


def workers(recipe: Recipe, facts: Facts) -> int:
    """Number of decoding workers; 0 where the data is already in memory."""
    if recipe.data.num_workers != "auto":
        return recipe.data.num_workers
    if _is_in_memory(recipe, facts):
        return 0
    is_parallel = _uses_processes(recipe, facts) or _decodes_without_gil(recipe, facts)
    return min(facts.cores, MAX_WORKERS if is_parallel else AUTO_THREADS)


def _decodes_without_gil(recipe: Recipe, facts: Facts) -> bool:
    """True if the native decoder reads and crops many training images in one call, in threads of its own."""
    return facts.fills_from_files and decoder(recipe, facts) == "native" and recipe.data.cache == "off"


def _uses_processes(recipe: Recipe, facts: Facts) -> bool:
    """True if training images are decoded by processes: as set, else where threads would wait for the GIL."""
    if recipe.data.backend != "auto":
        return recipe.data.backend != "threads"
    return not _decodes_without_gil(recipe, facts) and _prefers_processes(recipe, facts, facts.num_train)


def _prefers_processes(recipe: Recipe, facts: Facts, num_images: int) -> bool:
    """True if image by image processes are faster: many threads contend for the GIL, with Pillow even two do."""
    data = recipe.data
    if data.cache != "off" or not sys.platform.startswith("linux"):
        return False
    wanted = facts.cores if data.num_workers == "auto" else data.num_workers
    is_slow = not _is_in_memory(recipe, facts) and decoder(recipe, facts) == "pillow"
    is_long = (data.epoch_samples or num_images) >= MANY_IMAGES
    return wanted > AUTO_THREADS or (wanted > 1 and is_slow and is_long)


def backend(recipe: Recipe, facts: Facts) -> str:
    """Place where images are decoded: caller (no workers), threads or processes."""
    if workers(recipe, facts) == 0:
        return "caller"
    if recipe.data.backend != "auto":
        return recipe.data.backend
    return "processes" if _uses_processes(recipe, facts) else "threads"


def eval_backend(recipe: Recipe, facts: Facts) -> str:
    """Place where validation images are decoded: as for training, but Pillow decodes, so that many need processes."""
    chosen = backend(recipe, facts)
    is_small = facts.num_val < MANY_IMAGES
    if recipe.data.backend != "auto" or chosen != "threads" or not _decodes_without_gil(recipe, facts) or is_small:
        return chosen
    return "processes" if _prefers_processes(recipe, facts, facts.num_val) else "threads"


def check_worker_memory(plan: Plan, recipe: Recipe, num_ranks: int, available_bytes: int | None) -> None:
    """Raise if the decoding processes asked for, on all ranks of this machine, cannot fit into its memory."""
    num_workers = recipe.data.num_workers
    has_processes = "processes" in (plan.backend, plan.eval_backend)
    if num_workers == "auto" or not has_processes or available_bytes is None:
        return
    most = available_bytes // (WORKER_BYTES * num_ranks)
    if num_workers > most:
        on = f" on each of {num_ranks} ranks" * (num_ranks > 1)
        raise ResourceError(
            f"{num_workers:,} decoding processes{on} do not fit into the memory",
            where=f"data.num_workers: {num_workers}",
            why=f"each takes about {WORKER_BYTES / 1e9:.1f} GB, and {available_bytes / 1e9:.1f} GB are available",
            hint=f"--workers {most}" + (", or fewer" if most else ", which decodes in the main process"),
        )
