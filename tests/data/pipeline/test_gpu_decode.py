"""Rows that a device's JPEG engine makes: which they are, what of them goes back to the host, and that nothing else
changes. The engine here is Pillow and the plain form of the crop, on the CPU."""

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

from reconv.batch import Batch
from reconv.data.pipeline.bad_samples import BadSample, BadSamples
from reconv.data.pipeline.decode_balance import balanced_share, measure_gpu_share
from reconv.data.pipeline.eval_loader import EvalLoader
from reconv.data.pipeline.gpu_decode import GpuDecoder, is_on_gpu
from reconv.data.pipeline.prefetcher import DataContext
from reconv.data.pipeline.train_loader import make_train_loader
from reconv.data.pipeline.workers.process_pool import ProcessPool
from reconv.data.pipeline.workers.thread_pool import ThreadPool, Workers
from reconv.data.readers.folder import FolderDataset
from reconv.errors import DataError, RecipeError
from reconv.kernels.crop.ops import CropBox, crop_reference
from reconv.recipe.data_fields import AugmentConfig, DataConfig, PreprocessConfig
from reconv.recipe.plan import Facts, make_plan
from reconv.recipe.schema import BatchConfig, Recipe

SIZE = 48
SPEC = PreprocessConfig(size=SIZE, resize=SIZE)
ODD = {3: "PNG", 5: "grey", 8: "progressive", 9: "large"}  # what the engine is not given, by index
NUM = 14
BRIGHTER = 3  # what this engine adds, so that one sees whose a row is


class PillowEngine:
    """Decodes by Pillow; some files it does not take."""

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
        pictures = [
            torch.from_numpy(np.array(Image.open(io.BytesIO(data[number])))).permute(2, 0, 1) for number in taken
        ]
        own = [boxes[number] for number in taken]
        return crop_reference(pictures, own, size, antialias=antialias, is_cut=is_cut) + BRIGHTER, taken

    def write_crops(self, images: Tensor, rows: Tensor, crops: Tensor, indices: Tensor) -> None:
        images.index_copy_(0, rows, crops[indices])


@pytest.fixture
def source(tmp_path: Path) -> FolderDataset:
    folder = tmp_path / "tree" / "train" / "ant"
    folder.mkdir(parents=True)
    for number in range(NUM):
        pixels = photograph(60 + number, 90 - 2 * number, number)
        kind, file = ODD.get(number, ""), io.BytesIO()
        if kind == "PNG":
            Image.fromarray(pixels).save(file, "PNG")
        data = {
            "PNG": file.getvalue(),
            "grey": encoded(pixels, "L", quality=60),
            "progressive": encoded(pixels, quality=60, progressive=True),
            "large": encoded(np.random.default_rng(1).integers(0, 256, (90, 90, 3), dtype=np.uint8), quality=95),
        }.get(kind) or encoded(pixels, quality=60)
        (folder / f"{number:02}.jpg").write_bytes(data)
    (tmp_path / "tree" / "val" / "ant").mkdir(parents=True)
    (tmp_path / "tree" / "val" / "ant" / "0.jpg").write_bytes(encoded(photograph(60, 60)))
    return FolderDataset(tmp_path / "tree", "train")


@contextmanager
def opened(engine: PillowEngine | None) -> Iterator[GpuDecoder | None]:
    rows = None if engine is None else GpuDecoder(engine)
    yield rows
    if rows is not None:
        rows.close()


def stream(
    source: FolderDataset,
    engine: PillowEngine | None,
    share: float = 0.5,
    *,
    start: int = 0,
    stop: int = 5,
    workers: Workers | None = None,
    faults: BadSamples | None = None,
    micro: int = 8,
    process_group: int = 1,
) -> list[Batch]:
    """Steps of eight rows, the ranks' micro-batches after each other."""
    recipe = Recipe(
        seed=3,
        data=DataConfig(preprocess=SPEC, drop_last=False, num_workers=2),
        augment=AugmentConfig(decoder="pillow"),
        batch=BatchConfig(size=8, group=4, micro=micro // process_group),
    )
    plan = replace(make_plan(recipe, Facts(NUM, 1, 1, world_size=process_group)), gpu_share=share)
    found = []
    for rank in range(process_group):
        with opened(engine) as decoder:
            context = replace(DataContext.on_host(), workers=workers, gpu_decoder=decoder)
            loader = make_train_loader(source, recipe, plan, context, rank, faults)
            found += [
                batch.map(torch.clone) for step in loader.steps(start, stop) for batch in step
            ]  # memory is used again
    return sorted(found, key=lambda batch: int(batch.positions[0]))


def joined(batches: list[Batch], name: str) -> Tensor:
    return torch.cat([batch[name] for batch in batches])


def same(one: list[Batch], other: list[Batch]) -> bool:
    return all(torch.equal(joined(one, name), joined(other, name)) for name in ("images", "targets", "indices"))


def test_the_share_is_evenly_spread_by_position_and_exact() -> None:
    for share in (1 / 16, 0.3, 7 / 16, 1.0):
        own = is_on_gpu(np.arange(16_000), share)
        assert own.sum() == round(16_000 * share)
        counts = own.reshape(-1, 160).sum(1)
        assert counts.max() - counts.min() <= 1
    assert not is_on_gpu(np.arange(100), 0.0).any()


def test_handed_rows_are_the_engines_and_all_others_are_the_hosts(source: FolderDataset) -> None:
    engine = PillowEngine()
    with_engine, without = stream(source, engine), stream(source, None)
    assert with_engine[0].tensors.keys() == without[0].tensors.keys()
    apart = (joined(with_engine, "images").float() - joined(without, "images").float()).flatten(1).mean(1)
    positions = torch.cat([batch.positions for batch in with_engine])
    indices = joined(with_engine, "indices")
    wanted = torch.from_numpy(is_on_gpu(positions.numpy(), 0.5))
    wanted &= ~torch.isin(indices, torch.tensor(list(ODD)))
    assert 0 < wanted.sum() == engine.num_files < 20
    assert torch.equal(apart > BRIGHTER / 2, wanted)
    assert (apart[wanted] - BRIGHTER).abs().max() < 0.3  # the crops are those of the host
    assert (joined(with_engine, "images")[~wanted] == joined(without, "images")[~wanted]).all()


def test_workers_ranks_micro_batches_and_a_resume_change_nothing(source: FolderDataset) -> None:
    expected = stream(source, PillowEngine())
    for num_workers in (1, 3):
        workers = ThreadPool(num_workers)
        assert same(stream(source, PillowEngine(), workers=workers), expected)
        workers.close()
    processes = ProcessPool(1)
    assert same(stream(source, PillowEngine(), workers=processes), expected)
    processes.close()
    assert same(stream(source, PillowEngine(), micro=4), expected)
    assert same(stream(source, PillowEngine(), process_group=2), expected)
    later = stream(source, PillowEngine(), start=2)
    assert same(later, expected[-len(later) :]) and len(later) == 3


def test_what_the_engine_does_not_take_is_made_by_the_host(source: FolderDataset) -> None:
    refused = [source[index].data for index in (0, 1, 2)]
    found = stream(source, PillowEngine(refused))  # type: ignore[arg-type]
    engine, host = stream(source, PillowEngine()), stream(source, None)
    back = torch.isin(joined(found, "indices"), torch.tensor([0, 1, 2]))
    assert back.any() and not torch.equal(joined(engine, "images")[back], joined(host, "images")[back])
    assert torch.equal(joined(found, "images")[back], joined(host, "images")[back])
    assert torch.equal(joined(found, "images")[~back], joined(engine, "images")[~back])


def test_a_bad_file_is_the_hosts_to_judge_and_its_neighbours_stay_the_engines(source: FolderDataset) -> None:
    whole = stream(source, PillowEngine(), 1.0)
    broken = Path(source.path(4))
    broken.write_bytes(b"no image")
    with pytest.raises(DataError) as caught:
        stream(source, PillowEngine(), 1.0)
    assert caught.value.where == str(broken)
    runs = []
    for num_workers in (1, 4):
        told: list[BadSample] = []
        workers = ThreadPool(num_workers)
        runs.append(stream(source, PillowEngine(), 1.0, workers=workers, faults=BadSamples(3, told.append)))
        workers.close()
        assert [fault.path for fault in told] == [str(broken)]
    assert same(*runs)
    replaced = joined(whole, "indices") == 4
    assert replaced.any() and not torch.isin(joined(runs[0], "indices"), torch.tensor([4])).any()
    assert torch.equal(joined(runs[0], "images")[~replaced], joined(whole, "images")[~replaced])
    by_host = stream(source, None, faults=BadSamples(3))
    assert torch.equal(joined(runs[0], "images")[replaced], joined(by_host, "images")[replaced])


def test_an_engine_that_fails_ends_the_run(source: FolderDataset) -> None:
    class Broken(PillowEngine):
        def crops(self, *_: object, **__: object) -> tuple[Tensor, list[int]]:
            raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError):
        stream(source, Broken())


def test_a_share_is_balanced_by_what_each_side_takes() -> None:
    assert balanced_share(decode_s=1, read_s=0, gpu_s=1) == 0.5
    assert balanced_share(decode_s=1, read_s=0.25, gpu_s=0.25) == 15 / 16  # never all: evaluation needs workers too
    assert balanced_share(decode_s=1e-6, read_s=0, gpu_s=1) == 1 / 16


def test_a_share_is_measured_on_the_data_and_refused_where_the_engine_gets_nothing(source: FolderDataset) -> None:
    augment = AugmentConfig(decoder="pillow")
    share = measure_gpu_share(source, SPEC, augment, PillowEngine(), num_workers=2, seed=0)
    assert share * 16 in range(1, 16)
    with pytest.raises(RecipeError, match="supports none of the images"):
        measure_gpu_share(source, PreprocessConfig(size=8, resize=8), augment, PillowEngine(), num_workers=2, seed=0)


def test_a_share_is_measured_without_bad_files_which_a_run_may_bear(source: FolderDataset) -> None:
    whole, without = PillowEngine(), PillowEngine()
    measure_gpu_share(source, SPEC, AugmentConfig(decoder="pillow"), whole, num_workers=2, seed=0)
    Path(source.path(4)).write_bytes(b"no image")
    measure_gpu_share(source, SPEC, AugmentConfig(decoder="pillow"), without, num_workers=2, seed=0)
    assert 0 < without.num_files < whole.num_files


def evaluated(source: FolderDataset, engine: PillowEngine | None, faults: BadSamples | None = None) -> list[Batch]:
    with opened(engine) as decoder:
        context = replace(DataContext.on_host(), gpu_decoder=decoder)
        loader = EvalLoader(source, SPEC, 4, context, 2, bad_samples=faults)
        return [batch.map(torch.clone) for batch in loader]


def test_evaluation_is_the_engines_where_files_are_for_it_and_near_the_hosts(source: FolderDataset) -> None:
    engine = PillowEngine()
    found, expected = evaluated(source, engine), evaluated(source, None)
    assert torch.equal(joined(found, "indices"), torch.arange(NUM)) and engine.num_files == NUM - len(ODD)
    apart = joined(found, "images").int() - joined(expected, "images").int()
    for index in range(NUM):
        extra = 0 if index in ODD else BRIGHTER
        assert (apart[index] - extra).abs().max() <= (0 if index in ODD else 1)


def test_evaluation_leaves_bad_files_out_and_keeps_the_others_rows(source: FolderDataset) -> None:
    whole = evaluated(source, PillowEngine())
    Path(source.path(5)).write_bytes(b"no image")
    refused = [source[6].data]
    found = evaluated(source, PillowEngine(refused), BadSamples(1))  # type: ignore[arg-type]
    host = evaluated(source, None, BadSamples(1))
    indices = joined(found, "indices")
    assert indices.tolist() == [index for index in range(NUM) if index != 5]
    same_rows = indices[indices != 6]
    assert torch.equal(joined(found, "images")[indices != 6], joined(whole, "images")[same_rows])
    assert torch.equal(joined(found, "images")[indices == 6], joined(host, "images")[indices == 6])
