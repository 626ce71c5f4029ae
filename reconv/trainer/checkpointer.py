"""The checkpoints of a run: what goes into one, what it says of itself, and which of them stay.

Owns the one list of stateful parts. Refuses to know how files are written. Invariant: `restore` puts back what `parts`
took; what is written is the state at the save, whatever training does meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reconv import __version__
from reconv.checkpoint.async_writer import AsyncWriter
from reconv.checkpoint.load_weights import load_weights
from reconv.checkpoint.run_dir import BestCheckpoint, RunDir
from reconv.checkpoint.store import CheckpointStore, SavedCheckpoint
from reconv.data.boxes.annotations import DetectionDataset
from reconv.data.pipeline.bad_samples import BadSamples
from reconv.device import Device
from reconv.logging.events import CheckpointSaved
from reconv.logging.run_logger import RunLogger
from reconv.optim import ModelEma
from reconv.recipe.plan import Plan
from reconv.recipe.schema import Recipe
from reconv.trainer.build.datasets import Datasets
from reconv.trainer.build.network import Network
from reconv.trainer.oom import MicroBatchSize
from reconv.trainer.trainer import Counters


@dataclass(frozen=True, slots=True)
class Checkpointer:
    """Writes a checkpoint, keeps the ones the recipe wants, and says so."""

    folder: RunDir
    store: CheckpointStore
    recipe: Recipe
    plan: Plan
    network: Network
    optimizer: Any
    average: ModelEma | None
    about: Mapping[str, Any]  # what a checkpoint says of itself: classes, data, versions
    metric: str
    chosen_weights: str
    logger: RunLogger
    bad_samples: BadSamples
    device: Device
    writer: AsyncWriter
    fitting: MicroBatchSize

    def __call__(self, counters: Counters, reason: str) -> None:
        self.writer.wait()
        start_s = time.perf_counter()
        state = {
            **self.about,
            "step": counters.step,
            "history": list(counters.history),
            "skipped": counters.skipped,
            "micro_groups": self.fitting.most_groups,
            "bad_images": self.bad_samples.state(counters.step),
        }
        step, best = counters.step, counters.best(self.metric, self.chosen_weights)
        parts = snapshot(self.parts(), self.device)
        copied_s = time.perf_counter() - start_s

        def write() -> tuple[SavedCheckpoint, float]:
            saved = self._write(step, parts(), state, best)
            return saved, time.perf_counter() - start_s

        def tell(written: tuple[SavedCheckpoint, float], waited_s: float) -> None:
            saved, wall_s = written
            relative = str(saved.path.relative_to(self.folder.path))
            stall_s, write_s = copied_s + waited_s, wall_s - copied_s
            self.logger.log(
                CheckpointSaved(step, relative, saved.num_bytes, wall_s, reason, stall_s=stall_s, write_s=write_s)
            )

        self.writer.submit(write, tell)
        if not self.recipe.save.background:
            self.writer.wait()

    def _write(
        self,
        step: int,
        parts: Mapping[str, Mapping[str, Tensor]],
        state: Mapping[str, Any],
        best: tuple[int, float] | None,
    ) -> SavedCheckpoint:
        """Put a checkpoint on the disk; once it is whole, say which is the best and delete what is not kept."""
        saved = self.store.save(step, parts, state)
        if best is not None:
            self.folder.write_best(BestCheckpoint(best[0], self.metric, best[1], self.chosen_weights))
        keep_best = best[0] if best is not None and self.recipe.save.keep_best else None
        self.store.prune(self.recipe.save.keep_last, keep_best, self._pinned(step))
        return saved

    def take_part(self, counters: Counters, reason: str) -> None:
        """What a process does that does not save: hand over its share of the optimizer's state, if it has one."""
        self.optimizer.state_dict()

    def _pinned(self, done: int) -> list[int]:
        """The steps that must not be deleted: those the recipe pins, and those an average may still need."""
        window = self.plan.average
        averaged = [] if window is None else [s for s in self.store.steps() if window.holds(s, done)]
        return [*self.plan.keep_steps, *averaged]

    def parts(self) -> dict[str, dict[str, Tensor]]:
        """Every stateful part of a run by the name of its file; the one list of them."""
        parts = {"model": dict(self.network.model.state_dict())}
        if self.average is not None:
            parts["ema"] = self.average.state_dict()
        scaler = {f"precision.{name}": value for name, value in self.network.precision.state_dict().items()}
        parts["optimizer"] = {**self.optimizer.state_dict(), **scaler}
        return parts

    def restore(self, parts: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Put a checkpoint's tensors back where `parts` took them from."""
        load_weights(self.network.model, parts["model"], strict=True, source=str(self.store.folder))
        if self.average is not None:
            self.average.load_state_dict(parts["ema"])
        prefix = "precision."
        optimizer = {k: v for k, v in parts["optimizer"].items() if not k.startswith(prefix)}
        self.optimizer.load_state_dict(optimizer)
        self.network.precision.load_state_dict(
            {k.removeprefix(prefix): v for k, v in parts["optimizer"].items() if k.startswith(prefix)}
        )


def snapshot(parts: Mapping[str, Mapping[str, Tensor]], device: Device) -> Callable[[], dict[str, dict[str, Tensor]]]:
    """Start to copy tensors as they are now to the host; call the result, in any thread, to wait for the copies."""
    if any(tensor.device.type == "cpu" for part in parts.values() for tensor in part.values()):
        device.synchronize()  # state kept on the host comes back to it by copies that nobody has waited for

    def taken(tensor: Tensor) -> Callable[[], Tensor]:
        if tensor.device.type != "cpu":
            return device.copy_to_host(tensor)
        copy = tensor.detach().clone()
        return lambda: copy

    copies = {part: {name: taken(tensor) for name, tensor in tensors.items()} for part, tensors in parts.items()}
    return lambda: {part: {name: wait() for name, wait in waits.items()} for part, waits in copies.items()}


def about_checkpoint(
    recipe: Recipe, plan: Plan, sources: Datasets, device: Device, teacher: str | None = None
) -> dict[str, Any]:
    """What a checkpoint says of itself besides counters: enough to evaluate and predict without its run folder."""
    return {
        "format": 1,
        "recipe": recipe.model_dump(mode="json"),
        "class_names": list(sources.train.class_names),
        **({"class_ids": list(sources.train.class_ids)} if isinstance(sources.train, DetectionDataset) else {}),
        "data_fingerprint": sources.fingerprint(),
        "total_steps": plan.total_steps,
        "threads": plan.threads,
        "decoder": plan.decoder,
        "gpu_share": plan.gpu_share,
        "device": device.kind,
        "teacher": teacher,  # what identifies the weights that were learned from
        "versions": {"reconv": __version__, "torch": torch.__version__},
    }
