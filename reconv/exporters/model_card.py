"""README.md of an exported model: what it is, how to run it, and what the gate found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from reconv.core.text import printable
from reconv.core.version import __version__
from reconv.data.transforms.host import resized_shorter_side
from reconv.exporters.metadata import ExportMetadata
from reconv.logging.run_dir import RunDir, read_summary

if TYPE_CHECKING:
    from reconv.exporters.targets import ExportTarget

_NUM_CLASSES_SHOWN = 20


def model_card(metadata: ExportMetadata, target: ExportTarget, report: Mapping[str, Any], run: RunDir | None) -> str:
    """The model card in Markdown."""
    lines = [
        f"# {markdown_text(metadata.name)}, exported to {target.name}",
        "",
        f"{markdown_text(metadata.network)} for {metadata.task}, {len(metadata.class_names):,} classes, "
        f"exported by Reconv {__version__} from the {metadata.weights} weights"
        + (f" of step {metadata.step:,}." if metadata.step is not None else "."),
        "",
        "## Run it",
        "",
        f"    pip install numpy pillow {target.needs}",
        "    python run.py IMAGE...",
        "",
        f"`{target.model_file}` contains {target.contents}. `run.py` reads images exactly as they were read in "
        "training's evaluations; use its `preprocess` in your own program. `preprocess.json` has all settings.",
        "",
        *_input_lines(metadata),
        "",
        "## Results",
        "",
        *_result_lines(run),
        *_gate_lines(report),
        "",
        "## Classes",
        "",
        _classmarkdown_text(metadata),
        "",
        f"Recipe digest: `{metadata.recipe_digest}`",
        "",
    ]
    return "\n".join(lines)


def _input_lines(metadata: ExportMetadata) -> list[str]:
    preprocess, size = metadata.preprocess, metadata.preprocess.size
    shorter, batch = resized_shorter_side(preprocess), metadata.batch or "n"
    resize = (
        f"resized to {size} x {size}"
        if shorter is None
        else f"resized to a shorter side of {shorter} and center cropped to {size} x {size}"
    )
    color = "RGB" if preprocess.channels == 3 else "grayscale"
    normalized = (
        "each image to mean 0 and standard deviation 1"
        if preprocess.per_image_standardization
        else f"(x / {preprocess.divide_by} - {list(preprocess.mean)}) / {list(preprocess.std)}"
    )
    return [
        "## Input",
        "",
        f"- `images`: uint8 [{batch}, {size}, {size}, {preprocess.channels}], {color}, upright, {resize} "
        f"({preprocess.interpolation}, antialiased)",
        f"- normalization: {normalized}",
        *([f"- the logits are a mean over views of the image: {metadata.tta}"] if metadata.tta != "none" else []),
    ]


def _result_lines(run: RunDir | None) -> list[str]:
    """The result of the run, from its summary."""
    if run is None or not run.summary.is_file():
        return []
    try:
        summary = read_summary(run.path)
    except (OSError, ValueError):
        return []
    metric, value = summary.get("metric"), summary.get("value")
    if metric is None or value is None:
        return []
    return [f"The training run reached {markdown_text(str(metric))} {value:.4f} on its validation set."]


def _gate_lines(report: Mapping[str, Any]) -> list[str]:
    """Lines on what was compared when the model was exported."""
    lines = [
        f"When it was exported, this folder's `run.py` gave the results of the trained model on "
        f"{markdown_text(report['data'])}, "
        f"and on {report['num_test_images']} test images of odd sizes and color modes ({report['precision']}):",
        "",
    ]
    logits, decisions, accuracy = (report.get(name) for name in ("logits", "decisions", "top1_accuracy"))
    if logits is not None:
        bound = f" (allowed: {logits['bound']:g})" if logits["bound"] is not None else ""
        difference = logits["largest_difference"]
        lines.append(f"- largest difference of a logit: {difference:.2g} of their standard deviation{bound}")
    if decisions is not None:
        lines.append(f"- images with another {decisions['what']}: {decisions['num_different']:,}")
    boxes, precision = report.get("boxes"), report.get("average_precision")
    if boxes is not None:
        lines.append(f"- boxes that differ: {boxes['num_different']:,} of {boxes['num_boxes']:,}")
        lines.append(
            f"- largest difference of the others: {boxes['score_difference']:.2g} of a score, "
            f"{boxes['corner_difference_px']:.2g} pixels of a corner"
        )
    if precision is not None:
        name, theirs, ours = precision["metric"], precision["exported"], precision["model"]
        lines.append(f"- {name}: {theirs:.2%}, of the trained model {ours:.2%}")
    if report["precision"] == "int8":
        lines.append(f"- {int8_line(report)}")
    if accuracy is not None:
        lines.append(f"- top-1 accuracy: {accuracy['exported']:.2%}, of the trained model {accuracy['model']:.2%}")
    return lines


def int8_line(report: Mapping[str, Any]) -> str:
    """Line on the cost and gain of int8."""
    metric = report.get("top1_accuracy") or report["average_precision"]
    name, drop = metric.get("metric", "top-1 accuracy"), 100 * metric["drop"]
    speed = " and ".join(f"{item['times_fp32']:.2f} x (batch {item['batch']})" for item in report["speed"]["batches"])
    return (
        f"int8: {name} {metric['exported']:.2%} instead of {metric['model']:.2%} ({abs(drop):.2f} points "
        f"{'lost' if drop >= 0 else 'gained'}); {speed} as fast as fp32 in the same runtime on "
        f"{report['speed']['num_cores']} cores"
    )


def _classmarkdown_text(metadata: ExportMetadata) -> str:
    names = [markdown_text(name) for name in metadata.display_names[:_NUM_CLASSES_SHOWN]]
    more = len(metadata.display_names) - len(names)
    return ", ".join(names) + (f" and {more:,} more, in `preprocess.json`" if more else "")


def markdown_text(text: str) -> str:
    """Text from outside on one line, without the characters that Markdown would take as its own."""
    return "".join(f"\\{char}" if char in "\\`*_[]<>#|" else char for char in printable(text))
