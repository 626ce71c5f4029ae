"""Where the windows of a pool or a convolution lie along a side of an image.

Owns the arithmetic of paddings: torch's, the same on both ends, and TensorFlow's SAME. Refuses to know what is done
with a window. Invariant: with SAME there are ceil(side / stride) windows, and an odd total pads one more at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from reconv.models.layers.conv import same_padding


@dataclass(frozen=True, slots=True)
class PoolWindow:
    """A pool's window."""

    side: int
    stride: int
    pad: int | Literal["same"]
    ceil: bool = False  # whether a window may begin inside and end outside; SAME's do, and begin inside

    def before(self, side: int) -> int:
        """Pixels in front of the first of so many, where the first window begins."""
        return same_padding(side, self.side, self.stride)[0] if self.pad == "same" else self.pad

    def out_side(self, side: int) -> int:
        """Windows along a side of so many pixels."""
        if self.pad == "same":
            return -(-side // self.stride)
        room = side + 2 * self.pad - self.side
        number = (-(-room // self.stride) if self.ceil else room // self.stride) + 1
        begins_outside = self.ceil and (number - 1) * self.stride >= side + self.pad
        return number - 1 if begins_outside else number


STEM_WINDOW = PoolWindow(3, 2, 1)
STEM_WINDOWS = (STEM_WINDOW, PoolWindow(3, 2, "same"))  # of a stem's pool, which kernels fuse with its norm
STEM_KERNELS = (
    3,
    7,
)  # of a stem's convolution: with a tap more in front, its windows begin where blocks of 2x2 pixels do
MAX_STEM_CHANNELS = 4
