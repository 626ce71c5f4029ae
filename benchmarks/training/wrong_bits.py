"""Flip bits in short trainings, and see whether `engine.verify` finds them.

    python -m benchmarks.training.wrong_bits --parts full,sample,ranks --json bits.json
    python -m benchmarks.training.wrong_bits --parts full,sample --device cuda --injections 400

Each injection is a training of a small network: weights, gradients, optimizer state, activations, statistics, images
or a checkpoint in memory get a wrong bit, or some, at a random step (`tests/support/bit_flips.py` says how they are
drawn). It survives if its last checkpoint has the bits of an undisturbed training. The same injection without
`engine.verify` says whether it would have changed them. Parts:

    full         engine.verify: full, all targets
    sample       engine.verify: sample, what is at rest
    transient    the same for computed values, which are found by luck: one step of 100 is computed again
    persistent   faults that stay: steps until they are found, and that the run ends with its exit code
    ranks        both modes with two ranks on gloo, plain and with ordered reduction
    fixed        a rank that computes the same wrong values every time: only the other rank can see it
    soak         no faults: steps without a false alarm

Each result is appended to --log at once, so that a run that is cut off can be continued.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import multiprocessing
import os
import random
import shutil
import socket
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from bit_flips import AT_REST, IN_FLIGHT, TARGETS, TINY, Flip, run_with  # noqa: E402
from golden_data import write_photo_folder  # noqa: E402

Record = dict[str, Any]
STEPS = int(TINY["length"].removesuffix("step"))
LONG = {"length": "230step", "evaluate.every": "off", "save.every": "off", "log.every": "100step"}
SHARES = {"full": 1000, "sample": 500, "transient": 200, "persistent": 100, "ranks": 180, "fixed": 20}
EXIT_CODE = 10


def networks(folder: Path) -> dict[str, dict[str, str]]:
    """The settings of the small trainings."""
    photos = {
        **TINY,
        "data.source": "folder",
        "data.path": str(folder / "photos"),
        "data.cache": "ram",
        "data.subset_percent": "100",
        "data.preprocess.size": "32",
        "data.preprocess.resize": "36",
        "augment.crop": "random_resized",
    }
    adamw = {"optimizer.name": "adamw", "schedule.lr": "0.002", "optimizer.nesterov": "false"}
    lamb = {
        "optimizer.name": "lamb",
        "optimizer.nesterov": "false",
        "schedule.lr": "0.01",
        "batch.micro": "8",
        "augment.mixup.alpha": "0",
    }
    return {"digits, sgd": TINY, "photos in a cache, adamw": {**photos, **adamw}, "digits, lamb": {**TINY, **lamb}}


class Runs:
    """Trainings in folders that are removed, and the bits of the undisturbed ones."""

    def __init__(self, base: Path, device: str) -> None:
        self.base = base
        self.device = device
        self._number = 0
        self._expected: dict[str, Mapping[str, bytes]] = {}

    def folder(self) -> Path:
        self._number += 1
        return self.base / f"run-{self._number}"

    def run(self, flip: Flip | None, settings: Mapping[str, str], mode: str, size: int = 1) -> Record:
        folder = self.folder()
        settings = {**settings, "engine.verify": mode}
        try:
            if size == 1:
                return _train(folder, flip, settings, self.device)
            return _in_ranks(size, folder, flip, settings, self.device)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def expected(self, settings: Mapping[str, str], size: int = 1) -> Mapping[str, bytes]:
        key = json.dumps([settings, size], sort_keys=True)
        if key not in self._expected:
            undisturbed = self.run(None, settings, "off", size)
            if undisturbed["error"]:
                raise RuntimeError(f"the undisturbed training has failed: {undisturbed['error']}")
            self._expected[key] = undisturbed["bits"]
        return self._expected[key]


def _train(folder: Path, flip: Flip | None, settings: Mapping[str, str], device: str) -> Record:
    outcome = run_with(folder, flip, settings, device=device)
    error = outcome.error
    return {
        "bits": outcome.bits,
        "struck": list(outcome.struck[:3]),
        "found": [[e.step, e.rank, e.tensor, e.how, e.to_step] for e in outcome.found],
        "error": "" if error is None else f"{type(error).__name__}: {error}".splitlines()[0],
        "code": int(getattr(error, "code", 1)) if error is not None else 0,
        "replays": outcome.num_replays,
        "fit_s": round(outcome.fit_s, 3),
    }


def _rank(pipe: Any, variables: Mapping[str, str], args: tuple[Any, ...]) -> None:
    import torch

    os.environ.update(variables)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    pipe.send(_train(*args))


def _in_ranks(size: int, folder: Path, flip: Flip | None, settings: Mapping[str, str], device: str) -> Record:
    """The report of rank 0 on a training in several processes; `struck` is of all."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["reconv.api", "reconv.distributed.torch_group", "torch._dynamo"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    started = []
    for rank in range(size):
        here, there = context.Pipe(duplex=False)
        local = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
        variables = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        process = context.Process(target=_rank, args=(there, variables | local, (folder, flip, settings, device)))
        process.start()
        there.close()
        started.append((process, here))
    records: list[Record] = [pipe.recv() for _, pipe in started]
    for process, _ in started:
        process.join()
    return {**records[0], "struck": [name for record in records for name in record["struck"]]}


def draw(part: str, number: int, nets: Mapping[str, Mapping[str, str]]) -> tuple[str, Flip]:
    """The network and the flip of an injection."""
    chance = random.Random(f"{part} {number}")
    name = chance.choice(sorted(nets))
    targets: Sequence[str] = {"full": TARGETS, "sample": AT_REST, "ranks": TARGETS}.get(part, IN_FLIGHT[:3])
    target = targets[number % len(targets)]
    if part in ("persistent", "fixed"):
        step = chance.randrange(1, 100)
    elif part == "transient":
        step = chance.randrange(0, 200)
    else:
        # An image that is flipped late may not be needed again; a checkpoint is saved every fourth step.
        step = chance.randrange(0, 4 if target == "cache" else STEPS)
    is_fixed = part == "fixed"
    flip = Flip(
        target="gradients" if is_fixed else target,
        step=step,
        seed=chance.randrange(2**31),
        rank=chance.randrange(2) if part in ("ranks", "fixed") else 0,
        is_persistent=part in ("persistent", "fixed"),
        is_fixed=is_fixed,
    )
    return name, flip


def inject(part: str, number: int, nets: Mapping[str, Mapping[str, str]], runs: Runs) -> Record:
    """One injection, with what became of it."""
    name, flip = draw(part, number, nets)
    settings, size, mode = dict(nets[name]), 1, "full" if part == "full" else "sample"
    if part in ("ranks", "fixed"):
        size = 2
        settings |= {"batch.size": "16", "parallel.reduce": ("fast", "ordered")[number // 2 % 2]}
        mode = ("full", "sample")[number % 2] if part == "ranks" else "sample"
    if part in ("persistent", "transient", "fixed"):
        settings |= LONG
    settings |= {"save.every": "230step"} if part in ("transient", "persistent", "fixed") else {}
    expected = runs.expected(settings, size)
    done = runs.run(flip, settings, mode, size)
    is_same = done.pop("bits") == expected
    record = {"part": part, "number": number, "net": name, "mode": mode, "target": flip.target, "step": flip.step}
    record |= {"rank": flip.rank, "same": is_same, **done}
    if part in ("full", "sample", "transient", "ranks"):
        plain = runs.run(flip, settings, "off", size)
        record["harmful"] = plain["bits"] != expected or bool(plain["error"])
    return record


def soak(
    nets: Mapping[str, Mapping[str, str]], runs: Runs, steps: int, known: Collection[tuple[str, int]]
) -> Iterator[Record]:
    """Train without faults, half of the steps in each mode."""
    per_run = min(1_000, steps // 2)
    for number, mode in enumerate(("sample", "full") * (steps // per_run // 2)):
        if ("soak", number) in known:
            continue
        name = sorted(nets)[number // 2 % len(nets)]
        settings = {**nets[name], **LONG, "length": f"{per_run}step", "evaluate.every": "500step"}
        done = runs.run(None, {**settings, "save.every": "1000step"}, mode)
        done.pop("bits")
        target = {"part": "soak", "number": number, "net": name, "mode": mode, "steps": per_run, "target": ""}
        yield {**target, **done}


def survived(record: Record) -> bool:
    """True if a run ended as it should."""
    if record["part"] == "soak":
        return not record["found"] and not record["error"]
    if record["part"] in ("persistent", "fixed"):
        return bool(record["code"] == EXIT_CODE)
    return bool(record["same"] and not record["error"])


def _is_by_luck(record: Record) -> bool:
    """True if `sample` finds such a fault only in the step of 100 that it computes again."""
    is_sampled = record["part"] == "transient" or (record["part"] == "ranks" and record["mode"] == "sample")
    return is_sampled and record["target"] in IN_FLIGHT


def figures(records: Sequence[Record]) -> Iterator[tuple[str, float, str, int]]:
    """Name, value, unit and n of each figure."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        key = record["part"]
        if key == "ranks":
            key = f"two ranks, {record['mode']}" + (", by luck" if _is_by_luck(record) else "")
        groups.setdefault(key, []).append(record)
    for name, group in sorted(groups.items()):
        if name == "soak":
            yield (
                "soak: steps without a false alarm",
                sum(r["steps"] for r in group if survived(r)),
                "steps",
                len(group),
            )
            continue
        yield f"{name}: survived", 100 * sum(map(survived, group)) / len(group), "%", len(group)
        if harmful := [record for record in group if record.get("harmful")]:
            yield f"{name}: harmful ones found", 100 * sum(map(_found, harmful)) / len(harmful), "%", len(harmful)
        if name in ("persistent", "fixed"):
            delays = [record["found"][0][0] - record["step"] + 1 for record in group if record["found"]]
            yield f"{name}: steps until found, at most", max(delays), "steps", len(delays)


def _found(record: Record) -> bool:
    return bool(record["found"]) and survived(record)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(SHARES))
    parser.add_argument("--injections", type=int, default=sum(SHARES.values()), help="of all parts")
    parser.add_argument("--soak-steps", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop then; the same --log continues")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--log", type=Path, default=Path("wrong-bits.jsonl"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    records = [json.loads(line) for line in options.log.read_text().splitlines()] if options.log.exists() else []
    known = {(record["part"], record["number"]) for record in records}
    parts, end_s = options.parts.split(","), time.monotonic() + 60 * options.minutes
    total = sum(SHARES[part] for part in parts if part in SHARES)
    base = Path(tempfile.mkdtemp(prefix="wrong-bits-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    with options.log.open("a") as file:

        def log(record: Record) -> None:
            records.append(record)
            file.write(json.dumps(record) + "\n")
            file.flush()
            if not survived(record) and not _is_by_luck(record):
                print("NOT SURVIVED", json.dumps(record), file=sys.stderr, flush=True)

        try:
            write_photo_folder(base / "photos")
            nets, runs = networks(base), Runs(base, options.device)
            if "soak" in parts:
                for record in soak(nets, runs, options.soak_steps, known):
                    log(record)
                    if time.monotonic() > end_s:
                        break
            counts = {part: round(SHARES[part] * options.injections / total) for part in parts if part in SHARES}
            # All parts advance together, so that a run that is cut off has some of each.
            numbered = sorted(
                (number / count, part, number) for part, count in counts.items() for number in range(count)
            )
            for _, part, number in numbered:
                if (part, number) not in known and time.monotonic() < end_s:
                    log(inject(part, number, nets, runs))
        finally:
            shutil.rmtree(base, ignore_errors=True)
    found = list(figures(records))
    for name, value, unit, n in found:
        print(f"{name:50} {value:10.6g} {unit:6} (n={n})")
    lost = Counter((r["part"], r["target"]) for r in records if not survived(r) and not _is_by_luck(r))
    print(f"not survived: {dict(lost)}")
    if options.json:
        options.json.write_text(json.dumps({"figures": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
