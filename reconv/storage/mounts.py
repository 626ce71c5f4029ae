"""Detection of paths on local disks, where files can be mapped safely."""

from __future__ import annotations

import os
import re
from pathlib import Path

# Access to a mapped file that is truncated or lost on a server kills the process with SIGBUS; a read gives an error.
_REMOTE = ("9p", "afs", "beegfs", "ceph", "cifs", "fuse", "gfs", "glusterfs", "gpfs", "lustre", "nfs", "smb", "wekafs")
_MOUNTS = Path("/proc/self/mountinfo")


def is_local(path: Path, mounts: Path = _MOUNTS) -> bool:
    """True if the file is on a local disk according to the mount table; True without a table."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return True
    resolved = Path(os.path.realpath(path))  # Path.resolve raises for a link to itself
    longest, kind = -1, ""
    for line in lines:
        before, _, after = line.partition(" - ")
        # Spaces and backslashes are written in octal.
        point = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), before.split()[4]))
        # The last mount on a point hides the ones before it.
        if (resolved == point or point in resolved.parents) and len(point.parts) >= longest:
            longest, kind = len(point.parts), after.split()[0]
    return not kind.startswith(_REMOTE)
