"""Compiles a folded network and captures it as a CUDA graph for each batch; `bench infer` measures this.

A compiled network must give the outputs of the plain one; if it does not, the plain one is captured, with a note.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from reconv.device.graphs import GraphCapture
from reconv.inference.backends.compiler import compile_inference
from reconv.inference.backends.precisions import largest_difference

MAX_DIFFERENCE = 0.1  # relative to the largest output; a few percent are normal in bf16
MAX_ROUNDING_FACTOR = 2.0  # or relative to the plain network's own rounding, which is large in untrained networks
WARMUP_RUNS = 3  # eager runs that choose every algorithm a capture must find

NetworkFunction = Callable[[Tensor], Any]
Wrap = Callable[[NetworkFunction], NetworkFunction]


@dataclass(frozen=True, slots=True)
class CapturedInference:
    """Inference on one batch on the device, as a CUDA graph."""

    run: Callable[[], None]
    outputs: Any  # overwritten by every run, and by those of other batches
    num_fused: int  # convolutions with fused bias, addition or activation
    difference: float  # of the outputs from the plain network's, relative to the largest
    note: str = ""  # why nothing is fused


class FusedInference:
    """Compiles a network once, fusing operations into its convolutions, and captures it for each batch."""

    def __init__(
        self,
        model: nn.Module,
        capture: GraphCapture,
        exact: NetworkFunction | None = None,
        prepare: NetworkFunction | None = None,
        wrap: Wrap = lambda network: network,
    ) -> None:
        """`exact` is the same network in a dtype that rounds less, `prepare` makes its input from the images of a
        batch, and `wrap` is what happens around it (test-time augmentation)."""
        self._model = model
        self._capture = capture
        self._exact = exact or model
        self._prepare: NetworkFunction = prepare or (lambda images: images)
        self._wrap = wrap
        self._compiled: tuple[NetworkFunction, int] | None = None

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> CapturedInference:
        """Inference on the images in this tensor, whatever they are when it runs."""
        plain = self._from_images(self._model)
        expected = self._capture.run_on_stream(lambda: plain(images))
        rounding = largest_difference(
            expected, self._capture.run_on_stream(lambda: self._from_images(self._exact)(images))
        )
        try:
            if self._compiled is None:
                self._compiled = compile_inference(self._model, self._prepare(images))
            compiled, num_fused = self._compiled
            captured = self._capture_run(self._from_images(compiled), num_fused, images, expected)
        except RuntimeError as error:  # data-dependent control flow, or a fixed batch size
            why = f"it fails: {str(error).splitlines()[0]}"
        else:
            if captured.difference <= max(MAX_DIFFERENCE, MAX_ROUNDING_FACTOR * rounding):
                return captured
            why = f"its outputs differ by {captured.difference:.2g} of the largest"
        return replace(self._capture_run(plain, 0, images, expected), note=f"the fused model is not used: {why}")

    def _from_images(self, network: NetworkFunction) -> NetworkFunction:
        wrapped, prepare = self._wrap(network), self._prepare
        return lambda images: wrapped(prepare(images))

    def _capture_run(
        self, forward: NetworkFunction, num_fused: int, images: Tensor, expected: Any
    ) -> CapturedInference:
        for _ in range(WARMUP_RUNS):
            self._capture.run_on_stream(lambda: forward(images))
        outputs, replay = self._capture.capture(lambda: forward(images))
        replay()
        return CapturedInference(replay, outputs, num_fused, largest_difference(outputs, expected))
