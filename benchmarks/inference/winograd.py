"""Measure the folded backend with and without its Winograd convolutions, layer by layer and for whole networks.

    python -m benchmarks.inference.winograd [--layers] [--models NAME...] [--batches N...] [--threads N]
                                            [--count N] [--json FILE]

Both ways, and onnxruntime and OpenVINO if they are installed, alternate in one process. With one thread the clock is
the CPU time of the process, which other programs disturb less; with several it is the wall clock.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from reconv.bench.infer import open_network
from reconv.inference.backends.base import EagerBackend
from reconv.inference.backends.choose import LoadedNetwork
from reconv.inference.backends.fold import FoldedBackend
from reconv.inference.backends.onednn import PackedConvolution
from reconv.inference.backends.onnxruntime import OnnxRuntimeBackend, onnx_file
from reconv.inference.backends.precisions import fixed_images, largest_difference
from reconv.inference.backends.winograd import WinogradConvolution
from reconv.kernels.ops.conv_candidates import ConvConfig

LAYERS = ((56, 64), (28, 128), (14, 256), (7, 512))  # side and channels of those of ResNet-50
CONFIG = ConvConfig((1, 1), (1, 1), (1, 1), 1, "relu")

Way = Callable[[], object]


def measure(ways: dict[str, Way], count: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds of each way, alternating; the first pass is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(count + 1):
        for name, way in ways.items():
            start_s = clock()
            way()
            if round_number:
                seconds[name].append(clock() - start_s)
    return seconds


def print_row(title: str, measured: dict[str, list[float]]) -> None:
    """Times of the first way, and how much faster the others are in the same round."""
    (first, base), *others = measured.items()
    cells = [f"{first} {1e3 * statistics.median(base):.2f} ms (from {1e3 * min(base):.2f})"]
    for name, seconds in others:
        ratios = sorted(a / b for a, b in zip(base, seconds, strict=True))
        cells.append(f"{name} {statistics.median(ratios):.2f} x ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    print(f"{title}: {', '.join(cells)}", flush=True)


def layer_ways(side: int, channels: int, batch: int) -> dict[str, Way]:
    x = torch.randn(batch, channels, side, side).relu().contiguous(memory_format=torch.channels_last)
    weight, bias = torch.randn(channels, channels, 3, 3) / (9 * channels) ** 0.5, torch.randn(channels)
    direct = PackedConvolution(weight, bias, CONFIG, list(x.shape))
    winograd = WinogradConvolution(direct, weight, bias, CONFIG)
    return {"direct": lambda: direct(x, None, None), "winograd": lambda: winograd.winograd(x, None)}


def load_network(name: str) -> LoadedNetwork:
    """A network with random weights, whose residual branches are not zero."""
    overrides = [("model.name", name, "benchmark"), ("precision.mode", "fp32", "benchmark")]
    recipe, network, device = open_network("resnet50", overrides, "cpu")
    with torch.no_grad():
        for module in network.model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(0.5, 1.5)
    network.model.eval()
    return LoadedNetwork(recipe, network, device)


def folded_backend(loaded: LoadedNetwork, has_winograd: bool) -> FoldedBackend:
    backend = FoldedBackend(loaded.recipe, loaded.fold("fp32"), "fp32")
    network: Any = backend._forward
    for name, module in list(network.named_children()):
        if isinstance(module, WinogradConvolution) and not has_winograd:
            setattr(network, name, module.direct)
    return backend


def openvino_forward(loaded: LoadedNetwork, threads: int) -> Callable[[Tensor], Tensor]:
    """The network in OpenVINO, in float32 and with as many threads as torch."""
    import openvino

    options = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads}
    path = onnx_file(loaded.recipe, loaded.network.model)
    model = openvino.Core().compile_model(openvino.convert_model(path), "CPU", options)

    def forward(images: Tensor) -> Tensor:
        return torch.from_numpy(model([images.permute(0, 2, 3, 1).contiguous().numpy()])[0])

    return forward


def measure_network(
    name: str, batches: Sequence[int], threads: int, count: int, clock: Callable[[], float]
) -> dict[int, dict[str, list[float]]]:
    """Seconds of each way in each round, by batch size."""
    loaded = load_network(name)
    torch.set_num_threads(threads)
    backends: dict[str, Callable[[Tensor], Any]] = {
        "direct": folded_backend(loaded, False),
        "winograd": folded_backend(loaded, True),
    }
    if importlib.util.find_spec("onnxruntime") is not None:
        backends["onnxruntime"] = OnnxRuntimeBackend(loaded.recipe, loaded.network.model)
    if importlib.util.find_spec("openvino") is not None:
        backends["openvino"] = openvino_forward(loaded, threads)
    images = fixed_images(loaded.image_shape)
    expected = EagerBackend(loaded.recipe, loaded.network)(images)
    differences = {way: f"{largest_difference(run(images), expected):.1g}" for way, run in backends.items()}
    print(f"{name}: differences from eager {differences}", flush=True)
    seconds: dict[int, dict[str, list[float]]] = {}
    for batch in batches:
        images = torch.randint(0, 256, (batch, *loaded.image_shape), dtype=torch.uint8)
        ways: dict[str, Way] = {way: partial(run, images) for way, run in backends.items()}
        seconds[batch] = measure(ways, count, clock)
        print_row(f"{name}, batch {batch}, {threads} threads", seconds[batch])
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", action="store_true", help="the layers of ResNet-50 one by one, too")
    parser.add_argument("--models", nargs="*", default=["resnet50"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--count", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the seconds of each round")
    options = parser.parse_args()
    clock = time.process_time if options.threads == 1 else time.perf_counter
    torch.set_num_threads(options.threads)
    for side, channels in LAYERS if options.layers else ():
        for batch in options.batches:
            seconds = measure(layer_ways(side, channels, batch), options.count, clock)
            print_row(f"{side} x {side} x {channels}, batch {batch}, {options.threads} threads", seconds)
    measured = {
        name: measure_network(name, options.batches, options.threads, options.count, clock) for name in options.models
    }
    if options.json:
        options.json.write_text(json.dumps({"threads": options.threads, "models": measured}))


if __name__ == "__main__":
    with torch.no_grad():
        main()
