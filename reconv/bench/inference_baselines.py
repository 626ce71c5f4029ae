"""Networks ready for inference on one batch: ours, compiled and captured, and those of other packages.

A compiled network must give the outputs of the plain one; if it does not, the plain one is measured, with a note.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from reconv.bench.baselines import TrainBaseline, select_by_name
from reconv.device import Device
from reconv.inference.compiler import compile_inference
from reconv.trainer.cuda_graph import GraphCapture

MAX_DIFFERENCE = 0.1  # relative to the largest output; a few percent are normal in bf16
MAX_ROUNDING_FACTOR = 2.0  # or relative to the plain network's own rounding, which is large in untrained networks
WARMUP_RUNS = 3  # eager runs that choose every algorithm a capture must find

Run = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class CapturedInference:
    """Inference on one batch on the device, as a CUDA graph."""

    run: Run
    num_fused: int  # convolutions with fused bias, addition or activation
    difference: float  # of the outputs from the plain network's, relative to the largest
    note: str = ""  # why nothing is fused


class FusedInference:
    """Compiles a network once, fusing operations into its convolutions, and captures it for each batch."""

    def __init__(self, model: nn.Module, capture: GraphCapture, exact: Callable[[Tensor], Any] | None = None) -> None:
        """`exact` is the same network in a dtype that rounds less."""
        self._model = model
        self._capture = capture
        self._exact = exact or model
        self._compiled: tuple[Callable[[Tensor], Any], int] | None = None

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> CapturedInference:
        expected = self._capture.run_on_stream(lambda: self._model(images))
        rounding = _difference(expected, self._capture.run_on_stream(lambda: self._exact(images)))
        try:
            if self._compiled is None:
                self._compiled = compile_inference(self._model, images)
            captured = self._capture_run(*self._compiled, images, expected)
        except RuntimeError as error:  # data-dependent control flow, or a fixed batch size
            why = f"it fails: {str(error).splitlines()[0]}"
        else:
            if captured.difference <= max(MAX_DIFFERENCE, MAX_ROUNDING_FACTOR * rounding):
                return captured
            why = f"its outputs differ by {captured.difference:.2g} of the largest"
        return replace(
            self._capture_run(self._model, 0, images, expected), note=f"the fused network is not used: {why}"
        )

    def _capture_run(
        self, forward: Callable[[Tensor], Any], num_fused: int, images: Tensor, expected: Any
    ) -> CapturedInference:
        for _ in range(WARMUP_RUNS):
            self._capture.run_on_stream(lambda: forward(images))
        outputs, replay = self._capture.capture(lambda: forward(images))
        replay()
        return CapturedInference(replay, num_fused, _difference(outputs, expected))


def _difference(outputs: Any, expected: Any) -> float:
    """The largest absolute difference, relative to the largest expected value."""
    pairs = list(zip(tree_leaves(outputs), tree_leaves(expected), strict=True))
    if any(o.shape != e.shape for o, e in pairs):  # they would be broadcast
        return math.inf
    largest = max(float(e.double().abs().max()) for _, e in pairs)
    return max(float((o.double() - e.double()).abs().max()) for o, e in pairs) / max(largest, 1e-30)


@dataclass(frozen=True, slots=True)
class InferenceBaseline:
    """A network of another package in channels_last, eager or compiled with CUDA graphs."""

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
    """The networks of these baselines, eager and compiled; `named` selects by the name or a part of it."""
    builders = {baseline.name.split()[0]: baseline.build for baseline in baselines}
    found = [
        InferenceBaseline(f"{package} channels_last{' compiled' if is_compiled else ''}", build, is_compiled)
        for package, build in builders.items()
        for is_compiled in (False, True)
    ]
    return select_by_name(found, named)
