"""`export`: a trained model as a folder that another program can run, refused where it gives other numbers."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from reconv.build.postprocess import build_anchors, build_postprocess_config
from reconv.checkpoint.locate import LocatedWeights
from reconv.core.custom_code import TrustCode
from reconv.core.errors import ExportError, UsageError
from reconv.core.machine import Machine, usable_cores
from reconv.exporters.detector import ExportDetector
from reconv.exporters.folder import REPORT, SETTINGS, ExportFolder, write_json
from reconv.exporters.gate import check as gate
from reconv.exporters.gate.boxes import BoxRules, compare_detections
from reconv.exporters.gate.images import collect_images
from reconv.exporters.gate.speed import measure_speed
from reconv.exporters.metadata import ExportMetadata
from reconv.exporters.model_card import model_card
from reconv.exporters.run_script import run_script
from reconv.exporters.targets import ExportOptions, ExportTarget, find_target
from reconv.inference.backends.base import U8, LogFunction, no_log
from reconv.inference.backends.exported import ExportClassifier, example_images
from reconv.inference.backends.quantize import MAX_DROP
from reconv.inference.calibration import CalibrationSource
from reconv.inference.predictor import Predictor, find_model
from reconv.storage.files import write_atomic

_FP32 = "fp32"  # the folder with the model before it is quantized


@dataclass(frozen=True, slots=True)
class ExportResult:
    """An exported model."""

    folder: Path
    model: Path  # the model's file in it
    target: str
    report: Mapping[str, Any]  # of the gate, as in report.json


def export(
    run: str | Path,
    *,
    to: str = "onnx",
    out: str | Path | None = None,
    images: str | Path | None = None,
    data: str | Path | None = None,
    samples: int | None = None,
    best: bool = False,
    weights: str = "auto",
    recipe: str | None = None,
    opset: int | None = None,
    batch: int | None = None,
    nms: bool = True,
    precision: Literal["fp32", "int8"] = "fp32",
    int8: bool = False,
    calibration: str | Path | None = None,
    max_drop: float = MAX_DROP,
    force: bool = False,
    trust_code: TrustCode = False,
    model: Any = None,
    log: LogFunction = no_log,
) -> ExportResult:
    """Write a run, a checkpoint or a weights file in the format `to`, into a folder with a model card and a run.py.

    The written file is then run by that run.py in a fresh process, on the validation set of the run (or of `data`, or
    on the `images` of a folder; `samples` limits their number), and must give the numbers of the model: otherwise
    `ExportError` is raised, and there is no folder. A model in `precision="int8"` (`int8=True` in 0.2) is calibrated
    with training images, or with those of the folder `calibration`, and may lose `max_drop` of its accuracy or mAP.
    See docs/how-to/export.md.
    """
    int8 = int8 or precision == "int8"
    target, options = find_target(to), ExportOptions(opset, int8, nms)
    target.check_packages()
    _check_options(target, options)
    if images is not None and data is not None:
        raise UsageError("--images and --data cannot be combined", hint="omit one of them")
    located = find_model(run, best, log)
    predictor = Predictor.from_located(
        located, weights=weights, recipe=recipe, device="cpu", backend="eager", trust_code=trust_code, model=model
    )
    if int8:
        _check_int8(predictor, images)
    metadata = ExportMetadata.of(predictor, batch, nms=nms, precision="int8" if int8 else "fp32")
    if target.adapt is not None:
        target, metadata = target.adapt(target, predictor, metadata)
    exporter = _Exporter(predictor, target, options, metadata)
    folder = ExportFolder(_destination(out, located, metadata, target), replace=force)
    with tempfile.TemporaryDirectory(prefix="reconv-export-") as name, folder.staged() as staging:
        temporary = Path(name)
        (temporary / "images").mkdir()
        collected = collect_images(predictor, images, data, samples, temporary / "images")
        reference = gate.compute_reference(predictor, collected, log)
        log(f"writing {target.model_file} ...")
        if int8:
            source = CalibrationSource(predictor.recipe, predictor.model_classes, predictor.read, calibration, data)
            exporter.write_int8(source.batches(batch), temporary / _FP32, staging)
        else:
            exporter.write(staging)
        log(f"running it on {len(reference.images):,} images ...")
        result = exporter.compare(reference, collected.num_probes, staging, temporary, max_drop)
        report = {"target": target.name, "data": collected.origin, **result.report()}
        if not result.passed:
            write_json(folder.refused_report, report)
            raise _refused(result, folder)
        if int8:
            files = [image.path for image in reference.images]
            speed = measure_speed(temporary / _FP32, staging, files, target.hidden_packages, batch)
            report["speed"] = {"num_cores": usable_cores(Machine()), "batches": speed}
        write_json(staging / REPORT, report)
        write_atomic(staging / "README.md", model_card(metadata, target, report, located.run))
        folder.publish()
    return ExportResult(folder.path, folder.path / target.model_file, target.name, report)


def _check_options(target: ExportTarget, options: ExportOptions) -> None:
    given = {"--opset": options.opset is not None, "--precision int8": options.int8, "--no-nms": not options.nms}
    for option, is_given in given.items():
        if is_given and option not in target.options:
            raise UsageError(f"export --to {target.name} has no {option}", hint=f"omit {option}")


def _check_int8(predictor: Predictor, images: str | Path | None) -> None:
    """Refuse what cannot be judged: int8 moves every logit, so only accuracy can judge it."""
    if predictor.recipe.task == "multilabel":
        raise UsageError("multi-label models cannot be exported in int8", why="the check has no accuracy for them")
    if images is not None:
        raise UsageError(
            "int8 is judged by accuracy, and the images of --images have no known classes",
            hint="omit --images, or give a dataset: --data DIR; to calibrate with these images: --calibration DIR",
        )


def _destination(
    out: str | Path | None, located: LocatedWeights, metadata: ExportMetadata, target: ExportTarget
) -> Path:
    """Destination of the export: as given, else into the run directory, else into the current one."""
    if out is not None:
        return Path(out)
    parent = Path() if located.run is None else located.run.path / "exports"
    precision = "" if metadata.precision == "fp32" else f"-{metadata.precision}"
    return parent / f"{metadata.name.replace('/', '-')}-{target.name}{precision}"


@dataclass(frozen=True, slots=True)
class _Exporter:
    """A trained model, and the format that it is written in."""

    predictor: Predictor
    target: ExportTarget
    options: ExportOptions
    metadata: ExportMetadata

    def write(self, folder: Path) -> None:
        """Write the model's file, preprocess.json and run.py."""
        example = example_images(self.metadata.preprocess, self.metadata.batch)
        self.target.write(self._build_module().eval(), example, self.metadata, self.options, folder)
        write_json(folder / SETTINGS, self.metadata.settings(self.target.model_file))
        write_atomic(folder / "run.py", run_script(self.target.runtime))

    def write_int8(self, calibration: Sequence[U8], fp32: Path, folder: Path) -> None:
        """Write the model in fp32 into the new folder `fp32`, and the same with the quantized model into `folder`."""
        assert self.target.quantize is not None
        fp32.mkdir()
        self.write(fp32)
        self.target.quantize(fp32 / self.target.model_file, folder / self.target.model_file, calibration)
        for name in (SETTINGS, "run.py"):
            shutil.copyfile(fp32 / name, folder / name)

    def _build_module(self) -> nn.Module:
        """The network with what the file contains around it."""
        recipe, metadata, model = self.predictor.recipe, self.metadata, self.predictor.module.float()
        if metadata.nms is None:
            return ExportClassifier(model, metadata.preprocess, metadata.tta)
        return ExportDetector(
            model,
            metadata.preprocess,
            build_anchors(recipe),
            recipe.detection.anchors.variances,
            build_postprocess_config(recipe),
            self.target.nms if metadata.nms.in_model else None,
        )

    def compare(
        self, reference: gate.Reference, num_probes: int, folder: Path, temporary: Path, max_drop: float
    ) -> gate.GateResult:
        """Run the written folder in a fresh process and compare its results with the reference."""
        metadata = self.metadata
        files = [image.path for image in reference.images]
        found = gate.run_exported(folder / "run.py", files, self.target.hidden_packages, temporary)
        if metadata.task == "detection":
            metric = self.predictor.recipe.detection.metric
            rules = BoxRules(metadata.preprocess.size, metadata.class_names, metric, metadata.precision, max_drop)
            return compare_detections(reference, found, rules, num_probes)
        return gate.compare(
            reference,
            found,
            task=metadata.task,
            precision=metadata.precision,
            num_probes=num_probes,
            max_drop=max_drop,
        )


def _refused(result: gate.GateResult, folder: ExportFolder) -> ExportError:
    return ExportError(
        "the exported model gives other results than the trained one, and was not written",
        where=str(folder.path),
        why="; ".join(result.failures),
        hint=f"see {folder.refused_report}",
    )
