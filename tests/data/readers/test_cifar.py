"""CIFAR-10 and CIFAR-100 in four layouts."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from data_examples import cifar_layout

from reconv.core.errors import DataError, ExitCode
from reconv.data.dataset import Sample
from reconv.data.readers.cifar import open_cifar


def pixels(sample: Sample) -> np.ndarray:
    assert isinstance(sample.data, np.ndarray)
    return sample.data


@pytest.mark.parametrize("kind", ["cifar10", "cifar100"])
def test_both_formats_of_cifar_hold_the_same_samples(
    tmp_path: Path, write_cifar: Callable[..., Path], kind: str
) -> None:
    sources = []
    for cifar_format in ("binary", "python"):
        folder = write_cifar(tmp_path, kind, cifar_format)
        sources.append(open_cifar(cifar_layout(kind, cifar_format), folder, "train"))
    binary, python = sources
    assert len(binary) == (35 if kind == "cifar10" else 7)
    assert np.array_equal(binary.images, python.images)
    assert np.array_equal(binary.targets, python.targets)
    assert binary.class_names == python.class_names
    assert binary.fingerprint() == python.fingerprint()


def test_cifar_pixels_are_planes_and_its_fine_label_is_the_second_byte(
    tmp_path: Path, write_cifar: Callable[..., Path]
) -> None:
    folder = write_cifar(tmp_path, "cifar100", "binary")
    raw = (folder / "test.bin").read_bytes()
    sample = open_cifar(cifar_layout("cifar100", "binary"), folder, "val")[2]
    record = raw[2 * 3074 : 3 * 3074]
    assert sample.target == record[1]
    assert pixels(sample)[3, 5].tolist() == [record[2 + plane * 1024 + 3 * 32 + 5] for plane in range(3)]


def test_the_files_of_cifar_are_in_order(tmp_path: Path, write_cifar: Callable[..., Path]) -> None:
    folder = write_cifar(tmp_path, "cifar10", "binary")
    raw = b"".join((folder / f"data_batch_{number}.bin").read_bytes() for number in range(1, 6))
    records = np.frombuffer(raw, np.uint8).reshape(-1, 3073)
    found = open_cifar(cifar_layout("cifar10", "binary"), folder, "train")
    assert np.array_equal(found.images.reshape(-1, 3072), records[:, 1:])
    assert np.array_equal(found.targets, records[:, 0])
    assert len({image.tobytes() for image in found.images}) == len(found)


def test_truncated_cifar_files_are_named_with_the_download_command(
    tmp_path: Path, write_cifar: Callable[..., Path]
) -> None:
    folder = write_cifar(tmp_path, "cifar10", "binary")
    file = folder / "data_batch_3.bin"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"data_batch_3.bin(.|\n)*reconv data get cifar10") as caught:
        open_cifar(cifar_layout("cifar10", "binary"), folder, "train")
    assert caught.value.code == ExitCode.DATA
    file.write_bytes(file.read_bytes()[: 3073 * 5])
    with pytest.raises(DataError, match="should be equal"):
        open_cifar(cifar_layout("cifar10", "binary"), folder, "train")
    file.unlink()
    with pytest.raises(DataError, match=r"has no data_batch_3\.bin"):
        open_cifar(cifar_layout("cifar10", "binary"), folder, "train")


def test_cifar_label_out_of_range_is_an_error(tmp_path: Path, write_cifar: Callable[..., Path]) -> None:
    folder = write_cifar(tmp_path, "cifar10", "binary")
    file = folder / "test_batch.bin"
    file.write_bytes(b"\x0b" + file.read_bytes()[1:])
    with pytest.raises(DataError, match="label 11 of sample 0 is out of range"):
        open_cifar(cifar_layout("cifar10", "binary"), folder, "val")


class Attack:
    """A pickle that would make a folder."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("attacked",)


@pytest.mark.parametrize("content", [Attack(), {b"data": Attack()}])
def test_a_cifar_pickle_cannot_run_code(tmp_path: Path, write_cifar: Callable[..., Path], content: object) -> None:
    folder = write_cifar(tmp_path, "cifar10", "python")
    (folder / "test_batch").write_bytes(pickle.dumps(content))
    with pytest.raises(DataError, match=r"refused to load posix\.mkdir") as caught:
        open_cifar(cifar_layout("cifar10", "python"), folder, "val")
    assert caught.value.where == str(folder / "test_batch")
    assert not Path("attacked").exists()


def test_a_damaged_cifar_pickle_is_a_data_error(tmp_path: Path, write_cifar: Callable[..., Path]) -> None:
    folder = write_cifar(tmp_path, "cifar10", "python")
    whole = (folder / "test_batch").read_bytes()
    others = (pickle.dumps([1, 2]), pickle.dumps({b"data": b"text"}))
    for content in (*others, *(whole[:length] for length in (0, 1, len(whole) // 2, len(whole) - 1))):
        (folder / "test_batch").write_bytes(content)
        with pytest.raises(DataError, match="test_batch"):
            open_cifar(cifar_layout("cifar10", "python"), folder, "val")
