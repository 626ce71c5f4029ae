"""Pooling windows with torch's padding (equal on both ends) or TensorFlow's SAME padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from reconv.models.layers.conv import same_padding


@dataclass(frozen=True, slots=True)
class PoolWindow:
    """The window of a max-pool."""

    side: int
    stride: int
    pad: int | Literal["same"]
    ceil: bool = False  # torch's ceil_mode; always so with SAME

    def before(self, side: int) -> int:
        """Padding before the first of `side` pixels."""
        return same_padding(side, self.side, self.stride)[0] if self.pad == "same" else self.pad

    def out_side(self, side: int) -> int:
        """The output size for `side` pixels."""
        if self.pad == "same":
            return -(-side // self.stride)
        room = side + 2 * self.pad - self.side
        number = (-(-room // self.stride) if self.ceil else room // self.stride) + 1
        begins_outside = self.ceil and (number - 1) * self.stride >= side + self.pad
        return number - 1 if begins_outside else number


STEM_WINDOW = PoolWindow(3, 2, 1)
STEM_WINDOWS = (  # of a stem's pool, which is fused with its norm: ResNet's, TensorFlow's, GoogLeNet's
    STEM_WINDOW,
    PoolWindow(3, 2, "same"),
    PoolWindow(3, 2, 0, ceil=True),
)
STEM_KERNELS = (
    3,
    7,
)  # of a stem's convolution: with one more tap in front, windows are aligned with 2x2 blocks of pixels
MAX_STEM_CHANNELS = 4
