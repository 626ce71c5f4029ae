"""Objects that ranks send to each other: what travels unchanged, and what is never built."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks
from torch.distributed import distributed_c10d

from reconv.core.errors import DataError, RankLostError, RemoteRankError
from reconv.data.decode.native import NativeSupport
from reconv.data.pipeline.bad_samples import BadSample
from reconv.distributed import collectives
from reconv.distributed.collectives import decode, encode
from reconv.distributed.process_group import open_process_group
from reconv.recipe.load.resolved import Resolved
from reconv.recipe.loader import load

VALUES = [
    None,
    [True, 1, -(2**70), 0.1, float("inf"), 5e-324, "text \udcff \0"],
    (1, (2, [3]), ()),
    {"a": 1, 2: "b", (3, "c"): {}},
    {"dict": 1},  # no key is taken for a kind
    [{1, 2}, frozenset({"x"}), b"\0\xff", Path("a/b")],
    (torch.float16, torch.Size([2, 3])),
    BadSample("val", 3, 4, "a.jpg", "cut off"),
    NativeSupport("", True),
]


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_values_come_back_with_their_types(value: object) -> None:
    back = decode(memoryview(encode(value)))
    assert back == value
    assert type(back) in (type(value), tuple)


@pytest.mark.parametrize("name", ["quickstart", "ssd-resnet34-voc", "cifar10-fast"])
def test_a_resolved_recipe_comes_back_equal(name: str) -> None:
    resolved = load(name, [("schedule.lr", "2^-11 per image", "--lr")])
    back = decode(memoryview(encode(resolved)))
    assert isinstance(back, Resolved) and back == resolved
    assert back.recipe.model_fields_set == resolved.recipe.model_fields_set
    assert back.recipe.schedule.model_fields_set == resolved.recipe.schedule.model_fields_set


def test_arrays_and_tensors_keep_every_bit() -> None:
    array = np.frombuffer(os.urandom(96), dtype=np.float64).reshape(3, 4)[:, ::2]
    tensors = [torch.randn(3, 4, 2).to(dtype) for dtype in (torch.bfloat16, torch.float64, torch.bool)]
    sent = {"a": array, "t": [*tensors, torch.empty(0, 3), torch.tensor(2)], "s": np.int64(7), "n": np.array(["é"])}
    back: Any = decode(memoryview(encode(sent)))
    assert back["a"].tobytes() == array.tobytes() and back["a"].flags.writeable
    assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(back["t"], sent["t"], strict=True))
    assert back["s"] == 7 and isinstance(back["s"], np.int64)
    assert back["n"].tolist() == ["é"]


class _Unmarked(NamedTuple):
    x: int


@pytest.mark.parametrize(
    "value", [_Unmarked(1), object(), print, np.array([None]), [RankLostError("x")], int], ids=range(6)
)
def test_other_classes_are_not_sent(value: object) -> None:
    with pytest.raises(TypeError, match="ranks cannot send each other"):
        encode(value)


class _RunsCode:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("executed"),)


def _framed(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        pickle.dumps(_RunsCode()),
        _framed("{"),
        _framed("[" * 100_000),
        _framed('{"class": ["os:system", {"x": 1}]}'),
        _framed('{"class": ["reconv.logging.run_dir:RunDir", {"path": "x", "files": 1}]}'),
        _framed('{"named": ["reconv.logging.run_dir:RunDir", ["x"]]}'),
        _framed('{"section": ["reconv.recipe.schema:Recipe", {"name": "x"}, []]}'),
        _framed('{"array": ["|O8", [1], [0, 8]]}') + b"\0" * 8,
        _framed('{"array": ["<f8", [1000000000000], [0, 8]]}') + b"\0" * 8,
        _framed('{"tensor": ["load", [1], [0, 8]]}') + b"\0" * 8,
        _framed('{"tensor": ["float32", [3], [0, 8]]}') + b"\0" * 8,
        _framed('{"pickle": "gASVAAAA"}'),
        _framed('{"tuple": [], "list": []}'),
        _framed('{"error": {"what": 1}}'),
    ],
    ids=range(15),
)
def test_bytes_of_strangers_are_an_error_and_run_nothing(content: bytes) -> None:
    with pytest.raises(RankLostError, match="rank 3 sent something that is not a message"):
        collectives._decode_from(
            3, torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
        )
    assert not Path("executed").exists()


def _exchange_without_pickles() -> Any:
    def refuse(*args: object) -> Any:
        raise AssertionError("torch pickles an object")

    distributed_c10d._object_to_tensor = distributed_c10d._tensor_to_object = refuse
    group = open_process_group()

    def fail() -> int:
        raise DataError("no such image", where="a.jpg")

    try:
        parts = group.all_gather({"rank": group.rank, "long": b"x" * group.rank})
        metadata = group.on_rank0(lambda: ("from", group.rank))
        with pytest.raises((DataError, RemoteRankError), match="no such image") as error:
            group.on_rank0(fail)
        return parts, metadata, group.broadcast([group.rank]), error.value.where
    finally:
        group.close()


def test_collectives_of_objects_send_no_pickle() -> None:
    results = in_ranks(3, _exchange_without_pickles)
    parts = [{"rank": rank, "long": b"x" * rank} for rank in range(3)]
    assert results == [(parts, ("from", 0), [0], "a.jpg")] * 3


def _with_a_rank_that_sends_a_pickle() -> str:
    group = open_process_group()
    try:
        if group.rank == 1:
            received: list[object] = [None] * 2
            dist.all_gather_object(received, _RunsCode())
            return ""
        with pytest.raises(RankLostError) as error:
            group.all_gather("hello")
        return str(error.value)
    except Exception as error:  # what rank 0 has sent is no pickle
        assert group.rank == 1, error
        return type(error).__name__
    finally:
        group.close("failed")


def test_a_pickle_of_a_rank_is_not_loaded() -> None:
    message, _ = in_ranks(2, _with_a_rank_that_sends_a_pickle)
    assert "rank 1 sent something that is not a message of a rank" in message
    assert not Path("executed").exists()
