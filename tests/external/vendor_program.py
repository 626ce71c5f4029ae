"""Run a training program of another project as its user does, on a CPU, and record its first steps.

    python vendor_program.py SETTINGS.json PROGRAM.py ARGUMENTS...

Runs without Reconv. The program's own code runs unchanged; what is exchanged beneath it is named here:

- `order`: random samplers give these indices, one list for each epoch, instead of shuffling;
- `whole`: random resized crops take the whole image and random flips do nothing;
- `float64`: weights are made as float64 with values that float32 has, and images are normalized in float64 (those of
  timm in float32) and converted;
- `cpu`: what asks for CUDA gets the CPU, and the loggers and the affinity library of NVIDIA's program are empty;
- `torchvision::nms`: declared, because the wheels of torchvision are built for CUDA.

Writes `weights.pth` (before the first step), and at the end `steps.json` (losses and learning rates) and `images.npy`
(the first `keep_batches` batches as the network gets them) to the current folder.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import random
import runpy
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

_OPERATORS = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _OPERATORS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

EMPTY_MODULES = ("nvidia", "nvidia.dali", "nvidia.dali.ops", "nvidia.dali.types", "nvidia.dali.plugin")


class Done(BaseException):
    """Enough steps are recorded."""


class Recorder:
    """What a program computes, step by step."""

    def __init__(self, steps: int, keep_batches: int) -> None:
        self.steps, self.keep_batches = steps, keep_batches
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.images: list[np.ndarray[Any, Any]] = []
        self._model: nn.Module | None = None

    def install(self) -> None:
        nn.modules.module.register_module_forward_pre_hook(self.before_forward)
        register_optimizer_step_pre_hook(self.before_step)
        register_optimizer_step_post_hook(self.after_step)
        backward = Tensor.backward

        def record(loss: Tensor, *arguments: Any, **options: Any) -> Any:
            self.losses.append(float(loss))
            return backward(loss, *arguments, **options)

        Tensor.backward = record  # type: ignore[method-assign,assignment]

    def before_forward(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Take the network's weights and images: its own forward pass is the first one of all modules."""
        is_batch = bool(inputs) and isinstance(inputs[0], Tensor) and inputs[0].ndim == 4
        if self._model is None and module.training and is_batch and any(True for _ in module.parameters()):
            self._model = module
            with torch.no_grad():
                for tensor in (*module.parameters(), *module.buffers()):
                    tensor.copy_(tensor.to(torch.float32) if tensor.is_floating_point() else tensor)
            network = getattr(module, "module", module)
            torch.save(network.state_dict(), "weights.pth")
        if module is self._model and module.training and len(self.images) < self.keep_batches:
            self.images.append(inputs[0].detach().to(torch.float32).numpy())
        if not is_batch or inputs[0].dtype == torch.get_default_dtype():
            return None
        return (inputs[0].to(torch.get_default_dtype()), *inputs[1:])

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.rates.append(float(optimizer.param_groups[0]["lr"]))

    def after_step(self, *_: Any) -> None:
        if len(self.losses) >= self.steps:
            raise Done

    def write(self) -> None:
        Path("steps.json").write_text(json.dumps({"losses": self.losses, "rates": self.rates}))
        np.save("images.npy", np.stack(self.images) if self.images else np.empty(0))


def replay_order(order: list[list[int]]) -> None:
    """Give the indices of each epoch in this order; NVIDIA's validation loader shuffles, too, and goes on doing so."""
    epochs, shuffled = iter(order), torch.utils.data.RandomSampler.__iter__

    def replayed(self: torch.utils.data.RandomSampler) -> Any:
        return iter(next(epochs)) if len(self.data_source) == len(order[0]) else shuffled(self)

    torch.utils.data.RandomSampler.__iter__ = replayed  # type: ignore[method-assign]


def take_whole_images() -> None:
    """Crop and flip nothing."""
    from torchvision import transforms

    def whole(image: Any, scale: Any, ratio: Any) -> tuple[int, int, int, int]:
        width, height = image.size
        return 0, 0, height, width

    transforms.RandomResizedCrop.get_params = staticmethod(whole)
    transforms.RandomHorizontalFlip.forward = lambda self, image: image


def compute_in_float64() -> None:
    """Make float64 of what a program calls float."""
    from torchvision import transforms
    from torchvision.transforms import functional

    torch.set_default_dtype(torch.float64)
    Tensor.float = Tensor.double  # type: ignore[method-assign]
    transforms.ConvertImageDtype.forward = lambda self, image: functional.convert_image_dtype(image, torch.float64)


def use_cpu() -> None:
    """Stand in for CUDA and for packages that NVIDIA's program imports and that compute nothing of a step."""
    nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign,assignment]
    Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign,assignment]
    stream = types.SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)
    torch.cuda.Stream = lambda *_, **__: stream  # type: ignore[misc,assignment]
    torch.cuda.current_stream = lambda *_: stream  # type: ignore[assignment]
    torch.cuda.stream = lambda *_: contextlib.nullcontext()  # type: ignore[assignment]
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.device_count = lambda: 1
    logger = types.ModuleType("dllogger")
    logger.Verbosity = enum.IntEnum("Verbosity", {"OFF": -1, "DEFAULT": 0, "VERBOSE": 1})  # type: ignore[attr-defined]

    class Silent:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: None

    for name in ("Logger", "StdOutBackend", "JSONStreamBackend"):
        setattr(logger, name, Silent)
    for name in ("metadata", "log", "flush", "init"):
        setattr(logger, name, lambda *_, **__: None)
    pipeline = types.ModuleType("nvidia.dali.pipeline")
    pipeline.Pipeline = object  # type: ignore[attr-defined]
    iterator = types.ModuleType("nvidia.dali.plugin.pytorch")
    iterator.DALIClassificationIterator = object  # type: ignore[attr-defined]
    affinity = types.ModuleType("pynvml")
    affinity.nvmlInit = affinity.nvmlDeviceGetCount = lambda: 1  # type: ignore[attr-defined]
    quantile = np.quantile
    np.quantile = lambda values, q, interpolation: quantile(values, q, method=interpolation)  # NumPy 1's name
    modules = (logger, affinity, pipeline, iterator, *map(types.ModuleType, EMPTY_MODULES))
    sys.modules.update({module.__name__: module for module in modules})


def main() -> None:
    settings_file, program, *arguments = sys.argv[1:]
    settings: dict[str, Any] = json.loads(Path(settings_file).read_text())
    torch.manual_seed(settings["seed"])
    random.seed(settings["seed"])
    np.random.seed(settings["seed"])
    torch.set_num_threads(1)
    if settings["float64"]:
        compute_in_float64()
    recorder = Recorder(settings["steps"], settings["keep_batches"])
    recorder.install()
    if settings["order"]:
        replay_order(settings["order"])
    if settings["whole"]:
        take_whole_images()
    if settings["cpu"]:
        use_cpu()
    sys.argv = [program, *arguments]
    sys.path.insert(0, os.path.dirname(program))
    try:
        with contextlib.suppress(Done):
            runpy.run_path(program, run_name="__main__")
    finally:
        recorder.write()


if __name__ == "__main__":
    main()
