"""Store the losses and weights of the golden runs as the expected ones, or print them.

    python tests/golden/accept.py                     all runs, on the CPU
    python tests/golden/accept.py quickstart photos   only these
    python tests/golden/accept.py --device cuda       those of tests/gpu
    PYTHONPATH=CHECKOUT python tests/golden/accept.py --print    the numbers of another commit

The numbers of AVX2 come from a machine with AVX-512, too:

    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 python tests/golden/accept.py
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from contextlib import chdir
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--print", action="store_true", help="print them, store nothing")
    options = parser.parse_args()

    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported, here and in ranks
    import torch
    from golden_runs import GPU_RUNS, GPU_SETTINGS, RUNS, gpu_key, machine_key, perform, read_values, write_values

    import reconv

    torch.set_num_threads(1)
    is_gpu = options.device == "cuda"
    key = gpu_key() if is_gpu else machine_key()
    print(f"{key}, {Path(reconv.__file__).parent}", file=sys.stderr)
    values = read_values(options.device)
    stored = dict(values.get(key, {}))
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        for name in options.names or (GPU_RUNS if is_gpu else RUNS):
            outcome = perform(name, Path(folder) / "data", options.device, GPU_SETTINGS if is_gpu else None)
            note = "new" if name not in stored else "equal" if stored[name] == asdict(outcome) else "CHANGED"
            print(f"{name:32} {outcome.losses[-1]:<20} {outcome.digests['model']}  {note}", flush=True)
            stored[name] = asdict(outcome)
    if not options.print:
        write_values(options.device, {**values, key: stored})


if __name__ == "__main__":
    main()
