"""TensorFlow checkpoints, written by TensorFlow (fixtures/make_tensorflow.py), are read without it."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reconv.checkpoint.interop.sstable import read_table
from reconv.checkpoint.interop.tensorflow import read_tensorflow
from reconv.checkpoint.locate import is_tensorflow
from reconv.core.errors import CheckpointError
from reconv.storage.tensorflow_encoding import MalformedError, masked_crc32c

FIXTURES = Path(__file__).parent / "fixtures" / "tensorflow"
EXPECTED: dict[str, Any] = json.loads((FIXTURES / "expected.json").read_text())
OFFICIAL = FIXTURES / "official" / "model.ckpt-7"
FILES = ("model.ckpt-7.index", "model.ckpt-7.data-00000-of-00002", "model.ckpt-7.data-00001-of-00002")


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    for name in FILES:
        shutil.copy(OFFICIAL.parent / name, tmp_path / name)
    return tmp_path / OFFICIAL.name


def rewrite(path: Path, at: int, new: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[at : at + len(new)] = new
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("which", "path", "num_tensors"),
    [
        ("official", "official/model.ckpt-7", 90),
        ("scoped", "scoped", 82),
        ("preactivated", "preactivated/model.ckpt-2.data-00000-of-00001", 50),
        ("object", "object/ckpt-1.index", 2),
    ],
)
def test_every_tensor_has_the_bytes_that_tensorflow_reads(which: str, path: str, num_tensors: int) -> None:
    expected = EXPECTED[which]["tensors"]
    tensors = read_tensorflow(FIXTURES / path)
    assert list(tensors) == sorted(expected)
    assert len(tensors) == num_tensors
    for name, tensor in tensors.items():
        found = {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "sha256": hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest(),
        }
        assert found == expected[name], name


def test_the_fixture_has_every_type_and_two_data_files() -> None:
    types = {tensor.dtype for tensor in read_tensorflow(OFFICIAL).values()}
    floats = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
    assert types == floats | {torch.int32, torch.int64, torch.bool}
    assert all((OFFICIAL.parent / name).stat().st_size > 1000 for name in FILES)


def test_values_are_those_that_were_saved() -> None:
    tensors = read_tensorflow(OFFICIAL)
    assert tensors["global_step"].item() == 7
    ramp = torch.linspace(-3, 3, 6, dtype=torch.float64).reshape(2, 3)
    torch.testing.assert_close(tensors["other/float64"], ramp)
    assert torch.equal(tensors["other/bfloat16"], ramp.to(torch.bfloat16))
    assert torch.equal(tensors["other/float16"], ramp.to(torch.float16))
    assert tensors["other/bool"].tolist() == [True, False]
    assert tensors["other/empty"].shape == (0, 3)


def test_prefix_index_data_file_and_directory_find_the_same_checkpoint() -> None:
    paths = [OFFICIAL, OFFICIAL.parent, *(OFFICIAL.parent / name for name in FILES)]
    for path in paths:
        assert is_tensorflow(path)
        assert read_tensorflow(path).keys() == EXPECTED["official"]["tensors"].keys()


def test_other_paths_are_not_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "weights.pth").write_bytes(b"PK")
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "gone"\n')
    (tmp_path / "lonely.data-00000-of-00001").write_bytes(b"1234")
    for name in ("weights.pth", "missing", "", "lonely.data-00000-of-00001"):
        assert not is_tensorflow(tmp_path / name)
        with pytest.raises(CheckpointError, match="not a TensorFlow checkpoint"):
            read_tensorflow(tmp_path / name)


def test_tensors_can_be_written_to() -> None:
    kernel = read_tensorflow(OFFICIAL)["resnet_model/conv2d/kernel"]
    kernel.zero_()
    assert not kernel.any()


def test_a_partitioned_variable_is_rejected_by_name() -> None:
    with pytest.raises(CheckpointError, match="embedding is stored in slices"):
        read_tensorflow(FIXTURES / "partitioned" / "model.ckpt")


def test_a_missing_data_file_is_named(copied: Path) -> None:
    copied.with_name(FILES[2]).unlink()
    with pytest.raises(CheckpointError, match=FILES[2]) as exc_info:
        read_tensorflow(copied)
    assert "copy all 2 data files" in exc_info.value.hint


@pytest.mark.parametrize("name", FILES[1:])
def test_a_flipped_bit_is_reported_with_tensor_and_file(copied: Path, name: str) -> None:
    path = copied.with_name(name)
    rewrite(path, 5000, bytes([path.read_bytes()[5000] ^ 4]))
    with pytest.raises(CheckpointError, match=r"the tensor resnet_model/\S+ is damaged") as exc_info:
        read_tensorflow(copied)
    assert exc_info.value.where == str(path)
    assert exc_info.value.why == "its checksum does not match"


def test_a_short_data_file_is_reported_with_tensor_and_file(copied: Path) -> None:
    path = copied.with_name(FILES[1])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"ends at byte 30356, but the file has 30355") as exc_info:
        read_tensorflow(copied)
    assert exc_info.value.where == str(path)


def test_every_truncated_index_is_rejected(copied: Path) -> None:
    index = copied.with_name(FILES[0])
    data = index.read_bytes()
    for size in {*range(0, len(data), 97), len(data) - 1}:
        index.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match="not a TensorFlow checkpoint"):
            read_tensorflow(copied)


def test_a_changed_name_in_the_index_is_detected(copied: Path) -> None:
    index = copied.with_name(FILES[0])
    rewrite(index, index.read_bytes().index(b"global_step"), b"global_stop")
    with pytest.raises(CheckpointError, match="the checksum of the block at 0 does not match"):
        read_tensorflow(copied)


def test_every_flipped_byte_of_the_index_is_detected_or_harmless(copied: Path) -> None:
    index = copied.with_name(FILES[0])
    data = index.read_bytes()
    num_refused = 0
    positions = [*range(0, len(data) - 48, 31), *range(len(data) - 48, len(data))]
    for at in positions:
        rewrite(index, at, bytes([data[at] ^ 0xFF]))
        try:
            assert read_tensorflow(copied).keys() == EXPECTED["official"]["tensors"].keys()
        except CheckpointError:
            num_refused += 1
        index.write_bytes(data)
    # Nothing is read of the empty block of metadata (13 bytes), of its handle and of the footer's padding.
    assert num_refused >= len(positions) - 1 - 40


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def message(field: int, content: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(content)) + content


def tensor_entry(
    shape: list[int], num_bytes: int, *, dtype: int = 1, file: int = 0, offset: int = 0, crc: int = 0
) -> bytes:
    dims = b"".join(message(2, number(1, size)) for size in shape)
    where = number(3, file) + number(4, offset) + number(5, num_bytes)
    return number(1, dtype) + message(2, dims) + where + varint(6 << 3 | 5) + struct.pack("<I", crc)


def sealed(entries: bytes, compression: int = 0) -> bytes:
    """A block with its restart points, compression and right checksum."""
    body = entries + struct.pack("<II", 0, 1) + bytes([compression])
    return body + struct.pack("<I", masked_crc32c(body))


def table_of(block: bytes) -> bytes:
    """A table of one sealed block."""
    handle = varint(0) + varint(len(block) - 5)
    index = sealed(varint(0) + varint(1) + varint(len(handle)) + b"\xff" + handle)
    footer = varint(0) + varint(0) + varint(len(block)) + varint(len(index) - 5)
    return block + index + footer.ljust(40, b"\0") + bytes.fromhex("57fb808b247547db")


def table(entries: list[tuple[bytes, bytes]], *, compression: int = 0) -> bytes:
    """A table whose checksums are right, whatever its entries say."""
    body = b"".join(varint(0) + varint(len(k)) + varint(len(v)) + k + v for k, v in entries)
    return table_of(sealed(body, compression))


HEADER = (b"", number(1, 1))


def write(folder: Path, index: bytes, data: bytes = b"") -> Path:
    (folder / "w.index").write_bytes(index)
    (folder / "w.data-00000-of-00001").write_bytes(data)
    return folder / "w"


def test_a_written_table_is_read_back(tmp_path: Path) -> None:
    data = np.arange(6, dtype="<f4").tobytes()
    entry = tensor_entry([2, 3], 24, crc=masked_crc32c(data))
    tensors = read_tensorflow(write(tmp_path, table([HEADER, (b"a", entry)]), data))
    assert torch.equal(tensors["a"], torch.arange(6.0).reshape(2, 3))


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ([], "it is empty"),
        ([(b"a", tensor_entry([1], 4))], "first entry is not the header"),
        ([(b"", number(1, 1) + number(2, 1))], "big-endian"),
        ([(b"", number(1, 1) + message(3, number(2, 2)))], "unknown version"),
        ([(b"", b"\x0a\x7f")], "beyond its message"),
        ([HEADER, (b"a", b"\x0f\x01")], "unknown wire type 7"),
        ([HEADER, (b"b", tensor_entry([1], 4)), (b"a", tensor_entry([1], 4))], "not in order"),
        ([HEADER, (b"\xff\xfe", tensor_entry([1], 4))], "is not text"),
        ([HEADER, (b"a", tensor_entry([1], 4, dtype=8))], "unsupported DataType 8"),
        ([HEADER, (b"a", tensor_entry([3], 4))], r"shape \[3\] in 4 bytes"),
        ([HEADER, (b"a", tensor_entry([0, 2**62, 2**62], 0))], "in 0 bytes"),
        ([HEADER, (b"a", tensor_entry([1] * 40, 4))], "in 4 bytes"),
        ([HEADER, (b"a", tensor_entry([2**40], 2**42))], "ends at byte 4398046511104, but the file has 8"),
        ([HEADER, (b"a", tensor_entry([1], 4, offset=2**63))], "but the file has 8"),
        ([HEADER, (b"a", tensor_entry([1], 4, file=2**60))], "missing or cannot be read"),
        ([HEADER, (b"a", tensor_entry([2], 8)), (b"b", tensor_entry([2], 8))], "b is damaged(.|\n)*overlaps a"),
    ],
)
def test_an_inconsistent_index_is_rejected_with_the_reason(
    tmp_path: Path, entries: list[tuple[bytes, bytes]], reason: str
) -> None:
    with pytest.raises(CheckpointError, match=reason):
        read_tensorflow(write(tmp_path, table(entries), bytes(8)))


def test_a_compressed_index_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"compressed \(type 1\)"):
        read_tensorflow(write(tmp_path, table([HEADER], compression=1)))


def test_keys_that_grow_without_bound_are_rejected() -> None:
    num_shared = 1_000_000
    body = varint(0) + varint(num_shared) + varint(0) + b"k" * num_shared
    for i in range(100):  # each shares all of the key before it: 100 MB of keys out of 1 MB
        body += varint(num_shared + i) + varint(1) + varint(0) + b"k"
    with pytest.raises(MalformedError, match="more than 64 MiB"):
        for _ in read_table(table_of(sealed(body))):
            pass


ANYWHERE = {"start": st.integers(0, 4000), "junk": st.binary(max_size=40), "num_removed": st.integers(0, 40)}


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(**ANYWHERE)
def test_a_mutated_index_raises_only_checkpoint_errors(copied: Path, start: int, junk: bytes, num_removed: int) -> None:
    data = (OFFICIAL.parent / FILES[0]).read_bytes()
    copied.with_name(FILES[0]).write_bytes(data[:start] + junk + data[start + num_removed :])
    try:
        read_tensorflow(copied)
    except CheckpointError as error:
        assert error.where


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(**ANYWHERE)
def test_mutated_entries_with_a_valid_checksum_raise_only_checkpoint_errors(
    copied: Path, start: int, junk: bytes, num_removed: int
) -> None:
    entries = list(read_table((OFFICIAL.parent / FILES[0]).read_bytes()))
    key, value = entries[start % len(entries)]
    at = start // len(entries) % (len(value) + 1)
    entries[start % len(entries)] = (key, value[:at] + junk[:4] + value[at + num_removed % 4 :])
    copied.with_name(FILES[0]).write_bytes(table(entries))
    try:
        read_tensorflow(copied)
    except CheckpointError as error:
        assert error.where


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    value=st.binary(max_size=60)
    | st.builds(
        tensor_entry,
        st.lists(st.integers(0, 2**64 - 1), max_size=4),
        st.integers(0, 2**64 - 1),
        dtype=st.integers(0, 25),
        file=st.integers(0, 2**31),
        offset=st.integers(0, 2**64 - 1),
    ),
    header=st.just(HEADER[1]) | st.binary(max_size=12),
)
def test_any_entry_with_a_valid_checksum_raises_only_checkpoint_errors(
    tmp_path: Path, value: bytes, header: bytes
) -> None:
    prefix = write(tmp_path, table([(b"", header), (b"a", value)]), bytes(16))
    try:
        read_tensorflow(prefix)
    except CheckpointError as error:
        assert error.where
