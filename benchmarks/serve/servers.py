"""The servers that `benchmarks.serve.throughput` compares: how each is started, stopped and asked."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from benchmarks.serve.http_load import Target
from reconv.models import build_model

START_LIMIT_S = 180  # of all servers together
STOP_LIMIT_S = 10
LITSERVE = "LitServe"
RECONV = "reconv serve"
_SCRIPT = Path(__file__).with_name("litserve_resnet50.py")
IMAGES = "images"  # the folder of the calibration images
NUM_KINDS = 16  # of images, and classes that the network tells apart


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """A row of the table: a server with its options."""

    server: str  # LITSERVE or RECONV
    precision: str
    options: tuple[str, ...]
    is_compared: bool = False  # a row of reconv in a precision that LitServe has, too; the first has an open loop

    @property
    def label(self) -> str:
        return (
            " ".join(self.options).replace("--", "").replace(" max-batch", ", batch").replace(" compile", ", compile")
        )


def cpu_configs() -> list[ServerConfig]:
    """On two cores: LitServe with one and two workers, without and with batching; reconv in fp32, bf16 and int8."""
    litserve = [(1, 1), (2, 1), (1, 8), (2, 4)]
    return [
        *(
            ServerConfig(LITSERVE, "fp32", ("--workers", str(workers), "--max-batch", str(batch)))
            for workers, batch in litserve
        ),
        ServerConfig(RECONV, "fp32", ("--decoder", "pillow"), is_compared=True),
        ServerConfig(RECONV, "fp32", (), is_compared=True),
        ServerConfig(RECONV, "fp32", ("--decoder", "pillow", "--processes", "2", "--max-batch", "4"), is_compared=True),
        *(
            ServerConfig(RECONV, "fp32", (*backend, *places, "--max-batch", "4"), is_compared=True)
            for backend in ((), ("--backend", "onnxruntime"))
            for places in (("--device", "cpu,cpu"), ("--processes", "2"))
        ),
        ServerConfig(RECONV, "bf16", ()),
        ServerConfig(RECONV, "int8", ()),
    ]


def cuda_configs() -> list[ServerConfig]:
    """On a GPU: LitServe with up to 12 workers, which decode as well, and batches up to 64."""
    litserve = [("bf16", 1, 64), ("bf16", 4, 32), ("bf16", 8, 16), ("bf16", 12, 16), ("fp32", 8, 16)]
    return [
        *(
            ServerConfig(LITSERVE, precision, ("--workers", str(workers), "--max-batch", str(batch)))
            for precision, workers, batch in litserve
        ),
        ServerConfig(LITSERVE, "bf16", ("--workers", "4", "--max-batch", "32", "--compile")),
        ServerConfig(RECONV, "bf16", ("--max-batch", "64"), is_compared=True),
        *(
            ServerConfig(RECONV, "bf16", ("--max-batch", "64", "--processes", str(processes)), is_compared=True)
            for processes in (4, 8, 12)
        ),
        *(
            ServerConfig(RECONV, "bf16", ("--max-batch", "64", "--decoder", "pillow", *processes), is_compared=True)
            for processes in ((), ("--processes", "8"))
        ),
        ServerConfig(RECONV, "fp32", ("--max-batch", "64"), is_compared=True),
    ]


class RunningServer:
    """A server in a process group of its own; it is stopped (SIGSTOP) while others are measured."""

    def __init__(self, config: ServerConfig, weights: Path, device: str, litserve_python: str, folder: Path) -> None:
        self.config, self.port = config, _free_port()
        common = ("--port", str(self.port), "--device", device, "--precision", config.precision)
        if config.server == LITSERVE:
            command = (litserve_python, str(_SCRIPT), str(weights), *common, *config.options)
            self.target = Target(self.port, ("classes", 0, "index"))
            self._ready_path = "/health"
        else:
            command = (sys.executable, "-m", "reconv", "serve", f"resnet50={weights}", "--recipe", "resnet50")
            calibration = ("--calibration", str(folder / IMAGES)) if config.precision == "int8" else ()
            command = (*command, *common, *calibration, *config.options)
            self.target = Target(self.port, ("predictions", 0, "classes", 0, "index"))
            self._ready_path = "/v2/health/ready"
        self.log = folder / f"{self.port}.log"
        # Each program chooses its own number of threads.
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        with self.log.open("w") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    def wait_until_ready(self, deadline: float) -> str:
        """Wait for the server until `deadline` (of time.monotonic); returns why it did not start, or nothing."""
        while True:
            if self._process.poll() is not None:
                return f"it ended: {_last_lines(self.log)}"
            try:
                url = f"http://127.0.0.1:{self.port}{self._ready_path}"
                with urllib.request.urlopen(url, timeout=5) as answer:
                    if answer.status == 200:
                        return ""
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
            if time.monotonic() > deadline:
                return f"it was not ready within {START_LIMIT_S} s"

    def suspend(self) -> None:
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)

    def end(self) -> None:
        """End the whole group; LitServe's children outlive its main process otherwise."""
        for number in (signal.SIGCONT, signal.SIGTERM):
            self._signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_LIMIT_S)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _last_lines(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-5:]) or "without a message"


def make_images(count: int) -> list[bytes]:
    """JPEGs of the size and detail of ImageNet's (500 x 375 pixels, about 63 kB), of `NUM_KINDS` kinds in turn.

    They are noise of all scales; a kind has more of one scale, and a tint.
    """
    random = np.random.default_rng(0)
    return [_make_image(random, number % NUM_KINDS) for number in range(count)]


def _make_image(random: np.random.Generator, kind: int) -> bytes:
    total = np.zeros((375, 500, 3), dtype=np.float32)
    for octave in range(9):
        cells = 2**octave
        noise = random.integers(0, 256, (cells, cells, 3), dtype=np.uint8)
        scaled = Image.fromarray(noise).resize((500, 375), Image.Resampling.BICUBIC)
        contrast = 3 if octave == 2 + 2 * (kind % 4) else 1
        total += (np.asarray(scaled, dtype=np.float32) - 127.5) * contrast / cells**0.3
    tint = 40 * np.eye(4, 3, dtype=np.float32)[kind // 4]
    spread = 117.5 + tint + total * (50 / total.std())
    buffer = io.BytesIO()
    Image.fromarray(spread.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=92)
    return buffer.getvalue()


def write_images(images: list[bytes], folder: Path) -> None:
    """Write the images where servers in int8 are calibrated with them."""
    (folder / IMAGES).mkdir()
    for number, image in enumerate(images):
        (folder / IMAGES / f"{number}.jpg").write_bytes(image)


def make_weights(images: list[bytes], path: Path) -> None:
    """A ResNet-50 with random convolutions, and norms and a linear layer that are fitted to the kinds of the images."""
    torch.manual_seed(0)
    model = build_model("resnet50", num_classes=1000)
    norms = {name: module for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)}
    for name, norm in norms.items():
        # Weak residual branches, as in trained networks: otherwise a random network amplifies the last bit of a pixel.
        scale = 0.2 if name.endswith("bn3") else 1.0
        nn.init.uniform_(norm.weight, 0.5 * scale, 1.5 * scale)
        nn.init.normal_(norm.bias, std=0.1)
        norm.momentum = None  # the mean over all batches
    batch = torch.stack([_to_tensor(image) for image in images])
    linear = next(module for module in model.modules() if isinstance(module, nn.Linear))
    features: list[torch.Tensor] = []
    with torch.no_grad():
        model.train()
        model(batch)
        model.eval()
        hook = linear.register_forward_pre_hook(lambda module, args: features.append(args[0]))
        model(batch)
        hook.remove()
        weight, bias = _fit_linear(features[0], torch.arange(len(images)) % NUM_KINDS, linear.out_features)
        linear.weight.copy_(weight)
        linear.bias.copy_(bias)
    torch.save(model.state_dict(), path)


def _fit_linear(features: torch.Tensor, kinds: torch.Tensor, num_classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and bias of a ridge regression to logits of 10 for the class of an image, and 0 for the others."""
    mean = features.mean(0)
    x = (features - mean).double()
    targets = 10 * nn.functional.one_hot(kinds * (num_classes // NUM_KINDS), num_classes).double()
    kernel = x @ x.T
    ridge = 0.01 * kernel.diagonal().mean() * torch.eye(len(x))
    weight = ((targets - targets.mean(0)).T @ torch.linalg.solve(kernel + ridge, x)).float()
    return weight, targets.mean(0).float() - weight @ mean


def _to_tensor(image: bytes) -> torch.Tensor:
    opened = Image.open(io.BytesIO(image)).resize((341, 256)).crop((58, 16, 282, 240))
    pixels = torch.from_numpy(np.array(opened)).permute(2, 0, 1).float() / 255
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return (pixels - mean.view(3, 1, 1)) / std.view(3, 1, 1)
