"""TFRecords: written by TensorFlow, written by us, and damaged ones."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_examples import encode, noise
from hypothesis import given, settings
from hypothesis import strategies as st

from reconv.core.errors import DataError, ExitCode
from reconv.data.dataset import Sample
from reconv.data.decode.pillow import decode
from reconv.data.readers.dataset_factory import open_dataset
from reconv.data.readers.detect import detect
from reconv.data.readers.shards.dataset import ShardDataset
from reconv.data.readers.shards.tfrecord import TFRECORD
from reconv.data.readers.shards.tfrecord_format import (
    encode_example,
    parse_example,
    peek_features,
    read_record,
    record_spans,
    write_records,
)
from reconv.recipe.parts.data import DataConfig
from reconv.storage.local import ReadWindow
from reconv.storage.tensorflow_encoding import MalformedError, masked_crc32c

FIXTURES = Path(__file__).parents[1] / "fixtures" / "tfrecord"
EXPECTED: dict[str, Any] = json.loads((FIXTURES / "expected.json").read_text())


@pytest.fixture(params=["folders", "flat"])
def written_by_tensorflow(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy, since the index is kept beside the data."""
    return Path(shutil.copytree(FIXTURES / request.param, tmp_path / request.param))


def example(label: int, seed: int = 0, **more: Any) -> bytes:
    image = encode(noise(9, 7, 3, seed), "JPEG")
    return encode_example({"image/encoded": [image], "image/class/label": [label], **more})


def write_set(root: Path, labels: dict[str, list[list[int]]], **more: Any) -> Path:
    """Shards in the flat layout, the labels of each."""
    root.mkdir(exist_ok=True)
    for split, shards in labels.items():
        for number, inside in enumerate(shards):
            path = root / f"{split}-{number:05}-of-{len(shards):05}"
            write_records(path, (example(label, 100 * number + row, **more) for row, label in enumerate(inside)))
    return root


def test_records_of_tensorflow_are_read_as_tensorflow_reads_them(written_by_tensorflow: Path) -> None:
    num_seen = 0
    for split in ("train", "val"):
        source = open_dataset("auto", written_by_tensorflow, split, DataConfig())  # type: ignore[arg-type]
        expected = EXPECTED[written_by_tensorflow.name][split]
        assert len(source) == len(expected)
        assert source.kind == "tfrecord"
        for index, wanted in enumerate(expected):
            sample = source[index]
            assert isinstance(sample.data, bytes)
            assert sample.target == wanted["label"] - 1
            assert hashlib.sha256(sample.data).hexdigest() == wanted["sha256"]
            assert decode(sample.data, 3, sample.name).shape[2] == 3  # JPEG, PNG and CMYK alike
            num_seen += 1
    assert num_seen in (19, 15)


def test_the_fixture_has_a_png_a_cmyk_image_and_boxes() -> None:
    examples = []
    for path in sorted((FIXTURES / "folders" / "train").iterdir()):
        window = ReadWindow(path)
        examples += [parse_example(read_record(path, start, length)) for start, length in record_spans(window)]
    images = [e["image/encoded"][0] for e in examples]
    assert len(images) == 13
    assert sum(isinstance(p, bytes) and p.startswith(b"\x89PNG") for p in images) == 2
    assert sum(isinstance(p, bytes) and b"Adobe" in p[:100] for p in images) == 2
    for found, wanted in zip(examples, EXPECTED["folders"]["train"], strict=True):
        assert list(found["image/object/bbox/ymax"]) == wanted["ymax"]


def test_class_names_come_from_synset_text_or_number(tmp_path: Path) -> None:
    full = Path(shutil.copytree(FIXTURES / "folders", tmp_path / "full"))
    assert ShardDataset(TFRECORD, full, "val").class_names[:2] == ("n01440764", "n01443537")
    bare = Path(shutil.copytree(FIXTURES / "flat", tmp_path / "bare"))
    assert ShardDataset(TFRECORD, bare, "train").class_names == ("class0", "class1", "class2", "class3", "class4")
    named = write_set(tmp_path / "named", {"train": [[1, 2]], "validation": [[1]]}, **{"image/class/text": [b"crane"]})
    assert ShardDataset(TFRECORD, named, "val").class_names == ("crane (0)", "crane (1)")


def test_the_published_number_of_shards_is_found_in_both_layouts(tmp_path: Path) -> None:
    record = example(1)
    for layout in ("folders", "flat"):
        for split, count in (("train", 1024), ("validation", 128)):
            folder = tmp_path / layout / split if layout == "folders" else tmp_path / layout
            folder.mkdir(parents=True, exist_ok=True)
            first = folder / f"{split}-00000-of-{count:05}"
            write_records(first, [record])
            for number in range(1, count):
                (folder / f"{split}-{number:05}-of-{count:05}").hardlink_to(first)
        found = detect(tmp_path / layout)
        assert (found.kind, found.path) == ("tfrecord", tmp_path / layout)
        assert "train-00000-of-01024" in found.why
        assert len(ShardDataset(TFRECORD, tmp_path / layout, "train")) == 1024
        assert len(ShardDataset(TFRECORD, tmp_path / layout, "val")) == 128


def test_class_0_is_label_1_and_samples_follow_the_shards(tmp_path: Path) -> None:
    root = write_set(tmp_path / "set", {"train": [[3, 1], [], [2]], "validation": [[2]]})
    train = ShardDataset(TFRECORD, root, "train")
    assert [train[index].target for index in range(3)] == [2, 0, 1]
    assert train[2].data == encode(noise(9, 7, 3, 200), "JPEG")
    assert train[2].name == f"{root / 'train-00002-of-00003'}, byte 12"
    assert train.index_bytes == 20 * 3
    with pytest.raises(IndexError):
        train[3]


def cut(data: bytes) -> bytes:
    return data[:-5]


def flip(position: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


def framed(content: bytes, length: int | None = None) -> bytes:
    header = struct.pack("<Q", len(content) if length is None else length)
    crc = struct.pack("<I", masked_crc32c(header))
    return header + crc + content + struct.pack("<I", masked_crc32c(content))


BROKEN: dict[str, tuple[Callable[[bytes], bytes], str, str]] = {
    "cut in the last record": (cut, "truncated record", "byte "),
    "cut in a header": (lambda data: data + b"\x01\x02", "truncated record: 2 bytes are left", "byte "),
    "a length beyond the file": (lambda data: data + framed(b"x", 2**40), "truncated record", "byte "),
    "a length with a wrong checksum": (flip(0), "wrong checksum of a record's length", "byte 0"),
    "a compressed file": (lambda _: b"\x1f\x8b" + bytes(30), "compressed record file", "byte 0"),
    "no example": (lambda data: framed(b"\xff\xff\xff") + data, "not a tf.train.Example", "byte 0"),
    "label 0": (lambda data: framed(example(0)) + data, "label 0 out of range", "byte 0"),
    "a negative label": (lambda data: framed(example(-7)) + data, "label -7 out of range", "byte 0"),
    "a huge label": (lambda data: framed(example(2**40)) + data, f"label {2**40} out of range", "byte 0"),
    "no label": (lambda data: framed(encode_example({})) + data, "record has no image/class/label", "byte 0"),
    "a file of text": (lambda _: b"this is no record file, it is a text", "wrong checksum", "byte 0"),
}


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_a_damaged_file_is_refused_with_its_path_and_byte(tmp_path: Path, name: str) -> None:
    damage, what, where = BROKEN[name]
    root = write_set(tmp_path / "set", {"train": [[1, 2], [1, 2]], "validation": [[2]]})
    path = root / "train-00001-of-00002"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=what) as caught:
        ShardDataset(TFRECORD, root, "train")
    assert caught.value.code == ExitCode.DATA
    assert caught.value.where.startswith(f"{path}, {where}")
    assert caught.value.hint


def test_a_record_with_a_wrong_checksum_is_an_error_when_read(tmp_path: Path) -> None:
    root = write_set(tmp_path / "set", {"train": [[1, 2]], "validation": [[2]]})
    path = root / "train-00000-of-00001"
    data = path.read_bytes()
    for position in (data.index(b"\xff\xd8") + 20, len(data) - 1):
        path.write_bytes(flip(position)(data))
        source = ShardDataset(TFRECORD, root, "train")
        bad = 0 if position < len(data) - 1 else 1
        assert source[1 - bad].target == 1 - bad
        with pytest.raises(DataError, match="wrong checksum") as caught:
            source[bad]
        assert caught.value.code == ExitCode.DATA
        assert caught.value.where == f"{path}, byte {0 if bad == 0 else len(framed(example(1, 0)))}"


def test_a_record_without_an_image_is_an_error_when_read(tmp_path: Path) -> None:
    root = write_set(tmp_path / "set", {"train": [[1]], "validation": [[1]]})
    write_records(root / "train-00000-of-00001", [encode_example({"image/class/label": [1]})])
    with pytest.raises(DataError, match="record has no image/encoded") as caught:
        ShardDataset(TFRECORD, root, "train")[0]
    assert "byte 0" in caught.value.where


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    root = write_set(tmp_path / "set", {"train": [[1]] * 4, "validation": [[1]]})
    (root / "train-00001-of-00004").unlink()
    (root / "train-00003-of-00004").unlink()
    with pytest.raises(DataError, match="missing shard: train-00001-of-00004 and 1 more") as caught:
        ShardDataset(TFRECORD, root, "train")
    assert caught.value.where == str(root / "train-00001-of-00004")
    assert caught.value.code == ExitCode.DATA


def test_two_datasets_in_one_folder_and_a_missing_split_are_refused(tmp_path: Path) -> None:
    root = write_set(tmp_path / "set", {"train": [[1]] * 2, "validation": [[1]]})
    write_set(root, {"train": [[1]] * 3})
    with pytest.raises(DataError, match="shards of more than one dataset: of 00002 and of 00003"):
        ShardDataset(TFRECORD, root, "train")
    alone = write_set(tmp_path / "alone", {"train": [[1]]})
    with pytest.raises(DataError, match="no TFRecords for validation"):
        open_dataset("auto", alone, "val", DataConfig())


def test_both_layouts_at_once_are_ambiguous(tmp_path: Path) -> None:
    root = write_set(tmp_path / "set", {"train": [[1]], "validation": [[1]]})
    write_set(root / "train", {"train": [[1]]})
    with pytest.raises(DataError, match="more than one place"):
        detect(root)


def test_a_validation_label_that_training_does_not_have_is_refused(tmp_path: Path) -> None:
    root = write_set(tmp_path / "set", {"train": [[1, 2]], "validation": [[1], [2, 3]]})
    with pytest.raises(DataError, match="label 3 out of range") as caught:
        ShardDataset(TFRECORD, root, "val")
    assert "validation-00001-of-00002, byte" in caught.value.where


VALUES = st.one_of(
    st.lists(st.binary(max_size=300), max_size=3),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4),
    st.lists(st.floats(width=32, allow_nan=False), max_size=4),
)


@given(st.dictionaries(st.text(max_size=8), VALUES, max_size=4))
@settings(max_examples=60, deadline=None)
def test_an_example_round_trips(features: dict[str, Any]) -> None:
    assert {name: list(values) for name, values in parse_example(encode_example(features)).items()} == features


@given(st.binary(max_size=200), st.integers(0, 400), st.integers(0, 255))
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_parsed_or_refused(data: bytes, at: int, byte: int) -> None:
    whole = bytearray(encode_example({"a": [1, 2], "b": [b"x" * 20], "c": [0.5]}) + data)
    whole[at % len(whole)] = byte
    with contextlib.suppress(MalformedError):
        assert isinstance(parse_example(bytes(whole)), dict)


def test_the_index_is_built_without_reading_images(tmp_path: Path) -> None:
    path = tmp_path / "train-00000-of-00001"
    big = encode_example({"image/encoded": [bytes(500_000)], "image/class/label": [4]})
    write_records(path, [big, big])
    asked: list[int] = []

    class Counted(ReadWindow):
        def read(self, start: int, length: int) -> bytes:
            asked.append(length)
            return super().read(start, length)

    window = Counted(path)
    labels = [peek_features(window, *span, ["image/class/label"]) for span in record_spans(window)]
    assert labels == [{"image/class/label": [4]}] * 2
    assert max(asked) < 100


def test_samples_are_the_same_from_many_threads(written_by_tensorflow: Path) -> None:
    source = ShardDataset(TFRECORD, written_by_tensorflow, "train")
    indices = np.random.default_rng(0).permutation(np.repeat(np.arange(len(source)), 20)).tolist()
    with ThreadPoolExecutor(8) as pool:
        samples: list[Sample] = list(pool.map(source.__getitem__, indices))
    assert all(sample == source[index] for index, sample in zip(indices, samples, strict=True))
