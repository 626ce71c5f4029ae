"""Other packages' networks, trained as their own scripts train them, on the same batches in the same process.

Owns who is a peer and its plain training step. Refuses to know recipes' finer points: a peer has SGD with momentum and
a smoothed cross-entropy. Invariant: a peer gets the batches and the preparation that ours got; one that cannot run is
said, with the reason.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from reconv.batch import Batch
from reconv.bench.bench_target import BenchTarget
from reconv.bench.timing import Marks, Wish, measure
from reconv.data.pipeline.buffers import BlockingTransfer
from reconv.data.pipeline.prefetcher import DataContext
from reconv.data.pipeline.train_loader import make_train_loader
from reconv.data.transforms.device_transforms import TrainPreprocess
from reconv.device import is_out_of_memory
from reconv.errors import UsageError
from reconv.trainer.build.network import wants_kernels

MOMENTUM, RATE, WEIGHT_DECAY = 0.9, 0.1, 1e-4  # torchvision's reference script; they do not change the speed
_TIMM_NAMES = {"mobilenet_v2": "mobilenetv2_100", "se_resnext101_32x4d": "seresnext101_32x4d"}
_WITHOUT_HEADS = ("googlenet", "inception_v3")  # torchvision's script cannot train their auxiliary heads

_DEPTHS = [3, 4, 23, 3]
_WIDTHS = {"resnext101_32x4d": 4}  # of networks that torchvision's class builds but that have no name there

Half = Literal["fp16", "bf16"]
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Peer:
    """A network of someone else's and how it is trained; on the CPU in fp32, whatever `half` says."""

    name: str
    build: Callable[[int], nn.Module]  # from the number of classes
    half: Half
    channels_last: bool
    compiled: bool = False


def find_peers(model: str, named: str = "") -> tuple[list[Peer], list[str]]:
    """The installed peers with this network, of those whose name is, or else holds, `named`; why others are missing."""
    peers: list[Peer] = []
    missing: list[str] = []
    for package in ("torchvision", "timm"):
        found, why = _find(package, model)
        peers += found
        missing += [why] if why else []
    chosen = [peer for peer in peers if peer.name == named] or [peer for peer in peers if named in peer.name]
    if peers and not chosen:
        names = ", ".join(peer.name for peer in peers)
        raise UsageError(f"no peer's name holds {named!r}", then=f"a part of one of these: {names}")
    return chosen, missing


def _find(package: str, model: str) -> tuple[list[Peer], str]:
    if importlib.util.find_spec(package) is None:
        return [], f"{package} is not installed"
    try:
        module = importlib.import_module(package)
    except (ImportError, OSError, RuntimeError) as error:  # a build for another torch fails while it loads
        return [], f"{package} cannot be imported: {str(error).splitlines()[0]}"
    name = _TIMM_NAMES.get(model, model) if package == "timm" else model
    known = module.list_models() if package == "timm" else [*module.models.list_models(), *_WIDTHS]
    if name not in known:
        return [], f"{package} has no {model}"
    if package == "torchvision":
        build = partial(_torchvision_network, module.models, name)
        return [Peer("torchvision", build, "fp16", channels_last=False), *_both("torchvision", build)], ""

    def theirs(num_classes: int) -> nn.Module:
        built: nn.Module = module.create_model(name, num_classes=num_classes)
        return built

    return _both("timm", theirs), ""


def _torchvision_network(models: Any, name: str, num_classes: int) -> nn.Module:
    if name in _WIDTHS:
        resnet = models.resnet
        network: nn.Module = resnet.ResNet(
            resnet.Bottleneck, _DEPTHS, num_classes, groups=32, width_per_group=_WIDTHS[name]
        )
        return network
    options: dict[str, Any] = {"aux_logits": False} if name in _WITHOUT_HEADS else {}
    network = models.get_model(name, weights=None, num_classes=num_classes, **options)
    return network


def _both(package: str, build: Callable[[int], nn.Module]) -> list[Peer]:
    """The network in channels_last and bf16, eager and compiled."""
    name = f"{package} channels_last"
    return [
        Peer(name, build, "bf16", channels_last=True),
        Peer(f"{name} compiled", build, "bf16", channels_last=True, compiled=True),
    ]


def compare(
    subject: BenchTarget, peers: Sequence[Peer], wish: Wish, ours_images_per_s: float, tell: Callable[[str], None]
) -> tuple[dict[str, dict[str, float | str]], list[str]]:
    """Each peer's speed and how many times ours is of it; and which could not be measured."""
    precision = "fp32" if subject.device.kind == "cpu" else ""
    results: dict[str, dict[str, float | str]] = {}
    notes: list[str] = []
    for peer in peers:
        tell(f"measuring {peer.name}")
        try:
            rate = images_per_s(subject, open_peer(subject, peer), wish)
        except Exception as error:  # another package's failure must not lose what was measured
            if not (is_out_of_memory(error) or isinstance(error, RuntimeError | ValueError | TypeError)):
                raise
            notes.append(f"{peer.name} could not be measured: {str(error).splitlines()[0] if str(error) else error!r}")
            continue
        results[peer.name] = {
            "images_per_s": rate,
            "ratio": ours_images_per_s / rate,
            "precision": precision or peer.half,
        }
    return results, notes


def images_per_s(subject: BenchTarget, step: PeerStep, wish: Wish) -> float:
    """How many of the subject's images a peer's step takes a second."""
    plan, device = subject.plan, subject.device
    context = DataContext(BlockingTransfer(device.move))
    loader = make_train_loader(subject.source, subject.recipe, plan, context)
    windows = measure(step, loader, device, wish, Marks(device))
    return plan.global_batch / windows.median_s


def open_peer(subject: BenchTarget, peer: Peer) -> PeerStep:
    """A peer's training step on the subject's batches, with weights of its own."""
    recipe, plan, device = subject.recipe, subject.plan, subject.device
    if peer.compiled:
        torch.compiler.reset()  # as in a process of its own
    with torch.random.fork_rng(devices=[]):
        model = peer.build(plan.num_classes).to(device.torch).train()
    if peer.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return PeerStep(
        model=torch.compile(model) if peer.compiled else model,
        optimizer=torch.optim.SGD(model.parameters(), RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY),
        loss=nn.CrossEntropyLoss(label_smoothing=recipe.loss.label_smoothing),
        prepare=TrainPreprocess(
            recipe.data.preprocess,
            recipe.augment,
            plan.num_classes,
            torch.float32,
            peer.channels_last,
            wants_kernels(recipe, device),
        ),
        device_kind=device.kind,
        half=None if device.kind == "cpu" else _DTYPES[peer.half],
    )


class PeerStep:
    """The training step as everyone writes it: autocast, loss, backward, optimizer; fp16 with a gradient scaler."""

    def __init__(
        self,
        *,
        model: Callable[..., Any],
        optimizer: torch.optim.Optimizer,
        loss: nn.CrossEntropyLoss,
        prepare: TrainPreprocess,
        device_kind: str,
        half: torch.dtype | None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._loss = loss
        self._prepare = prepare
        self._kind = device_kind
        self._half = half
        self._scaler = torch.amp.GradScaler(device_kind, enabled=half == torch.float16)

    def __call__(self, step: int, micro_batches: Sequence[Batch]) -> None:
        """Train on one global batch."""
        self._optimizer.zero_grad(set_to_none=True)
        for batch in micro_batches:
            prepared = self._prepare(batch, step)
            targets = prepared.tensors.get("soft_targets", prepared["targets"])
            with torch.autocast(self._kind, self._half, enabled=self._half is not None):
                loss = self._loss(self._model(prepared["images"]), targets)
            self._scaler.scale(loss / len(micro_batches)).backward()
        self._scaler.step(self._optimizer)
        self._scaler.update()
