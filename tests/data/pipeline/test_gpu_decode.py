"""Rows that a GPU decodes: which they are, which fall back to the host, and that nothing else changes.

The decoder here is Pillow with the reference crop, on the CPU.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from jpeg_examples import encoded, photograph
from PIL import Image
from torch import Tensor

from reconv.core.batch import Batch
from reconv.core.errors import DataError, RecipeError
from reconv.data.pipeline.bad_samples import BadSample, BadSamples
from reconv.data.pipeline.decode_balance import balanced_fraction, measure_gpu_decode_fraction
from reconv.data.pipeline.eval_loader import EvalLoader
from reconv.data.pipeline.gpu_decode import GpuDecoder, is_on_gpu
from reconv.data.pipeline.prefetcher import DataContext
from reconv.data.pipeline.train_loader import make_train_loader
from reconv.data.pipeline.workers.process_pool import ProcessPool
from reconv.data.pipeline.workers.thread_pool import ThreadPool, Workers
from reconv.data.readers.folder import FolderDataset
from reconv.kernels.ops.crop import CropBox, crop_reference
from reconv.recipe.parts.batch import BatchConfig
from reconv.recipe.parts.data import AugmentConfig, DataConfig, PreprocessConfig
from reconv.recipe.plan import Facts, make_plan
from reconv.recipe.schema import Recipe

SIZE = 48
SPEC = PreprocessConfig(size=SIZE, resize=SIZE)
ODD = {3: "PNG", 5: "gray", 8: "progressive", 9: "large"}  # files that the GPU does not get, by index
NUM = 14
BRIGHTER = 3  # added by this decoder, to tell its rows from those of the host


class PillowDecoder:
    """Decodes with Pillow and rejects some files."""

    def __init__(self, refused: Sequence[bytes] = ()) -> None:
        self.refused = list(refused)
        self.num_files = 0

    def crops(
        self, files: Sequence[Tensor], boxes: Sequence[CropBox], size: int, *, antialias: bool, is_cut: bool
    ) -> tuple[Tensor, list[int]]:
        data = [bytes(file.numpy()) for file in files]
        taken = [number for number, file in enumerate(data) if file not in self.refused]
        self.num_files += len(taken)
        if not taken:
            return torch.empty((0, 3, size, size), dtype=torch.uint8), taken
        images = [torch.from_numpy(np.array(Image.open(io.BytesIO(data[number])))).permute(2, 0, 1) for number in taken]
        own = [boxes[number] for number in taken]
        return crop_reference(images, own, size, antialias=antialias, is_cut=is_cut) + BRIGHTER, taken

    def write_crops(self, images: Tensor, rows: Tensor, crops: Tensor, indices: Tensor) -> None:
        images.index_copy_(0, rows, crops[indices])


@pytest.fixture
def dataset(tmp_path: Path) -> FolderDataset:
    folder = tmp_path / "tree" / "train" / "ant"
    folder.mkdir(parents=True)
    for number in range(NUM):
        pixels = photograph(60 + number, 90 - 2 * number, number)
        kind, file = ODD.get(number, ""), io.BytesIO()
        if kind == "PNG":
            Image.fromarray(pixels).save(file, "PNG")
        data = {
            "PNG": file.getvalue(),
            "gray": encoded(pixels, "L", quality=60),
            "progressive": encoded(pixels, quality=60, progressive=True),
            "large": encoded(np.random.default_rng(1).integers(0, 256, (90, 90, 3), dtype=np.uint8), quality=95),
        }.get(kind) or encoded(pixels, quality=60)
        (folder / f"{number:02}.jpg").write_bytes(data)
    (tmp_path / "tree" / "val" / "ant").mkdir(parents=True)
    (tmp_path / "tree" / "val" / "ant" / "0.jpg").write_bytes(encoded(photograph(60, 60)))
    return FolderDataset(tmp_path / "tree", "train")


@contextmanager
def opened(device: PillowDecoder | None) -> Iterator[GpuDecoder | None]:
    rows = None if device is None else GpuDecoder(device)
    yield rows
    if rows is not None:
        rows.close()


def stream(
    dataset: FolderDataset,
    device: PillowDecoder | None,
    fraction: float = 0.5,
    *,
    start: int = 0,
    stop: int = 5,
    workers: Workers | None = None,
    bad_samples: BadSamples | None = None,
    micro: int = 8,
    world_size: int = 1,
) -> list[Batch]:
    """Steps of eight rows, the ranks' micro-batches after each other."""
    recipe = Recipe(
        seed=3,
        data=DataConfig(preprocess=SPEC, drop_last=False, num_workers=2),
        augment=AugmentConfig(decoder="pillow"),
        batch=BatchConfig(size=8, group=4, micro=micro // world_size),
    )
    plan = replace(make_plan(recipe, Facts(NUM, 1, 1, world_size=world_size)), gpu_decode_fraction=fraction)
    found = []
    for rank in range(world_size):
        with opened(device) as decoder:
            context = replace(DataContext.on_host(), workers=workers, gpu_decoder=decoder)
            loader = make_train_loader(dataset, recipe, plan, context, rank, bad_samples)
            found += [
                batch.map(torch.clone) for step in loader.steps(start, stop) for batch in step
            ]  # memory is used again
    return sorted(found, key=lambda batch: int(batch.positions[0]))


def joined(batches: list[Batch], name: str) -> Tensor:
    return torch.cat([batch[name] for batch in batches])


def same(one: list[Batch], other: list[Batch]) -> bool:
    return all(torch.equal(joined(one, name), joined(other, name)) for name in ("images", "targets", "indices"))


def test_the_gpu_decode_fraction_is_exact_and_evenly_spaced() -> None:
    for fraction in (1 / 16, 0.3, 7 / 16, 1.0):
        own = is_on_gpu(np.arange(16_000), fraction)
        assert own.sum() == round(16_000 * fraction)
        counts = own.reshape(-1, 160).sum(1)
        assert counts.max() - counts.min() <= 1
    assert not is_on_gpu(np.arange(100), 0.0).any()


def test_the_gpu_decodes_its_fraction_and_the_host_all_other_rows(dataset: FolderDataset) -> None:
    device = PillowDecoder()
    with_gpu, without = stream(dataset, device), stream(dataset, None)
    assert with_gpu[0].tensors.keys() == without[0].tensors.keys()
    apart = (joined(with_gpu, "images").float() - joined(without, "images").float()).flatten(1).mean(1)
    positions = torch.cat([batch.positions for batch in with_gpu])
    indices = joined(with_gpu, "indices")
    wanted = torch.from_numpy(is_on_gpu(positions.numpy(), 0.5))
    wanted &= ~torch.isin(indices, torch.tensor(list(ODD)))
    assert 0 < wanted.sum() == device.num_files < 20
    assert torch.equal(apart > BRIGHTER / 2, wanted)
    assert (apart[wanted] - BRIGHTER).abs().max() < 0.3  # the crops are those of the host
    assert (joined(with_gpu, "images")[~wanted] == joined(without, "images")[~wanted]).all()


def test_batches_do_not_depend_on_workers_ranks_micro_batches_or_first_step(
    dataset: FolderDataset, processes: ProcessPool
) -> None:
    expected = stream(dataset, PillowDecoder())
    for num_workers in (1, 3):
        workers = ThreadPool(num_workers)
        assert same(stream(dataset, PillowDecoder(), workers=workers), expected)
        workers.close()
    assert same(stream(dataset, PillowDecoder(), workers=processes), expected)
    assert same(stream(dataset, PillowDecoder(), micro=4), expected)
    assert same(stream(dataset, PillowDecoder(), world_size=2), expected)
    later = stream(dataset, PillowDecoder(), start=2)
    assert same(later, expected[-len(later) :]) and len(later) == 3


def test_files_that_the_gpu_rejects_are_decoded_by_the_host(dataset: FolderDataset) -> None:
    refused = [dataset[index].data for index in (0, 1, 2)]
    found = stream(dataset, PillowDecoder(refused))  # type: ignore[arg-type]
    device, host = stream(dataset, PillowDecoder()), stream(dataset, None)
    back = torch.isin(joined(found, "indices"), torch.tensor([0, 1, 2]))
    assert back.any() and not torch.equal(joined(device, "images")[back], joined(host, "images")[back])
    assert torch.equal(joined(found, "images")[back], joined(host, "images")[back])
    assert torch.equal(joined(found, "images")[~back], joined(device, "images")[~back])


def test_a_bad_file_is_reported_by_the_host_and_its_neighbors_stay_on_the_gpu(dataset: FolderDataset) -> None:
    whole = stream(dataset, PillowDecoder(), 1.0)
    broken = Path(dataset.path(4))
    broken.write_bytes(b"no image")
    with pytest.raises(DataError) as caught:
        stream(dataset, PillowDecoder(), 1.0)
    assert caught.value.where == str(broken)
    runs = []
    for num_workers in (1, 4):
        logged: list[BadSample] = []
        workers = ThreadPool(num_workers)
        runs.append(stream(dataset, PillowDecoder(), 1.0, workers=workers, bad_samples=BadSamples(3, logged.append)))
        workers.close()
        assert [fault.path for fault in logged] == [str(broken)]
    assert same(*runs)
    replaced = joined(whole, "indices") == 4
    assert replaced.any() and not torch.isin(joined(runs[0], "indices"), torch.tensor([4])).any()
    assert torch.equal(joined(runs[0], "images")[~replaced], joined(whole, "images")[~replaced])
    by_host = stream(dataset, None, bad_samples=BadSamples(3))
    assert torch.equal(joined(runs[0], "images")[replaced], joined(by_host, "images")[replaced])


def test_a_gpu_decoder_that_fails_is_an_error(dataset: FolderDataset) -> None:
    class Broken(PillowDecoder):
        def crops(self, *_: object, **__: object) -> tuple[Tensor, list[int]]:
            raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError):
        stream(dataset, Broken())


def test_the_fraction_balances_the_time_of_workers_and_gpu() -> None:
    assert balanced_fraction(decode_s=1, read_s=0, gpu_s=1) == 0.5
    assert balanced_fraction(decode_s=1, read_s=0.25, gpu_s=0.25) == 15 / 16  # never all: evaluation needs workers too
    assert balanced_fraction(decode_s=1e-6, read_s=0, gpu_s=1) == 1 / 16


def test_measuring_the_fraction_fails_if_no_file_is_supported(dataset: FolderDataset) -> None:
    augment = AugmentConfig(decoder="pillow")
    fraction = measure_gpu_decode_fraction(dataset, SPEC, augment, PillowDecoder(), num_workers=2, seed=0)
    assert fraction * 16 in range(1, 16)
    with pytest.raises(RecipeError, match="supports none of the images"):
        measure_gpu_decode_fraction(
            dataset, PreprocessConfig(size=8, resize=8), augment, PillowDecoder(), num_workers=2, seed=0
        )


def test_the_fraction_is_measured_without_bad_files(dataset: FolderDataset) -> None:
    whole, without = PillowDecoder(), PillowDecoder()
    measure_gpu_decode_fraction(dataset, SPEC, AugmentConfig(decoder="pillow"), whole, num_workers=2, seed=0)
    Path(dataset.path(4)).write_bytes(b"no image")
    measure_gpu_decode_fraction(dataset, SPEC, AugmentConfig(decoder="pillow"), without, num_workers=2, seed=0)
    assert 0 < without.num_files < whole.num_files


def evaluated(
    dataset: FolderDataset, device: PillowDecoder | None, bad_samples: BadSamples | None = None
) -> list[Batch]:
    with opened(device) as decoder:
        context = replace(DataContext.on_host(), gpu_decoder=decoder)
        loader = EvalLoader(dataset, SPEC, 4, context, 2, bad_samples=bad_samples)
        return [batch.map(torch.clone) for batch in loader]


def test_evaluation_on_the_gpu_is_close_to_the_host(dataset: FolderDataset) -> None:
    device = PillowDecoder()
    found, expected = evaluated(dataset, device), evaluated(dataset, None)
    assert torch.equal(joined(found, "indices"), torch.arange(NUM)) and device.num_files == NUM - len(ODD)
    apart = joined(found, "images").int() - joined(expected, "images").int()
    for index in range(NUM):
        extra = 0 if index in ODD else BRIGHTER
        assert (apart[index] - extra).abs().max() <= (0 if index in ODD else 1)


def test_evaluation_on_the_gpu_drops_bad_files_and_keeps_the_other_rows(dataset: FolderDataset) -> None:
    whole = evaluated(dataset, PillowDecoder())
    Path(dataset.path(5)).write_bytes(b"no image")
    refused = [dataset[6].data]
    found = evaluated(dataset, PillowDecoder(refused), BadSamples(1))  # type: ignore[arg-type]
    host = evaluated(dataset, None, BadSamples(1))
    indices = joined(found, "indices")
    assert indices.tolist() == [index for index in range(NUM) if index != 5]
    same_rows = indices[indices != 6]
    assert torch.equal(joined(found, "images")[indices != 6], joined(whole, "images")[same_rows])
    assert torch.equal(joined(found, "images")[indices == 6], joined(host, "images")[indices == 6])
