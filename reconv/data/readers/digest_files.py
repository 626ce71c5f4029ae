"""What sources of single files share: telling one set of files from another.

Owns that digest. Refuses to know where a list of files comes from. Invariant: a file added, removed, renamed or
relabelled gives another digest, and so does one of the looked-at files that changes its size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from reconv.data.dataset import evenly_spaced
from reconv.data.readers.packed_names import PackedNames
from reconv.data.storage.local import size_bytes

NUM_SIZES = 4096  # of files spread over the set: asking for all of a million takes minutes on a network disk


def digest_files(
    class_names: tuple[str, ...], names: PackedNames, targets: npt.NDArray[np.integer], path: Callable[[int], str]
) -> str:
    """A digest of all names and targets and of the sizes of up to 4096 files spread over the set."""
    digest = hashlib.blake2b("\0".join(class_names).encode("utf-8", "surrogateescape"), digest_size=16)
    for piece in (*names.content(), targets.data):
        digest.update(piece)
    for index in evenly_spaced(len(names), 100 * min(1, NUM_SIZES / len(names))):
        digest.update(size_bytes(path(int(index))).to_bytes(8, "little"))
    return digest.hexdigest()
