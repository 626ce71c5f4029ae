"""On CPUs with int8 instructions, by onnxruntime: quantized with calibration images and judged with held-out ones.

The quantized network and what was found are kept in the cache directory. Every output moves, so that no tolerance of
the outputs says whether int8 is good: it may lose a point of accuracy or mAP.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from reconv.build.postprocess import build_postprocess
from reconv.core.errors import UsageError
from reconv.core.python_child import python_command
from reconv.device.base import Device
from reconv.device.cpu import reports_amx
from reconv.inference.backends.base import InferenceBackend
from reconv.inference.backends.onnxruntime import OnnxRuntimeBackend, check_packages, network_digest, onnx_file
from reconv.inference.backends.quantize import MAX_DROP, quantize_onnx
from reconv.inference.calibration import CalibrationSource, HeldOutImages
from reconv.metrics.average_precision import average_precision, detection_outputs
from reconv.recipe.schema import Recipe
from reconv.storage.cache import cache_dir
from reconv.storage.files import write_atomic

MIN_AGREEMENT = 0.9  # of the top-1 class with that of fp32, where classes are not known
_VERSION = 1  # of how networks are quantized and judged
_BATCH_SIZE = 16
# Multiplies int8 matrices, in a process of its own: it may die.
_TRY_INT8 = """
import sys, numpy, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
session.run(None, {"a": numpy.ones((64, 64), numpy.uint8)})
"""


class Int8Backend(OnnxRuntimeBackend):
    """A quantized network."""

    precision = "int8"

    def __init__(self, recipe: Recipe, model: nn.Module, path: Path, judgment: str) -> None:
        super().__init__(recipe, model, path)
        self._judgment = judgment

    def describe(self) -> str:
        return f"{super().describe()}: {self._judgment}"


@dataclass(frozen=True, slots=True)
class Int8Builder:
    """Quantizes a network, or takes it from the cache."""

    recipe: Recipe
    model: nn.Module
    device: Device
    source: CalibrationSource
    fp32: Callable[[], InferenceBackend]  # what int8 is compared with
    log: Callable[[str], None]

    def build(self) -> Int8Backend:
        """The quantized network; raises `UsageError` where it loses too much."""
        check_packages("--precision int8")
        self._check_model()
        check_amx()
        import onnxruntime

        settings = f"{_VERSION} {onnxruntime.__version__} {network_digest(self.recipe, self.model)}"
        name = hashlib.sha256(f"{settings} {self.source.identity()}".encode(errors="surrogateescape")).hexdigest()
        path = cache_dir() / "onnx" / f"{name}-int8.onnx"
        judgment = path.with_suffix(".json")
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):  # one of several processes does it
            if not (path.is_file() and judgment.is_file()):
                with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                    found = self._quantize(Path(folder) / path.name)
                    write_atomic(judgment, json.dumps(found))
                    os.replace(Path(folder) / path.name, path)
        return Int8Backend(self.recipe, self.model, path, json.loads(judgment.read_text()))

    def _check_model(self) -> None:
        if self.recipe.task == "multilabel":
            raise UsageError(
                "multi-label models do not run in int8",
                why="there is no accuracy to judge it by",
                hint="omit --precision",
            )

    def _quantize(self, path: Path) -> str:
        """Write the quantized network; returns how good it is, in words."""
        held_out = self.source.held_out()
        batches = self.source.batches(hold_out=held_out.targets is None and held_out.annotations is None)
        self.log(
            f"quantizing to int8 with {sum(map(len, batches)):,} images, judged with {len(held_out.pixels):,} others; "
            "the result is kept"
        )
        fp32 = self.fp32()
        quantize_onnx(onnx_file(self.recipe, self.model), path, batches)
        int8 = OnnxRuntimeBackend(self.recipe, self.model, path)
        expected, found = (self._outputs(backend, held_out) for backend in (fp32, int8))
        text, failure = (self._judge_boxes if held_out.annotations else judge_classes)(expected, found, held_out)
        if failure:
            raise UsageError(
                "the int8 model is not as good as in fp32",
                where="--precision int8",
                why=f"{text}; {failure}",
                hint="calibrate with images like those it will see (--calibration DIR), or omit --precision",
            )
        return text

    def _outputs(self, backend: InferenceBackend, images: HeldOutImages) -> dict[str, Any]:
        parts = []
        with torch.no_grad():
            for part in images.pixels.split(_BATCH_SIZE):
                outputs = backend(part)
                if images.annotations is None:
                    parts.append({"logits": outputs})
                else:
                    found = build_postprocess(self.recipe, self.device)(outputs)
                    parts.append(detection_outputs(found, self.recipe.data.preprocess.size))
        return {name: torch.cat([part[name] for part in parts]).numpy() for name in parts[0]}

    def _judge_boxes(self, expected: dict[str, Any], found: dict[str, Any], images: HeldOutImages) -> tuple[str, str]:
        assert images.annotations is not None
        truths, metric = dict(enumerate(images.annotations)), self.recipe.detection.metric
        names, size = self.source.classes.names, self.recipe.data.preprocess.size
        before, after = (average_precision(truths, outputs, size, names, metric) for outputs in (expected, found))
        text = f"{metric} {after:.2%} instead of {before:.2%} on {len(truths):,} held-out images"
        return text, f"at most {100 * MAX_DROP:g} points may be lost" if before - after > MAX_DROP + 1e-9 else ""


def judge_classes(expected: dict[str, Any], found: dict[str, Any], images: HeldOutImages) -> tuple[str, str]:
    """Accuracy of int8 logits beside those of fp32, in words, and the reason if that is not good enough.

    Two standard errors of the difference are accepted where they are more than the points that may be lost.
    """
    before, after = (outputs["logits"].argmax(axis=1) for outputs in (expected, found))
    count = len(before)
    if images.targets is None:
        agreement = float((before == after).mean())
        text = f"the top-1 class of fp32 for {agreement:.1%} of {count:,} held-out images"
        return text, f"at least {MIN_AGREEMENT:.0%} are needed" if agreement < MIN_AGREEMENT else ""
    targets = np.array(images.targets)
    was_right, is_right = before == targets, after == targets
    drop = float(was_right.mean() - is_right.mean())
    allowed = max(MAX_DROP, 2 * math.sqrt((was_right != is_right).sum()) / count)
    text = f"top-1 accuracy {is_right.mean():.2%} instead of {was_right.mean():.2%} on {count:,} held-out images"
    return text, f"at most {100 * allowed:.2g} points may be lost" if drop > allowed + 1e-9 else ""


def check_amx() -> None:
    """Raise `UsageError` where the CPU reports AMX that does not work (see device/cpu.py): onnxruntime would use it."""
    if not reports_amx():
        return
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    a = helper.make_tensor_value_info("a", TensorProto.UINT8, [64, 64])
    y = helper.make_tensor_value_info("y", TensorProto.INT32, [64, 64])
    weights = numpy_helper.from_array(np.ones((64, 64), np.int8), "b")
    graph = helper.make_graph([helper.make_node("MatMulInteger", ["a", "b"], ["y"])], "int8", [a], [y], [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    with tempfile.TemporaryDirectory(prefix="reconv-int8-") as folder:
        path = Path(folder) / "int8.onnx"
        onnx.save(model, str(path))
        done = subprocess.run(python_command(_TRY_INT8, str(path)), capture_output=True)
    if done.returncode != 0:
        raise UsageError(
            "onnxruntime cannot compute in int8 on this machine",
            where="--precision int8",
            why="the CPU reports AMX, and using it ends the process",
            hint="omit --precision",
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
