"""The command `data review`: find wrong labels, copies, leaks and outliers, for a human to decide."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reconv.cli.options import (
    DEVICE_HELP,
    Command,
    complete_recipes,
    emit_json,
    json_option,
    parse_settings,
    print_line,
    print_note,
    print_table,
    set_option,
    trust_option,
)

if TYPE_CHECKING:
    from reconv.review.review import Review

_LISTED = 10  # findings of a kind that are printed


@click.command("review", cls=Command)
@click.argument("source", metavar="SOURCE")
@click.option("--run", metavar="RUN", help="Judge the images by the network of a run; of boxes, by its detections.")
@click.option(
    "--init", metavar="WEIGHTS", help="Judge the images by the features of these weights, as of train --init."
)
@click.option(
    "--predictions",
    metavar="FILE",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Judge the images by a file that eval --predictions wrote; repeatable.",
)
@click.option(
    "--recipe", metavar="RECIPE", shell_complete=complete_recipes, help="The recipe that the folds are trained with."
)
@click.option(
    "--folds",
    metavar="N",
    type=click.IntRange(1, 100),
    help="Judge each image by networks trained on the other folds [default: 5]; 1: one network, while it learns.",
)
@click.option(
    "--out",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("data-review"),
    show_default=True,
    help="Folder for review.html and review.csv.",
)
@click.option(
    "--accept-above",
    metavar="SCORE",
    type=click.FloatRange(0, 1),
    help="Accept wrong labels, copies and leaks from this score on, without a human.",
)
@click.option(
    "--export",
    "formats",
    multiple=True,
    type=click.Choice(["label-studio", "fiftyone", "coco"]),
    help="Also write the findings for another program; repeatable.",
)
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(1, 2000),
    default=200,
    show_default=True,
    help="Findings of each kind on the page; the list has all.",
)
@click.option("--device", metavar="NAME", default="auto", show_default=True, help=DEVICE_HELP)
@trust_option
@set_option
@json_option
def review_command(
    source: str,
    out: Path,
    formats: tuple[str, ...],
    limit: int,
    settings: tuple[str, ...],
    json_file: str | None,
    **options: Any,
) -> None:
    """Find wrong labels, near duplicates, leaks between the splits, outliers and classes that are short of images.

    SOURCE is anything --data takes, or a run for its own data. Labels are judged by networks that have not seen the
    image: folds that are trained now, or heads fitted in folds to the features of --init or --run. A run alone is
    judged by its checkpoints, a run of a detector by its detections. DIR gets review.html, to accept and reject the
    findings, and review.csv. The data is only read: train takes the list as data.relabel and data.exclude.

    \b
    Examples:
      reconv data review photos/ --init torchvision:mobilenet_v2
      reconv data review photos/ --run runs/finetune/1 --out photos-review
      reconv data review runs/finetune/1
      reconv data review cifar10/ --accept-above 0.5
      reconv train finetune --data photos/ --set data.relabel=corrections.csv --set data.exclude=corrections.csv
    """
    from reconv.core.errors import UsageError
    from reconv.review.exports import export
    from reconv.review.page import render
    from reconv.review.review import LIST_FILE, PAGE_FILE, ReviewOptions, review
    from reconv.storage.bounded import real_path
    from reconv.storage.files import disk_errors, write_atomic

    if Path(source).is_dir() and real_path(out).is_relative_to(real_path(source)):
        raise UsageError(f"{out} is inside the data", where=source, hint="choose another place with --out")
    result = review(ReviewOptions(source, out, overrides=parse_settings(settings), **options), print_note)
    with disk_errors(out):
        write_atomic(out / PAGE_FILE, render(result, limit).encode("utf-8", "replace"))
        files = [path for kind in formats for path in export(result.images, list(result.findings), kind, out)]
    written = [out / PAGE_FILE, out / LIST_FILE, *files]
    if json_file is not None:
        emit_json(_as_json(result, written), json_file)
        return
    _print(result, written)


def _as_json(result: Review, written: Sequence[Path]) -> dict[str, Any]:
    from reconv.review.findings import as_row

    return {
        "source": result.source,
        "evidence": result.evidence.method,
        "notes": list(result.evidence.notes),
        "images": {split: len(dataset) for split, dataset in result.images.datasets.items()},
        "counts": result.counts(),
        "estimated_wrong_labels": None if result.scores is None else result.scores.num_wrong,
        "accepted": len(result.accepted),
        "findings": [as_row(result.images, finding) for finding in result.findings],
        "short_classes": {row.name: row.shortage for row in result.classes if row.shortage},
        "wall_s": result.wall_s,
        "files": [str(path) for path in written],
    }


def _print(result: Review, written: Sequence[Path]) -> None:
    from reconv.review.findings import KINDS

    for kind, title in KINDS.items():
        findings = [finding for finding in result.findings if finding.kind == kind]
        if not findings:
            continue
        print_line(f"{title}: {len(findings):,}", bold=True)
        rows = [
            [f"{finding.score:.2f}", result.images.paths[finding.row], finding.given, finding.label, finding.note]
            for finding in findings[:_LISTED]
        ]
        print_table(["score", "image", "label", "proposed", "why"], rows)
        print_line()
    short = [row for row in result.classes if row.shortage]
    if short:
        print_line(f"Classes short of images: {len(short):,} of {len(result.classes):,}", bold=True)
        print_table(["class", "images"], [[row.name, row.shortage] for row in short[:_LISTED]])
        print_line()
    if result.scores is not None:
        counts = result.counts()
        print_line(
            f"{counts['label']:,} labels are more likely wrong than right (estimate: {result.scores.num_wrong:,}), "
            f"by {result.evidence.method}"
        )
    if result.accepted:
        print_line(f"{len(result.accepted):,} findings are accepted in the list: --set data.relabel={written[1]}")
    print_line(" · ".join(map(str, written)), bold=True)
