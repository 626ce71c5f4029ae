"""Models of other packages, ready for inference on one batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from reconv.bench.baselines import TrainBaseline, select_by_name
from reconv.device import Device

Run = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class InferenceBaseline:
    """A model of another package in channels_last, eager or compiled with CUDA graphs."""

    name: str
    build: Callable[[int], nn.Module]  # from the number of classes
    is_compiled: bool

    def prepare(self, num_classes: int, images: Tensor, device: Device) -> Run:
        """Inference on a batch on the device."""
        model: nn.Module = self.build(num_classes).eval().requires_grad_(False)
        model = model.to(device.torch, images.dtype).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if not self.is_compiled:
            return lambda: model(images)
        torch.compiler.reset()  # as in a new process
        compiled = torch.compile(model, dynamic=False, mode="reduce-overhead")
        return lambda: compiled(images)


def inference_baselines(baselines: Sequence[TrainBaseline], named: str = "") -> list[InferenceBaseline]:
    """The models of these baselines, eager and compiled; `named` selects by the name or a part of it."""
    builders = {baseline.name.split(" channels_last")[0]: baseline.build for baseline in baselines}
    found = [
        InferenceBaseline(f"{network} channels_last{' compiled' if is_compiled else ''}", build, is_compiled)
        for network, build in builders.items()
        for is_compiled in (False, True)
    ]
    return select_by_name(found, named)
