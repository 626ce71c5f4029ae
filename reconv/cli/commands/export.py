"""`reconv export`: write a trained model for another runtime, checked to give the same results; `reconv push`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from reconv.cli.options import (
    Command,
    NumberRange,
    check_run,
    complete_runs,
    emit_json,
    json_option,
    print_line,
    print_note,
    trust_option,
    trust_or_ask,
    weights_options,
)
from reconv.exporters.targets import TARGETS

if TYPE_CHECKING:
    from reconv.api import ExportResult


@click.command(cls=Command)
@click.argument("run", type=click.Path(), shell_complete=complete_runs)
@click.option("--to", "to", type=click.Choice(tuple(TARGETS)), required=True, help="The format.")
@click.option("--out", metavar="DIR", type=click.Path(), help="The new folder [default: RUN/exports/NAME-FORMAT].")
@click.option("--images", metavar="DIR", type=click.Path(), help="Check it with these images, not validation data.")
@click.option("--data", metavar="DIR", type=click.Path(), help="Check it with this dataset [default: the run's own].")
@click.option("--samples", metavar="N", type=click.IntRange(min=1), help="Check it with N images only.")
@click.option("--batch", metavar="N", type=click.IntRange(min=1), help="A fixed batch size [default: any].")
@click.option("--opset", metavar="N", type=click.IntRange(min=18), help="onnx: the opset version [default: 20].")
@click.option("--no-nms", is_flag=True, help="Detectors: leave non-maximum suppression to run.py.")
@click.option(
    "--precision",
    type=click.Choice(["fp32", "int8"]),
    default="fp32",
    show_default=True,
    help="int8: quantize to 8 bits; the check is the loss of accuracy.",
)
@click.option("--int8", "precision", flag_value="int8", hidden=True)  # as in 0.2
@click.option("--calibration", metavar="DIR", type=click.Path(), help="int8: typical images [default: training data].")
@click.option(
    "--max-drop",
    metavar="POINTS",
    type=NumberRange(min=0),
    default=1.0,
    show_default=True,
    help="int8: refuse a larger loss of accuracy or mAP, in percentage points.",
)
@click.option("--force", is_flag=True, help="Replace an earlier export.")
@weights_options
@json_option
def export(
    run: str,
    no_nms: bool,
    max_drop: float,
    weights: str | None,
    trust_code: bool,
    json_file: str | None,
    **options: Any,
) -> None:
    """Export RUN to a folder with the model, a model card and a run.py.

    RUN is a run directory, a checkpoint directory or a weights file. The model takes uint8 images; normalization is
    part of it. The written file is run by its run.py in a fresh process, on the validation set: where it gives other
    results than the trained model it is refused, with exit code 9.

    \b
    Examples:
      reconv export runs/quickstart/1 --to onnx
      reconv export runs/resnet50/1 --to onnx --best --samples 1000
      reconv export runs/resnet50/1 --to openvino --precision int8 --max-drop 0.5
      reconv export weights.safetensors --to onnx --images photos/ --out resnet50-onnx
    """
    check_run(run)
    from reconv.api import export as export_run

    result = export_run(
        run,
        nms=not no_nms,
        max_drop=max_drop / 100,
        weights=weights or "auto",
        trust_code=trust_or_ask(trust_code),
        log=print_note,
        **options,
    )
    if json_file is not None:
        emit_json({"folder": str(result.folder), "model": str(result.model), **result.report}, json_file)
        return
    _print_result(result)


def _print_result(result: ExportResult) -> None:
    from reconv.exporters.model_card import int8_line

    report = result.report
    size = sum(file.stat().st_size for file in result.folder.glob(f"{result.model.stem}.*")) / 1e6
    print_line(f"{result.folder}: {result.model.name}, {size:,.1f} MB; run it: python {result.folder}/run.py IMAGE")
    logits, decisions = report.get("logits"), report.get("decisions")
    if logits is not None and decisions is not None:
        print_line(
            f"checked in a fresh process on {report['data']}: largest difference of a logit "
            f"{logits['largest_difference']:.1e} standard deviations, another {decisions['what']} in "
            f"{decisions['num_different']:,} images"
        )
    if report["precision"] == "int8":
        if logits is None:
            print_line(f"checked in a fresh process on {report['data']}")
        print_line(int8_line(report))
    boxes = report.get("boxes")
    if boxes is not None:
        print_line(
            f"checked in a fresh process on {report['data']}: {boxes['num_different']:,} of {boxes['num_boxes']:,} "
            f"boxes differ, the others by up to {boxes['score_difference']:.1e} (score) and "
            f"{boxes['corner_difference_px']:.1e} pixels"
        )


@click.command(cls=Command)
@click.argument("run", type=click.Path(), shell_complete=complete_runs)
@click.argument("repo", metavar="hf://OWNER/MODEL")
@click.option("--private", is_flag=True, help="Let only you see the repository, if it is new.")
@click.option("--force", is_flag=True, help="Replace the model that the repository has.")
@click.option("--best", is_flag=True, help="Push the best checkpoint instead of the newest.")
@click.option("--raw", "weights", flag_value="raw", help="Push the weights as trained.")
@click.option("--ema", "weights", flag_value="ema", help="Push the EMA weights (the default if there are any).")
@click.option("--averaged", "weights", flag_value="averaged", help="Push the average of the run's checkpoints.")
@trust_option
@json_option
def push(run: str, repo: str, weights: str | None, trust_code: bool, json_file: str | None, **options: Any) -> None:
    """Push RUN to the Hugging Face Hub: weights, config.json in timm's format, and a model card.

    The token is that of HF_TOKEN, or of `hf auth login`; HF_ENDPOINT names another hub. Images and recipes of data are
    not uploaded.

    \b
    Examples:
      reconv push runs/finetune/1 hf://me/flowers
      reconv push runs/finetune/1 hf://me/flowers --best --private
      reconv train finetune --data flowers/ --init hf://me/flowers
    """
    check_run(run)
    from reconv.exporters.hub import push as push_run

    result = push_run(
        run, repo, weights=weights or "auto", trust_code=trust_or_ask(trust_code), log=print_note, **options
    )
    if json_file is not None:
        emit_json(asdict(result), json_file)
        return
    print_line(f"{result.page}: {', '.join(f'{name} {size:,} bytes' for name, size in result.files.items())}")
    print_line(f"use it: reconv train finetune --data DIR --init {result.repo}")
