"""The gate of an export: the written file, run by its own run.py in a fresh process, must give the model's numbers."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from reconv.build.postprocess import build_postprocess
from reconv.core.errors import DataError, ExportError
from reconv.data.transforms.host import eval_transform
from reconv.data.transforms.normalize import Normalize
from reconv.exporters.gate.images import GateImage, GateImages
from reconv.inference.backends.base import LogFunction
from reconv.inference.image_input import ImageFile, to_pil
from reconv.inference.predictor import Predictor
from reconv.metrics.average_precision import detection_outputs
from reconv.tasks.evaluation import average_views

BATCH_SIZE = 64
# The largest difference of a logit, in standard deviations of all logits. None: judged by accuracy alone.
LOGIT_BOUNDS: Mapping[str, float | None] = {"fp32": 1e-4, "int8": None}
IMAGES_PER_TIE = 1000  # one image of so many (and one more) may have another top-1 if its best two classes are tied
USE_DATA = "use validation data (--data)"
_NUM_WORST = 5
_NUM_ERROR_LINES = 12
_TOP1 = {"classification": "top-1 class", "multilabel": "set of labels"}
# Hides packages from run.py: importing them fails, as where they are not installed.
_LAUNCH = """\
import runpy, sys
for name in sys.argv[1].split(","):
    sys.modules[name] = None
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Reference:
    """Outputs of the model itself for the images: in float32, on the CPU, with the network as it was trained."""

    images: Sequence[GateImage]  # those that can be read
    pixels_crc32: Array  # [n], of the pixels [size, size, channels] that the network takes
    outputs: Mapping[str, Array]  # logits [n, classes]; of a detector boxes, scores, labels and counts
    num_unreadable: int

    def facts(self, precision: str, num_probes: int) -> dict[str, Any]:
        """Facts at the beginning of every report."""
        return {
            "precision": precision,
            "num_images": len(self.images) - num_probes,
            "num_test_images": num_probes,
            "num_unreadable": self.num_unreadable,
        }


@dataclass(frozen=True, slots=True)
class GateResult:
    """Result of the gate; the export is refused where there are failures."""

    failures: tuple[str, ...]
    facts: dict[str, Any]

    @property
    def passed(self) -> bool:
        return not self.failures

    def report(self) -> dict[str, Any]:
        return {"passed": self.passed, "failures": list(self.failures), **self.facts}


def compute_reference(predictor: Predictor, collected: GateImages, log: LogFunction) -> Reference:
    """The outputs of the model for each image that can be read."""
    forward = _forward(predictor)
    kept: list[GateImage] = []
    outputs, crcs = [], []
    for images, pixels in _read_batches(predictor, collected.images, log):
        kept += images
        crcs += [zlib.crc32(image.transpose(1, 2, 0).tobytes()) for image in pixels]
        with torch.no_grad():
            outputs.append(forward(torch.from_numpy(pixels)))
    if len(kept) <= collected.num_probes:
        raise DataError("no image can be read to check the exported model with", where=collected.origin)
    joined = {name: torch.cat([part[name] for part in outputs]).numpy() for name in outputs[0]}
    return Reference(kept, np.array(crcs, np.uint32), joined, len(collected.images) - len(kept))


def _forward(predictor: Predictor) -> Callable[[Tensor], dict[str, Tensor]]:
    """A function from uint8 images [n, channels, size, size] to what the exported model must return."""
    recipe, module = predictor.recipe, predictor.module.float().eval()
    normalize, size = Normalize(recipe.data.preprocess, torch.float32), recipe.data.preprocess.size
    if not predictor.is_detector:
        network = average_views(module, recipe.evaluate.tta)
        return lambda images: {"logits": network(normalize(images)).float()}
    postprocess = build_postprocess(recipe, predictor.device)

    def detect(images: Tensor) -> dict[str, Tensor]:
        return detection_outputs(postprocess(module(normalize(images))), size)

    return detect


def _read_batches(
    predictor: Predictor, images: Sequence[GateImage], log: LogFunction
) -> Iterator[tuple[list[GateImage], Array]]:
    """Images and their pixels [n, channels, size, size] as evaluation and prediction read them."""
    preprocess = predictor.recipe.data.preprocess
    for start in range(0, len(images), BATCH_SIZE):
        kept, pixels = [], []
        for image in images[start : start + BATCH_SIZE]:
            try:
                pixels.append(eval_transform(to_pil(ImageFile(image.path), preprocess.channels), preprocess))
                kept.append(image)
            except DataError as error:
                log(f"skipped {image.name}: {error.what}")
        if kept:
            yield kept, np.stack(pixels)


def run_isolated(script: Path, arguments: Sequence[str], hidden_packages: Sequence[str]) -> str:
    """Output of a script in a fresh process that cannot import the hidden packages."""
    command = [sys.executable, "-I", "-c", _LAUNCH, ",".join(hidden_packages), str(script.absolute()), *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()][-_NUM_ERROR_LINES:]
        why = " | ".join(lines) or f"{script.name} ended with {done.returncode}"
        raise ExportError("the exported model does not run", why=why)
    return done.stdout


def run_exported(script: Path, files: Sequence[Path], hidden_packages: Sequence[str], folder: Path) -> dict[str, Array]:
    """The outputs of run.py for the files, in a fresh process that cannot import the hidden packages."""
    listed, outputs = folder / "files.txt", folder / "outputs.npz"
    listed.write_text("".join(f"{file}\n" for file in files), encoding="utf-8")
    run_isolated(script, [f"@{listed}", "--outputs", str(outputs)], hidden_packages)
    with np.load(outputs) as stored:
        return {name: stored[name] for name in stored.files}


def compare(
    reference: Reference, found: Mapping[str, Array], *, task: str, precision: str, num_probes: int, max_drop: float
) -> GateResult:
    """Compare the logits of run.py with the model's own: pixels, logits, top-1 class (or labels), accuracy."""
    failures = compare_pixels(reference, found["pixels_crc32"])
    ours, theirs = (logits.astype(np.float64) for logits in (reference.outputs["logits"], found["logits"]))
    if ours.shape != theirs.shape:
        return GateResult((f"logits {list(theirs.shape)} instead of {list(ours.shape)}",), {})
    bound, scale = LOGIT_BOUNDS[precision], float(ours.std())
    difference = np.abs(theirs - ours).max(axis=1) / max(scale, 1e-30)
    difference[~np.isfinite(theirs).all(axis=1)] = np.inf
    is_other = _decisions(theirs, task) != _decisions(ours, task)
    is_other = is_other.any(axis=1) if is_other.ndim == 2 else is_other
    facts: dict[str, Any] = {
        **reference.facts(precision, num_probes),
        "logits": {"largest_difference": _finite(difference.max()), "bound": bound, "unit": scale},
        "decisions": {"what": _TOP1[task], "num_different": int(is_other.sum())},
    }
    if bound is not None:
        failures += _check_logits(reference.images, difference, bound)
        margin = _margins(ours, task) / max(scale, 1e-30)
        is_tie, allowed = is_other & (margin <= 2 * bound), 1 + len(ours) // IMAGES_PER_TIE
        facts["decisions"] |= {"num_ties": int(is_tie.sum()), "num_ties_allowed": allowed}
        failures += _check_decisions(reference.images, is_other, is_tie, allowed, _TOP1[task])
    accuracy = _accuracy(reference.images, ours, theirs) if task == "classification" else None
    if accuracy is not None:
        drop = accuracy["model"] - accuracy["exported"]
        facts["top1_accuracy"] = {**accuracy, "drop": drop}
        if bound is None and drop > max_drop + 1e-9:  # the difference of two fractions
            failures.append(
                f"top-1 accuracy is {accuracy['exported']:.2%} instead of {accuracy['model']:.2%}: "
                f"{100 * drop:.2f} points lost, more than {100 * max_drop:g} (--max-drop)"
            )
    elif bound is None:
        failures.append(f"{precision} is judged by accuracy, and these images have no known class: {USE_DATA}")
    worst = np.argsort(-difference, kind="stable")[:_NUM_WORST]
    facts["most_different"] = [
        {"image": reference.images[index].name, "difference": _finite(difference[index])} for index in worst
    ]
    return GateResult(tuple(failures), facts)


def compare_pixels(reference: Reference, crcs: Array) -> list[str]:
    """Differences in the pixels that run.py gives to the model."""
    if len(crcs) != len(reference.images):
        return [f"run.py read {len(crcs):,} of {len(reference.images):,} images"]
    [different] = np.nonzero(crcs != reference.pixels_crc32)
    if not len(different):
        return []
    names = _names(reference.images, different)
    return [f"run.py prepares {len(different):,} of {len(crcs):,} images differently: {names}"]


def _check_logits(images: Sequence[GateImage], difference: Array, bound: float) -> list[str]:
    [beyond] = np.nonzero(~(difference <= bound))
    if not len(beyond):
        return []
    order = beyond[np.argsort(-difference[beyond], kind="stable")]
    return [
        f"the logits of {len(beyond):,} of {len(images):,} images differ by up to {difference.max():.2g} standard "
        f"deviations, more than {bound:g}: {_names(images, order)}"
    ]


def _check_decisions(images: Sequence[GateImage], is_other: Array, is_tie: Array, allowed: int, what: str) -> list[str]:
    [wrong], num_ties = np.nonzero(is_other & ~is_tie), int(is_tie.sum())
    failures = [f"the {what} of {len(wrong):,} images differs: {_names(images, wrong)}"] if len(wrong) else []
    if num_ties > allowed:
        failures.append(f"the {what} of {num_ties:,} images differs by a tie, of which {allowed:,} are allowed")
    return failures


def _decisions(logits: Array, task: str) -> Array:
    """The best class [n], or the labels [n, classes]."""
    decisions: Array = logits > 0 if task == "multilabel" else logits.argmax(axis=1)
    return decisions


def _margins(logits: Array, task: str) -> Array:
    """Distance that a logit would have to move to change the decision [n]."""
    if task == "multilabel":
        margins: Array = np.abs(logits).min(axis=1)
        return margins
    if logits.shape[1] == 1:
        return np.full(len(logits), np.inf)
    best = np.partition(logits, -2, axis=1)[:, -2:]
    margins = best[:, 1] - best[:, 0]
    return margins


def _accuracy(images: Sequence[GateImage], ours: Array, theirs: Array) -> dict[str, float] | None:
    """The top-1 accuracy of both on the images whose class is known; None if there are none."""
    rows = [row for row, image in enumerate(images) if image.target is not None]
    if not rows:
        return None
    targets = np.array([images[row].target for row in rows])
    return {
        name: float((logits[rows].argmax(axis=1) == targets).mean())
        for name, logits in (("model", ours), ("exported", theirs))
    }


def _names(images: Sequence[GateImage], rows: Array) -> str:
    shown = ", ".join(images[row].name for row in rows[:_NUM_WORST])
    return shown + f" and {len(rows) - _NUM_WORST:,} more" * (len(rows) > _NUM_WORST)


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
