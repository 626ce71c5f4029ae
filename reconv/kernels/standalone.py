"""`reconv.fuse` and `reconv.unfuse`: fused kernels in a model that is trained by anybody's loop.

Only classes of modules change: parameters, buffers, names and the state dict stay. A fused module uses kernels in
training, for channels_last images on a GPU, and runs its own code for everything else. Batch norms update their running
statistics in each forward pass, as torch's do; dropouts are left alone.

As in the trainer the layers, then the blocks of our own models and of others are swapped (`kernels.fuse`). Here the
blocks of users are recognized, too, if reading their code shows that it only computes (`pure_code`).
"""

from __future__ import annotations

import copy
import csv
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from reconv.core.errors import UsageError
from reconv.kernels import fuse as passes
from reconv.kernels.block_graph import BlockGraph, has_known_code, is_plain_container
from reconv.kernels.fused.external import ExternalBlock
from reconv.kernels.fused.norm import (
    FusedBatchNorm2d,
    StandaloneBatchNorm2d,
    StandaloneBatchNormAct2d,
    standalone_norm_class,
)
from reconv.kernels.pure_code import why_not_traced
from reconv.models.layers.batch_norm import BatchNorm2d, BatchNormAct2d

_LEFT_ALONE = Path(__file__).with_name("left_alone.csv")  # models and patterns, times as fast, measured where
_TORCH_LAYERS = "torch.nn.modules"
_PATTERNS = {passes.DEPTHWISE_7}
_OTHER_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.instancenorm._InstanceNorm)


def fuse(
    model: nn.Module,
    *,
    inplace: bool = True,
    image: Sequence[int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    everything: bool = False,
) -> FuseReport:
    """Make a model's layers and blocks compute with fused kernels in training; returns what was fused and what not.

    The model trains as before, in any loop: move it to a GPU and channels_last, and give it channels_last images.
    Fuse before wrapping it in DistributedDataParallel, `fully_shard` or `torch.compile`.

    Args:
        model: any module with supported blocks; on a CPU, in evaluation and for other images it runs its own code
        inplace: change the model itself; else a copy, which is `report.model`
        image: channels, height and width of the training images, to compile all kernels now and in parallel instead of
            one after another in the first step; needs a GPU
        dtype: that of the training images' activations, with `image`
        everything: fuse, too, what is left alone otherwise: what was measured to be slower with kernels, or not yet
    """
    if not inplace:
        model = copy.deepcopy(model)
    kind = (_plain_class(type(model)) or type(model)).__name__
    report = FuseReport(model, kind)
    left_alone = {} if everything else _left_alone()
    network = f"{type(model).__module__}.{type(model).__qualname__}"
    if network in left_alone:
        report.plain.append(PlainModule("", kind, left_alone[network]))
        return report
    plain_classes = {name: type(module) for name, module in model.named_modules()}
    for module in model.modules():
        _fuse_norm(module)
    passes.fuse_layers(model, _is_traceable, _PATTERNS - left_alone.keys())
    _describe(report, plain_classes, left_alone)
    if report:
        _keep_out_of_compiled_graphs()
        if image is not None:
            _compile_now(model, image, dtype, report)
    return report


def unfuse(model: nn.Module) -> nn.Module:
    """Give every fused module of a model its own class back, in place; returns the model.

    Raises:
        reconv.core.errors.UsageError: a fused module was wrapped, as by `fully_shard`, which cannot be undone
    """
    for name, module in model.named_modules():
        plain = _plain_class(type(module))
        if plain is not None:
            module.__class__ = plain
        elif any(_plain_class(base) is not None for base in type(module).__mro__):
            raise UsageError(
                f"{name or 'the model'} cannot be unfused",
                why=f"its class {type(module).__name__} was made from a fused one by another package",
                hint="unfuse before wrapping modules, as by fully_shard",
            )
    return model


def _is_traceable(module: nn.Module) -> bool:
    return has_known_code(module) or not why_not_traced(module)


def _fuse_norm(module: nn.Module) -> None:
    if isinstance(module, _BatchNorm) and not _why_norm_is_plain(module):
        kind: Any = type(module)
        module.__class__ = standalone_norm_class(kind, _has_activation(kind))


def _has_activation(kind: type[nn.Module]) -> bool:
    """True if a class of batch norms ends in a dropout and an activation."""
    is_timms = kind.__name__ == "BatchNormAct2d" and kind.__module__.partition(".")[0] == "timm"
    return kind is BatchNormAct2d or is_timms


def _why_norm_is_plain(norm: _BatchNorm) -> str:
    """Reason why kernels cannot compute a batch norm; empty if they can."""
    kind = type(norm)
    if isinstance(norm, FusedBatchNorm2d):
        return "it is fused already"
    if not (kind in (nn.BatchNorm2d, BatchNorm2d) or _has_activation(kind)):
        return f"there are no kernels for {kind.__name__}"
    if not norm.affine:
        return "it has no weight and bias"
    if norm.momentum is None or not norm.track_running_stats:
        return "it has no running statistics with a momentum"
    if norm.num_features % 8:
        return f"its {norm.num_features} channels are not a multiple of 8"
    return ""


@cache
def _left_alone() -> dict[str, str]:
    """The models and patterns that are left alone, and why."""
    with _LEFT_ALONE.open(encoding="utf-8", newline="") as file:
        return {row["name"]: _why_left_alone(row["times_as_fast"]) for row in csv.DictReader(file)}


def _why_left_alone(ratio: str) -> str:
    return f"measured {ratio} x as fast with kernels as without" if ratio else "its kernels were not measured yet"


@cache
def _static_plain_classes() -> dict[type[nn.Module], type[nn.Module]]:
    return passes.plain_classes()


def _plain_class(kind: type[nn.Module]) -> type[nn.Module] | None:
    """The class that a fused class was made from; None for other classes."""
    made: Any = vars(kind).get("fused_plain_class")
    return made if made is not None else _static_plain_classes().get(kind)


def _describe(report: FuseReport, plain_classes: dict[str, type[nn.Module]], left_alone: Mapping[str, str]) -> None:
    """Fill a report by comparing each module's class with the one it had."""
    for name, module in report.model.named_modules():
        was = plain_classes[name]
        if _plain_class(type(module)) is not None:
            report.fused.append(FusedModule(name, (_plain_class(was) or was).__name__, _computes(module)))
        elif why := _why_plain(module, left_alone):
            report.plain.append(PlainModule(name, was.__name__, why))
    if report and not torch.cuda.is_available():
        report.notes.append("there is no CUDA GPU here, so the model runs its own code")
    elif report:
        report.notes.append("kernels are used in training, for channels_last images on a GPU")


def _computes(module: nn.Module) -> str:
    """Description of what a fused module computes."""
    if isinstance(module, StandaloneBatchNorm2d):
        return "batch norm"
    if isinstance(module, ExternalBlock):
        return _graph_text(module.fused_graph)
    return type(module).__name__.removeprefix("Fused")


def _graph_text(graph: BlockGraph | None) -> str:
    if graph is None or graph.kind == "chain":
        return "layers one after another, norms with what follows them"
    if graph.kind == "gate":
        return "squeeze-and-excitation"
    return "residual sum and activation" if graph.act else "residual sum"


def _why_plain(module: nn.Module, left_alone: Mapping[str, str]) -> str:
    """Reason why a module that kernels might compute is not fused; empty for others, such as convolutions left to
    cuDNN.
    """
    if isinstance(module, nn.Conv2d):
        return left_alone.get(passes.DEPTHWISE_7, "") if passes.is_depthwise_7(module) else ""
    if isinstance(module, _BatchNorm):
        return _why_norm_is_plain(module)
    if isinstance(module, _OTHER_NORMS):
        return f"there are no kernels for {type(module).__name__}"
    is_block = next(module.children(), None) is not None and not type(module).__module__.startswith(_TORCH_LAYERS)
    if not is_block or is_plain_container(module) or not _has_direct_norm(module):
        return ""
    if not has_known_code(module) and (why := why_not_traced(module)):
        return why
    return "it computes something else than a chain of layers, a residual sum or squeeze-and-excitation"


def _has_direct_norm(module: nn.Module) -> bool:
    """True if a fused norm is a child of a module, or of a container in it."""
    children = list(module.children())
    inner = [grandchild for child in children if is_plain_container(child) for grandchild in child.children()]
    return any(isinstance(child, FusedBatchNorm2d) for child in (*children, *inner))


def _compile_now(model: nn.Module, image: Sequence[int], dtype: torch.dtype, report: FuseReport) -> None:
    """Compile the kernels of a training step in parallel; their first launches wait for them."""
    if not torch.cuda.is_available():
        report.notes.append("without a GPU no kernels are compiled")
        return
    from reconv.kernels.jit.compile_ahead import compile_ahead
    from reconv.kernels.trace import trace_kernels

    device = next((p.device for p in model.parameters() if p.is_cuda), torch.device("cuda"))
    try:
        variants = trace_kernels(model, image, dtype, torch.autocast("cuda", dtype))
        compile_ahead(variants, device, report.notes.append)
    except Exception as error:  # the forward pass of a user's model on "meta" images; it costs time alone
        report.notes.append(f"kernels could not be compiled ahead and are compiled in the first step: {error!r}")


@cache
def _keep_out_of_compiled_graphs() -> None:
    """Let torch.compile call fused modules instead of tracing them: Dynamo cannot trace how kernels are launched.

    It imports Dynamo, which takes a second, so only where kernels can run.
    """
    if not torch.cuda.is_available():
        return
    for kind in _classes_with_a_forward():
        disable: Callable[..., Any] = torch.compiler.disable
        kind.forward = disable(kind.forward)


def _classes_with_a_forward() -> Iterator[Any]:
    """Classes whose own `forward` launches kernels."""
    norms = (StandaloneBatchNorm2d, StandaloneBatchNormAct2d)
    for kind in (ExternalBlock, *norms, *_static_plain_classes()):
        if "forward" in vars(kind):
            yield kind


_MAX_NAMES = 3  # of modules in a row of the table


@dataclass(frozen=True, slots=True)
class FusedModule:
    """A module that computes with fused kernels, and what they compute."""

    name: str
    kind: str  # its class
    computes: str


@dataclass(frozen=True, slots=True)
class PlainModule:
    """A module that was left alone, and why."""

    name: str
    kind: str
    why: str


@dataclass(slots=True)
class FuseReport:
    """Report of what `reconv.fuse` did with a model; `print` shows it as a table."""

    model: nn.Module
    """The fused model: the one that was passed, or its copy."""
    kind: str
    """Its class before it was fused."""
    fused: list[FusedModule] = field(default_factory=list)
    """Modules that compute with fused kernels."""
    plain: list[PlainModule] = field(default_factory=list)
    """Modules that kernels could not be used for."""
    notes: list[str] = field(default_factory=list)
    """What to do for the kernels to be used, or for all of them."""

    def __bool__(self) -> bool:
        """True if anything was fused."""
        return bool(self.fused)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"reconv.fuse: {len(self.fused)} modules of {self.kind} compute with fused kernels"
        if self.fused:
            counts = Counter((row.kind, row.computes) for row in self.fused)
            yield from _table("fused", [(str(n), kind, what) for (kind, what), n in counts.items()])
        if self.plain:
            names: dict[tuple[str, str], list[str]] = {}
            for row in self.plain:
                names.setdefault((row.kind, row.why), []).append(row.name)
            rows = [(str(len(n)), kind, f"{why} ({_some(n)})") for (kind, why), n in names.items()]
            yield from _table("left alone", rows)
        yield from (f"note: {note}" for note in self.notes)


def _some(names: list[str]) -> str:
    """The first names of a list."""
    rest = len(names) - _MAX_NAMES
    return ", ".join(name or "the model" for name in names[:_MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def _table(title: str, rows: list[tuple[str, str, str]]) -> Iterator[str]:
    numbers, kinds = (max(len(row[column]) for row in rows) for column in range(2))
    yield f"{title}:"
    yield from (f"  {number:>{numbers}}  {kind:<{kinds}}  {text}" for number, kind, text in rows)
