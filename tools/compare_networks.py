"""Train networks of ours and their peers on one device, each pair in one process, and print the ratios.

    python tools/compare_networks.py [RECIPE ...] [--batch 256] [--peer "torchvision channels_last compiled"]
                                     [--windows 5] [--compile-s 300] [--json FILE] [--set A.B=V ...]

As `reconv bench train RECIPE --peers ...` for each recipe, but the peers of all are compiled side by side first, which
takes most of the time, and only then is one process after another let to measure: ours, then its peer, on the same
batches, with the device to itself. A recipe may bring settings of its own: `NAME+precision.mode=bf16`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECIPES = (
    "resnet50-habana-1card-bf16",
    "resnet152-habana-1card-bf16",
    "resnext101-habana-1card-bf16-256",
    "mobilenet-v2-habana-1card-bf16",
    "googlenet-habana-1card-bf16",
    "efficientnet-b0-nv-400ep-8gpu-tf32+precision.mode=bf16",
)
MEASURE_S = 120  # what one pair may take


@dataclass(frozen=True, slots=True)
class Task:
    """What one process measures."""

    recipe: str  # with its own settings behind plus signs
    batch: int
    peer: str
    windows: int
    settings: tuple[str, ...]
    device: str


def work(task: Task, turn: Any, told: Any) -> None:
    """Compile the peer, then measure ours and it when it is this process's turn."""
    from reconv.bench.peers import find_peers, images_per_s, open_peer
    from reconv.bench.subject import open_subject
    from reconv.bench.timing import Wish
    from reconv.bench.train import bench_train

    name, *own = task.recipe.split("+")
    given: list[tuple[str, object, str]] = [("batch.size", task.batch, "tool"), ("batch.group", "all", "tool")]
    pairs = [pair.partition("=") for pair in (*task.settings, *own)]
    given += [(field, value, "tool") for field, _, value in pairs]
    try:
        subject = open_subject(name, input="device", data=None, overrides=given, device=task.device)
        found, missing = find_peers(subject.recipe.model.name, task.peer)
        steps = [(peer, open_peer(subject, peer)) for peer in found]
        for _, step in steps:
            images_per_s(subject, step, Wish(1, 1, 0))
        subject.device.release_memory()
        told.put((task.recipe, "ready", None))
        turn.wait()
        wish = Wish(task.windows)
        ours = bench_train(name, overrides=given, device=task.device, wish=wish)
        subject.device.release_memory()
        rates = {peer.name: images_per_s(subject, step, wish) for peer, step in steps}
        told.put((task.recipe, "done", {**ours, "peers": rates, "notes": [*ours["notes"], *missing]}))
    except Exception as error:  # one network's failure must not lose the others' figures
        told.put((task.recipe, "failed", repr(error)[:500]))


def line(name: str, result: dict[str, Any]) -> str:
    """One row of a table."""
    ours, low, high = (f(result["window_images_per_s"]) for f in (lambda _: result["images_per_s"], min, max))
    theirs = "; ".join(f"{peer} {rate:,.0f}, ratio {ours / rate:.2f}" for peer, rate in result["peers"].items())
    return f"{name}: {ours:,.0f} images/s ({low:,.0f} to {high:,.0f}); {theirs or 'no peer'}"


def compare(tasks: Sequence[Task], compile_s: float) -> dict[str, Any]:
    """The results by recipe; what failed or took too long is a text."""
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    turns = {task.recipe: context.Event() for task in tasks}
    processes = {
        task.recipe: context.Process(target=work, args=(task, turns[task.recipe], told), daemon=True) for task in tasks
    }
    for process in processes.values():
        process.start()
    ready, results = [], dict[str, Any]()

    def hear(until: float) -> bool:
        try:
            name, what, value = told.get(timeout=max(0.1, until - time.monotonic()))
        except queue.Empty:
            return False
        if what == "ready":
            ready.append(name)
        else:
            results[name] = value
        return True

    end = time.monotonic() + compile_s
    while len(ready) + len(results) < len(tasks) and hear(end):
        pass
    for name in processes.keys() - set(ready) - results.keys():
        processes[name].kill()
        results[name] = f"not compiled within {compile_s:.0f} s"
    print(f"{len(ready)} of {len(tasks)} compiled after {compile_s - (end - time.monotonic()):.0f} s", flush=True)
    for name in ready:
        turns[name].set()
        hear(time.monotonic() + MEASURE_S)
        processes[name].kill()
        result = results.setdefault(name, f"not measured within {MEASURE_S} s")
        print(line(name, result) if isinstance(result, dict) else f"{name}: {result}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("recipes", nargs="*", default=RECIPES)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--peer", default="torchvision channels_last compiled")
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--compile-s", type=float, default=300)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    tasks = [
        Task(recipe, given.batch, given.peer, given.windows, tuple(given.set), given.device) for recipe in given.recipes
    ]
    results = compare(tasks, given.compile_s)
    for name, result in results.items():
        if not isinstance(result, dict):
            print(f"{name}: {result}")
    if given.json:
        given.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
