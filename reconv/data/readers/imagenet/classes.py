"""The 1,000 classes of ImageNet (ILSVRC 2012): WordNet ids (wnids) and names, in the order of the class indices."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

from reconv.storage.local import read

NUM_IMAGENET_CLASSES = 1000
_WNID = re.compile(r"n\d{8}")


@cache
def imagenet_names() -> Mapping[str, str]:
    """Names by wnid, such as n01440764: tench; the names are unique."""
    lines = read(Path(__file__).with_name("imagenet_classes.txt")).decode("utf-8").splitlines()
    pairs = (line.partition(" ") for line in lines)
    return MappingProxyType({wnid: name for wnid, _, name in pairs})


def with_imagenet_names(class_names: Iterable[str]) -> tuple[str, ...]:
    """Class names for people: wnids of ImageNet become names, everything else stays."""
    classes = tuple(class_names)
    if not any(map(_WNID.fullmatch, classes)):
        return classes
    names = imagenet_names()
    return tuple(names.get(name, name) for name in classes)
