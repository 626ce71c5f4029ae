"""The commands `data check`, `data show` and `data review`: look at data before training on it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reconv.cli.options import (
    DEVICE_HELP,
    Command,
    NumberRange,
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
from reconv.core.errors import ExitCode, ReconvError, ResourceError, UsageError
from reconv.core.text import count
from reconv.storage.bounded import real_path
from reconv.storage.object_stores.store import is_url

if TYPE_CHECKING:
    from reconv.data.inspect.check import CheckReport
    from reconv.data.inspect.lenient_open import DataIssue
    from reconv.recipe.derive import Derivation
    from reconv.review.run import Review

_CLASSES_SHOWN = 30
_PATHS_SHOWN = 5
_FINDINGS_SHOWN = 10  # of a kind


@click.command("check", cls=Command)
@click.argument("path")
@click.option(
    "--out",
    metavar="DIR",
    type=click.Path(path_type=Path),
    default=Path("data-check"),
    show_default=True,
    help="Folder for check.json and contact.png.",
)
@click.option("--workers", metavar="N", type=click.IntRange(1, 1024), help="Decoding threads; default: one per core.")
@click.option("--quiet", is_flag=True, help="No progress bar.")
@json_option
def check(path: str, out: Path, workers: int | None, quiet: bool, json_file: str | None) -> None:
    """Read and decode every image at PATH and report what is wrong; exit code 3 if there are errors.

    PATH is anything --data takes, the name of a dataset in the package (digits), or the import path of your own
    (my_pkg.data:make). Reported are images that do not
    decode, images that are in both training and validation or have two labels, empty classes, classes that only
    validation has, and class names that look like mistakes. For images with boxes: boxes outside of their image,
    without area, with swapped corners or of an unknown class, missing images, images of another size, and duplicate
    ids. DIR gets check.json with all paths and contact.png with images of each class. PATH is only read. Run the same
    command again to continue after an interruption. Started by srun, mpirun or torchrun, the processes share the images
    of PATH; all of them must see DIR.

    \b
    Examples:
      reconv data check /imagenet
      reconv data check flowers/ --out /tmp/flowers-check
      reconv data check digits --json
      srun -N 10 reconv data check /imagenet --out /shared/imagenet-check
    """
    from reconv.core.machine import Machine, cores_per_process
    from reconv.data.inspect.check import check_in_ranks
    from reconv.distributed.shared_work import joined_ranks
    from reconv.recipe.parts.data import DataConfig
    from reconv.storage.work_journal import remove_journal

    _check_outside(out, Path(path))
    journal_dir = out / ".checking"
    with joined_ranks() as ranks:
        num_threads = workers or cores_per_process(Machine(), ranks.launch_env.local_world_size)
        with _progress(quiet or not ranks.is_rank0) as advance:
            report = check_in_ranks(path, DataConfig(), num_threads, advance, ranks, journal_dir)
        has_errors = ranks.on_rank0(lambda: report is not None and _write_report(report, path, out, json_file))
        if ranks.is_rank0:
            remove_journal(journal_dir)
    if has_errors:
        click.get_current_context().exit(ExitCode.DATA)


@contextmanager
def _progress(is_hidden: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar that counts samples."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=is_hidden or not sys.stderr.isatty(), console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=None)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield advance


def _write_report(report: CheckReport, path: str, out: Path, json_file: str | None) -> bool:
    """Write and print what was found. Returns whether there are errors."""
    from reconv.recipe.load.adapt import show as shown

    derived = _derive(path, report)
    content = {**report.as_json(), "finetune": {d.name: {"value": shown(d.value), "why": d.why} for d in derived}}
    emit_json(content, str(out / "check.json"))
    write_image(out / "contact.png", _contact_sheet(report))
    if json_file is not None:
        emit_json(content, json_file)
    else:
        _print(report, out)
        _print_derived(path, derived)
    return bool(report.errors)


@click.command("show", cls=Command)
@click.argument("path")
@click.option(
    "--recipe",
    metavar="RECIPE",
    shell_complete=complete_recipes,
    help="Recipe whose augmentation and preprocessing are shown; default: the usual one for the data.",
)
@click.option(
    "--out",
    metavar="FILE.png",
    type=click.Path(path_type=Path),
    default=Path("show.png"),
    show_default=True,
    help="File to write.",
)
@click.option(
    "--images",
    metavar="N",
    type=click.IntRange(1, 128),
    default=32,
    show_default=True,
    help="Number of images of each split to draw.",
)
@click.option(
    "--step", metavar="N", type=click.IntRange(min=0), default=0, show_default=True, help="Training step to show."
)
@set_option
def show(path: str, recipe: str | None, out: Path, images: int, step: int, settings: tuple[str, ...]) -> None:
    """Draw what a model trained on PATH sees: augmented training images and evaluation images.

    \b
    Examples:
      reconv data show /imagenet
      reconv data show flowers/ --recipe my.yaml --out flowers.png
      reconv data show digits --set augment.mixup.alpha=0.4
    """
    from reconv.trainer.show_batch import show_batch

    _check_outside(out, Path(path))
    shown = show_batch(path, recipe, overrides=parse_settings(settings), images=images, step=step)
    write_image(out, shown.png)
    print_line(f"{shown.origin}, with recipe {shown.recipe}: {out}")


def write_image(path: Path, png: bytes) -> None:
    """Write an image to the path the user gave."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png)
    except OSError as error:
        raise ResourceError(
            f"cannot write {path}", where=str(path.parent), why=str(error.strerror), hint="choose another --out"
        ) from error


def _check_outside(out: Path, data: Path) -> None:
    """Results must not be written into the data: the next check would read them."""
    if data.is_dir() and real_path(out).is_relative_to(real_path(data)):
        raise UsageError(f"{out} is inside the data", where=str(data), hint="choose another place with --out")


def _contact_sheet(report: CheckReport) -> bytes:
    from reconv.data.inspect.check import class_tiles
    from reconv.data.inspect.contact_sheet import ContactSheet, contact_sheets

    sheets = [ContactSheet(f"{name} ({count:,})", tiles) for name, count, tiles in class_tiles(report)]
    return contact_sheets(sheets or [ContactSheet("no image decodes", [])])


def _print(report: CheckReport, out: Path) -> None:
    """Print the tables, then the issues, errors first."""
    print_line(report.origin)
    rows = []
    for split, own in report.splits.items():
        facts = own.as_json()
        sides = [_range(facts["width_px"]), _range(facts["height_px"])]
        counts = [
            f"{own.num_samples:,}",
            f"{len(own.bad):,}",
            f"{len(own.classes):,}",
            f"{own.num_bytes / 1e6:,.1f}",
        ]
        kinds = ", ".join(f"{name} {count:,}" for name, count in (*own.formats.most_common(), *own.modes.most_common()))
        rotated = sum(count for number, count in own.orientations.items() if number != 1)
        boxes = [] if own.num_boxes is None else [f"{own.num_boxes:,}"]
        rows.append([split, *counts, *boxes, *sides, kinds + (f", rotated by EXIF {rotated:,}" if rotated else "")])
    boxes = ["boxes"] if any(own.num_boxes is not None for own in report.splits.values()) else []
    print_table(["split", "images", "bad", "classes", "MB", *boxes, "width", "height", "formats and modes"], rows)
    print_line()
    _print_classes(report)
    whys = {path: f"{path}: {why}" for own in report.splits.values() for path, why in own.bad}
    for issue in report.issues:
        _print_issue(issue, whys)
    num_errors = len(report.errors)
    summary = f"{num_errors} kind{'s' * (num_errors > 1)} of error" if num_errors else "no errors"
    print_line(f"{summary} · {out / 'check.json'} · {out / 'contact.png'}", bold=True)


def _derive(path: str, report: CheckReport) -> tuple[Derivation, ...]:
    """Values that `reconv train finetune` derives from the data; empty if it cannot train on it."""
    from reconv.build.derived_recipe import load_derived

    has_boxes = any(own.num_boxes is not None for own in report.splits.values())
    if report.errors or not (is_url(path) or Path(path).exists()):
        return ()
    try:
        return load_derived(f"finetune{'-detection' * has_boxes}", [("data.path", path, "PATH")]).derived
    except ReconvError:
        return ()


def _print_derived(path: str, derived: Sequence[Derivation]) -> None:
    """Print the most important derived values, and proposed anchors as fields to paste."""
    from reconv.recipe.load.adapt import show as shown

    values = {d.name: d for d in derived}
    anchors = [values[name] for name in values if name.startswith("detection.anchors.")]
    if anchors:
        print_line()
        print_line(f"anchors for these boxes ({anchors[0].why}):")
        print_line("detection:")
        print_line("  anchors:")
        for anchor in anchors:
            print_line(f"    {anchor.name.rpartition('.')[2]}: {shown(anchor.value)}")
    if not values:
        return
    recipe = "finetune-detection" if "detection.max_gt_boxes" in values else "finetune"
    network = values.get("model.name") or values["model.options.backbone"]
    short = ", ".join(
        f"{name} {shown(values[name].value)}"
        for name in (network.name, "data.preprocess.size", "batch.size", "length", "schedule.lr", "loss.class_weights")
        if name in values
    )
    print_line()
    print_line(f"reconv train {recipe} --data {path} would use, from scratch: {short}")
    print_line(f"everything, with its arithmetic: reconv recipes show {recipe} --data {path} [--init WEIGHTS]")


def _print_classes(report: CheckReport) -> None:
    names = list(report.class_names)
    first = next(iter(report.splits.values()))
    if len(names) > _CLASSES_SHOWN:
        ranked = sorted(names, key=lambda name: first.classes[name])
        names = [*ranked[: _CLASSES_SHOWN // 2], *ranked[-_CLASSES_SHOWN // 2 :]]
        print_line(f"the {_CLASSES_SHOWN // 2} smallest and largest of {len(ranked):,} classes; check.json has all")
    rows = [[name, *(f"{own.classes[name]:,}" for own in report.splits.values())] for name in names]
    print_table(["class", *report.splits], rows)
    print_line()


def _print_issue(issue: DataIssue, whys: Mapping[str, str]) -> None:
    color = "red" if issue.level == "error" else "yellow"
    print_line(f"{issue.level}: {issue.text} ({issue.total:,})", fg=color)
    for path in issue.paths[:_PATHS_SHOWN]:
        print_line(f"    {whys.get(path, path)}")
    if issue.paths[_PATHS_SHOWN:]:
        print_line(f"    and {issue.total - _PATHS_SHOWN:,} more")


def _range(values: dict[str, float] | None) -> str:
    """Minimum, maximum and median."""
    if values is None:
        return "-"
    low, median, high = values["min"], values["median"], values["max"]
    return f"{low:g}" if low == high else f"{low:g} to {high:g} ({median:g})"


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
    type=NumberRange(0, 1),
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
    from reconv.review.exports import export
    from reconv.review.page import render
    from reconv.review.run import LIST_FILE, PAGE_FILE, ReviewOptions, review
    from reconv.storage.files import disk_errors, write_atomic

    _check_outside(out, Path(source))
    result = review(ReviewOptions(source, out, overrides=parse_settings(settings), **options), print_note)
    with disk_errors(out):
        write_atomic(out / PAGE_FILE, render(result, limit).encode("utf-8", "replace"))
        files = [path for kind in formats for path in export(result.images, list(result.findings), kind, out)]
    written = [out / PAGE_FILE, out / LIST_FILE, *files]
    if json_file is not None:
        emit_json(_review_as_json(result, written), json_file)
        return
    _print_review(result, written)


def _review_as_json(result: Review, written: Sequence[Path]) -> dict[str, Any]:
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


def _print_review(result: Review, written: Sequence[Path]) -> None:
    from reconv.review.findings import KINDS

    for kind, title in KINDS.items():
        findings = [finding for finding in result.findings if finding.kind == kind]
        if not findings:
            continue
        print_line(f"{title}: {len(findings):,}", bold=True)
        empty = "no box" if kind == "box" else "leave out"
        rows = [
            [
                f"{finding.score:.2f}",
                result.images.paths[finding.row],
                finding.given,
                finding.label or empty,
                finding.note,
            ]
            for finding in findings[:_FINDINGS_SHOWN]
        ]
        print_table(["score", "image", "label", "proposed", "why"], rows)
        print_line()
    short = [row for row in result.classes if row.shortage]
    if short:
        print_line(f"Classes short of images: {len(short):,} of {len(result.classes):,}", bold=True)
        print_table(["class", "images"], [[row.name, row.shortage] for row in short[:_FINDINGS_SHOWN]])
        print_line()
    if result.scores is not None:
        counts = result.counts()
        print_line(
            f"{counts['label']:,} labels are more likely wrong than right (estimate: {result.scores.num_wrong:,}), "
            f"by {result.evidence.method}"
        )
    print_line(" · ".join(map(str, written)), bold=True)
    if result.accepted:
        print_line(f"accepted {count(len(result.accepted), 'finding')}; to train with them:")
        print_line(f"  {result.train_command(written[1])}")
    elif result.findings:
        print_line(f"decide in {written[0]}, download corrections.csv, and train with it:")
        print_line(f"  {result.train_command(Path('corrections.csv'))}")
