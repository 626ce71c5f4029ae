"""Rows of detection batches: loaded bytes, padding, crowds, sizes, flips."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from box_examples import Listed
from data_examples import encode, noise
from jpeg_examples import encoded, photograph
from PIL import Image
from torch import Tensor

from reconv.core.batch import Batch
from reconv.core.errors import DataError
from reconv.data.dataset import LabelError
from reconv.data.pipeline.detection import DetectionPipeline, make_detection_pipeline, mean_color
from reconv.data.pipeline.eval_loader import EvalLoader
from reconv.data.pipeline.prefetcher import DataContext
from reconv.data.pipeline.train_loader import make_train_loader
from reconv.data.transforms.geometry import Flip
from reconv.data.transforms.train import TrainPreprocess
from reconv.detection.annotation import Annotation, make_annotation
from reconv.recipe.parts.batch import BatchConfig
from reconv.recipe.parts.data import AugmentConfig, DataConfig, PreprocessConfig, ZoomOutConfig
from reconv.recipe.parts.detection import DetectionConfig
from reconv.recipe.plan import Facts, make_plan
from reconv.recipe.schema import Recipe

SQUARE = PreprocessConfig(size=32, resize=None)


def many(count: int = 12) -> Listed:
    """Images of several sizes, some encoded, with 0 to 4 boxes."""
    samples: list[tuple[bytes | np.ndarray, Annotation]] = []
    rng = np.random.default_rng(0)
    for number in range(count):
        height, width = 40 + 3 * number, 90 - 2 * number
        pixels = noise(height, width, 3, number)
        corners = rng.random((number % 5, 2)) * 0.5
        sides = 0.1 + rng.random((number % 5, 2)) * 0.4
        boxes = np.concatenate([corners, corners + sides], axis=1) * [width, height, width, height]
        annotation = make_annotation(boxes, rng.integers(0, 3, number % 5), number, height, width)
        samples.append((encode(pixels) if number % 2 else pixels, annotation))
    return Listed(samples)


def recipe_of(workers: int = 0, size: int = 4, **augment: object) -> Recipe:
    return Recipe(
        task="detection",
        seed=5,
        detection=DetectionConfig(max_gt_boxes=6),
        data=DataConfig(preprocess=SQUARE, drop_last=False, num_workers=workers),
        augment=AugmentConfig(**{"crop": "ssd", "zoom_out": ZoomOutConfig(probability=0.5), **augment}),  # type: ignore[arg-type]
        batch=BatchConfig(size=size, group=2),
    )


def steps(dataset: Listed, recipe: Recipe, start: int, stop: int, world_size: int = 1) -> list[dict[str, Tensor]]:
    plan = make_plan(recipe, Facts(len(dataset), 1, 3, world_size=world_size))
    make = make_detection_pipeline(recipe)
    streams = [
        list(
            make_train_loader(dataset, recipe, plan, DataContext.on_host(), rank, make_pipeline=make).steps(start, stop)
        )
        for rank in range(world_size)
    ]
    whole = []
    for step in range(stop - start):
        batches = [batch for stream in streams for batch in stream[step]]
        whole.append({name: torch.cat([b[name] for b in batches]) for name in batches[0].tensors})
    return whole


@pytest.mark.parametrize(("workers", "world_size", "start"), [(2, 1, 0), (0, 2, 0), (3, 1, 3)])
def test_batches_do_not_depend_on_workers_ranks_or_the_first_step(workers: int, world_size: int, start: int) -> None:
    dataset = many()
    expected = steps(dataset, recipe_of(), 0, 6)[start:]
    found = steps(dataset, recipe_of(workers), start, 6, world_size)
    assert len(found) == 6 - start
    for one, other in zip(expected, found, strict=True):
        assert set(one) == {"images", "boxes", "labels", "num_boxes", "indices", "flips"}
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_rows_follow_the_layout_of_detection_batches() -> None:
    num_boxes = 0
    for batch in steps(many(), recipe_of(), 0, 9):
        assert batch["images"].shape == (4, 3, 32, 32) and batch["images"].dtype == torch.uint8
        assert batch["boxes"].shape == (4, 6, 4) and batch["boxes"].dtype == torch.float32
        assert batch["labels"].shape == (4, 6) and batch["labels"].dtype == batch["num_boxes"].dtype == torch.int64
        used = torch.arange(6) < batch["num_boxes"][:, None]
        assert ((batch["labels"] > 0) == used).all() and batch["labels"].max() <= 3
        boxes = batch["boxes"][used]
        assert (boxes >= 0).all() and (boxes <= 1).all() and (boxes[:, 2:] > boxes[:, :2]).all()
        assert (batch["boxes"][~used] == 0).all()
        num_boxes += len(boxes)
    assert num_boxes > 20


def test_evaluation_has_whole_images_with_their_boxes_in_order() -> None:
    dataset, recipe = many(), recipe_of()
    (batch,) = list(
        EvalLoader(dataset, SQUARE, 20, DataContext.on_host(), make_pipeline=make_detection_pipeline(recipe))
    )
    assert batch["num_boxes"].tolist() == [number % 5 for number in range(12)]
    for index in range(12):
        annotation = dataset.annotation(index)
        scale = np.array([annotation.width, annotation.height] * 2)
        assert batch["boxes"][index, : len(annotation)].numpy() == pytest.approx(
            annotation.boxes_xyxy / scale, abs=1e-6
        )
        assert batch["labels"][index, : len(annotation)].tolist() == (annotation.labels + 1).tolist()


def test_crowds_are_not_used_and_difficult_boxes_only_if_asked_for() -> None:
    annotation = make_annotation(
        [[0, 0, 5, 5], [5, 5, 9, 9], [1, 1, 4, 4]], [0, 1, 2], 1, 10, 10, is_crowd=[1, 0, 0], difficult=[0, 1, 0]
    )
    dataset = Listed([(noise(10, 10, 3, 0), annotation)])
    for use_difficult, labels in ((True, [2, 3]), (False, [3])):
        rows = filled(DetectionPipeline(dataset, SQUARE, None, 4, use_difficult))
        assert rows["num_boxes"].tolist() == [len(labels)]
        assert rows["labels"][0].tolist() == labels + [0] * (4 - len(labels))


def test_boxes_beyond_max_boxes_are_dropped() -> None:
    annotation = make_annotation([[n, 0, n + 1, 1] for n in range(5)], [0, 1, 2, 0, 1], 1, 10, 10)
    rows = filled(DetectionPipeline(Listed([(noise(10, 10, 3, 0), annotation)]), SQUARE, None, 3))
    assert rows["num_boxes"].tolist() == [3] and rows["labels"].tolist() == [[1, 2, 3]]


def test_boxes_are_clipped_to_the_image_and_empty_ones_dropped() -> None:
    annotation = make_annotation([[-5, 2, 5, 8], [3, 3, 3, 9], [11, 1, 12, 2]], [0, 1, 2], 1, 10, 10)
    rows = filled(DetectionPipeline(Listed([(noise(10, 10, 3, 0), annotation)]), SQUARE, None, 3))
    assert rows["num_boxes"].tolist() == [1]
    assert rows["boxes"][0, 0].tolist() == pytest.approx([0, 0.2, 0.5, 0.8])


def filled(pipeline: DetectionPipeline) -> dict[str, np.ndarray]:
    rows = {column.name: column.empty(1) for column in pipeline.columns}
    for array in rows.values():
        array.fill(77)  # a used buffer
    pipeline(np.arange(1), None, rows)
    return rows


def test_an_image_has_the_orientation_of_its_annotation() -> None:
    pixels = np.zeros((20, 40, 3), np.uint8)
    pixels[:, :20] = 255
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # upright it is 20 wide and 40 high, the white half on top
    Image.fromarray(pixels).save(file, "JPEG", exif=exif, quality=95)
    for width, height, is_lying in ((40, 20, True), (20, 40, False)):
        annotation = make_annotation([[0, 0, width, height / 2]], [0], 1, height, width)
        image = filled(DetectionPipeline(Listed([(file.getvalue(), annotation)]), SQUARE, None, 3))["images"][0, 0]
        white = image[:, :12] if is_lying else image[:12]
        assert white.min() > 200 and image[20:, 20:].max() < 50


def test_an_annotation_for_another_size_is_an_error_that_is_never_tolerated() -> None:
    annotation = make_annotation([[0, 0, 5, 5]], [0], 1, 30, 30)
    with pytest.raises(LabelError, match="the image is 20 x 10, its annotation is for 30 x 30") as caught:
        filled(DetectionPipeline(Listed([(noise(10, 20, 3, 0), annotation)]), SQUARE, None, 3))
    assert caught.value.where == "listed[0]" and "scale its boxes" in caught.value.hint


def test_images_without_annotations_are_an_error() -> None:
    from reconv.data.readers.digits import open_digits

    with pytest.raises(DataError, match="an image without boxes"):
        DetectionPipeline(open_digits("train"), SQUARE, None, 3)(np.arange(1), None, {})


def test_images_and_boxes_are_flipped_together_and_twice_is_no_flip() -> None:
    images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    images[:, :, 1:3, 0:2] = 255
    boxes = torch.zeros(2, 3, 4)
    boxes[:, 0] = torch.tensor([0, 1 / 8, 2 / 8, 3 / 8])
    labels = torch.tensor([[1, 0, 0]] * 2)
    tensors = {"images": images, "boxes": boxes, "labels": labels, "flips": torch.tensor([True, False])}
    batch = Batch(tensors, torch.arange(2), (2,))
    flip = Flip(AugmentConfig(hflip=0.5))
    once = flip.apply(batch)
    assert once["boxes"][0, 0].tolist() == [6 / 8, 1 / 8, 1, 3 / 8]
    assert once["images"][0, 0, 1:3, 6:8].min() == 255 and once["images"][0].sum() == images[0].sum()
    assert torch.equal(once["boxes"][1], boxes[1]) and torch.equal(once["images"][1], images[1])
    assert (once["boxes"][:, 1:] == 0).all()
    twice = flip.apply(once)
    assert torch.equal(twice["images"], images) and torch.allclose(twice["boxes"], boxes)


def test_training_flips_on_the_device_with_boxes() -> None:
    recipe = recipe_of(hflip=1.0)
    (before,) = steps(many(), recipe, 2, 3)
    prepare = TrainPreprocess(SQUARE, recipe.augment, 3, torch.float32)
    after = prepare(Batch(before, torch.arange(4), (4,)), 2)
    used = before["labels"] > 0
    assert used.any() and torch.equal(after["boxes"][used][:, 0], 1 - before["boxes"][used][:, 2])


def test_the_fill_is_the_color_that_becomes_zero() -> None:
    assert mean_color(SQUARE) == (124, 116, 104)
    assert mean_color(PreprocessConfig(divide_by=1, mean=(1.0, 2.0, 3.0))) == (1, 2, 3)
    assert mean_color(PreprocessConfig(per_image_standardization=True, channels=1, mean=(0.5,), std=(0.5,))) == (128,)


@pytest.mark.native
@pytest.mark.usefixtures("compiled_decoder")
def test_views_of_the_compiled_decoder_differ_only_a_little() -> None:
    upright, turned = photograph(90, 60), Image.Exif()
    turned[0x0112] = 6
    on_its_side = io.BytesIO()
    Image.fromarray(upright).save(on_its_side, "JPEG", exif=turned)
    files = [(encoded(upright), 60, 90), (encode(upright), 60, 90), (on_its_side.getvalue(), 90, 60)]
    dataset = Listed([(data, make_annotation([[20, 15, 50, 40]], [1], 1, *size)) for data, *size in files])
    zoom = ZoomOutConfig(probability=0.5, max_scale=2.0)
    native, plain = (
        DetectionPipeline(dataset, SQUARE, AugmentConfig(crop="ssd", decoder=decoder, zoom_out=zoom), 4)  # type: ignore[arg-type]
        for decoder in ("native", "pillow")
    )
    num_beyond = 0
    for index in range(3):
        indices = np.full(20, index)
        rows = [{c.name: c.empty(20) for c in pipeline.columns} for pipeline in (native, plain)]
        for pipeline, own in zip((native, plain), rows, strict=True):
            pipeline(indices, pipeline.params(5, np.arange(20)), own)
        assert all(np.array_equal(rows[0][name], rows[1][name]) for name in ("boxes", "labels", "num_boxes"))
        apart = np.abs(rows[0]["images"].astype(int) - rows[1]["images"]).mean((1, 2, 3))
        assert (apart > 0).all() and (apart <= 0.5).all() if index == 0 else not apart.any()
        beyond = np.array(mean_color(SQUARE))
        num_beyond += int((rows[0]["images"].transpose(0, 2, 3, 1) == beyond).all(3).any((1, 2)).sum())
    assert num_beyond > 10


@pytest.mark.native
@pytest.mark.usefixtures("compiled_decoder")
def test_an_annotation_for_another_size_is_the_same_error_by_the_compiled_decoder() -> None:
    dataset = Listed([(encoded(photograph(90, 60)), make_annotation([[1, 1, 9, 9]], [0], 1, 61, 90))])
    pipeline = DetectionPipeline(dataset, SQUARE, AugmentConfig(crop="ssd", decoder="native"), 4)
    with pytest.raises(DataError, match="the image is 90 x 60, its annotation is for 90 x 61"):
        pipeline(
            np.zeros(1, np.int64),
            pipeline.params(0, np.zeros(1, np.int64)),
            {c.name: c.empty(1) for c in pipeline.columns},
        )
