"""CPU time that `engine.verify: sample` takes of a training on a CPU.

    python -m benchmarks.training.verify_cost resnet50 --batch 32 --rounds 5 --json cost.json

One process trains the same network by turns without verification, with the digests of an ordinary step, with a probe
and with a whole step computed again. The digests are timed within steps, because they take less than steps differ. The
share is that of the steps between two that are computed again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from reconv.trainer.run import TrainingRun
from reconv.trainer.verifier import SAMPLE_STEPS, STEPS_PER_REPLAY

# The kinds of steps, by their numbers.
STEPS = {"digests": 1, "probe": SAMPLE_STEPS - 1, "replay": STEPS_PER_REPLAY * SAMPLE_STEPS - 1}

LABELS = {
    "off": "a step without verification",
    "digests": "the digests of a step",
    "probe": "a step with a probe",
    "replay": "a step computed twice",
}


def measure(recipe: str, settings: Mapping[str, str], rounds: int, repeats: int) -> dict[str, list[float]]:
    """CPU seconds of each kind of step, after one that is not counted."""
    overrides = [(name, value, "--set") for name, value in settings.items()]
    taken_s: dict[str, list[float]] = {name: [] for name in ("off", *STEPS)}
    with (
        tempfile.TemporaryDirectory() as folder,
        TrainingRun.open(recipe, overrides, out=Path(folder) / "run", device="cpu") as run,
    ):
        trainer = run.trainer()
        step, verifier = trainer.step, trainer.verifier
        assert verifier is not None
        batches = next(iter(trainer.loader.steps(0, 1)))
        digests, plain = step.digests, replace(step, digests=None)
        digest_s = [0.0]  # of all calls

        def timed(function: Callable[..., None]) -> Callable[..., None]:
            def call(*args: Any) -> None:
                began_s = time.process_time()
                function(*args)
                digest_s[0] += time.process_time() - began_s

            return call

        assert digests is not None
        digests.check, digests.record = timed(digests.check), timed(digests.record)  # type: ignore[method-assign]

        def verified(number: int) -> Callable[[], object]:
            return lambda: verifier.run_step(step, number, batches, batches)

        kinds: dict[str, Callable[[], object]] = {"off": lambda: plain(1, batches)}
        kinds |= {name: verified(number) for name, number in STEPS.items()}
        for round_number in range(rounds + 1):
            for name, run_step in kinds.items():
                if not round_number and name != "off":
                    continue
                verifier.start()  # a step without digests has changed the state
                times = repeats if name in ("off", "digests") else 1
                began_s, digest_s[0] = time.process_time(), 0.0
                for _ in range(times):
                    run_step()
                total_s = digest_s[0] if name == "digests" else time.process_time() - began_s
                if round_number:
                    taken_s[name].append(total_s / times)
    return taken_s


def share(off: float, digests: float, probe: float, replay: float) -> float:
    """Percent of the time that verification adds."""
    sampled_s = replay - off + (STEPS_PER_REPLAY - 1) * (probe - off)
    return 100 * (digests + sampled_s / (STEPS_PER_REPLAY * SAMPLE_STEPS)) / off


def figures(taken_s: Mapping[str, list[float]]) -> Iterator[tuple[str, float, str, int]]:
    """Name, value, unit and n of each figure."""
    n = len(taken_s["off"])
    medians = {kind: statistics.median(values) for kind, values in taken_s.items()}
    for kind, value in medians.items():
        yield LABELS[kind], 1000 * value, "ms", n
    yield "engine.verify=sample adds", share(**medians), "%", n


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=1, help="ordinary steps in a round, for small networks")
    parser.add_argument("--set", action="append", default=[], help="a setting, NAME=VALUE")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    settings = {"batch.size": str(options.batch), "engine.verify": "sample", "engine.num_threads": "1"}
    settings |= dict(setting.split("=", 1) for setting in options.set)
    taken_s = measure(options.recipe, settings, options.rounds, options.repeats)
    found = list(figures(taken_s))
    for kind, values in taken_s.items():
        print(f"{kind:10} " + " ".join(f"{1000 * value:.2f}" for value in values) + " ms")
    for name, value, unit, n in found:
        print(f"{name:50} {value:10.5g} {unit:4} (n={n})")
    if options.json:
        options.json.write_text(json.dumps({"figures": found}))
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
