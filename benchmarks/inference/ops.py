"""Time on a CUDA GPU every operation of a network in inference, a convolution with each of its implementations.

    python -m benchmarks.inference.ops MODEL [--batch 256] [--size 224] [--dtype bfloat16]

Prints one line per kind of operation, the longest first: how often it occurs, its milliseconds in all, and the time of
each implementation of a convolution, marked WRONG where it is off by more than the tolerance. Operations are timed
alone, with their inputs in the cache where they fit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from reconv.inference.backends.compiler import compile_inference
from reconv.inference.backends.fold import fold_batch_norms
from reconv.kernels.autotune import time_on_device_ms, tolerance
from reconv.kernels.ops.conv_bias_act import conv_bias_act
from reconv.kernels.ops.conv_candidates import Candidate, ConvConfig, ConvInputs, find_candidates, torch_conv
from reconv.models import build_model, init_weights

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass
class Kind:
    """Operations of one shape."""

    times_ms: dict[str, float]
    number: int = 0

    def total_ms(self) -> float:
        """Milliseconds of all of them, each in its fastest correct implementation."""
        return self.number * min(ms for name, ms in self.times_ms.items() if not name.endswith("WRONG"))


@dataclass
class Times:
    """Times by kind of operation."""

    kinds: dict[str, Kind] = field(default_factory=dict)

    def add(self, name: str, time: Callable[[], dict[str, float]]) -> None:
        """Count an operation; the first of its kind is timed."""
        if name not in self.kinds:
            self.kinds[name] = Kind(time())
        self.kinds[name].number += 1


class TimingInterpreter(fx.Interpreter):
    """Runs a graph and times each operation."""

    def __init__(self, compiled: fx.GraphModule) -> None:
        super().__init__(compiled)
        self.times = Times()

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is conv_bias_act:
            *tensors, shape = args
            self.times.add(_words(ConvInputs(*tensors), shape), partial(_forms_ms, ConvInputs(*tensors), shape))
        else:
            call = partial(target, *args, **kwargs)
            sides = [tuple(leaf.shape) for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            self.times.add(f"{getattr(target, '__name__', target)} {sides}", lambda: {"once": time_on_device_ms(call)})
        return super().call_function(target, args, kwargs)


def _words(inputs: ConvInputs, shape: ConvConfig) -> str:
    joint = [word for word, there in (("+", inputs.other), ("gate", inputs.gate)) if there is not None]
    sides = f"{tuple(inputs.x.shape[1:])} by {tuple(inputs.weight.shape)} stride {shape.stride[0]}"
    return " ".join([sides, f"groups {shape.groups}", shape.act, *joint])


def _forms_ms(inputs: ConvInputs, shape: ConvConfig) -> dict[str, float]:
    expected = torch_conv(inputs, shape).float()
    found = {"plain": time_on_device_ms(partial(torch_conv, inputs, shape))}
    for form in find_candidates(inputs, shape):
        name = _name(form)
        try:
            far = (form(inputs, shape).float() - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
        except RuntimeError:  # cuDNN has no plan for it
            continue
        name += "" if float(far) <= tolerance(inputs.x.dtype) else f" {float(far):.1g} WRONG"
        found[name] = time_on_device_ms(partial(form, inputs, shape))
    return found


def _name(form: Candidate) -> str:
    if not isinstance(form, partial):
        return getattr(form, "__name__", str(form))
    inner = form.keywords.get("form")
    tile = form.keywords.get("tile")
    words = [
        form.func.__name__,
        "" if inner is None else _name(inner),
        "" if tile is None else "x".join(map(str, tile)),
    ]
    return " ".join(word for word in words if word)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    options = parser.parse_args()
    dtype = DTYPES[options.dtype]
    model = build_model(options.model, num_classes=1000)
    init_weights(model, 0)
    shape = (3, options.size, options.size)
    model, _ = fold_batch_norms(model.cuda().to(memory_format=torch.channels_last), shape)  # type: ignore[call-overload]
    images = torch.randn(options.batch, *shape, device="cuda", dtype=dtype).contiguous(
        memory_format=torch.channels_last
    )
    with torch.inference_mode():
        compiled, num_fused = compile_inference(model.to(dtype), images)
        assert isinstance(compiled, fx.GraphModule)
        timed = TimingInterpreter(compiled)
        timed.run(images)
    kinds = sorted(timed.times.kinds.items(), key=lambda item: -item[1].total_ms())
    total_ms = sum(kind.total_ms() for _, kind in kinds)
    print(
        f"{torch.cuda.get_device_name()}, {options.model}, batch {options.batch}, {num_fused} joined: {total_ms:.2f} ms"
    )
    for name, kind in kinds:
        forms = ", ".join(f"{form} {ms:.3f}" for form, ms in sorted(kind.times_ms.items(), key=lambda item: item[1]))
        print(f"{kind.number:3} x {name}: {kind.total_ms():.3f} ms; {forms}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
