"""The wire format of protocol buffers, and the masked CRC-32C, against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconv.storage.tensorflow_encoding import MalformedError, encode_varint, masked_crc32c, read_message, read_varint


@given(st.binary(max_size=80))
def test_any_bytes_are_parsed_or_reported_as_malformed(data: bytes) -> None:
    try:
        assert all(field >= 0 for field, _ in read_message(data))
    except MalformedError as error:
        assert str(error)


@pytest.mark.parametrize("value", [0, 1, 127, 128, 300, 2**63, 2**64 - 1])
def test_a_varint_round_trips_and_is_refused_when_truncated(value: int) -> None:
    data = encode_varint(value)
    assert read_varint(memoryview(data + b"x"), 0) == (value, len(data))
    with pytest.raises(MalformedError):
        read_varint(memoryview(data[:-1]), 0)


def test_masked_crc32c_equals_its_definition() -> None:
    for size in (0, 1, 7, 8, 63, 64, 4097):
        data = np.random.default_rng(size).bytes(size)
        state = 0xFFFFFFFF
        for byte in data:
            state ^= byte
            for _ in range(8):
                state = state >> 1 ^ (0x82F63B78 if state & 1 else 0)
        crc = state ^ 0xFFFFFFFF
        assert masked_crc32c(data) == ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32
    assert masked_crc32c(b"123456789") == ((0xE3069283 >> 15 | 0xE3069283 << 17) + 0xA282EAD8) % 2**32
