"""Who makes images of files: which decoder, how many workers, and whether they are threads or processes.

Owns what `auto` means in the fields about that. Refuses to know batches and how anything is decoded. Invariant: it is a
matter of speed alone, but for the decoder, whose pixels a run keeps.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from reconv.recipe.data_fields import Decoder, why_plain
from reconv.recipe.schema import Recipe

if TYPE_CHECKING:
    from reconv.recipe.plan import Facts

AUTO_THREADS = 8  # more of them wait for the GIL, which each holds for a tenth of an image's time
AUTO_PROCESSES = 32  # each takes about 0.2 GB
MANY_PICTURES = 10_000  # of an epoch: with fewer, starting processes costs more than they save
IN_MEMORY = ("digits", "scattered-digits", "cifar10", "cifar100", "synthetic", "synthetic-device")  # nothing to decode


def _is_in_memory(recipe: Recipe, facts: Facts) -> bool:
    return (facts.source or recipe.data.source) in IN_MEMORY


def decoder(recipe: Recipe, facts: Facts) -> Decoder:
    """Who makes resized crops of JPEG files: the plain way where there are none, or where the compiled one has none."""
    if _is_in_memory(recipe, facts) or why_plain(recipe.augment, recipe.data.preprocess) is not None:
        return "pillow"
    return facts.decoder if recipe.augment.decoder == "auto" else recipe.augment.decoder


def workers(recipe: Recipe, facts: Facts) -> int:
    """Decoding workers: none where the data is already in memory."""
    if recipe.data.num_workers != "auto":
        return recipe.data.num_workers
    if _is_in_memory(recipe, facts):
        return 0
    return min(facts.cores, AUTO_PROCESSES if _in_processes(recipe, facts) else AUTO_THREADS)


def _in_processes(recipe: Recipe, facts: Facts) -> bool:
    """Whether workers are processes: as asked, else where threads would wait for the GIL.

    Many threads do; and without the compiled decoder two of them already.
    """
    data = recipe.data
    if data.backend != "auto":
        return data.backend != "threads"
    if data.cache != "off" or not sys.platform.startswith("linux"):
        return False
    wanted = facts.cores if data.num_workers == "auto" else data.num_workers
    is_slow = not _is_in_memory(recipe, facts) and decoder(recipe, facts) == "pillow"
    is_long = (data.epoch_samples or facts.num_train) >= MANY_PICTURES
    return wanted > AUTO_THREADS or (wanted > 1 and is_slow and is_long)


def backend(recipe: Recipe, facts: Facts) -> str:
    """Who decodes: nobody but the caller where there are no workers."""
    if workers(recipe, facts) == 0:
        return "caller"
    if recipe.data.backend != "auto":
        return recipe.data.backend
    return "processes" if _in_processes(recipe, facts) else "threads"


def gpu_share(recipe: Recipe, facts: Facts) -> float:
    """Of the training images, what the GPU makes: nothing but with that back-end."""
    if backend(recipe, facts) != "gpu":
        return 0.0
    return facts.gpu_share if recipe.data.gpu_decode_fraction == "auto" else recipe.data.gpu_decode_fraction
