"""Renew `packaging/constraints.txt`, the versions that `make train`, `make test` and CI install.

    python packaging/renew_constraints.py [--torch 2.13.0]

Lets pip choose the newest releases that fit the package and its extras for tests, documentation and containers, and
writes them down; nothing is installed. torch is chosen by hand: it decides what else is tested, and how much is
downloaded.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = Path(__file__).with_name("constraints.txt")
EXTRAS = ("test", "dev", "docs", "serve", "onnx", "detection", "tensorboard", "imagenet")

# torch's wheels for CUDA require their Triton and CUDA libraries, in versions that its CPU wheels know nothing of.
LEFT_OUT = re.compile(r"(triton|nvidia|cuda|reconv)\b")

HEADER = """\
# The versions that are tested: `make train`, `make test`, CI and the containers install them; `make constraints` renews
# them. torch has no "+cpu", which only PyTorch's own index has; Triton and CUDA's libraries follow from torch's wheel.
"""


def resolve(torch: str) -> list[str]:
    """The packages that pip would install into an empty environment, as `name==version`."""
    target = f"{ROOT}[{','.join(EXTRAS)}]"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        options = ["--dry-run", "--ignore-installed", "--quiet", "--report", str(report)]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, f"torch=={torch}", target], check=True)
        found = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    return [f"{package['name'].lower().replace('_', '-')}=={package['version']}" for package in found]


def constraints(resolved: list[str]) -> str:
    """The text of the file: without local versions such as +cpu, and without what belongs to a build of torch."""
    lines = [line.partition("+")[0] for line in resolved if not LEFT_OUT.match(line)]
    return HEADER + "".join(f"{line}\n" for line in sorted(lines, key=str.lower))


def main() -> None:
    pinned = re.search(r"^torch==(\S+)$", CONSTRAINTS.read_text(), re.MULTILINE) if CONSTRAINTS.exists() else None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default=pinned[1] if pinned else None, required=pinned is None, metavar="VERSION")
    CONSTRAINTS.write_text(constraints(resolve(parser.parse_args().torch)))


if __name__ == "__main__":
    main()
