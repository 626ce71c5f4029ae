"""`predict`: what a trained run sees in images, as names with scores, or as boxes with names and scores.

Owns the way from image files to answers and, for boxes, to images of them. Refuses to know training and scoring.
Invariant: the preprocessing is the one saved with the model; boxes are in pixels of the image as one sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from reconv.batch import Batch
from reconv.data.decode.decode import decode, host_eval, picture
from reconv.data.inspect.draw_boxes import DrawnBox, class_colour, draw_boxes
from reconv.data.readers.folder import is_image_name
from reconv.data.storage.local import read, read_named
from reconv.detection.postprocess import Detections
from reconv.errors import DataError, UsageError
from reconv.inference.predictor import LoadedModel, Tell, find_model, open_model, silent
from reconv.inference.tta import average_views
from reconv.io.atomic import disk_errors
from reconv.precision.accumulate import wide
from reconv.trainer.build import loaders as parts
from reconv.trainer.build.task_builder import build_postprocess

PREDICT_BATCH = 64
NUM_NAMES = 5  # of an image, unless told otherwise
LEAST_SCORE = 0.3  # of a box that is worth telling, unless told otherwise


@dataclass(frozen=True, slots=True)
class FoundBox:
    """Something found in an image."""

    name: str
    score: float
    box_xyxy: tuple[float, float, float, float]  # left, top, right, bottom, in pixels
    label: int  # the class's place among the class names
    class_id: int | None = None  # the number that the training data had for it


@dataclass(frozen=True, slots=True)
class Prediction:
    """What an image shows, best guess first: names, or boxes where the run is a detector."""

    path: Path
    labels: tuple[tuple[str, float], ...]
    error: str = ""  # why there is no answer, when a bad image is not to stop the others
    boxes: tuple[FoundBox, ...] | None = None  # None: the run tells names
    drawn: Path | None = None  # the image with its boxes, where one was asked for


@dataclass(frozen=True, slots=True)
class Wishes:
    """How much is told, and where images go."""

    top: int | None
    min_score: float | None
    pictures: Path | None


@dataclass(frozen=True, slots=True)
class Opened:
    """An image as evaluation sees it, and the size it really has."""

    seen: Tensor
    width: int
    height: int


Answer = Callable[[Mapping[Path, Opened], Tensor], Iterator[Prediction]]  # of images and their prepared images


def predict(
    run: str | Path,
    paths: Sequence[str | Path],
    *,
    top: int | None = None,
    min_score: float | None = None,
    pictures: str | Path | None = None,
    device: str = "auto",
    weights: str = "auto",
    best: bool = False,
    recipe: str | None = None,
    skip_bad: bool = False,
    tell: Tell = silent,
) -> list[Prediction]:
    """Say what each image (or every image in each folder) shows; `skip_bad`: a bad one gets its error instead.

    A classifier gives the `top` names (5). A detector gives boxes with a score of at least `min_score` (0.3), at most
    `top` of them, and draws them into the folder `images`.
    """
    named = dict.fromkeys(Path(path) for path in paths)
    files = list(dict.fromkeys(file for path in named for file in _pictures(path)))
    model = open_model(find_model(run, best, tell), device=device, weights=weights, recipe=recipe)
    wishes = Wishes(top, min_score, None if pictures is None else Path(pictures))
    answer = _boxes(model, wishes, files) if model.recipe.task == "detection" else _names(model, wishes)
    prepare = parts.eval_prepare(model.recipe, model.network)
    model.network.model.eval()
    results: list[Prediction] = []
    for start in range(0, len(files), PREDICT_BATCH):
        opened, bad = _open(files[start : start + PREDICT_BATCH], named, model, skip_bad)
        results += bad
        if opened:
            batch = _batch_of([one.seen for one in opened.values()], model)
            with torch.no_grad(), model.network.precision.autocast():
                results += answer(opened, prepare(batch, 0)["images"])
    order = {file: number for number, file in enumerate(files)}
    return sorted(results, key=lambda result: order[result.path])


def _names(model: LoadedModel, wishes: Wishes) -> Answer:
    """Answers with the most likely names."""
    for option, value in (("--score", wishes.min_score), ("--images", wishes.pictures)):
        if value is not None:
            raise UsageError(f"{option} is for detectors; this run names whole images", then=f"leave {option} out")
    forward = average_views(model.network.model, model.recipe.evaluate.tta)

    def answer(opened: Mapping[Path, Opened], images: Tensor) -> Iterator[Prediction]:
        logits = forward(images)
        scores, classes = wide(logits).softmax(dim=1).topk(min(wishes.top or NUM_NAMES, logits.shape[1]))
        for file, row, names in zip(opened, scores.tolist(), classes.tolist(), strict=True):
            yield Prediction(file, tuple((model.class_names[c], score) for c, score in zip(names, row, strict=True)))

    return answer


def _boxes(model: LoadedModel, wishes: Wishes, files: Sequence[Path]) -> Answer:
    """Answers with boxes, and draws them."""
    detections = build_postprocess(model.recipe, model.device)
    least = LEAST_SCORE if wishes.min_score is None else wishes.min_score
    drawn = _drawn_files(files, wishes.pictures) if wishes.pictures is not None else {}

    told = partial(found_boxes, class_names=model.class_names, class_ids=model.class_ids)

    def answer(opened: Mapping[Path, Opened], images: Tensor) -> Iterator[Prediction]:
        found = detections(model.network.model(images)).cpu()
        for row, (file, one) in enumerate(opened.items()):
            boxes = [box for box in told(found, row, one) if box.score >= least][: wishes.top]
            target = drawn.get(file)
            if target is not None:
                _draw(file, boxes, target)
            yield Prediction(file, (), boxes=tuple(boxes), drawn=target)

    return answer


def found_boxes(
    found: Detections, row: int, picture: Opened, class_names: Sequence[str], class_ids: Sequence[int] = ()
) -> Iterator[FoundBox]:
    """The boxes of one image of a batch, in its pixels, best first."""
    count = int(found.counts[row])
    sides = torch.tensor([picture.width, picture.height, picture.width, picture.height])
    corners = (found.boxes_xyxy[row, :count].double() * sides).tolist()
    scores, labels = found.scores[row, :count].tolist(), found.labels[row, :count].tolist()
    for (left, top, right, bottom), score, label in zip(corners, scores, labels, strict=True):
        class_id = class_ids[label - 1] if class_ids else None
        yield FoundBox(class_names[label - 1], score, (left, top, right, bottom), label - 1, class_id)


def _drawn_files(files: Sequence[Path], folder: Path) -> dict[Path, Path]:
    """A name in the folder for each image; images of one name get numbers."""
    names: dict[Path, Path] = {}
    taken: set[str] = set()
    for file in files:
        name, number = file.stem, 1
        while name in taken:
            number += 1
            name = f"{file.stem}-{number}"
        taken.add(name)
        names[file] = folder / f"{name}.png"
    clash = next((target for file in files for target in names.values() if target.resolve() == file.resolve()), None)
    if clash is not None:
        raise UsageError("an image would be overwritten by the drawing of it", where=str(clash), then="another folder")
    return names


def _draw(file: Path, boxes: Sequence[FoundBox], target: Path) -> None:
    """The image again, in colour and full size, with its boxes; it is not kept from before, since many are large."""
    written = [DrawnBox(b.box_xyxy, f"{b.name} {b.score:.0%}", class_colour(b.label)) for b in boxes]
    drawn = draw_boxes(picture(decode(read(file), 3, str(file)), 3), written)
    with disk_errors(target.parent, "choose another folder with --images DIR"):
        target.parent.mkdir(parents=True, exist_ok=True)
        drawn.save(target)


def _pictures(path: Path) -> list[Path]:
    if path.is_dir():
        # What is called an image and cannot be read as one is told when it is opened, not left out here.
        files = sorted(file for file in path.rglob("*") if is_image_name(file.name) and not file.is_dir())
        if not files:
            raise DataError("no image in this folder", where=str(path))
        return files
    if not path.exists():
        raise DataError("no such image", where=str(path))
    return [path]


def _open(
    files: Sequence[Path], named: Container[Path], model: LoadedModel, skip_bad: bool
) -> tuple[dict[Path, Opened], list[Prediction]]:
    """The images that decode, upright and preprocessed, and an answer without labels for those that do not."""
    preprocess = model.recipe.data.preprocess
    opened: dict[Path, Opened] = {}
    bad: list[Prediction] = []
    for file in files:
        try:
            data = read_named(file) if file in named else read(file)
            image = decode(data, preprocess.channels, str(file))
        except DataError as error:
            if not skip_bad:
                raise
            bad.append(Prediction(file, (), error.what))
        else:
            opened[file] = Opened(torch.tensor(host_eval(image, preprocess)), image.shape[1], image.shape[0])
    return opened, bad


def _batch_of(images: Sequence[Tensor], model: LoadedModel) -> Batch:
    rows = torch.arange(len(images))
    batch = Batch({"images": torch.stack(list(images)), "indices": rows, "targets": rows * 0}, rows, (len(images),))
    return batch.map(model.device.move)
