"""Train networks of timm in a plain loop on one GPU: eager, with torch.compile, with `reconv.fuse`, with both.

`graph`: forward and backward pass are captured by torch.cuda.make_graphed_callables, so that Python launches nothing.

`all` is `reconv.fuse(model, everything=True)`, for networks where that fuses more.

    python -m benchmarks.training.fuse_models [NETWORK ...] [--batch 256] [--side 224] [--ways eager fuse ...]
                                              [--steps 50] [--fill 200] [--limit 45] [--within 540]
                                              [--caches FOLDER] [--json FILE]

Each network is trained in one process on the same random images, in channels_last, bf16 autocast and SGD with
momentum, in each way from the same weights. Its first losses are compared with the eager ones; how far those of
torch.compile are from them shows what another order of sums does. Images per second are the median of five windows.

First, every way of every network makes its first step in processes with empty caches, several at once, because
torch.compile takes a minute or two of one core: those are the seconds of the first step, without cuDNN's benchmark.
Then the networks are measured one after the other from these caches, with cuDNN's benchmark; what torch autotuned
beside other processes is deleted before. Every figure is written as soon as it is known. With `--caches` the caches
are kept: a later call with `--fill 0` measures from them.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import multiprocessing
import os
import queue
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# In order of value, since time may end before the last one; the second number orders the first steps: longest first.
NETWORKS = {
    "resnet50": 5,
    "convnext_tiny": 6,
    "efficientnetv2_rw_s": 9,
    "regnety_032": 8,
    "mobilenetv3_large_100": 7,
    "densenet121": 10,
    "resnext50_32x4d": 4,
    "seresnet50": 6,
    "resnet50d": 5,
    "resnet18": 2,
}
WAYS = ("eager", "fuse", "fuse+graph", "compile", "fuse+compile", "all", "all+graph", "all+compile")
EAGER, FUSE, COMPILE, ALL = "eager", "fuse", "compile", "all"  # all: also what the shipped table leaves alone
GRAPHED = "fuse+graph"  # by torch.cuda.make_graphed_callables
WINDOWS, WINDOW_S, WARMUP = 5, 0.3, 10
NUM_CLASSES, NUM_BATCHES, LR, MOMENTUM, WEIGHT_DECAY = 1000, 4, 0.01, 0.9, 1e-4
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
AUTOTUNED = "*.best_config"  # files in the second one
READY_S = 120  # limit for the imports of a process


@dataclass(frozen=True, slots=True)
class Task:
    """The measurement of one model, and the folder with its caches."""

    network: str
    ways: tuple[str, ...]
    batch: int
    side: int
    steps: int  # whose losses are compared
    device: str
    caches: str
    compile_threads: int


class Loop:
    """A training loop as timm's script has it, in one way."""

    def __init__(self, task: Task, way: str) -> None:
        import timm

        import reconv

        self.device = torch.device(task.device)
        torch.manual_seed(0)
        model: nn.Module = timm.create_model(task.network, num_classes=NUM_CLASSES)
        model = model.to(self.device, memory_format=torch.channels_last).train()  # type: ignore[call-overload]
        generator = torch.Generator(self.device).manual_seed(1)
        shape = (task.batch, 3, task.side, task.side)
        self.images = [
            torch.randn(shape, generator=generator, device=self.device).to(memory_format=torch.channels_last)
            for _ in range(NUM_BATCHES)
        ]
        self.labels = [
            torch.randint(NUM_CLASSES, shape[:1], generator=generator, device=self.device) for _ in range(NUM_BATCHES)
        ]
        synchronize(self.device)
        self.began_s = time.perf_counter()
        self.report: Any = None
        if is_fused(way):
            image = shape[1:] if self.device.type == "cuda" else None
            self.report = reconv.fuse(model, image=image, everything=ALL in way)
        self.optimizer = torch.optim.SGD(model.parameters(), LR, MOMENTUM, weight_decay=WEIGHT_DECAY)
        self.model: Callable[[Tensor], Tensor] = torch.compile(model) if COMPILE in way.split("+") else model
        self.is_graphed = "graph" in way.split("+")
        if self.is_graphed:
            with self.autocast():
                torch.cuda.make_graphed_callables(model, (self.images[0],))  # replaces the model's forward
        self.number = 0

    def autocast(self) -> torch.autocast:
        """bf16; graphs must not keep cast weights."""
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=not self.is_graphed)

    def step(self) -> Tensor:
        """Train on the next batch; returns the loss."""
        images, labels = (tensors[self.number % NUM_BATCHES] for tensors in (self.images, self.labels))
        self.number += 1
        with self.autocast():
            loss = nn.functional.cross_entropy(self.model(images), labels, label_smoothing=0.1)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def run(self, steps: int) -> tuple[list[Tensor], float]:
        """The losses of some steps, and their seconds."""
        began_s = time.perf_counter()
        losses = [self.step() for _ in range(steps)]
        synchronize(self.device)
        return losses, time.perf_counter() - began_s


def is_fused(way: str) -> bool:
    """True for a way with fused kernels."""
    return way.split("+")[0] in (FUSE, ALL)


def changes(task: Task, way: str) -> bool:
    """True if a way differs from others: something is fused, and with `all` more than without."""
    import timm

    import reconv

    if not is_fused(way):
        return True
    model = timm.create_model(task.network)  # some compute their widths with tensors, which "meta" has none of
    default = reconv.fuse(model, inplace=False)
    return len(reconv.fuse(model, everything=True).fused) > len(default.fused) if ALL in way else bool(default)


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_first_steps(task: Task, turn: Any, messages: Any) -> None:
    """Send the seconds of the first step of each way, with empty caches."""
    prepare(task, turn, messages)
    torch.backends.cudnn.benchmark = False
    with suppress(Exception):  # the context and the libraries, which every way needs
        Loop(replace(task, batch=8), EAGER).run(1)
    for way in task.ways:
        if way != EAGER and changes(task, way):
            send_measured(task, way, messages, first_step)
    messages.put(("done", None))


def first_step(task: Task, way: str) -> dict[str, Any]:
    """Seconds from a model on the device to the end of its first step."""
    loop = Loop(task, way)
    loop.run(1)
    seconds = time.perf_counter() - loop.began_s
    return {"first_step_s": seconds, **fused_facts(loop)}


def measure_ways(task: Task, turn: Any, messages: Any) -> None:
    """Send losses and images per second of each way."""
    prepare(task, turn, messages)
    torch.backends.cudnn.benchmark = True
    for way in task.ways:
        if changes(task, way):
            send_measured(task, way, messages, throughput)
    messages.put(("done", None))


def throughput(task: Task, way: str) -> dict[str, Any]:
    """Losses of the first steps, and images per second of windows of steps."""
    loop = Loop(task, way)
    losses, _ = loop.run(1)
    warm_s = time.perf_counter() - loop.began_s
    more, seconds = loop.run(WARMUP)
    losses += more
    more, seconds = loop.run(WARMUP)
    losses += more
    steps = max(WARMUP // 2, math.ceil(WINDOW_S / (seconds / WARMUP)))
    windows = []
    for _ in range(WINDOWS):
        more, seconds = loop.run(steps)
        losses += more
        windows.append(task.batch * steps / seconds)
    losses += loop.run(max(0, task.steps - len(losses)))[0]
    peak = torch.cuda.max_memory_allocated() / 2**30 if loop.device.type == "cuda" else None
    rate = statistics.median(windows)
    found = {"images_per_s": rate, "windows": windows, "warm_first_step_s": warm_s, "memory_gib": peak}
    return {**found, "losses": torch.stack(losses[: task.steps]).tolist(), **fused_facts(loop)}


def fused_facts(loop: Loop) -> dict[str, Any]:
    """The number of fused modules, and the report's words about the others."""
    report = loop.report
    return {} if report is None else {"fused": len(report.fused), "report": str(report).splitlines()}


def prepare(task: Task, turn: Any, messages: Any) -> None:
    """Import, then wait until it is this process's turn."""
    import timm  # noqa: F401

    import reconv.kernels.standalone  # noqa: F401

    messages.put(("ready", None))
    turn.wait()


def send_measured(task: Task, way: str, messages: Any, work: Callable[[Task, str], dict[str, Any]]) -> None:
    """Send the figures of a way, or why there are none."""
    torch.compiler.reset()
    if task.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        messages.put(("way", (way, work(task, way))))
    except Exception as error:  # one failure must not lose the other figures
        messages.put(("way", (way, {"failed": repr(error)[:500]})))
    gc.collect()
    if task.device == "cuda":
        torch.cuda.empty_cache()


class Child:
    """A process that measures one network when it is its turn."""

    def __init__(self, target: Callable[[Task, Any, Any], None], task: Task) -> None:
        context = multiprocessing.get_context("spawn")
        self.task, self.messages, self.turn = task, context.Queue(), context.Event()
        os.environ |= {name: f"{task.caches}/{name.lower()}" for name in CACHES}
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(task.compile_threads)
        self.process = context.Process(target=target, args=(task, self.turn, self.messages))
        self.process.start()

    def receive(self, until: float) -> Iterator[tuple[str, dict[str, Any]]]:
        """The ways that are measured before a time; then the process is ended."""
        while time.monotonic() < until:
            try:
                kind, value = self.messages.get(timeout=0.2)
            except queue.Empty:
                if self.process.is_alive():
                    continue
                break
            if kind == "ready":
                continue
            if kind == "done":
                break
            yield value
        self.end()

    def end(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.join()


def fill_caches(tasks: Sequence[Task], parallel: int, until: float, save: Callable[[Task, str, Any], None]) -> None:
    """Make the first step of every way of all networks, several processes at once."""
    waiting = sorted(tasks, key=lambda task: -NETWORKS.get(task.network, 0))
    running: list[Child] = []
    while (waiting or running) and time.monotonic() < until:
        while waiting and len(running) < parallel:
            child = Child(measure_first_steps, waiting.pop(0))
            child.turn.set()
            running.append(child)
        for child in list(running):
            try:
                kind, value = child.messages.get(timeout=0.05)
            except queue.Empty:
                kind, value = ("done", None) if not child.process.is_alive() else ("ready", None)
            if kind == "way":
                save(child.task, *value)
            elif kind == "done":
                child.end()
                running.remove(child)
    for child in running:
        child.end()
    for task in tasks:
        for file in Path(task.caches).rglob(AUTOTUNED):
            file.unlink()


def measure_all(tasks: Sequence[Task], limit_s: float, until: float, save: Callable[[Task, str, Any], None]) -> None:
    """Measure the networks one after the other; while one is measured, the process of the next one imports."""
    children: list[Child] = []
    for number, task in enumerate(tasks):
        if time.monotonic() > until:
            break
        if number == len(children):
            children.append(Child(measure_ways, task))
        child = children[number]
        with suppress(queue.Empty):
            child.messages.get(timeout=READY_S)
        child.turn.set()
        if number + 1 < len(tasks):
            children.append(Child(measure_ways, tasks[number + 1]))
        for way, found in child.receive(min(time.monotonic() + limit_s, until)):
            save(task, way, found)
    for child in children:
        child.end()


def compare_losses(ways: dict[str, dict[str, Any]]) -> None:
    """Add to each way the largest and the mean difference of its losses from the eager ones."""
    exact = ways.get(EAGER, {}).get("losses")
    for found in ways.values():
        if exact and found.get("losses"):
            differences = [abs(a - b) for a, b in zip(found["losses"], exact, strict=True)]
            found["loss_difference"] = {"max": max(differences), "mean": statistics.fmean(differences)}


def main(args: Sequence[str] | None = None) -> None:
    """Measure, and write the JSON after each figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(NETWORKS))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--side", type=int, default=224, help="of the images, in pixels")
    parser.add_argument("--steps", type=int, default=50, help="whose losses are compared")
    parser.add_argument("--fill", type=float, default=200, help="seconds for first steps with empty caches; 0: none")
    parser.add_argument("--parallel", type=int, default=6, help="processes that make them at once")
    parser.add_argument("--limit", type=float, default=45, help="seconds per network after that")
    parser.add_argument("--within", type=float, default=540, help="seconds in all")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--caches", help="folder of the compilers' caches, which is kept")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(args)
    began_s = time.monotonic()
    cores = len(os.sched_getaffinity(0))
    content: dict[str, Any] = {"batch": given.batch, "side": given.side, "networks": {}}
    with tempfile.TemporaryDirectory(prefix="reconv-fuse-") as folder:
        tasks = [
            Task(
                network=network,
                ways=tuple(given.ways),
                batch=given.batch,
                side=given.side,
                steps=given.steps,
                device=given.device,
                caches=f"{given.caches or folder}/{network}",
                compile_threads=max(1, cores // given.parallel),
            )
            for network in given.networks
        ]

        def save(task: Task, way: str, found: dict[str, Any]) -> None:
            ways = content["networks"].setdefault(task.network, {})
            ways.setdefault(way, {}).update(found)
            compare_losses(ways)
            content["wall_s"] = time.monotonic() - began_s
            shown = {name: value for name, value in found.items() if name not in ("losses", "report", "windows")}
            print(f"{content['wall_s']:4.0f} s  {task.network:22} {way:13} {shown}", flush=True)
            if given.json:
                given.json.write_text(json.dumps(content, indent=1) + "\n")

        until = began_s + given.within
        if given.fill:
            fill_caches(tasks, given.parallel, min(began_s + given.fill, until), save)
        measure_all(tasks, given.limit, until, save)
    print("\n".join(table(content["networks"])))


def table(networks: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The figures as Markdown."""
    yield f"| network | {' | '.join(WAYS)} | fuse+graph / compile | first step (s) | loss: fuse, compile |"
    yield "|" + "---|" * (len(WAYS) + 4)
    for network, ways in networks.items():
        rates = [ways.get(way, {}).get("images_per_s") for way in WAYS]
        cells = ["-" if rate is None else f"{rate:,.0f}" for rate in rates]
        fused, compiled = rates[WAYS.index(GRAPHED)], rates[WAYS.index(COMPILE)]
        cells.append(f"{fused / compiled:.2f}" if fused and compiled else "-")
        for name, form in (("first_step_s", "{:.1f}"), ("loss_difference", "{:.4f}")):
            values = [ways.get(way, {}).get(name) for way in (FUSE, COMPILE)]
            numbers = [value["max"] if isinstance(value, dict) else value for value in values]
            cells.append(", ".join("-" if number is None else form.format(number) for number in numbers))
        yield f"| {network} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
