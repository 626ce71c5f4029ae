"""One dataset in every format gives the same samples and batches."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

import reconv
from reconv.core.errors import DataError, ExitCode
from reconv.data.dataset import Dataset, Split, all_targets, class_counts
from reconv.data.pipeline.eval_loader import EvalLoader
from reconv.data.pipeline.prefetcher import DataContext
from reconv.data.pipeline.sample_cache import CacheBudget, cache_samples
from reconv.data.pipeline.train_loader import make_train_loader
from reconv.data.readers.dataset_factory import open_dataset
from reconv.data.readers.detect import detect
from reconv.data.readers.folder import FolderDataset
from reconv.data.readers.shards.tfrecord_format import encode_example, write_records
from reconv.recipe.parts.batch import BatchConfig
from reconv.recipe.parts.data import AugmentConfig, DataConfig, PreprocessConfig
from reconv.recipe.plan import Facts, make_plan
from reconv.recipe.schema import Recipe

FORMATS = ("tfrecord", "tar", "csv")
PREPROCESS = PreprocessConfig(size=24, resize=28)
NUM_SHARDS = 2


def rewritten(tree: Path, kind: str) -> Path:
    """The tree's samples, in the tree's order, in another format."""
    root = tree.parent / kind
    lines = ["file,label,split"]
    for split, name in (("train", "train"), ("val", "validation")):
        source = FolderDataset(tree, split)  # type: ignore[arg-type]
        rows = [(source[i], source.class_names[source[i].target], i) for i in range(len(source))]
        (root / name).mkdir(parents=True, exist_ok=True)
        cut = len(rows) // NUM_SHARDS + 1
        for shard in range(NUM_SHARDS):
            part = rows[shard * cut : (shard + 1) * cut]
            if kind == "tfrecord":
                examples = (
                    encode_example(
                        {
                            "image/encoded": [sample.data],
                            "image/class/label": [sample.target + 1],
                            "image/class/synset": [class_name.encode()],
                        }
                    )
                    for sample, class_name, _ in part
                    if isinstance(sample.data, bytes)
                )
                write_records(root / name / f"{name}-{shard:05}-of-{NUM_SHARDS:05}", examples)
            elif kind == "tar":
                with tarfile.open(root / name / f"{shard:04}.tar", "w") as tar:
                    for sample, _, index in part:
                        assert isinstance(sample.data, bytes)
                        for ending, data in (("jpg", sample.data), ("cls", b"%d" % sample.target)):
                            info = tarfile.TarInfo(f"{index:06}.{ending}")
                            info.size = len(data)
                            tar.addfile(info, io.BytesIO(data))
        lines += [f"{os.path.relpath(sample.name, tree.parent)},{class_name},{split}" for sample, class_name, _ in rows]
    if kind == "tar":
        (root / "classes.txt").write_text("ant\nbee\ncat\n")
    if kind == "csv":
        for name in ("train", "validation"):
            (root / name).rmdir()
        (root / "list.csv").write_text("\n".join(lines).replace("tree/", "../tree/") + "\n")
    return root


def recipe_of(workers: int) -> Recipe:
    return Recipe(
        seed=5,
        data=DataConfig(preprocess=PREPROCESS, drop_last=False, num_workers=workers),
        augment=AugmentConfig(crop="random_resized"),
        batch=BatchConfig(size=6, group=3, micro=3),
    )


def batches(source: Dataset, workers: int, start: int = 0, world_size: int = 1) -> list[dict[str, Tensor]]:
    """The global batches of the steps [start, 4), ranks and micro-batches joined."""
    recipe = recipe_of(workers)
    plan = make_plan(recipe, Facts(len(source), 1, len(source.class_names), world_size=world_size))
    ranks = [
        list(make_train_loader(source, recipe, plan, DataContext.on_host(), rank).steps(start, 4))
        for rank in range(world_size)
    ]
    steps = [[batch for rank in ranks for batch in rank[step]] for step in range(4 - start)]
    return [{name: torch.cat([b[name] for b in step]) for name in ("images", "targets", "indices")} for step in steps]


def equal(left: list[dict[str, Tensor]], right: list[dict[str, Tensor]]) -> bool:
    assert len(left) == len(right) > 0
    return all(torch.equal(a[name], b[name]) for a, b in zip(left, right, strict=True) for name in a)


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_gives_the_bytes_of_the_folder_for_any_workers_ranks_and_first_step(tree: Path, kind: str) -> None:
    expected = batches(FolderDataset(tree, "train"), 0)
    root = rewritten(tree, kind)
    assert detect(root).kind == kind
    source = open_dataset("auto", root, "train", DataConfig())
    assert source.class_names == ("ant", "bee", "cat")
    for workers in (0, 8):
        assert equal(batches(source, workers), expected)
    assert equal(batches(source, 2, world_size=2), expected)
    assert equal(batches(source, 2, start=3), expected[3:])


@pytest.mark.parametrize("kind", ("folder", *FORMATS))
def test_every_format_knows_its_targets_without_reading_an_image(tree: Path, kind: str) -> None:
    root = tree if kind == "folder" else rewritten(tree, kind)
    config = DataConfig(subset_percent=50, background_class=True)
    source = cache_samples(open_dataset(kind, root, "train", config), CacheBudget(10**6))
    for folder in {root, tree}:
        shutil.rmtree(folder)
    assert all_targets(source).tolist() == [1, 1, 1, 2, 2, 3]
    assert class_counts(source) == (0, 3, 2, 1)


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_evaluates_each_sample_once(tree: Path, kind: str) -> None:
    root = rewritten(tree, kind)
    for source in (FolderDataset(tree, "val"), open_dataset(kind, root, "val", DataConfig())):
        loaded = list(EvalLoader(source, PREPROCESS, 2, DataContext.on_host(), 2))
        assert torch.cat([batch["indices"] for batch in loaded]).tolist() == list(range(5))
        assert torch.cat([batch["targets"] for batch in loaded]).tolist() == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("kind", FORMATS)
def test_a_fingerprint_survives_a_move_and_changes_with_the_data(tree: Path, kind: str) -> None:
    root = rewritten(tree, kind)
    splits: tuple[Split, ...] = ("train", "val")
    before = [open_dataset("auto", root, split, DataConfig()).fingerprint() for split in splits]
    moved = root.rename(root.with_name("moved"))
    assert [open_dataset("auto", moved, split, DataConfig()).fingerprint() for split in splits] == before
    assert before[0] != before[1]
    if kind == "csv":
        table = moved / "list.csv"
        table.write_text(table.read_text().replace(",ant,train", ",bee,train", 1))
    else:
        first, second = sorted((moved / "train").iterdir())[-2:]
        swapped = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(swapped)
    assert open_dataset("auto", moved, "train", DataConfig()).fingerprint() != before[0]


@pytest.mark.parametrize("workers", [0, 4])
def test_a_wrong_checksum_ends_the_epoch_for_any_workers(tree: Path, workers: int) -> None:
    root = rewritten(tree, "tfrecord")
    path = root / "train" / "train-00001-of-00002"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    source = open_dataset("auto", root, "train", DataConfig())
    with pytest.raises(DataError, match="wrong checksum") as caught:
        batches(source, workers)
    assert caught.value.code == ExitCode.DATA
    assert caught.value.where.startswith(f"{path}, byte ")


def test_a_run_on_records_has_the_weights_of_one_on_folders(tree: Path, tmp_path: Path) -> None:
    settings = {"batch.size": "4", "length": "3step", "schedule.warmup": "0step", "engine.num_threads": "1"}
    settings |= {"data.source": "auto", "data.preprocess.resize": "32", "save.every": "3step"}
    overrides = [(field, value, "--set") for field, value in settings.items()]
    weights = {}
    for kind, root in (("folder", tree), ("tfrecord", rewritten(tree, "tfrecord"))):
        out = tmp_path / f"run-{kind}"
        result = reconv.train("cifar10-resnet20", data=root, out=out, overrides=overrides, device="cpu")
        assert result.summary["steps"] == 3
        weights[kind] = (out / "checkpoints" / "step-000000003" / "model.safetensors").read_bytes()
        (score,) = reconv.evaluate(out, device="cpu")
        assert score.metrics["top1"] == result.summary["value"]
    assert weights["folder"] == weights["tfrecord"]
