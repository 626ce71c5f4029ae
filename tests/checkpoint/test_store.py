"""Checkpoints load bit for bit, damage is always detected, and pruning keeps what it must."""

from __future__ import annotations

import errno
import io
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from reconv import __version__
from reconv.checkpoint import manifest
from reconv.checkpoint.safetensors_bytes import encode
from reconv.checkpoint.store import CheckpointStore, NewestCheckpoint, WrongTensorError
from reconv.core.bits import bits_sum
from reconv.core.errors import CheckpointError, ExitCode
from reconv.storage import transient
from reconv.storage.files import FileSystem

FILES = ["ema.safetensors", "manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"]


def parts_of(seed: int) -> dict[str, dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return {part: {"w": torch.randn(4, 3, generator=draw)} for part in ("model", "ema", "optimizer")}


def two_checkpoints(folder: Path) -> CheckpointStore:
    store = CheckpointStore(folder)
    store.save(10, parts_of(1), {"step": 10})
    store.save(20, parts_of(2), {"step": 20})
    return store


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_every_dtype_is_loaded_bit_for_bit(tmp_path: Path) -> None:
    special = torch.tensor([0.0, -0.0, float("nan"), float("inf"), 1e-40, 3.14159, 65504.0])
    tensors = {
        "float32": special,
        "float64": special.double() / 3,
        "bfloat16": special.bfloat16(),
        "float16": special.half(),
        "int64": torch.tensor([-(2**62), 2**53 + 1]),
        "int32": torch.tensor([-1, 7], dtype=torch.int32),
        "uint8": torch.arange(256, dtype=torch.uint8),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(2.5),
        "count": torch.tensor(12345678901234),
        "empty": torch.empty(0, 3),
        "name with spaces/and.dots": torch.ones(1),
    }
    saved = CheckpointStore(tmp_path).save(1, {"model": tensors, "ema": {}}, {})
    loaded = CheckpointStore(tmp_path).load(saved.path).parts
    assert loaded["ema"] == {}
    assert loaded["model"].keys() == tensors.keys()
    for name, tensor in tensors.items():
        found = loaded["model"][name]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
        if tensor.dim():
            assert bits(found) == bits(tensor), name
        else:
            assert torch.equal(found, tensor), name


def test_channels_last_transposed_shared_and_sliced_tensors_are_loaded_equal(tmp_path: Path) -> None:
    base = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
    tensors = {
        "channels_last": base.to(memory_format=torch.channels_last),
        "transposed": base[0, 0].t(),
        "shared": base,
        "shared again": base,
        "slice": base[:, 1],
        "expanded": torch.ones(1, 3).expand(4, 3),
        "parameter": torch.nn.Parameter(base.clone()),
    }
    saved = CheckpointStore(tmp_path).save(1, {"model": tensors}, {})
    loaded = CheckpointStore(tmp_path).load(saved.path).parts["model"]
    assert len(loaded) == len(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].is_contiguous()
        assert torch.equal(loaded[name], tensor), name


def test_saving_does_not_touch_the_tensors(tmp_path: Path) -> None:
    weight = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    before = (weight.clone(), weight.stride(), weight.data_ptr())
    CheckpointStore(tmp_path).save(1, {"model": {"w": weight}}, {})
    assert torch.equal(weight, before[0])
    assert (weight.stride(), weight.data_ptr()) == before[1:]


def test_model_file_depends_on_the_weights_alone(tmp_path: Path) -> None:
    weights = {"b": torch.randn(3, 2, 2, 2), "a": torch.randn(5), "n": torch.tensor(3)}
    shuffled = {name: weights[name].clone() for name in ("n", "a", "b")}
    shuffled["b"] = shuffled["b"].to(memory_format=torch.channels_last)
    one = CheckpointStore(tmp_path / "one").save(1, {"model": weights}, {"x": 1})
    two = CheckpointStore(tmp_path / "two").save(99, {"model": shuffled, "ema": weights}, {"x": 2, "y": [3]})
    digest = manifest.verify(one.path).files["model.safetensors"]
    assert digest == manifest.verify(two.path).files["model.safetensors"]
    changed = {**weights, "n": torch.tensor(4)}
    assert manifest.entry_of(encode(changed)) != digest


def test_a_tensor_that_changes_before_it_is_on_disk_is_not_saved(tmp_path: Path) -> None:
    store, parts = CheckpointStore(tmp_path), parts_of(3)
    digests = {part: {name: int(bits_sum(t)) for name, t in tensors.items()} for part, tensors in parts.items()}
    store.save(3, parts, {}, digests=digests)
    name, tensor = next(iter(parts["model"].items()))
    tensor.view(-1)[0] += 1
    with pytest.raises(WrongTensorError) as error:
        store.save(4, parts, {}, digests=digests)
    assert error.value.tensor == f"model.{name}"
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000003"]
    store.save(4, parts, {})
    store.discard_after(3)
    assert store.steps() == [3]


def test_state_is_loaded_with_exact_numbers(tmp_path: Path) -> None:
    state = {"count": 2**60 + 1, "best": 0.1 + 0.2, "nested": {"list": [1, None, True, "ü"]}, "worst": float("-inf")}
    saved = CheckpointStore(tmp_path).save(7, {"model": {"w": torch.ones(1)}}, state)
    loaded = CheckpointStore(tmp_path).load(saved.path)
    assert loaded.state == state
    assert loaded.step == 7
    assert saved.path == tmp_path / "step-000000007"
    assert saved.num_bytes == sum((saved.path / name).stat().st_size for name in ("model.safetensors", "state.json"))


def test_an_empty_directory_has_no_newest_checkpoint(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "absent").newest().path is None
    assert CheckpointStore(tmp_path / "absent").steps() == []
    assert CheckpointStore(tmp_path / "absent").prune(keep_last=1) == []


def test_newest_is_by_step_and_ignores_other_files(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (999_999_999, 5, 1_000_000_000):
        store.save(step, parts_of(step), {})
    for name in ("step-7", "step-x", "notes", ".tmp-step-000000077-1", "step-000000008.bak"):
        (tmp_path / name).mkdir()
    (tmp_path / "readme.txt").write_text("mine")
    assert store.steps() == [5, 999_999_999, 1_000_000_000]
    assert store.newest().path == tmp_path / "step-1000000000"
    store.remove_leftovers()
    assert (tmp_path / "notes").is_dir() and (tmp_path / "readme.txt").is_file()
    assert not (tmp_path / ".tmp-step-000000077-1").exists()


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_detected_and_the_older_checkpoint_found(tmp_path: Path, name: str) -> None:
    store = two_checkpoints(tmp_path)
    path = store.path(20) / name
    good = path.read_bytes()
    draw = random.Random(name)
    places = {0, len(good) - 1, *draw.sample(range(len(good)), min(30, len(good)))}
    for place in places:
        flipped = bytearray(good)
        flipped[place] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
        newest = store.newest()
        assert newest.path == store.path(10), f"byte {place}"
        ((skipped, reason),) = newest.skipped
        assert skipped == store.path(20)
        assert name in reason
        with pytest.raises(CheckpointError, match=name) as exc_info:
            store.load(store.path(20))
        assert exc_info.value.code == ExitCode.CHECKPOINT
    assert len(places) >= min(30, len(good))
    path.write_bytes(good)
    assert store.newest().path == store.path(20)


@pytest.mark.parametrize("name", FILES)
def test_truncated_grown_empty_and_missing_files_are_detected(tmp_path: Path, name: str) -> None:
    store = two_checkpoints(tmp_path)
    path = store.path(20) / name
    good = path.read_bytes()
    broken = [good[:-1], good[: len(good) // 2], good[:1], b"", good + b"x", None]
    for content in broken:
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        newest = store.newest()
        assert newest.path == store.path(10)
        assert name in newest.skipped[0][1]
        with pytest.raises(CheckpointError, match=name):
            store.load(store.path(20))
        path.write_bytes(good)
    assert store.newest().path == store.path(20)
    assert len(broken) == 6


def test_unlisted_weights_are_errors_and_other_files_ignored(tmp_path: Path) -> None:
    store = two_checkpoints(tmp_path)
    (store.path(20) / "notes.txt").write_text("mine")
    assert store.newest().path == store.path(20)
    shutil.copy(store.path(20) / "ema.safetensors", store.path(20) / "extra.safetensors")
    newest = store.newest()
    assert newest.path == store.path(10)
    assert "extra.safetensors" in newest.skipped[0][1]


def test_files_swapped_between_checkpoints_are_detected(tmp_path: Path) -> None:
    store = two_checkpoints(tmp_path)
    shutil.copy(store.path(10) / "ema.safetensors", store.path(20) / "ema.safetensors")
    with pytest.raises(CheckpointError, match=r"ema\.safetensors.*sha256"):
        store.load(store.path(20))


def test_a_manifest_cannot_point_outside_its_directory(tmp_path: Path) -> None:
    store = two_checkpoints(tmp_path)
    (tmp_path / "secret").write_bytes(b"x")
    entries = {"../secret": manifest.entry_of(b"x"), "state.json": manifest.entry_of(b"{}")}
    text = manifest.render(manifest.Manifest(20, entries))
    (store.path(20) / "manifest.json").write_bytes(text)
    with pytest.raises(CheckpointError, match="not a file in the directory"):
        manifest.verify(store.path(20))


def test_another_format_version_is_an_error(tmp_path: Path) -> None:
    store = two_checkpoints(tmp_path)
    path = store.path(20) / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"format": 2', b'"format": 1'))
    assert f"has format 1, but Reconv {__version__} reads format 2" in store.newest().skipped[0][1]


def test_an_unreadable_checkpoint_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transient, "RETRY_DELAYS_S", (0.0, 0.0))

    class BadSector(FileSystem):
        def open(self, path: Path) -> io.BufferedReader:
            if path.parent.name == "step-000000020" and path.name == "optimizer.safetensors":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().open(path)

    two_checkpoints(tmp_path)
    newest = CheckpointStore(tmp_path, BadSector()).newest()
    assert newest.path == tmp_path / "step-000000010"
    assert "Input/output error" in newest.skipped[0][1]


def test_an_unreadable_directory_is_an_error(tmp_path: Path) -> None:
    class Forbidden(FileSystem):
        def listdir(self, path: Path) -> list[str]:
            if path.name in forbidden:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return super().listdir(path)

    two_checkpoints(tmp_path)
    forbidden = {tmp_path.name}
    with pytest.raises(CheckpointError, match="cannot be read: Permission denied") as exc_info:
        CheckpointStore(tmp_path, Forbidden()).newest()
    assert exc_info.value.where == str(tmp_path)
    forbidden = {"step-000000020"}
    newest = CheckpointStore(tmp_path, Forbidden()).newest()
    assert newest.path == tmp_path / "step-000000010"
    assert [path.name for path, _ in newest.skipped] == ["step-000000020"]


def test_newest_reports_why_each_checkpoint_is_damaged(tmp_path: Path) -> None:
    store = two_checkpoints(tmp_path)
    for step in (10, 20):
        (store.path(step) / "state.json").unlink()
    newest = store.newest()
    assert newest.path is None
    assert [path.name for path, _ in newest.skipped] == ["step-000000020", "step-000000010"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = two_checkpoints(tmp_path)
    store.save(20, parts_of(3), {"step": 20, "again": True})
    assert store.load(store.path(20)).state["again"] is True
    (store.path(20) / "ema.safetensors").write_bytes(b"torn")
    store.save(20, parts_of(3), {})
    assert store.newest() == NewestCheckpoint(store.path(20), ())
    assert sorted(os.listdir(tmp_path)) == ["step-000000010", "step-000000020"]


def test_a_path_is_not_a_valid_part_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a valid name for a part"):
        CheckpointStore(tmp_path).save(1, {"../model": {}}, {})
    assert CheckpointStore(tmp_path).newest().path is None


def five_checkpoints(folder: Path) -> CheckpointStore:
    store = CheckpointStore(folder)
    for step in (1, 2, 3, 4, 5):
        store.save(step, parts_of(step), {})
    return store


@pytest.mark.parametrize(
    ("keep_last", "best", "keep_steps", "left"),
    [
        (2, None, (), [4, 5]),
        (1, 2, (), [2, 5]),
        (2, 5, (1,), [1, 4, 5]),
        (1, 3, (1, 2, 77), [1, 2, 3, 5]),
        (9, None, (), [1, 2, 3, 4, 5]),
        (0, None, (), [5]),
    ],
)
def test_pruning_keeps_the_last_the_best_and_the_kept_steps(
    tmp_path: Path, keep_last: int, best: int | None, keep_steps: tuple[int, ...], left: list[int]
) -> None:
    store = five_checkpoints(tmp_path)
    deleted = store.prune(keep_last=keep_last, best_step=best, keep_steps=keep_steps)
    assert store.steps() == left
    assert sorted(deleted + left) == [1, 2, 3, 4, 5]
    assert all(store.load(store.path(step)).step == step for step in left)


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_pruning_never_deletes_the_only_valid_one(tmp_path: Path) -> None:
    store = five_checkpoints(tmp_path)
    for step in (2, 3, 4, 5):
        flip_last_byte(store.path(step) / "ema.safetensors")
    assert store.prune(keep_last=1, best_step=4) == []
    assert store.newest().path == store.path(1)


def test_pruning_does_not_count_damaged_ones(tmp_path: Path) -> None:
    store = five_checkpoints(tmp_path)
    flip_last_byte(store.path(5) / "ema.safetensors")
    assert store.prune(keep_last=2) == [1, 2]
    assert store.newest().path == store.path(4)


def test_pruning_deletes_nothing_if_nothing_is_valid(tmp_path: Path) -> None:
    store = five_checkpoints(tmp_path)
    for step in store.steps():
        flip_last_byte(store.path(step) / "state.json")
    assert store.prune(keep_last=1) == []
    assert store.steps() == [1, 2, 3, 4, 5]


def test_pruning_keeps_complete_ones_instead_of_incomplete_ones(tmp_path: Path) -> None:
    store = five_checkpoints(tmp_path)
    torn = store.path(4) / "ema.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1])
    assert store.prune(keep_last=2) == [1, 2, 4]
    assert store.steps() == [3, 5]
