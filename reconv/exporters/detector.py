"""A detector as it is exported: uint8 images in, boxes in pixels of the network's input out, with or without NMS."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from reconv.detection.box_coder import decode_boxes
from reconv.detection.box_ops import broadcast_iou
from reconv.detection.postprocess import PostprocessConfig
from reconv.inference.backends.exported import ExportNormalize
from reconv.recipe.parts.data import PreprocessConfig

NMSOperation = Literal["torch", "onnx"]


class ExportDetector(nn.Module):
    """uint8 images [n, height, width, channels] to boxes xyxy in pixels of the network's input.

    With an `nms` operation the outputs are boxes [n, k, 4], scores [n, k], labels [n, k] (from 0, without background)
    and counts [n]: the first rows of each image are its detections, best score first, and the rest are zeros. They are
    those of `reconv.detection.postprocess`, except for the order of equal scores. The operation is ONNX's, which only
    a traced graph can contain, or a loop of torch.

    Without, they are the box [n, num_anchors, 4], not clipped, and the scores [n, num_anchors, classes] of each anchor.
    """

    anchors: Tensor

    def __init__(
        self,
        model: nn.Module,
        preprocess: PreprocessConfig,
        anchors_cxcywh: Tensor,
        variances: tuple[float, float],
        config: PostprocessConfig,
        nms: NMSOperation | None,
    ) -> None:
        super().__init__()
        self.normalize = ExportNormalize(preprocess)
        self.model = model
        self.register_buffer("anchors", anchors_cxcywh.clone())
        self._variances, self._config, self._size = variances, config, preprocess.size
        self._nms = nms

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        outputs = self.model(self.normalize(images))
        boxes = decode_boxes(outputs.box_deltas.to(torch.float32), self.anchors, self._variances)
        scores = outputs.logits.to(torch.float32).softmax(dim=2)[:, :, 1:]
        if self._nms is None:
            return boxes * self._size, scores
        return self._detections(boxes, scores)

    def _detections(self, boxes: Tensor, scores: Tensor) -> tuple[Tensor, ...]:
        config, num_classes = self._config, scores.shape[2]
        per_class = min(config.max_per_class, scores.shape[1])
        scores, anchor = scores.transpose(1, 2).topk(per_class, dim=2)  # [n, classes, per_class]
        candidates = _gather_boxes(boxes, anchor.flatten(1))  # [n, classes * per_class, 4]
        suppress = _remains_onnx if self._nms == "onnx" else _remains_torch
        lists = scores.flatten(0, 1)
        remains = suppress(candidates.view(-1, per_class, 4), lists, config.score_threshold, config.nms_iou)
        kept = torch.where(remains.view_as(scores), scores, 0).flatten(1)
        best, index = kept.topk(min(config.max_per_image, num_classes * per_class), dim=1)
        is_box = best > 0
        pixels = _gather_boxes(candidates, index).clamp(0, 1) * self._size
        labels = torch.where(is_box, index // per_class, 0)
        return torch.where(is_box[..., None], pixels, 0), best, labels, is_box.sum(dim=1)


def _gather_boxes(boxes: Tensor, index: Tensor) -> Tensor:
    """Rows `index` [n, k] of boxes [n, num_boxes, 4]."""
    return boxes.gather(1, index[..., None].expand(-1, -1, 4))


def _remains_torch(boxes_xyxy: Tensor, scores: Tensor, score_threshold: float, iou_threshold: float) -> Tensor:
    """Mask [num_lists, k] of the boxes that remain of lists sorted by falling score.

    Greedy NMS is the fixed point of "a box remains unless one that remains suppresses it", which is reached after as
    many rounds as the longest chain of suppressions: a loop that does not grow the graph.
    """
    valid, k = scores > score_threshold, scores.shape[1]
    is_earlier = torch.ones(k, k, dtype=torch.bool, device=scores.device).triu(1)
    suppresses = (broadcast_iou(boxes_xyxy[:, :, None], boxes_xyxy[:, None]) >= iou_threshold) & is_earlier

    def is_unfinished(remains: Tensor, changed: Tensor) -> Tensor:
        return changed.clone()  # the condition may not be its own input

    def suppress_once(remains: Tensor, changed: Tensor) -> tuple[Tensor, Tensor]:
        after = valid & ~(remains[:, :, None] & suppresses).any(dim=1)
        return after, (after != remains).any()

    state = valid.clone(), torch.ones((), dtype=torch.bool, device=scores.device)
    if torch.compiler.is_exporting():
        from torch._higher_order_ops.while_loop import while_loop

        remains: Tensor = while_loop(is_unfinished, suppress_once, state)[0]
        return remains
    while is_unfinished(*state):
        state = suppress_once(*state)
    return state[0]


def _remains_onnx(boxes_xyxy: Tensor, scores: Tensor, score_threshold: float, iou_threshold: float) -> Tensor:
    """The same by ONNX's operation, which suppresses above the threshold where ours suppresses from it."""
    num_lists, k = scores.shape
    selected = torch.onnx.ops.symbolic(
        "NonMaxSuppression",
        (
            boxes_xyxy,
            scores[:, None],
            torch.tensor([k]),
            torch.tensor([_just_below(iou_threshold)]),
            torch.tensor([score_threshold]),
        ),
        dtype=torch.int64,
        shape=(num_lists * k, 3),  # the most there can be
        version=11,
    )
    position = selected[:, 0] * k + selected[:, 2]
    remains = scores.new_zeros(num_lists * k).scatter(0, position, torch.ones_like(position, dtype=scores.dtype))
    return remains.view(num_lists, k) > 0


def _just_below(threshold: float) -> float:
    """The float32 number before `threshold`."""
    number = torch.tensor(threshold, dtype=torch.float32)
    return float(torch.nextafter(number, torch.tensor(-math.inf)))
