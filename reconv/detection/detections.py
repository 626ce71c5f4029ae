"""What a detector found: boxes, scores and classes of a batch, padded to one length.

Owns the container. Refuses to know networks, thresholds and images. Invariant: the first `counts[i]` rows of image i
are its detections, best score first, and the rows after them are zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Detections:
    """The detections of n images, K rows each."""

    boxes_xyxy: Tensor  # [n, K, 4] float32, fractions of the input image's width and height
    scores: Tensor  # [n, K] float32
    labels: Tensor  # [n, K] int64: 1 to the number of classes; 0 in rows that hold nothing
    counts: Tensor  # [n] int64

    def __len__(self) -> int:
        return int(self.counts.shape[0])

    def to_host(self) -> Detections:
        """The same detections in the host's memory."""
        return Detections(self.boxes_xyxy.cpu(), self.scores.cpu(), self.labels.cpu(), self.counts.cpu())
