"""Build the archives of a release: `make wheel` writes a wheel and a source archive to dist.

    python packaging/build_wheel.py [--folder dist]

The wheel is made from the source archive, with the libraries of csrc inside, and is for every Python on x86-64 Linux
with glibc 2.28 or newer, which auditwheel checks. The same commit and tools give the same bytes: times in archives are
SOURCE_DATE_EPOCH, by default the time of the commit.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLATFORM = "manylinux_2_28_x86_64"  # that of torch's wheels
OLDER_GLIBC = "csrc/glibc_2_28.h"


def commit_time() -> str:
    """The time of the checked out commit, in seconds since 1970."""
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def build(folder: Path) -> list[Path]:
    """Write both archives to a folder; returns their paths."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "LC_ALL": "C"}
    environment["SOURCE_DATE_EPOCH"] = os.environ.get("SOURCE_DATE_EPOCH") or commit_time()
    environment["CC"] = f"{os.environ.get('CC', 'cc')} -include {OLDER_GLIBC}"

    def run(*command: str | Path) -> None:
        subprocess.run([sys.executable, "-m", *command], check=True, cwd=ROOT, env=environment)

    folder = folder.resolve()
    os.umask(0o022)  # auditwheel stores the modes of folders
    with tempfile.TemporaryDirectory() as name:
        unrepaired = Path(name)
        run("build", "--no-isolation", "--outdir", unrepaired, ROOT)
        (wheel,), (archive,) = unrepaired.glob("*.whl"), unrepaired.glob("*.tar.gz")
        if wheel.name.endswith("-any.whl"):
            raise SystemExit("make wheel needs a C compiler: the wheel has no compiled library")
        run("auditwheel", "repair", "--plat", PLATFORM, "--only-plat", "--wheel-dir", folder, wheel)
        target = folder / archive.name
        target.write_bytes(archive.read_bytes())
    return [*folder.glob(f"{wheel.name.split('-py3-')[0]}-*{PLATFORM}.whl"), target]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "dist")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for path in build(folder):
        print(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path}")


if __name__ == "__main__":
    main()
