"""Bits flipped in a run: where, when, and how many, drawn from what was published about silent data corruption.

In computed values (gradients, activations, updates) fewer than 40 % of the events flip one bit of a word, and 1 % of
them show as NaN or infinity (Tung et al., "The Anatomy of Silent Data Corruption", DSN 2026, arXiv:2605.04213). In
memory single bits dominate, and the bits of the others lie together (Sullivan et al.,
"Characterizing and Mitigating Soft Errors in GPU DRAM", MICRO 2021; Sridharan et al., "Memory Errors in Modern
Systems", ASPLOS 2015). The shares below are ours, within these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from reconv.core.batch import Batch
from reconv.core.bits import in_storage_order
from reconv.data.pipeline.sample_cache import CachedDataset
from reconv.data.readers.arrays import ArrayDataset
from reconv.logging.events import Event, WrongBits
from reconv.trainer import run as run_module
from reconv.trainer.callbacks.base import TrainerCallback
from reconv.trainer.loop import Trainer
from reconv.trainer.run import TrainingRun
from reconv.trainer.step import StepResult

AT_REST = ("weights", "weights in use", "optimizer", "ema", "statistics", "cache", "checkpoint", "kept copy")
IN_FLIGHT = ("gradients", "activations", "update", "batch")
TARGETS = (*AT_REST, *IN_FLIGHT)

_IN_MEMORY = ((1, 0.75), (2, 0.15), (4, 0.10))  # bits of one byte or two neighboring ones, and the share of events
_IN_COMPUTATION = ((1, 0.38), (2, 0.20), (4, 0.22), (8, 0.20))  # bits anywhere in a word
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# A residual network with every kind of state: accumulation, several groups, mixing, an average, momentum.
TINY = {
    "model.options.width": "4",
    "length": "12step",
    "schedule.warmup": "1step",
    "data.subset_percent": "5",
    "data.num_workers": "0",
    "batch.size": "8",
    "batch.group": "4",
    "batch.micro": "4",
    "augment.mixup.alpha": "0.2",
    "ema.decay": "0.9",
    "evaluate.every": "6step",
    "evaluate.num_samples": "16",
    "save.every": "4step",
    "save.keep_last": "2",
    "log.every": "6step",
    "engine.num_threads": "1",
}


@dataclass(frozen=True, kw_only=True)
class Flip:
    """Bits to flip."""

    target: str
    step: int  # steps done before
    seed: int
    rank: int = 0
    is_persistent: bool = False  # in every computation from then on, each time other bits
    is_fixed: bool = False  # always the same bits of the same element: the same computation gives the same wrong value


@dataclass
class Injector(TrainerCallback):
    """Flips the bits; `struck` is where it has."""

    flip: Flip
    trainer: Trainer
    train_state: Any
    struck: list[str] = field(default_factory=list)
    is_armed: bool = False

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.flip.seed)
        model = self.train_state.network.model
        target = self.flip.target
        if target == "gradients":
            parameters = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
            name, parameter = self._draw(parameters)
            parameter.register_hook(lambda gradient: self._flipped(f"gradient of {name}", gradient))
        elif target in ("activations", "weights in use"):
            layers = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)]
            name, layer = layers[int(self._random.integers(len(layers)))]
            layer.register_forward_hook(lambda module, _, output: self._after_forward(name, module, output))
        elif target == "update":
            step, optimizer = self.trainer.step.optimizer.step, self.trainer.step.optimizer

            def strike_after(*args: Any) -> None:
                step(*args)
                self._strike_part("model")

            optimizer.step = strike_after  # type: ignore[method-assign,assignment]
        elif target == "checkpoint":
            store = self.trainer.checkpointer._store
            save = store.save
            store.save = lambda step, parts, *rest: save(step, self._flipped_parts(step, parts), *rest)  # type: ignore[method-assign]
        elif target == "batch":
            self.trainer.loader = _FlippedLoader(self.trainer.loader, self)

    def _draw(self, named: Sequence[tuple[str, Any]]) -> tuple[str, Any]:
        """One of several tensors, the larger the likelier."""
        sizes = np.array([tensor.nbytes for _, tensor in named], float)
        return named[int(self._random.choice(len(named), p=sizes / sizes.sum()))]

    # When

    def _strikes(self) -> bool:
        """Whether to strike now: once, or from now on."""
        if not self.is_armed or self.trainer.process_group.rank != self.flip.rank:
            return False
        return self.flip.is_persistent or not self.struck

    def on_batch_fetch_end(self, trainer: Trainer, step: int) -> None:
        self.is_armed = step == self.flip.step or (self.flip.is_persistent and step >= self.flip.step)
        parts = {"weights": "model", "optimizer": "optimizer", "ema": "ema", "statistics": "model"}
        if self.flip.target in parts:
            self._strike_part(parts[self.flip.target])
        elif self.flip.target == "kept copy" and self._strikes() and trainer.verifier is not None:
            self._strike("kept copy", trainer.verifier._proved[0].block)

    def on_batch_fetch_start(self, trainer: Trainer, step: int) -> None:
        if self.flip.target == "cache" and step == self.flip.step:
            self.is_armed = True
            self._strike_cache()

    # Where

    def _strike_part(self, part: str) -> None:
        if not self._strikes():
            return
        tensors = self.train_state.state_dict()[part]
        is_statistic = self.flip.target == "statistics"
        named = [(n, t) for n, t in tensors.items() if part != "model" or ("running_" in n) == is_statistic]
        name, tensor = self._draw([(n, t) for n, t in named if t.is_floating_point() and t.numel()])
        self._strike(f"{part}.{name}", tensor)

    def _after_forward(self, name: str, module: nn.Module, output: Tensor) -> Tensor:
        if not module.training or not self._strikes():
            return output
        if self.flip.target == "activations":
            return self._flipped(f"output of {name}", output)
        weight = module.weight
        assert isinstance(weight, Tensor)
        self._strike(f"model.{name}.weight", weight)
        return output

    def _flipped(self, name: str, tensor: Tensor) -> Tensor:
        if not self._strikes():
            return tensor
        other = tensor.clone()
        self._strike(name, other)
        return other

    def _strike_cache(self) -> None:
        """Flip bits of the images that the next steps need: any of them."""
        loader = self.trainer.loader
        dataset = loader._dataset  # type: ignore[attr-defined]
        if not self._strikes():
            return
        if isinstance(dataset, CachedDataset):
            index = int(self._random.choice(sorted(dataset._cache)))
            sample = dataset._cache[index]
            is_encoded = isinstance(sample.data, bytes)
            content = (
                np.frombuffer(sample.data, np.uint8) if isinstance(sample.data, bytes) else sample.data.reshape(-1)
            )
            changed = torch.from_numpy(content.copy())
            self._strike(sample.name, changed)
            pixels = changed.numpy()
            data = pixels.tobytes() if is_encoded else pixels.reshape(np.shape(sample.data))
            dataset._cache[index] = replace(sample, data=data)
        else:
            assert isinstance(dataset, ArrayDataset)
            self._strike("images", torch.from_numpy(dataset.images))

    def _flipped_parts(
        self, step: int, parts: Mapping[str, Mapping[str, Tensor]]
    ) -> Mapping[str, Mapping[str, Tensor]]:
        if step >= self.flip.step and (self.flip.is_persistent or not self.struck):
            named = [(f"{p}.{n}", t) for p, tensors in parts.items() for n, t in tensors.items() if t.numel()]
            self._strike(*self._draw(named))
        return parts

    # What

    @torch.no_grad()
    def _strike(self, name: str, tensor: Tensor) -> None:
        """Flip bits of one element, in place."""
        random = np.random.default_rng(self.flip.seed) if self.flip.is_fixed else self._random
        flat = in_storage_order(tensor.detach())
        words = flat.view(_INTEGERS[flat.element_size()])
        num_bits = 8 * flat.element_size()
        shares = _IN_MEMORY if self.flip.target in AT_REST else _IN_COMPUTATION
        count = int(random.choice([n for n, _ in shares], p=[share for _, share in shares]))
        if self.flip.target in AT_REST:
            span = min(num_bits, 16 if count > 1 else 1)
            first = int(random.integers(num_bits - span + 1))
            bits = first + random.choice(span, min(count, span), replace=False)
        else:
            bits = random.choice(num_bits, min(count, num_bits), replace=False)
        mask = 0
        for bit in bits:
            mask |= 1 << int(bit)
        if mask >= 1 << (num_bits - 1) and flat.element_size() > 1:
            mask -= 1 << num_bits
        index = int(random.integers(len(words)))
        with _unsafe_preserve_version_counter(tensor):  # hardware does not tell autograd either
            words[index] ^= mask
        self.struck.append(f"{name}[{index}]")


class _FlippedLoader:
    """A loader whose batches change in memory before they are used."""

    def __init__(self, loader: Any, injector: Injector) -> None:
        self._loader = loader
        self._injector = injector

    def steps(self, start: int, stop: int) -> Iterator[tuple[Batch, ...]]:
        for step, batches in enumerate(self._loader.steps(start, stop), start):
            flip = self._injector.flip
            is_here = self._injector.trainer.process_group.rank == flip.rank
            if is_here and step == flip.step and not self._injector.struck:
                images = batches[-1]["images"].clone()
                self._injector._strike("images of the batch", images)
                batches = (*batches[:-1], batches[-1].replace(images=images))
            yield batches


@dataclass(frozen=True)
class Outcome:
    """How a run with flipped bits ended."""

    bits: Mapping[str, bytes]  # the tensors of the last checkpoint
    struck: tuple[str, ...]
    found: tuple[WrongBits, ...]
    error: Exception | None
    num_replays: int
    fit_s: float

    def equals(self, other: Outcome) -> bool:
        return self.bits == other.bits


def run_with(
    folder: Path,
    flip: Flip | None,
    settings: Mapping[str, str],
    preset: str = "quickstart",
    device: str = "cpu",
    setup: Callable[[Trainer], None] = lambda trainer: None,
) -> Outcome:
    """Train with flipped bits."""
    import time

    overrides = [(name, value, "--set") for name, value in settings.items()]
    events: list[Event] = []
    error: Exception | None = None
    struck: list[str] = []
    trainer: Trainer | None = None
    began_s = time.perf_counter()
    with _train_states() as states:
        try:
            with TrainingRun.open(preset, overrides, out=folder, device=device, on_event=events.append) as run:
                trainer = run.trainer()
                if flip is not None:
                    injector = Injector(flip, trainer, states[-1], struck)
                    trainer.callbacks = [*trainer.callbacks, injector]
                setup(trainer)
                began_s = time.perf_counter()
                trainer.fit()
        except Exception as raised:
            error = raised
    fit_s = time.perf_counter() - began_s
    verifier = trainer.verifier if trainer is not None else None
    found = tuple(event for event in events if isinstance(event, WrongBits))
    return Outcome(last_bits(folder), tuple(struck), found, error, verifier.num_replays if verifier else 0, fit_s)


def last_bits(folder: Path) -> dict[str, bytes]:
    """The bytes of every tensor of the last checkpoint."""
    steps = sorted((folder / "checkpoints").glob("step-*"))
    files = sorted(steps[-1].glob("*.safetensors")) if steps else []
    return {
        f"{file.stem}/{name}": tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        for file in files
        for name, tensor in safetensors.torch.load_file(file).items()
    }


@contextmanager
def _train_states() -> Iterator[list[Any]]:
    """The train states that runs build inside."""
    built: list[Any] = []
    module: Any = run_module
    build = module.build_train_state

    def recorded(*args: Any, **options: Any) -> Any:
        built.append(build(*args, **options))
        return built[-1]

    module.build_train_state = recorded
    try:
        yield built
    finally:
        module.build_train_state = build


__all__ = ["AT_REST", "IN_FLIGHT", "TARGETS", "TINY", "Flip", "Outcome", "StepResult", "last_bits", "run_with"]
