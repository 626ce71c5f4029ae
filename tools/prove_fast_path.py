"""Prove on a CUDA GPU that the fast path trains as the plain one does, waits for nothing, and can give equal bits.

    python tools/prove_fast_path.py [RECIPE] [--batch 128] [--steps 10]

Three claims: the losses of some steps by kernels and graph against the same steps launched plainly with
`engine.compile=off`, in bf16 and in fp32, at a small rate (a large one without a warm-up makes much of any difference);
no wait of the host for the device in a step of either (torch's own check raises); with
`engine.deterministic` two runs of the fast path end with equal digests of their weights, and what that costs. The exit
code says whether all hold.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from reconv.bench.bench_target import open_subject
from reconv.bench.timing import Marks, Wish, measure
from reconv.checkpoint.run_dir import RunDir
from reconv.distributed.process_group import ProcessGroup
from reconv.logging.run_logger import RunLogger
from reconv.trainer.build import loaders as parts
from reconv.trainer.build.datasets import Datasets
from reconv.trainer.build.train_state import TrainingRun, build_learner, build_step
from reconv.trainer.resume import RestorePoint
from reconv.trainer.trainer import Counters

TOLERANCES = {"bf16": 0.02, "fp32": 0.01}  # of a loss after ten steps: the two ways round at other places, which grows
SMALL_RATE = {"schedule.kind": "constant", "schedule.lr": 0.005, "schedule.values": [], "schedule.milestones": []}
WARM_STEPS = 5


@dataclass(frozen=True, slots=True)
class Trained:
    """What some steps left."""

    losses: list[float]
    digest: str
    images_per_s: float


def train(name: str, batch: int, steps: int, settings: Mapping[str, object]) -> Trained:
    """Train on made-up images that lie on the device; after the first steps a wait of the host is an error."""
    given = [("batch.size", batch, "tool"), ("batch.group", "all", "tool")]
    given += [(field, value, "tool") for field, value in settings.items()]
    subject = open_subject(name, input="device", data=None, overrides=given, device="cuda")
    recipe, plan, device = subject.recipe, subject.plan, subject.device
    sources = Datasets(subject.source, subject.source)
    job = TrainingRun(
        recipe, plan, sources, device, ProcessGroup.single(), RunDir(Path("tool")), RestorePoint(None, ())
    )
    learner = build_learner(job, RunLogger())
    marks = Marks(device)
    step = build_step(job, learner, Counters(step=1), RunLogger(), marks.mark)
    losses = []
    for number, batches in enumerate(parts.train_loader(recipe, plan, subject.source, device.move).steps(0, steps)):
        torch.cuda.set_sync_debug_mode("error" if number >= WARM_STEPS else "default")
        losses.append(step(number, batches).loss)
        torch.cuda.set_sync_debug_mode("default")
    digest = hashlib.sha256()
    for tensor in learner.network.model.state_dict().values():
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    loader = parts.train_loader(recipe, plan, subject.source, device.move)
    windows = measure(step, loader, device, Wish(5, None, 2), marks)
    return Trained([float(loss) / batch for loss in losses], digest.hexdigest()[:16], batch / windows.median_s)


def is_near(recipe: str, batch: int, steps: int, precision: str) -> bool:
    """Print how far the losses of the two ways are apart, and whether that is within the tolerance."""
    settings = {**SMALL_RATE, "precision.mode": precision}
    fast = train(recipe, batch, steps, settings)
    plain = train(recipe, batch, steps, {**settings, "engine.compile": "off"})
    apart = [abs(a - b) / abs(b) for a, b in zip(fast.losses, plain.losses, strict=True)]
    most = TOLERANCES[precision]
    print(f"{precision}: losses of {steps} steps fast {fast.losses[0]:.4f} to {fast.losses[-1]:.4f}, plain "
          f"{plain.losses[0]:.4f} to {plain.losses[-1]:.4f}; the first {apart[0]:.3%} apart, at most {max(apart):.3%} "
          f"({most:.1%} allowed); {fast.images_per_s:,.0f} and {plain.images_per_s:,.0f} images/s")  # fmt: skip
    return max(apart) <= most


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("recipe", nargs="?", default="resnet50-habana-1card-bf16")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=10)
    given = parser.parse_args()
    are_near = [is_near(given.recipe, given.batch, given.steps, precision) for precision in TOLERANCES]
    print(f"no wait of the host in steps {WARM_STEPS + 1} to {given.steps} of any")
    fast = train(given.recipe, given.batch, given.steps, {})
    print(f"fast {fast.images_per_s:,.0f} images/s")
    settings = {"engine.deterministic": True}
    first, second = (train(given.recipe, given.batch, given.steps, settings) for _ in range(2))
    is_equal = first.digest == second.digest
    cost = fast.images_per_s / first.images_per_s - 1
    print(f"deterministic: weights {first.digest} and {second.digest}, {'equal' if is_equal else 'NOT EQUAL'}; "
          f"{first.images_per_s:,.0f} images/s, {cost:.1%} slower")  # fmt: skip
    return 0 if is_equal and all(are_near) else 1


if __name__ == "__main__":
    sys.exit(main())
