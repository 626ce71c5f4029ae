"""The recipe of a run: its file and overrides, and what follows from the data where the recipe says `derive`."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image

from reconv.build.data import data_path, open_split
from reconv.build.weight_facts import weight_facts
from reconv.checkpoint.locate import is_remote
from reconv.core.custom_code import is_import_path
from reconv.core.errors import DataError
from reconv.data.boxes.annotations import DetectionDataset
from reconv.data.dataset import Dataset, at_most, class_counts
from reconv.data.decode.pillow import formats_of
from reconv.detection.propose_anchors import mean_best_iou, propose_anchors
from reconv.recipe.derive import AnchorFacts, DataFacts, Derivation, HeadFacts
from reconv.recipe.derive_rules import derive
from reconv.recipe.load.resolved import Resolved
from reconv.recipe.loader import Override, load
from reconv.recipe.parts.code import add_code_path, names_code
from reconv.recipe.parts.detection import AnchorConfig
from reconv.recipe.schema import Recipe, flatten

_NUM_MEASURED = 200  # images whose size is read
_NUM_ANNOTATED = 5_000  # images whose boxes are read


@dataclass(frozen=True, slots=True)
class DerivedRecipe:
    """A recipe without open fields, and how the derived ones came about; its notes are for the plan."""

    resolved: Resolved
    derived: tuple[Derivation, ...] = ()

    @property
    def recipe(self) -> Recipe:
        return self.resolved.recipe


@dataclass(frozen=True, slots=True)
class HeadMeasurement:
    """Permissions to measure the input of a pretrained network's last layer.

    By default nothing is downloaded, and no network runs that only the weights name: it may be the code of others.
    """

    downloads: bool = False
    check_network: Callable[[Recipe], None] | None = None  # raises if a network that weights name is not to be trusted
    log: Callable[[str], None] | None = None


def load_derived(
    name: str,
    overrides: Sequence[Override] = (),
    resumed: Recipe | None = None,
    measurement: HeadMeasurement | None = HeadMeasurement(),
) -> DerivedRecipe:
    """Load a recipe and derive what it leaves to the data; a resumed run keeps the values it was started with.

    Without a `measurement` the rate does not follow from the features of the initial weights.
    """
    resolved = load(name, overrides)
    recipe = resolved.recipe
    if not recipe.derive:
        return DerivedRecipe(resolved)
    if resumed is not None:
        resolved = load(name, overrides, _kept(resolved, resumed))
        note = "values derived from the data are taken from the resumed run"
        return DerivedRecipe(replace(resolved, notes=(note, *resolved.notes)))
    if is_import_path(recipe.data.source):  # of your own code only the dataset is imported here
        add_code_path(recipe)
    weights = weight_facts(recipe, is_model_set="model.name" in resolved.fixed)
    dataset = _open_training_set(recipe)

    def measure_head(derived: Sequence[Derivation]) -> HeadFacts | None:
        so_far = load(name, overrides, _as_overrides(derived))
        return _measure_head(so_far.recipe, dataset, measurement, is_named_by_user="model.name" in resolved.fixed)

    derived = derive(recipe, resolved.fixed, data_facts(recipe, dataset), weights, measure_head)
    resolved = load(name, overrides, _as_overrides(derived))
    notes = (*(f"derived {derivation}" for derivation in derived), *resolved.notes)
    return DerivedRecipe(replace(resolved, notes=notes), derived)


def _as_overrides(derived: Sequence[Derivation]) -> list[Override]:
    return [(d.name, d.value, f"derived: {d.why}") for d in derived]


def _measure_head(
    recipe: Recipe, dataset: Dataset, measurement: HeadMeasurement | None, *, is_named_by_user: bool
) -> HeadFacts | None:
    """Input of the last layer of the recipe's network; None if it is not to be downloaded or run for that."""
    from reconv.build.head_features import head_facts  # the network and the loaders; most recipes need neither

    assert recipe.model.init is not None
    if measurement is None or (is_remote(recipe.model.init) and not measurement.downloads):
        return None
    if names_code(recipe.model.name) and not is_named_by_user:
        if measurement.check_network is None:
            return None
        measurement.check_network(recipe)
    return head_facts(recipe, dataset, measurement.log)


def _kept(resolved: Resolved, resumed: Recipe) -> list[Override]:
    """The derived values of the run that is resumed."""
    values = flatten(resumed).items()
    return [(name, value, "the run that is resumed") for name, value in values if resolved.is_open(name)]


def _open_training_set(recipe: Recipe) -> Dataset:
    dataset = open_split(recipe, data_path(recipe), "train")
    if len(dataset) == 0:
        raise DataError("the training set is empty", where=str(data_path(recipe) or recipe.data.source))
    return dataset


def data_facts(recipe: Recipe, dataset: Dataset) -> DataFacts:
    """Facts about the training set of a recipe, for the rules."""
    if isinstance(dataset, DetectionDataset):
        return _box_facts(dataset)
    return DataFacts(len(dataset), class_counts(dataset), _short_side(dataset, recipe))


def _short_side(dataset: Dataset, recipe: Recipe) -> int:
    """The median of the shorter side of some images, from their headers; unreadable ones are left out."""
    sides = []
    for index in at_most(len(dataset), _NUM_MEASURED).tolist():
        try:
            data = dataset[index].data
            if isinstance(data, bytes):
                with Image.open(io.BytesIO(data), formats=formats_of(data)) as image:
                    sides.append(min(image.size))
            else:
                sides.append(min(data.shape[:2]))
        except (DataError, OSError, Image.DecompressionBombError):
            continue
    return int(np.median(sides)) if sides else recipe.data.preprocess.size


def _box_facts(dataset: DetectionDataset) -> DataFacts:
    annotations = [dataset.annotation(index) for index in at_most(len(dataset), _NUM_ANNOTATED).tolist()]
    sides = [min(annotation.height, annotation.width) for annotation in annotations]
    corners = [a.boxes_xyxy[~a.is_crowd] / [a.width, a.height, a.width, a.height] for a in annotations]
    boxes = np.concatenate(corners).astype(np.float64)
    sizes = (boxes[:, 2:] - boxes[:, :2]).clip(0, 1)
    sizes = sizes[(sizes > 0).all(axis=1)]
    anchors = None
    if len(sizes):
        default = AnchorConfig()
        scales, ratios = propose_anchors(sizes, [len(ratios) for ratios in default.aspect_ratios])
        mean_iou = mean_best_iou(sizes, scales, ratios)
        default_iou = mean_best_iou(sizes, default.scales, default.aspect_ratios)
        anchors = AnchorFacts(scales, ratios, mean_iou, default_iou, len(sizes))
    max_boxes = max((len(annotation) for annotation in annotations), default=0)
    return DataFacts(len(dataset), (), int(np.median(sides)), max_boxes, anchors)
