"""A network as it would be served, and other packages' networks as people run them, each ready for one batch.

Owns how answers are launched and what other ways they are compared with. Refuses to time anything. Invariant: what is
launched gives the answers of the plain network, and how far it is from them is told; joint operations that do not are
given up for the plain ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from reconv.bench.baselines import Peer
from reconv.device import Device
from reconv.errors import UsageError
from reconv.inference.compiler import compile_inference

MOST_DIFFERENT = 0.1  # of the largest value; in bf16 hundredths are usual
MOST_SPREADS = 2.0  # or so many times what the plain answers are from exact ones: of untrained networks they may be far
WARM_ANSWERS = 3  # given before the recording: they choose every algorithm that it must find

Launch = Callable[[], Any]


class InferenceRecord(Protocol):
    """What is asked of a device that records."""

    def run_on_stream(self, work: Launch) -> Any: ...
    def capture(self, work: Launch) -> tuple[Any, Callable[[], None]]: ...


@dataclass(frozen=True, slots=True)
class Served:
    """Answers for one batch that lies on the device."""

    launch: Launch
    num_joined: int  # convolutions that took in what follows them
    difference: float  # from the plain network's answers, of their largest value
    given_up: str = ""  # why joint operations were


class Serving:
    """A network's operations, listed once and joined where they can be; recorded as one for each batch."""

    def __init__(
        self, model: nn.Module, recorder: InferenceRecord, exact: Callable[[Tensor], Any] | None = None
    ) -> None:
        self._model = model
        self._recorder = recorder
        self._exact = exact or model  # the same network in a type that rounds less
        self._listed: tuple[Callable[[Tensor], Any], int] | None = None

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Served:
        """Answers for these images."""
        expected = self._recorder.run_on_stream(lambda: self._model(images))
        spread = _difference(expected, self._recorder.run_on_stream(lambda: self._exact(images)))
        try:
            if self._listed is None:
                self._listed = compile_inference(self._model, images)
            served = self._recorded(*self._listed, images, expected)
        except RuntimeError as error:  # a network that asks for values, or a list that holds its number of images
            why = f"they fail: {str(error).splitlines()[0]}"
        else:
            if served.difference <= max(MOST_DIFFERENT, MOST_SPREADS * spread):
                return served
            why = f"their answers are {served.difference:.2g} of the largest value from the plain ones"
        return replace(
            self._recorded(self._model, 0, images, expected), given_up=f"joint operations are given up: {why}"
        )

    def _recorded(self, call: Callable[[Tensor], Any], num_joined: int, images: Tensor, expected: Any) -> Served:
        for _ in range(WARM_ANSWERS):
            self._recorder.run_on_stream(lambda: call(images))
        given, launch = self._recorder.capture(lambda: call(images))
        launch()
        return Served(launch, num_joined, _difference(given, expected))


def _difference(given: Any, expected: Any) -> float:
    """The largest difference of two answers, as a share of the largest value."""
    pairs = list(zip(tree_leaves(given), tree_leaves(expected), strict=True))
    if any(g.shape != e.shape for g, e in pairs):  # which a difference would broadcast
        return math.inf
    largest = max(float(e.double().abs().max()) for _, e in pairs)
    return max(float((g.double() - e.double()).abs().max()) for g, e in pairs) / max(largest, 1e-30)


@dataclass(frozen=True, slots=True)
class Other:
    """Another package's network in channels_last: each operation launched, or compiled and recorded by torch."""

    name: str
    build: Callable[[int], nn.Module]
    is_compiled: bool

    def ready(self, num_classes: int, images: Tensor, device: Device) -> Launch:
        """Its answers for a batch on the device."""
        model: nn.Module = self.build(num_classes).eval().requires_grad_(False)
        model = model.to(device.torch, images.dtype).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if not self.is_compiled:
            return lambda: model(images)
        torch.compiler.reset()  # as in a process of its own
        compiled = torch.compile(model, dynamic=False, mode="reduce-overhead")
        return lambda: compiled(images)


def others(peers: Sequence[Peer], named: str = "") -> list[Other]:
    """Both ways to run each package's network, of those whose name is, or else holds, `named`."""

    def ways() -> Iterator[Other]:
        for package, build in {peer.name.split()[0]: peer.build for peer in peers}.items():
            yield Other(f"{package} channels_last", build, False)
            yield Other(f"{package} channels_last compiled", build, True)

    found = list(ways())
    chosen = [way for way in found if way.name == named] or [way for way in found if named in way.name]
    if found and not chosen:
        names = ", ".join(way.name for way in found)
        raise UsageError(f"no peer's name holds {named!r}", then=f"a part of one of these: {names}")
    return chosen
