"""Time the training kernels on a CUDA GPU, ours beside what they replace.

    python -m benchmarks.kernels                          # all cases
    python -m benchmarks.kernels CASE ... [--only TEXT]   # some cases, and of them the rows whose name contains TEXT
    python -m benchmarks.kernels stem --sweep             # other launch configurations too, the fastest first
    python -m benchmarks.kernels inception --profile 4c   # the kernels of one row
    python -m benchmarks.kernels --dry-run                # every way once in Triton's interpreter, without a GPU

Inputs are bfloat16, channels_last, and rotate, so that none stays in the L2 cache; the time of a way is that of a CUDA
graph of its calls. TB/s is what must be read and written over the time of ours, and its fraction of what a copy
reaches (--peak). "error" is the relative difference from the reference at batch 8 in three groups. Exits with 1 if a
kernel is wrong or a second call gives other bits.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from reconv.core.compat import complete_interpreter

if TYPE_CHECKING:
    from benchmarks.kernels.harness import Case

DRY_ROWS, DRY_BATCH, DRY_SIDE = 1, 2, 6  # one row of each case takes minutes in the interpreter


def main(args: Sequence[str]) -> int:
    if "--dry-run" in args:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    from benchmarks.kernels.cases import CASES

    parser = argparse.ArgumentParser(
        "python -m benchmarks.kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"default: all of {', '.join(CASES)}")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose name contains this")
    parser.add_argument("--sweep", action="store_true", help="try other launch configurations")
    parser.add_argument("--profile", metavar="ROW", help="list the kernels of this row instead")
    parser.add_argument("--peak", type=float, default=4.3, help="TB/s of a copy, reads and writes counted")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dry-run", action="store_true", help="small shapes on the CPU, in Triton's interpreter")
    options = parser.parse_args(args)
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"unknown cases: {', '.join(sorted(unknown))}; choose from {', '.join(CASES)}")
    return run({name: CASES[name] for name in options.cases or CASES}, options)


def run(cases: Mapping[str, Case], options: argparse.Namespace) -> int:
    """Measure the cases, or profile a row of them."""
    import torch

    from benchmarks.kernels.harness import DTYPE, Harness, Sizes

    if options.dry_run:
        from triton.runtime import interpreter

        complete_interpreter(interpreter)
    sizes = Sizes(batch=DRY_BATCH, max_side=DRY_SIDE) if options.dry_run else Sizes(batch=options.batch)
    harness = Harness(sizes, sweep=options.sweep, is_dry=options.dry_run, peak=options.peak)
    torch.backends.cudnn.benchmark = True
    where = "Triton's interpreter" if options.dry_run else torch.cuda.get_device_name()
    print(f"{where}, torch {torch.__version__}, batch {sizes.batch}, {DTYPE}")
    figures = {}
    for name, case in cases.items():
        print(f"\n{name}", flush=True)
        if options.profile:
            harness.profile(case, options.profile)
        else:
            limit = DRY_ROWS if options.dry_run and not options.only else None
            figures[name] = harness.measure(case, options.only, limit)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    return 0 if harness.is_right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
