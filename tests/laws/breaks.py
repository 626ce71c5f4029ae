"""Deliberate breaks: one line of a copy of the package is changed, and the tests of the law that it breaks must fail.

    python tests/laws/breaks.py                  all of them, some minutes
    python tests/laws/breaks.py resume golden    those with these words in their names

A line is found by its text alone, so that a break survives a move of its file.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Break:
    """A line of the package, what it is changed to, and the tests that see it."""

    name: str
    line: str
    changed: str
    tests: str


BREAKS = (
    Break(
        "law 1, resume: the optimizer's state is not restored",
        "self.optimizer.load_state_dict({k: v for k, v in optimizer.items()",
        "self.optimizer.load_state_dict({k: 0 * v for k, v in optimizer.items()",
        "tests/laws/test_law_resume.py",
    ),
    Break(
        "law 2, accumulation: a loss is divided by the weight of its micro-batch",
        "self.precision.scale(sums.loss / weight).backward()",
        "self.precision.scale(sums.loss / self.task.weight(prepared)).backward()",
        "tests/laws/test_law_micro_batches.py",
    ),
    Break(
        "law 3, ranks: gradients are added in another order than that of the groups",
        "for pass_grads in self._pass_grads:",
        "for pass_grads in reversed(self._pass_grads):",
        "tests/laws/test_law_ranks.py",
    ),
    Break(
        "law 4, pipeline: the loss of a micro-batch is divided once more",
        "return self.precision.scale(sums[-1].loss / weight)",
        "return self.precision.scale(sums[-1].loss / weight / len(batches))",
        "tests/laws/test_law_pipeline.py",
    ),
    Break(
        "law 5, recomputation: statistics of both forward passes count",
        "self.batch_stats = stats",
        "self.batch_stats = tuple(s + o for s, o in zip(stats, self.batch_stats or stats))",
        "tests/laws/test_law_recompute.py",
    ),
    Break(
        "law 6, models: a shortcut has a bias",
        "projection: list[nn.Module] = [self.make_conv(in_channels, out_channels, 1, stride)]",
        "projection: list[nn.Module] = [nn.Conv2d(in_channels, out_channels, 1, stride)]",
        "tests/models/test_parameter_counts.py tests/models/test_published_outputs.py",
    ),
    Break(
        "law 7, detection: a box without an anchor of enough IoU is not matched",
        "return MatchResult(box_index, is_forced | (best_iou >= match_iou))",
        "return MatchResult(box_index, best_iou >= match_iou)",
        "tests/detection tests/laws/test_law_detection.py",
    ),
    Break(
        "law 8, COCO: boxes are one pixel larger",
        "boxes[:, 2:] -= boxes[:, :2]",
        "boxes[:, 2:] -= boxes[:, :2] - 1",
        "tests/metrics/test_coco_eval.py",
    ),
    Break(
        "law 9, augmentation: parameters depend on the first position of the rank",
        "return self._device_params.sample(Rows(self.seed, positions, indices, epochs, size))",
        "return self._device_params.sample(Rows(self.seed, positions - positions[0], indices, epochs, size))",
        "tests/laws/test_law_ranks.py tests/data/pipeline/test_train_loader.py tests/golden",
    ),
    Break(
        "law 10, evaluation: each rank evaluates the last batch, too",
        "self._batches = left[rank::world_size]",
        "self._batches = sorted({*left[rank::world_size], *left[-1:]})",
        "tests/data/pipeline/test_eval_loader.py tests/laws/test_law_detection_ranks.py tests/laws/test_law_ranks.py",
    ),
    Break(
        "golden numbers: label smoothing is a little stronger on all paths",
        'reduction="sum", label_smoothing=smoothing)',
        'reduction="sum", label_smoothing=smoothing * 1.0001)',
        "tests/golden/test_golden_runs.py",
    ),
    Break(
        "golden numbers: random erasing draws from another stream on all paths",
        'uniforms(key(seed, "erase"), positions',
        'uniforms(key(seed, "erasing"), positions',
        "tests/golden/test_golden_runs.py",
    ),
    Break(
        "non-finite steps: momentum takes the gradients of a step that is not ok",
        "copy_if_ok(velocities, momentum_buffers, ok)",
        "torch._foreach_copy_(momentum_buffers, velocities)",
        "tests/optim",
    ),
    Break(
        "checkpoints: damaged files are not noticed",
        "_check_sha256(folder / name, found, entry)",
        "pass",
        "tests/checkpoint",
    ),
    Break(
        "kernels: a flipped image begins a pixel too early",
        "is_flipped, (width - 1) * stride_w, 0)",
        "is_flipped, (width - 2) * stride_w, 0)",
        "tests/kernels -k normalize",
    ),
)


def apply(case: Break, package: Path) -> None:
    """Change the line in a copy of the package; it must be there exactly once."""
    files = [file for file in sorted(package.rglob("*.py")) if case.line in file.read_text()]
    places = sum(file.read_text().count(case.line) for file in files)
    if places != 1:
        raise SystemExit(f"{case.name}: {case.line!r} is in {places} places")
    files[0].write_text(files[0].read_text().replace(case.line, case.changed))


def is_caught(case: Break) -> bool:
    """Whether the tests fail with the changed line."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "reconv"
        shutil.copytree(ROOT / "reconv", package, ignore=shutil.ignore_patterns("__pycache__"))
        apply(case, package)
        words = [str(ROOT / word) if word.startswith("tests/") else word for word in case.tests.split()]
        environment = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml"]
        run = subprocess.run(
            [*command, "--rootdir", ROOT, *words], cwd=folder, env=environment, capture_output=True, text=True
        )
        if run.returncode not in (0, 1):
            raise SystemExit(
                f"{case.name}: pytest ended with {run.returncode}:\n{run.stdout[-2000:]}{run.stderr[-2000:]}"
            )
        return run.returncode == 1


def main() -> None:
    cases = [case for case in BREAKS if not sys.argv[1:] or any(word in case.name for word in sys.argv[1:])]
    missed = []
    for case in cases:
        caught = is_caught(case)
        print(f"{'caught' if caught else 'MISSED'}  {case.name}", flush=True)
        missed += [] if caught else [case.name]
    raise SystemExit(f"{len(missed)} of {len(cases)} breaks are missed" if missed else 0)


if __name__ == "__main__":
    main()
