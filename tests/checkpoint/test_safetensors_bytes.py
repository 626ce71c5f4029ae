"""The bytes of safetensors files: those of the library, for every dtype and layout."""

from __future__ import annotations

import json

import pytest
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from reconv.checkpoint.safetensors_bytes import _DTYPES, encode, encode_pieces


def example() -> dict[str, Tensor]:
    """Two tensors of every dtype, in an order and with names that have to be sorted, and odd shapes."""
    tensors = {}
    for number, dtype in enumerate(_DTYPES):
        tensors[f"z.{19 - number}"] = torch.arange(number + 1).to(dtype)
        tensors[f"a.{number}"] = torch.arange(6).reshape(2, 3).to(dtype)
    return {**tensors, "scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4), "a": torch.ones(1, dtype=torch.bool)}


def test_bytes_are_those_of_the_library() -> None:
    assert encode(example()) == safetensors.torch.save(example())


def test_a_tensor_of_any_layout_is_stored_contiguously() -> None:
    plain = torch.randn(2, 3, 4, 5)
    last, view = plain.to(memory_format=torch.channels_last), torch.randn(4, 2)
    stored = safetensors.torch.load(encode({"last": last, "view": view.t(), "twice": view.t()}))
    assert torch.equal(stored["last"], plain) and torch.equal(stored["view"], view.t())
    assert torch.equal(stored["twice"], stored["view"])


@pytest.mark.parametrize("metadata", [{"b": "2", "a": "\u00fc\n"}, {"a": "\u00fc\n", "b": "2"}])
def test_metadata_is_sorted_and_read_back(metadata: dict[str, str]) -> None:
    data = encode({"w": torch.ones(2)}, metadata)
    assert data == encode({"w": torch.ones(2)}, dict(sorted(metadata.items())))
    length = int.from_bytes(data[:8], "little")
    assert list(json.loads(data[8 : 8 + length])["__metadata__"]) == ["a", "b"]
    with open("weights.safetensors", "wb") as file:
        file.write(data)
    with safetensors.safe_open("weights.safetensors", "pt") as opened:
        assert opened.metadata() == metadata


def test_no_tensors_are_a_valid_file() -> None:
    assert safetensors.torch.load(encode({})) == {}


def test_large_tensors_are_not_copied_and_small_ones_are_joined() -> None:
    large, small = torch.randn(1 << 15), torch.ones(3)
    tensors = {"a": small, "b": large, "c": small, "d": small.clone()}
    pieces = encode_pieces(tensors)
    assert [len(piece) for piece in pieces[1:]] == [large.nbytes, 2 * small.nbytes]
    large[7] = 5.0
    assert safetensors.torch.load(b"".join(pieces))["b"][7] == 5.0
