"""Worker processes: the batches and errors of threads, shared arrays, and nothing left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch
from box_examples import write_coco, write_voc, write_yolo
from data_examples import encode, noise

from reconv.core import wait
from reconv.core.errors import DataError, RankLostError, ResourceError, UsageError
from reconv.data.convert.dataset import convert, make_target
from reconv.data.convert.open_splits import open_splits
from reconv.data.convert.transcode import TranscodeOptions
from reconv.data.dataset import Dataset, Sample
from reconv.data.pipeline.bad_samples import BadSample, BadSamples
from reconv.data.pipeline.eval_loader import EvalLoader
from reconv.data.pipeline.prefetcher import DataContext
from reconv.data.pipeline.train_loader import TrainLoader, make_train_loader
from reconv.data.pipeline.workers import process_pool
from reconv.data.pipeline.workers.process_pool import ProcessPool
from reconv.data.pipeline.workers.shared_pickle import pack, unpack
from reconv.data.readers.dataset_factory import open_dataset
from reconv.data.readers.digits import open_digits
from reconv.data.readers.folder import FolderDataset
from reconv.data.readers.shards.packed import PackedDataset, shard_name
from reconv.data.readers.shards.packed_format import PackedShardInfo, write_shard
from reconv.recipe.parts.batch import BatchConfig
from reconv.recipe.parts.data import AugmentConfig, DataConfig, PreprocessConfig
from reconv.recipe.plan import Facts, make_plan
from reconv.recipe.schema import Recipe

COLOR = PreprocessConfig(size=24, resize=28)
GRAY = PreprocessConfig(size=12, resize=None, channels=1, mean=(0.5,), std=(0.5,))


def loader(
    dataset: Dataset, workers: ProcessPool | None, spec: PreprocessConfig = COLOR, bad_samples: BadSamples | None = None
) -> TrainLoader:
    recipe = Recipe(
        data=DataConfig(preprocess=spec, drop_last=False, num_workers=2),
        augment=AugmentConfig(crop="random_resized"),
        batch=BatchConfig(size=6),
    )
    plan = make_plan(recipe, Facts(len(dataset), 1, len(dataset.class_names)))
    context = replace(DataContext.on_host(), workers=workers)
    return make_train_loader(dataset, recipe, plan, context, bad_samples=bad_samples)


@pytest.mark.parametrize("kind", ["folder", "packed", "digits"])
def test_batches_are_those_of_threads(tree: Path, tmp_path: Path, processes: ProcessPool, kind: str) -> None:
    dataset: Dataset = FolderDataset(tree, "train")
    if kind == "packed":
        description = PackedShardInfo("train", 0, 1, 11, 11, "", "", dataset.class_names)
        with open(tmp_path / shard_name("train", 0, 1), "wb") as file:
            write_shard(file, description, (dataset[index] for index in range(11)))
        dataset = PackedDataset(tmp_path, "train")
    spec = COLOR
    if kind == "digits":
        dataset, spec = open_digits("train"), GRAY
    expected = [step[0] for step in loader(dataset, None, spec).steps(0, 6)]
    found = [step[0] for step in loader(dataset, processes, spec).steps(0, 6)]
    for left, right in zip(expected, found, strict=True):
        assert left.tensors.keys() == right.tensors.keys()
        assert all(torch.equal(left[name], right[name]) for name in left.tensors)
    whole = list(EvalLoader(dataset, spec, 4, replace(DataContext.on_host(), workers=processes)))
    assert torch.cat([batch["indices"] for batch in whole]).tolist() == list(range(len(dataset)))


def test_a_bad_file_is_the_same_error_with_its_path(tree: Path, processes: ProcessPool) -> None:
    dataset = FolderDataset(tree, "train")
    broken = Path(dataset.path(6))
    broken.write_bytes(broken.read_bytes()[:200])
    with pytest.raises(DataError) as caught:
        list(loader(dataset, processes).steps(0, 3))
    assert caught.value.where == str(broken)
    assert caught.value.hint


def test_bad_files_are_replaced_as_by_threads(tree: Path, processes: ProcessPool) -> None:
    dataset = FolderDataset(tree, "train")
    for index in (2, 7):
        Path(dataset.path(index)).write_bytes(b"no image")
    results = []
    for workers in (None, processes):
        logged: list[BadSample] = []
        bad_samples = BadSamples(5, logged.append)
        steps = [step[0] for step in loader(dataset, workers, bad_samples=bad_samples).steps(0, 4)]
        results.append((logged, [batch["indices"].tolist() for batch in steps], [batch["images"] for batch in steps]))
    assert results[0][0] == results[1][0] and len(results[0][0]) == 2
    assert results[0][1] == results[1][1]
    assert all(torch.equal(a, b) for a, b in zip(results[0][2], results[1][2], strict=True))


def test_workers_import_reconv_from_where_this_process_found_it(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reconv").mkdir()  # the environment finds another package first
    (tmp_path / "reconv" / "__init__.py").write_text("raise ImportError('another reconv')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    workers = ProcessPool(1)
    next(iter(loader(FolderDataset(tree, "train"), workers).steps(0, 1)))
    workers.close()


def is_alive(process: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_killed_worker_is_an_error_and_the_others_end_too(tree: Path) -> None:
    workers = ProcessPool(2)
    ids = workers.process_ids
    stream = loader(FolderDataset(tree, "train"), workers).steps(0, 10_000)
    next(stream)
    os.kill(ids[0], signal.SIGKILL)
    with pytest.raises(ResourceError, match="data worker process died") as caught:
        for _ in stream:
            pass
    assert "SIGKILL" in caught.value.why and "threads" in caught.value.hint
    workers.close()
    assert not any(map(is_alive, ids))


def test_a_stopped_worker_is_named_and_ends_the_run(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = ProcessPool(1)
    stream = loader(FolderDataset(tree, "train"), workers).steps(0, 10_000)
    next(stream)
    monkeypatch.setattr(wait, "WAIT_TIMEOUT_S", 1.0)  # also of waits that have begun
    monkeypatch.setattr(process_pool, "_CLOSE_TIMEOUT_S", 0.1)
    (pid,) = workers.process_ids
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(RankLostError, match=f"data worker process {pid} did not respond") as caught:
        for _ in stream:
            pass
    assert "stopped" in caught.value.where
    workers.close()
    assert not is_alive(pid)


def shared_files() -> int:
    """Descriptors of shared memory that this process holds."""
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sum("reconv-data" in os.readlink(link) for link in links if os.path.lexists(link))


def named_shared_memory() -> set[str]:
    """Files of /dev/shm that this process has mapped; they would outlive it."""
    return {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line}


def test_a_closed_pool_leaves_no_process_and_no_shared_memory(tree: Path) -> None:
    gc.collect()
    held, before = shared_files(), named_shared_memory()
    workers = ProcessPool(1)
    ids = workers.process_ids
    stream = loader(FolderDataset(tree, "train"), workers).steps(0, 1000)
    for _ in range(4):
        batch = next(stream)
    assert shared_files() > held
    assert named_shared_memory() <= before
    stream.close()  # type: ignore[attr-defined]
    workers.close()
    del batch
    gc.collect()
    assert not any(map(is_alive, ids))
    assert shared_files() == held


def test_a_worker_that_does_not_end_does_not_keep_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_pool, "_CLOSE_TIMEOUT_S", 120)
    pool = ProcessPool(2)
    stopped, other = [worker.process for worker in pool._workers]
    os.kill(stopped.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as thread:
        closing = thread.submit(pool.close)
        assert other.wait(100) == 0
        assert not closing.done()
        os.kill(stopped.pid, signal.SIGCONT)
        closing.result()
    assert stopped.returncode == 0


@pytest.mark.slow
def test_workers_end_when_their_parent_is_killed(tree: Path) -> None:
    program = (
        "import os, sys, time\n"
        "from reconv.data.pipeline.workers.process_pool import ProcessPool\n"
        "workers = ProcessPool(1)\n"
        "print(*workers.process_ids, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    ids = [int(word) for word in parent.stdout.readline().split()]
    assert len(ids) == 1 and all(map(is_alive, ids))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    for _ in range(600):  # they may still be importing
        if not any(map(is_alive, ids)):
            break
        time.sleep(0.1)
    assert not any(map(is_alive, ids))


def test_a_stop_signal_to_the_whole_group_does_not_end_workers(tree: Path, processes: ProcessPool) -> None:
    stream = loader(FolderDataset(tree, "train"), processes).steps(0, 100)
    next(stream)
    next(stream)  # both are up
    for number in (signal.SIGTERM, signal.SIGINT):
        for process in processes.process_ids:
            os.kill(process, number)
    assert len([next(stream) for _ in range(10)]) == 10
    stream.close()  # type: ignore[attr-defined]


def test_the_index_is_sent_once_and_lies_in_shared_memory(tmp_path: Path, processes: ProcessPool) -> None:
    for split in ("train", "val"):
        (tmp_path / split / "only").mkdir(parents=True)
        for number in range(500):
            (tmp_path / split / "only" / f"{number:020}.png").write_bytes(encode(noise(4, 4, 3, 0)))
    dataset = FolderDataset(tmp_path, "train")
    shared = pack(dataset, {})
    assert shared.shared_bytes >= dataset.index_bytes
    assert len(shared.content) < 2000
    received = unpack(shared.content, shared.extents, shared.file, {})
    shared.close()
    assert received.path(317) == dataset.path(317)
    assert received[499] == dataset[499]
    assert dataset.index_bytes / len(dataset) < 100
    before = processes.shared_bytes
    processes.share(dataset)
    assert processes.shared_bytes >= before + dataset.index_bytes
    held = processes.shared_bytes
    list(loader(dataset, processes, GRAY).steps(0, 2))
    assert processes.shared_bytes == held  # the pipeline refers to the dataset that was sent before


def written(tree: Path, out: Path, kind: str) -> Path:
    """A dataset of a kind."""
    box = {"bbox": [2, 3, 10, 12], "category_id": 7, "area": 120}
    match kind:
        case "tfrecord" | "tar" | "packed":
            splits, root = open_splits(str(tree), "auto", None, None)
            of_shards = (None, {"train": 3, "val": 2}) if kind == "tfrecord" else (4, None)
            convert(splits, root, out, make_target(kind, TranscodeOptions(), *of_shards), 1, lambda done, total: None)
            return out
        case "csv":
            files = sorted(str(path.relative_to(tree)) for path in (tree / "train").rglob("*.*"))
            (tree / "labels.csv").write_text("\n".join(["file,label", *(f"{file},cat" for file in files)]) + "\n")
            return tree
        case "coco":
            images = [("a.jpg", 20, 30, [box]), ("b.jpg", 20, 30, [box])]
            return write_coco(out, {"train": images, "val": images}, {7: "cat"})
        case "voc":
            objects = [("cat", (1.0, 2.0, 9.0, 12.0), 0)]
            return write_voc(out, {"train": ["a"], "val": ["b"]}, {"a": (20, 30, objects), "b": (20, 30, objects)})
        case "yolo":
            return write_yolo(out, "images/train", {"a": ["0 0.5 0.5 0.2 0.4"]}, ["cat"])
    return tree


BOXED = ("coco", "voc", "yolo")


@pytest.mark.parametrize(
    ("kind", "percent"),
    [*zip(("folder", "tfrecord", "tar", "packed", "csv", *BOXED), cycle((60, 100)))],
)
def test_every_kind_of_dataset_can_be_sent_to_workers(tree: Path, tmp_path: Path, kind: str, percent: float) -> None:
    data = DataConfig(subset_percent=percent, background_class=percent < 100 and kind not in BOXED)
    dataset = open_dataset(kind, written(tree, tmp_path / "new", kind), "train", data, boxes=kind in BOXED)
    shared = pack(dataset, {})
    received = unpack(shared.content, shared.extents, shared.file, {})
    shared.close()
    assert len(received) == len(dataset) > 0
    for index in range(len(dataset)):
        ours, theirs = dataset[index], received[index]
        assert (ours.data, ours.target, ours.name) == (theirs.data, theirs.target, theirs.name)


def test_a_dataset_that_cannot_be_pickled_is_refused_with_a_hint(tree: Path, processes: ProcessPool) -> None:
    class Local(FolderDataset):
        def __getitem__(self, index: int) -> Sample:
            return super().__getitem__(index)

    with pytest.raises(UsageError, match="cannot be sent to worker processes") as caught:
        list(loader(Local(tree, "train"), processes).steps(0, 1))
    assert "threads" in caught.value.hint


def test_shared_arrays_are_read_only() -> None:
    shared = pack(np.arange(1000), {})
    received = unpack(shared.content, shared.extents, shared.file, {})
    shared.close()
    assert np.array_equal(received, np.arange(1000))
    with pytest.raises(ValueError, match="read-only"):
        received[0] = 1
