"""The checkpoints of a run: when one is due, what it contains, and which are kept.

A checkpoint holds the state at the call of `save`, whatever training does while it is written in the background.

Whatever has state has `state_dict()` and `load_state_dict()`; restored tensors take the strides of their parameter
(tests/laws/test_law_resume_optimizers.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from reconv.build.code import code_digests
from reconv.checkpoint.async_writer import AsyncWriter
from reconv.checkpoint.best import BestCheckpoint, best_evaluation, write_best
from reconv.checkpoint.manifest import confidence_in_state
from reconv.checkpoint.run_identity import read_identity
from reconv.checkpoint.store import CheckpointStore, LoadedCheckpoint, SavedCheckpoint, WrongTensorError, folder_name
from reconv.checkpoint.weights_metadata import WeightsMetadata, to_header
from reconv.core.bits import bits_sum
from reconv.core.errors import DivergedError, FaultyDeviceError
from reconv.core.version import __version__
from reconv.data.boxes.annotations import DetectionDataset
from reconv.data.pipeline.bad_samples import BadSamples
from reconv.device import Device
from reconv.logging.events import CheckpointSaved
from reconv.recipe.schema import Recipe
from reconv.trainer.progress import Counters
from reconv.trainer.step import MicroBatchSize
from reconv.trainer.train_state import TrainState
from reconv.trainer.verifier import Finding

if TYPE_CHECKING:
    from reconv.trainer.run import TrainingRun


_MAX_PACKED_BYTES = 2**16  # of a tensor that is copied to the host together with others
_NUM_TO_RESUME = 2  # checkpoints that serve to resume; with more in save.keep_last a run wants its history


class RunCheckpointer:
    """Saves checkpoints and deletes those that are no longer kept; `save` is called on all ranks, rank 0 writes."""

    def __init__(
        self,
        run: TrainingRun,
        train_state: TrainState,
        bad_samples: BadSamples,
        micro_batch_size: MicroBatchSize,
        writer: AsyncWriter,
    ) -> None:
        self._run = run
        self._state = train_state
        self._bad_samples = bad_samples
        self.micro_batch_size = micro_batch_size
        self._writer = writer
        identity = run.process_group.on_rank0(lambda: read_identity(run.run_dir))
        self._store = CheckpointStore(run.run_dir.checkpoints, identity=identity)
        self._metadata = checkpoint_metadata(run, train_state)
        self._last_save_s = time.monotonic()
        self._time_to_save = False
        self._completed_step: int | None = None  # of the last save that was followed by retention
        self.saved_step = run.restore_point.saved_step
        self.findings: list[Finding] = []  # checkpoints that were wrong in memory, and are not on disk

    @property
    def is_saving(self) -> bool:
        """True if a checkpoint of this rank is being written."""
        return self._writer.is_busy

    def take_findings(self) -> list[Finding]:
        """The checkpoints that were found wrong since the last call."""
        taken, self.findings = self.findings, []
        return taken

    def go_back(self, counters: Counters) -> None:
        """Delete the checkpoints of later steps, which may be wrong, and undo a later rewind."""

        def discard() -> int:
            self._writer.wait()
            self.take_findings()
            if self._run.plan.save is None:
                return self.saved_step
            self._store.discard_after(counters.step)
            write_best(self._run.run_dir, self._best(counters))
            return max(self._store.steps(), default=-1)

        self.saved_step = self._run.process_group.on_rank0(discard)
        self._state.lr_schedule.factor = float(counters.divergence.get("lr_factor", 1.0))

    def reload(self, last_step: int | None) -> Counters:
        """Load the newest checkpoint of a step up to `last_step`; returns its counters."""

        def load() -> LoadedCheckpoint:
            self._writer.wait()
            if last_step is not None:
                self._store.discard_after(last_step)
            newest = self._store.newest().path
            if newest is None:
                raise FaultyDeviceError(
                    "wrong bits, and no state that is proved right is left",
                    why="every copy in memory is damaged, and there is no checkpoint",
                    hint="start again on other hardware, with save.every",
                )
            return self._store.load(newest)

        loaded = self._run.process_group.on_rank0(load)
        self._state.load_state_dict(loaded.parts, source=folder_name(loaded.step))
        self.micro_batch_size.max_groups = loaded.state["micro_groups"]
        return Counters.from_state(loaded.state)

    def is_time_to_save(self) -> bool:
        """True if an interval in minutes has passed on this rank."""
        save = self._run.plan.save
        return (
            save is not None and save.minutes is not None and time.monotonic() - self._last_save_s >= 60 * save.minutes
        )

    def set_time_to_save(self, value: bool) -> None:
        """Set whether an interval in minutes has passed on any rank."""
        self._time_to_save = value

    def reason_to_save(self, step: int, *, is_last: bool, improved: bool) -> str:
        """Reason to save a checkpoint after `step` steps; empty if there is none."""
        plan = self._run.plan
        if plan.save is None:
            return ""
        # With several ranks the agreement is one step old, and may date from before the last save.
        time_to_save = self._time_to_save and (plan.world_size == 1 or step > self.saved_step + 1)
        if is_last:
            return "end"
        if time_to_save or plan.save.due(step, plan.total_steps):
            return "interval"
        if step in plan.keep_steps:
            return "keep_at"
        return "best" if improved and self._run.recipe.save.keep_best else ""

    def save(self, counters: Counters, reason: str) -> None:
        """Save a checkpoint, in the background if the recipe allows it.

        If the last one is still being written this one waits in memory, and a later one may replace it there.
        """
        if self._run.process_group.is_rank0:
            self._save(counters, reason)
        else:
            self._state.optimizer.state_dict()  # a collective call where the optimizer is sharded
        self.saved_step = counters.step
        self._last_save_s = time.monotonic()

    def rewind(self, counters: Counters, reason: str) -> tuple[int, float]:
        """Load the best checkpoint and make the learning rate smaller, on all ranks.

        Returns its step and the factor of the rates from now on. `reason` is that of the error if there is none.
        """
        self.wait()
        best = self._best(counters)
        group, store = self._run.process_group, self._store
        if best is None or not group.on_rank0(lambda: store.path(best.step).is_dir()):
            why = "there is no checkpoint of an evaluation to go back to"
            raise DivergedError(reason, why=why, hint="start again with a smaller --lr")
        loaded = group.on_rank0(lambda: store.load(store.path(best.step)))
        self._state.load_state_dict(loaded.parts, source=str(store.path(best.step)))
        schedule = self._state.lr_schedule
        schedule.factor *= self._run.recipe.engine.divergence.lr_factor
        counters.divergence["lr_factor"] = schedule.factor
        return best.step, schedule.factor

    def poll(self) -> None:
        """Log a background save that has ended, and raise its error if it failed."""
        self._writer.wait(False)

    def wait(self) -> None:
        """Wait for the background save."""
        self._writer.wait()

    def complete_last_save(self, counters: Counters) -> None:
        """Do what follows a save: `best.json` and retention. A kill may have come between; the history has it all."""
        is_saved = self._run.plan.save is not None and counters.step == self.saved_step
        if self._run.process_group.is_rank0 and is_saved and counters.step != self._completed_step:
            self._after_save(counters.step, self._best(counters))

    def _save(self, counters: Counters, reason: str) -> None:
        start_s = time.perf_counter()
        metadata = {
            **self._metadata,
            "data_fingerprint": self._run.datasets.fingerprint(),
            "step": counters.step,
            "history": list(counters.history),
            "skipped": counters.skipped,
            **({"callbacks": counters.callbacks} if counters.callbacks else {}),
            **({"divergence": counters.divergence} if counters.divergence else {}),
            "micro_groups": self.micro_batch_size.max_groups,
            "bad_images": self._bad_samples.state(counters.step),
        }
        step, best = counters.step, self._best(counters)
        state_dict = self._state.state_dict()
        tensors = snapshot(state_dict, self._run.device)
        digests = self._digests(state_dict) if self._run.recipe.engine.verify != "off" else None
        copy_s = time.perf_counter() - start_s

        def write() -> tuple[SavedCheckpoint | WrongTensorError, float, float]:
            began_s = time.perf_counter()
            saved: SavedCheckpoint | WrongTensorError
            try:
                saved = self._write(step, tensors(), metadata, best, digests and digests())
            except WrongTensorError as error:
                saved = error
            ended_s = time.perf_counter()
            return saved, ended_s - start_s, ended_s - began_s

        def log(
            written: tuple[SavedCheckpoint | WrongTensorError, float, float],
            blocked_s: float,
            replaced: tuple[int, ...],
        ) -> None:
            saved, wall_s, write_s = written
            if isinstance(saved, WrongTensorError):
                self.findings.append(Finding(self._run.process_group.rank, step, saved.tensor, "checkpoint"))
                return
            path = str(saved.path.relative_to(self._run.run_dir.path))
            stall_s = copy_s + blocked_s
            self._run.logger.log(
                CheckpointSaved(step, path, saved.num_bytes, wall_s, reason, stall_s, write_s, replaced)
            )

        self._writer.submit(step, write, log, lambda queued: self._is_needed(queued, step, best))
        if not self._run.recipe.save.background:
            self._writer.wait()

    def _write(
        self,
        step: int,
        tensors: Mapping[str, Mapping[str, Tensor]],
        metadata: Mapping[str, Any],
        best: BestCheckpoint | None,
        digests: Mapping[str, Mapping[str, int]] | None,
    ) -> SavedCheckpoint:
        headers = weights_headers(metadata, self._run.recipe, step)
        saved = self._store.save(step, tensors, metadata, headers, digests)
        self._after_save(step, best)
        return saved

    def _digests(self, parts: Mapping[str, Mapping[str, Tensor]]) -> Callable[[], dict[str, dict[str, int]]]:
        """Start to digest tensors as they are now, on their device; call the result, in any thread, to wait for it."""
        on_device = torch.stack([bits_sum(tensor) for tensors in parts.values() for tensor in tensors.values()])
        copied, names = self._run.device.copy_to_host(on_device), {part: list(parts[part]) for part in parts}

        def wait() -> dict[str, dict[str, int]]:
            numbers = iter(copied().tolist())
            return {part: {name: next(numbers) for name in names[part]} for part in names}

        return wait

    def _after_save(self, step: int, best: BestCheckpoint | None) -> None:
        config = self._run.recipe.save
        write_best(self._run.run_dir, best)
        self._store.prune(config.keep_last, self._best_to_keep(best), self._steps_to_keep(step))
        self._completed_step = step

    def _best(self, counters: Counters) -> BestCheckpoint | None:
        return best_evaluation(counters.history, self._state.task.metric, self._state.monitored_weights)

    def _best_to_keep(self, best: BestCheckpoint | None) -> int | None:
        return best.step if best is not None and self._run.recipe.save.keep_best else None

    def _is_needed(self, queued: int, step: int, best: BestCheckpoint | None) -> bool:
        """True if a checkpoint that waits to be written is needed beside that of a later step."""
        window = self._run.plan.average
        return (
            self._run.recipe.save.keep_last > _NUM_TO_RESUME
            or queued in self._run.plan.keep_steps
            or queued == self._best_to_keep(best)
            or (window is not None and window.holds(queued, step))
        )

    def _steps_to_keep(self, step: int) -> list[int]:
        """The steps that are never deleted: those the recipe names, and those to be averaged at the end."""
        window = self._run.plan.average
        averaged = [] if window is None else [s for s in self._store.steps() if window.holds(s, step)]
        return [*self._run.plan.keep_steps, *averaged]


def snapshot(parts: Mapping[str, Mapping[str, Tensor]], device: Device) -> Callable[[], dict[str, dict[str, Tensor]]]:
    """Start copying tensors to the host as they are now; call the result, in any thread, to wait for the copies.

    Small tensors of a dtype are copied together: starting a copy takes the host 50 us, and most tensors of a network
    are the few numbers per channel of its norms.
    """
    named = {(part, name): tensor for part, tensors in parts.items() for name, tensor in tensors.items()}
    if any(tensor.device.type == "cpu" for tensor in named.values()):
        device.synchronize()  # offloaded optimizer state comes back to the host by copies that may still be running
    together: dict[object, list[tuple[str, str]]] = {}
    for key, tensor in named.items():
        is_small = tensor.nbytes <= _MAX_PACKED_BYTES
        together.setdefault((tensor.device, tensor.dtype) if is_small else key, []).append(key)
    copies = [_copy({key: named[key] for key in keys}, device) for keys in together.values()]

    def wait() -> dict[str, dict[str, Tensor]]:
        found = {key: tensor for copied in copies for key, tensor in copied().items()}
        return {part: {name: found[part, name] for name in tensors} for part, tensors in parts.items()}

    return wait


def _copy(tensors: Mapping[tuple[str, str], Tensor], device: Device) -> Callable[[], dict[tuple[str, str], Tensor]]:
    """Start copying tensors of one dtype to the host, all at once; the result waits for them."""
    shapes = {key: tensor.shape for key, tensor in tensors.items()}
    given = [tensor.detach() for tensor in tensors.values()]
    values = given[0] if len(given) == 1 else torch.cat([tensor.reshape(-1) for tensor in given])
    cloned = values.clone() if values.device.type == "cpu" else None
    copied = device.copy_to_host(values) if cloned is None else lambda: cloned

    def wait() -> dict[tuple[str, str], Tensor]:
        parts = copied().reshape(-1).split([shape.numel() for shape in shapes.values()])
        return {key: part.view(shape) for (key, shape), part in zip(shapes.items(), parts, strict=True)}

    return wait


def weights_headers(state: Mapping[str, Any], recipe: Recipe, step: int) -> dict[str, dict[str, str]]:
    """The metadata of the weights files of a checkpoint, so that each can be used by itself."""
    raw = WeightsMetadata(
        recipe, tuple(state["class_names"]), tuple(state.get("class_ids", ())), "raw", step, __version__
    )
    raw, ema = (
        replace(raw, weights=weights, confidence=confidence_in_state(state, step, weights))
        for weights in ("raw", "ema")
    )
    return {"model": to_header(raw), "ema": to_header(ema)}


def checkpoint_metadata(run: TrainingRun, train_state: TrainState) -> dict[str, Any]:
    """Metadata in every checkpoint of a run: with its tensors, enough for inference without the run directory.

    The data's fingerprint is not waited for here: it may still be computed.
    """
    plan, datasets = run.plan, run.datasets
    return {
        "format": 2,
        "monitored": {"metric": train_state.task.metric, "weights": train_state.monitored_weights},
        "recipe": run.recipe.model_dump(mode="json"),
        "class_names": list(datasets.train.class_names),
        **({"display_names": list(datasets.names)} if datasets.names != tuple(datasets.train.class_names) else {}),
        **({"class_ids": list(datasets.train.class_ids)} if isinstance(datasets.train, DetectionDataset) else {}),
        **({"code": digests} if (digests := code_digests(run.recipe)) else {}),
        "total_steps": plan.total_steps,
        "threads": plan.threads,
        "decoder": plan.decoder,
        "device": run.device.kind,
        "teacher": train_state.teacher_fingerprint,
        "versions": {"reconv": __version__, "torch": torch.__version__},
    }
