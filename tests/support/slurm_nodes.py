"""A real Slurm of one controller and three nodes on this machine: `tests/external/slurm_cluster`."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SLURM = Path(__file__).parents[1] / "external" / "slurm_cluster"
_PROGRAMS = ("slurmctld", "slurmd", "munged", "ip", "nsenter", "unshare")


def missing_slurm() -> str:
    """Why there can be no cluster here; empty if there can."""
    if os.geteuid() != 0 or any(shutil.which(program) is None for program in _PROGRAMS):
        return "needs root, and: apt-get install --no-install-recommends slurm-wlm munge iproute2"
    return ""


@contextmanager
def slurm(folder: Path) -> Iterator[Path]:
    """A started cluster, with its files in the folder; SLURM_CONF names it."""
    log = folder.with_name(f"{folder.name}.out")  # not a pipe: the daemons would keep it open
    with log.open("w") as out:
        started = subprocess.run([SLURM, "start", folder], stdout=out, stderr=out, timeout=120, check=False)
    try:
        assert started.returncode == 0, log.read_text()
        os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
        yield folder
    finally:
        os.environ.pop("SLURM_CONF", None)
        subprocess.run([SLURM, "stop", folder], check=True, timeout=120)
