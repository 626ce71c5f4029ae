"""The ways from stored images to training images that `bench data --compare` sets beside each other.

Owns which ways there are for a data set, and the packed copies that some of them need. Refuses to time anything.
Invariant: every way has the same images in the same order; copies lie in a temporary folder and are gone at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from reconv.bench.bench_target import BenchTarget
from reconv.data.convert.convert import ConvertTarget, convert
from reconv.data.convert.transcode import TranscodeOptions
from reconv.data.dataset import Dataset, Subset, evenly_spaced
from reconv.data.readers.packed import PackedDataset

AS_GIVEN, FAST = "as-given", "fast"
PACKED = {
    "packed-320": TranscodeOptions(shortest=320, quality=90),
    "raw-400": TranscodeOptions(raw=True, longest=400),
}
WORDS = {
    AS_GIVEN: "the data as they are",
    FAST: "the same without antialiasing",
    "packed-320": "packed, short side 320, JPEG 90",
    "raw-400": "packed, raw pixels, long side 400",
}


@dataclass(frozen=True, slots=True)
class Way:
    """One way, by its name."""

    name: str
    subject: BenchTarget


@contextmanager
def open_ways(subject: BenchTarget, num_pictures: int, tell: Callable[[str], None]) -> Iterator[list[Way]]:
    """The ways for some of the subject's images: as they are, sampled instead of averaged and, if they are files,
    from packed copies of them."""
    few = replace(subject, source=_few(subject.source, num_pictures))
    found = [Way(AS_GIVEN, few)]
    if subject.recipe.augment.antialias:
        augment = subject.recipe.augment.model_copy(update={"antialias": False})
        found.append(Way(FAST, replace(few, recipe=subject.recipe.model_copy(update={"augment": augment}))))
    with TemporaryDirectory(prefix="reconv-bench-") as folder:
        for name, form in PACKED.items() if _are_files(few.source) else ():
            tell(f"packing {len(few.source):,} images: {form.text}")
            copy = Path(folder) / name
            convert(
                {"train": few.source}, None, copy, ConvertTarget("packed", form), subject.plan.workers or 1, _silent
            )
            found.append(Way(name, replace(few, source=PackedDataset(copy, "train"))))
        yield found


def _few(source: Dataset, num_pictures: int) -> Dataset:
    """So many images, from all over the data set."""
    if len(source) <= num_pictures:
        return source
    return Subset(source, evenly_spaced(len(source), 100 * num_pictures / len(source)))


def _are_files(source: Dataset) -> bool:
    return source.kind != PackedDataset.kind and isinstance(source[0].data, bytes)


def _silent(done: int, total: int) -> None:
    """A conversion of a few images needs no bar."""
