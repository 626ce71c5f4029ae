"""Conversions: lossless, reproducible, and complete or not there at all."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from data_examples import encode, noise
from PIL import Image

from reconv.cli import main
from reconv.core.errors import DataError, RunLockedError, UsageError
from reconv.data.convert.dataset import ConvertResult, convert, make_target
from reconv.data.convert.open_splits import open_splits
from reconv.data.convert.transcode import TranscodeOptions
from reconv.data.dataset import Dataset, Sample, Split
from reconv.data.decode.jpeg_header import read_header
from reconv.data.decode.pillow import decode
from reconv.data.readers.dataset_factory import open_dataset
from reconv.data.readers.shards.packed import PackedDataset
from reconv.data.readers.shards.tfrecord import TFRECORD
from reconv.data.readers.shards.tfrecord_format import parse_example
from reconv.recipe.parts.data import DataConfig

FORMATS = ("packed", "folder", "tar", "tfrecord")


def run(
    source: Path | str, destination: Path, kind: str, options: TranscodeOptions | None = None, workers: int = 1
) -> ConvertResult:
    """One conversion into small shards."""
    shards: dict[Split, int] | None = {"train": 3, "val": 2} if kind == "tfrecord" else None
    target = make_target(kind, options or TranscodeOptions(), None if shards else 4, shards)
    splits, root = open_splits(str(source), "auto", None, None)
    return convert(splits, root, destination, target, workers, lambda done, total: None)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones included."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def pixels(sample: Sample) -> np.ndarray:
    return decode(sample.data, 3, sample.name) if isinstance(sample.data, bytes) else sample.data


def decoded_samples(root: Path, split: Split) -> list[tuple[str, bytes]]:
    """Class name and pixels of every sample, sorted."""
    source = open_dataset("auto", root, split, DataConfig())
    samples = [source[index] for index in range(len(source))]
    return sorted((source.class_names[sample.target], pixels(sample).tobytes()) for sample in samples)


@pytest.fixture
def jpegs(tree: Path) -> Path:
    """The tree with JPEG files alone."""
    for path in [*tree.rglob("*.png")]:
        path.with_suffix(".JPEG").write_bytes(encode(np.asarray(Image.open(path)), "JPEG"))
        path.unlink()
    return tree


# Each format once as the source and once as the target.
@pytest.mark.parametrize(("first", "second"), [*zip(FORMATS, (*FORMATS[1:], FORMATS[0]), strict=True)])
def test_formats_are_converted_without_loss(jpegs: Path, tmp_path: Path, first: str, second: str) -> None:
    before = contents(jpegs)
    done = run(jpegs, tmp_path / "one", first)
    assert (done.num_samples, done.repaired, done.already_there) == ({"train": 11, "val": 5}, {}, False)
    run(tmp_path / "one", tmp_path / "two", second)
    for split in ("train", "val"):
        assert decoded_samples(tmp_path / "two", split) == decoded_samples(jpegs, split)
        source = open_dataset("auto", tmp_path / "two", split, DataConfig())
        assert source.kind == second
        assert source.class_names == ("ant", "bee", "cat")
    assert contents(jpegs) == before


def test_folders_survive_a_round_trip_through_packed(tree: Path, tmp_path: Path) -> None:
    (tree / "train" / "ant" / "deep").mkdir()
    (tree / "train" / "ant" / "000.JPEG").rename(tree / "train" / "ant" / "deep" / "x.JPEG")
    run(tree, tmp_path / "packed", "packed")
    run(tmp_path / "packed", tmp_path / "again", "folder")
    again = contents(tmp_path / "again")
    assert again.pop("reconv.json")
    assert again == contents(tree)


@pytest.mark.parametrize("kind", FORMATS)
def test_bytes_depend_neither_on_threads_nor_on_the_path(tree: Path, tmp_path: Path, kind: str) -> None:
    run(tree, tmp_path / "one", kind)
    tree.rename(tmp_path / "moved")
    run(tmp_path / "moved", tmp_path / "two", kind, workers=4)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


class PowerCutError(BaseException):
    """An error that nothing catches."""


@pytest.mark.parametrize("kind", ["packed", "folder"])
def test_a_conversion_killed_at_any_call_continues_to_the_same_bytes(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    for name in ("bee", "cat"):  # fewer shards, fewer calls
        for split in ("train", "val"):
            shutil.rmtree(tree / split / name)
    run(tree, tmp_path / "whole", kind)
    wanted = contents(tmp_path / "whole")
    real = {name: getattr(os, name) for name in ("fsync", "replace")}
    num_killed = 0
    for last in range(100):
        calls = 0
        destination = tmp_path / f"killed{last}"

        def killed(name: str, *args: object, last: int = last) -> object:
            nonlocal calls
            calls += 1
            if calls > last:
                raise PowerCutError
            return real[name](*args)

        for name in real:
            monkeypatch.setattr(os, name, partial(killed, name))
        try:
            run(tree, destination, kind)
            break
        except PowerCutError:
            num_killed += 1
        finally:
            for name, call in real.items():
                monkeypatch.setattr(os, name, call)
        # The rename gives the folder its name with all its content; only the sync of its parent may be missing.
        assert not destination.exists() or contents(destination) == wanted
        run(tree, destination, kind, workers=2)
        assert contents(destination) == wanted
    assert num_killed >= 15


_KILLED = """
import os, signal, sys
from pathlib import Path
from reconv.data.convert.transcode import TranscodeOptions
from reconv.data.convert.dataset import convert, make_target
from reconv.data.convert.open_splits import open_splits

splits, root = open_splits(sys.argv[1], "auto", None, None)
def progress(done, total):
    if done == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
convert(splits, root, Path(sys.argv[2]), make_target("packed", TranscodeOptions(quality=80), 4, None), 1, progress)
"""


def test_finished_shards_of_a_killed_process_are_not_written_again(tree: Path, tmp_path: Path) -> None:
    run(tree, tmp_path / "whole", "packed", TranscodeOptions(quality=80))
    cut = tmp_path / "cut"
    killed = subprocess.run([sys.executable, "-c", _KILLED, str(tree), str(cut), "10"], timeout=60)
    assert killed.returncode == -signal.SIGKILL
    staging = tmp_path / ".cut.converting"
    assert not cut.exists()
    finished = sorted(staging.glob("*.packed"))
    assert len(finished) == 2
    times = [path.stat().st_mtime_ns for path in finished]
    seen: list[int] = []
    splits, root = open_splits(str(tree), "auto", None, None)
    target = make_target("packed", TranscodeOptions(quality=80), 4, None)
    convert(splits, root, cut, target, 1, lambda done, total: seen.append(done))
    assert (seen[0], seen[-1]) == (8, 16)
    assert contents(cut) == contents(tmp_path / "whole")
    assert [(cut / path.name).stat().st_mtime_ns for path in finished] == times
    assert not staging.exists()


def test_continuing_with_other_options_or_data_is_refused(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination = tmp_path / "new"
    (tree / "val" / "cat" / "015.png").write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"(?s)not an image that can be converted.*015\.png"):
        run(tree, destination, "packed")
    with pytest.raises(UsageError, match=r"(?s)is unfinished.*form"):
        run(tree, destination, "packed", TranscodeOptions(longest=30))
    (tree / "val" / "cat" / "015.png").write_bytes(encode(noise(9, 9, 3, 0)))
    with pytest.raises(UsageError, match=r"(?s)is unfinished.*splits(.|\n)*rm -r"):
        run(tree, destination, "packed")
    assert not destination.exists()


@pytest.mark.parametrize("fact", ["encoder", "layout"])
def test_continuing_with_another_encoder_is_refused(tree: Path, tmp_path: Path, fact: str) -> None:
    """After an upgrade of the encoder, half of the shards would differ from the others."""
    (tree / "val" / "cat" / "015.png").write_bytes(b"damaged")
    with pytest.raises(DataError, match="not an image"):
        run(tree, tmp_path / "new", "packed", TranscodeOptions(quality=80))
    [begun] = (tmp_path / ".new.converting").rglob("plan.json")
    plan = json.loads(begun.read_text())
    plan["form"].pop(fact)
    begun.write_text(json.dumps(plan))
    with pytest.raises(UsageError, match=r"(?s)is unfinished.*form"):
        run(tree, tmp_path / "new", "packed", TranscodeOptions(quality=80))


def test_existing_files_are_never_overwritten(tree: Path, tmp_path: Path) -> None:
    destination = tmp_path / "new"
    destination.mkdir()
    assert not run(tree, destination, "packed").already_there
    before = contents(destination)
    assert run(tree, destination, "packed").already_there
    with pytest.raises(UsageError, match="another conversion"):
        run(tree, destination, "packed", TranscodeOptions(raw=True))
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("x")
    with pytest.raises(UsageError, match="never overwritten"):
        run(tree, mine, "packed")
    for inside in (tree, tree / "train" / "new"):
        with pytest.raises(UsageError, match="lies inside the data"):
            run(tree, inside, "packed")
    assert contents(destination) == before
    assert contents(mine) == {"thesis.txt": b"x"}


def test_two_processes_cannot_convert_to_one_folder(tree: Path, tmp_path: Path) -> None:
    splits, root = open_splits(str(tree), "auto", None, None)
    target = make_target("packed", TranscodeOptions(), 4, None)
    refused = 0

    def again(done: int, total: int) -> None:
        nonlocal refused
        if done == 5:
            with pytest.raises(RunLockedError):
                convert(splits, root, tmp_path / "new", target, 1, lambda done, total: None)
            refused += 1

    convert(splits, root, tmp_path / "new", target, 1, again)
    assert refused == 1


@pytest.mark.parametrize(
    "options",
    [
        TranscodeOptions(),
        TranscodeOptions(quality=70),
        TranscodeOptions(raw=True),
        TranscodeOptions(longest=50),
        TranscodeOptions(shortest=35),
    ],
)
def test_images_are_downscaled_and_never_upscaled(tree: Path, tmp_path: Path, options: TranscodeOptions) -> None:
    run(tree, tmp_path / "new", "packed", options)
    old, new = open_dataset("auto", tree, "train", DataConfig()), PackedDataset(tmp_path / "new", "train")
    limited = 0
    for index in range(len(old)):
        before, after = old[index], new[index]
        assert isinstance(after.data, np.ndarray) == options.raw
        (height, width), (high, wide) = pixels(before).shape[:2], pixels(after).shape[:2]
        side, limit = (
            (max(height, width), options.longest) if options.longest else (min(height, width), options.shortest)
        )
        factor = 1 if limit is None or side <= limit else limit / side
        limited += factor < 1
        assert (high, wide) == (round(height * factor), round(width * factor))
        if options == TranscodeOptions() or (factor == 1 and not options.raw and options.quality is None):
            assert after.data == before.data
        if options.raw:
            assert np.array_equal(after.data, pixels(before))
        if options.quality:
            assert isinstance(after.data, bytes)
            opened = Image.open(io.BytesIO(after.data))
            assert opened.format == "JPEG"
            assert [component[1] * component[2] for component in opened.layer] == [4, 1, 1]  # 4:2:0
            found = read_header(after.data)
            assert found is not None and found.segments is not None  # so that crops need not decode what is above
    assert limited > 0 or not (options.longest or options.shortest)


def test_gray_stays_gray_and_exif_orientation_is_applied(tmp_path: Path) -> None:
    folder = tmp_path / "tree"
    for split in ("train", "val"):
        (folder / split / "a").mkdir(parents=True)
        (folder / split / "a" / "gray.png").write_bytes(encode(noise(40, 20, 1, 0)[:, :, 0]))
        exif = Image.Exif()
        exif[0x0112] = 6
        (folder / split / "a" / "side.jpg").write_bytes(encode(noise(40, 20, 3, 1), "JPEG", exif=exif))
    run(folder, tmp_path / "raw", "packed", TranscodeOptions(raw=True))
    gray, side = (PackedDataset(tmp_path / "raw", "train")[index].data for index in range(2))
    assert isinstance(gray, np.ndarray) and isinstance(side, np.ndarray)
    assert (gray.shape, side.shape) == ((40, 20, 1), (20, 40, 3))
    assert np.array_equal(gray, noise(40, 20, 1, 0))


def test_pixels_stay_pixels_or_become_png(tmp_path: Path, write_cifar: Callable[..., Path]) -> None:
    cifar = write_cifar(tmp_path / "old", "cifar10", "binary")
    for kind in ("packed", "folder", "tar"):
        run(cifar, tmp_path / kind, kind)
        assert decoded_samples(tmp_path / kind, "train") == decoded_samples(cifar, "train")
    assert isinstance(PackedDataset(tmp_path / "packed", "train")[0].data, np.ndarray)
    assert all(path.suffix == ".png" for path in (tmp_path / "folder" / "train").rglob("*.*"))


def features_of(root: Path, pattern: str) -> list[dict[str, object]]:
    """Every record of some shards, in order."""
    from reconv.data.readers.shards.tfrecord_format import read_record, record_spans
    from reconv.storage.local import ReadWindow

    paths = sorted(root.glob(pattern))
    return [parse_example(read_record(path, *at)) for path in paths for at in record_spans(ReadWindow(path))]


def test_records_have_labels_from_1_and_png_and_cmyk_are_repaired_and_counted(tree: Path, tmp_path: Path) -> None:
    cmyk = Image.new("CMYK", (30, 20), (0, 255, 255, 0))
    cmyk.save(tree / "train" / "bee" / "zz.jpg", "JPEG", quality=100)
    done = run(tree, tmp_path / "new", "tfrecord")
    num_png = len(list(tree.rglob("*.png")))
    assert done.repaired == {"CMYK": 1, "PNG": num_png}
    records = features_of(tmp_path / "new", "train-*-of-00003")
    assert len(records) == 12
    for record in records:
        [data] = record["image/encoded"]  # type: ignore[misc]
        opened = Image.open(io.BytesIO(data))
        assert (opened.format, opened.mode) == ("JPEG", "RGB")
        assert ([opened.height], [opened.width]) == (record["image/height"], record["image/width"])
        number = {b"ant": 1, b"bee": 2, b"cat": 3}[record["image/class/synset"][0]]  # type: ignore[index]
        assert record["image/class/label"] == [number]
    [red] = [record for record in records if record["image/filename"] == [b"zz.jpg"]]
    mean = np.asarray(Image.open(io.BytesIO(red["image/encoded"][0]))).mean((0, 1))  # type: ignore[index]
    assert mean[0] > 200 and mean[1] < 60 and mean[2] < 60
    manifest = json.loads((tmp_path / "new" / "reconv.json").read_text())
    assert manifest["repaired"]["CMYK"] == ["train/bee/zz.jpg"]


def test_training_records_are_shuffled_with_seed_0_and_validation_is_not(jpegs: Path, tmp_path: Path) -> None:
    run(jpegs, tmp_path / "new", "tfrecord")
    files = [record["image/filename"][0] for record in features_of(tmp_path / "new", "train-*")]  # type: ignore[index]
    order = [8, 9, 1, 2, 5, 3, 7, 4, 0, 10, 6]  # random.seed(0), then random.shuffle of 11 numbers
    assert files == [f"{number:03}.JPEG".encode() for number in order]
    files = [record["image/filename"][0] for record in features_of(tmp_path / "new", "validation-*")]  # type: ignore[index]
    assert files == sorted(files)
    assert len(files) == 5


def test_default_and_excessive_numbers_of_shards(tree: Path) -> None:
    assert make_target("tfrecord", TranscodeOptions(), None, None).num_shards == {"train": 1024, "val": 128}
    splits, root = open_splits(str(tree), "auto", None, None)
    target = make_target("tfrecord", TranscodeOptions(), None, None)
    with pytest.raises(UsageError, match="1,024 shards for 11 train samples"):
        convert(splits, root, tree.parent / "new", target, 1, lambda done, total: None)


def test_tar_shards_have_no_times_owners_or_unknown_members(tree: Path, tmp_path: Path) -> None:
    run(tree, tmp_path / "new", "tar")
    assert sorted(path.name for path in (tmp_path / "new").glob("train*")) == [f"train-00000{n}.tar" for n in range(3)]
    with tarfile.open(tmp_path / "new" / "train-000001.tar") as tar:
        members = tar.getmembers()
    assert [member.name.partition(".")[0] for member in members[::3]] == [f"{number:08}" for number in range(4, 8)]
    assert {member.name.partition(".")[2] for member in members} <= {"jpg", "png", "cls", "json"}
    assert {(member.mtime, member.uid, member.uname) for member in members} == {(0, 0, "")}


def test_two_samples_with_one_name_are_an_error(tmp_path: Path) -> None:
    class Twins:
        kind, origin, class_names = "twins", "twins", ("a",)

        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Sample:
            return Sample(encode(noise(8, 8, 3, index)), 0, "train/a/same.png")

        def fingerprint(self) -> str:
            return "twins"

    twins: dict[Split, Dataset] = {"train": Twins()}
    with pytest.raises(DataError, match="2 train samples became 1 files"):
        convert(
            twins,
            None,
            tmp_path / "new",
            make_target("folder", TranscodeOptions(), None, None),
            1,
            lambda done, total: None,
        )


def test_a_name_cannot_leave_the_output_folder(tmp_path: Path) -> None:
    class Hostile:
        kind, origin, class_names = "hostile", "hostile", ("a", "..")

        def __init__(self, target: int) -> None:
            self._target = target

        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> Sample:
            return Sample(encode(noise(8, 8, 3, index)), self._target, "train/a/x/../../../../../out.png")

        def fingerprint(self) -> str:
            return "hostile"

    target = make_target("folder", TranscodeOptions(), None, None)
    convert({"train": Hostile(0)}, None, tmp_path / "new", target, 1, lambda done, total: None)
    assert sorted(contents(tmp_path / "new")) == ["reconv.json", "train/a/00000000.png"]
    with pytest.raises(DataError, match="cannot be a folder"):
        convert({"train": Hostile(1)}, None, tmp_path / "other", target, 1, lambda done, total: None)


def command(*words: object) -> int:
    """The exit code of a command line."""
    with pytest.raises(SystemExit) as ended:
        main(["data", "convert", *map(str, words)])
    return int(ended.value.code or 0)


def test_the_command_converts_and_refuses_contradictory_options(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "new"
    assert command(tree, new, "--to", "packed", "--shortest", 32, "--quality", 90, "--expect", "11,5") == 0
    assert f"packed data is complete: {new} (11 train, 5 val)" in capsys.readouterr().out
    assert "JPEG quality 90, shortest side at most 32" in PackedDataset(new, "train").origin
    assert command(tree, new, "--to", "packed", "--shortest", 32, "--quality", 90) == 0
    assert "was already there" in capsys.readouterr().out
    assert command("digits", tmp_path / "records", "--to", "tfrecord", "--shards", "3,2") == 0
    cases = [
        (("--to", "packed", "--expect", "12,5"), 3, "11 train samples instead of the expected 12"),
        (("--to", "packed", "--raw", "--quality", 90), 2, "use one of them"),
        (("--to", "packed", "--longest", 9, "--shortest", 9), 2, "exclude each other"),
        (("--to", "tar", "--raw"), 2, "--raw is for packed data"),
        (("--to", "packed", "--shards", "3,2"), 2, "--shards is for tfrecord"),
        (("--to", "tfrecord", "--per-shard", 3), 2, "--shards TRAIN,VAL"),
        (("--to", "packed", "--labels", tree), 2, "--labels is for the ImageNet archives"),
        (("--to", "packed", "--expect", "many"), 2, "two numbers"),
        (
            (
                "--to",
                "zip",
            ),
            2,
            "zip",
        ),
    ]
    for options, code, message in cases:
        assert command(tree, tmp_path / "refused", *options) == code
        assert message in capsys.readouterr().err
    assert not (tmp_path / "refused").exists()


def test_packed_data_gives_the_batches_of_its_source(tree: Path, tmp_path: Path) -> None:
    from reconv.data.pipeline.samples import make_sample_pipeline
    from reconv.recipe.parts.data import PreprocessConfig

    run(tree, tmp_path / "new", "packed", TranscodeOptions(raw=True))
    rows = []
    for root in (tree, tmp_path / "new"):
        images, targets = np.empty((11, 3, 24, 24), np.uint8), np.empty(11, np.int64)
        preprocess = PreprocessConfig(size=24, resize=28)
        fetch = make_sample_pipeline(open_dataset("auto", root, "train", DataConfig()), preprocess, None)
        fetch(np.arange(11), {}, {"images": images, "targets": targets})
        rows.append((images, targets))
    assert np.array_equal(rows[0][0], rows[1][0])
    assert np.array_equal(rows[0][1], rows[1][1])


def test_written_records_are_readable(jpegs: Path, tmp_path: Path) -> None:
    run(jpegs, tmp_path / "new", "tfrecord")
    source = open_dataset("tfrecord", tmp_path / "new", "val", DataConfig())
    assert source.kind == TFRECORD.kind
    assert [source[index].target for index in range(5)] == [0, 0, 1, 1, 2]
