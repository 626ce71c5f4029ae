"""Results of a model: typed predictions that print and, in a notebook, display themselves."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from reconv.core.errors import ReconvError
from reconv.data.inspect.draw_boxes import DrawnBox, class_color, draw_boxes
from reconv.inference.image_input import ImageInput, to_pil
from reconv.storage.remote_tree import shown_path

_THUMBNAIL_PX = 224
_DETECTION_PX = 480
_MAX_SHOWN = 24  # predictions of a list, and boxes of an image, that a notebook displays


class ClassScore(NamedTuple):
    """A class with its probability; a tuple, since thousands are made in a second."""

    name: str
    score: float
    index: int  # type: ignore[assignment]  # into the class names; hides tuple.index

    def __str__(self) -> str:
        return f"{self.name} {self.score:.1%}"

    def to_dict(self) -> dict[str, Any]:
        return {"index": self.index, "name": self.name, "score": self.score}


@dataclass(frozen=True, slots=True)
class DetectedBox:
    """A detection in one image."""

    name: str
    score: float
    box_xyxy: tuple[float, float, float, float]  # left, top, right, bottom in pixels of the upright image
    index: int  # into the class names
    class_id: int | None = None  # the category id of the training data, where it had one

    def __str__(self) -> str:
        corners = ", ".join(f"{edge:.0f}" for edge in self.box_xyxy)
        return f"{self.name} {self.score:.1%} at ({corners})"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DetectedBox:
        """The inverse of `to_dict`."""
        left, top, right, bottom = values["box_xyxy"]
        box = (left, top, right, bottom)
        return cls(values["name"], values["score"], box, values["index"], values.get("class_id"))

    def to_dict(self) -> dict[str, Any]:
        class_id = {} if self.class_id is None else {"class_id": self.class_id}
        return {
            "index": self.index,
            "name": self.name,
            **class_id,
            "score": self.score,
            "box_xyxy": list(self.box_xyxy),
        }


@dataclass(frozen=True, slots=True, repr=False)
class Prediction:
    """The prediction for one image, best score first: `classes` of a classifier, `boxes` of a detector."""

    path: Path | None  # None: the image was not a file
    classes: tuple[ClassScore, ...] = ()
    boxes: tuple[DetectedBox, ...] | None = None  # None: the model is a classifier, or there was an error
    error: str = ""  # why the image could not be read
    saved_image: Path | None = None  # the copy of the image with its boxes, where one was requested
    image: ImageInput | None = field(default=None, compare=False)  # what was predicted, as it was passed
    prediction_set: tuple[str, ...] | None = (
        None  # the classes that are probable enough; None: the model promises nothing
    )

    @property
    def unsure(self) -> bool | None:
        """True if the prediction set has no class or several; None where the model promises nothing."""
        return None if self.prediction_set is None else len(self.prediction_set) != 1

    @property
    def label(self) -> str | None:
        """The name of the best class or box; None where there is none."""
        best = self._best()
        return None if best is None else best.name

    @property
    def score(self) -> float:
        """The score of the best class or box; 0 where there is none."""
        best = self._best()
        return 0.0 if best is None else best.score

    @property
    def shown_path(self) -> str:
        """The path of the image, or its address in an object store."""
        return str(self.path) if self.path is None else shown_path(self.path)

    def _best(self) -> ClassScore | DetectedBox | None:
        found: Sequence[ClassScore | DetectedBox] = self.classes if self.boxes is None else self.boxes
        return found[0] if found else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as `reconv predict --json` writes it; an image that could not be read has only its error."""
        found: dict[str, Any] = {}
        if self.boxes is not None:
            found["boxes"] = [box.to_dict() for box in self.boxes]
        elif not self.error:
            found["classes"] = [item.to_dict() for item in self.classes]
            if self.prediction_set is not None:
                found |= {"unsure": self.unsure, "prediction_set": list(self.prediction_set)}
        return {
            "path": None if self.path is None else self.shown_path,
            **found,
            **({"saved_image": str(self.saved_image)} if self.saved_image is not None else {}),
            **({"error": self.error} if self.error else {}),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Prediction:
        """The inverse of `to_dict`; `image` is not part of it."""
        path, saved, boxes = values["path"], values.get("saved_image"), values.get("boxes")
        return cls(
            None if path is None else Path(path),
            tuple(ClassScore(item["name"], item["score"], item["index"]) for item in values.get("classes", ())),
            None if boxes is None else tuple(map(DetectedBox.from_dict, boxes)),
            values.get("error", ""),
            None if saved is None else Path(saved),
            prediction_set=tuple(values["prediction_set"]) if "prediction_set" in values else None,
        )

    def __str__(self) -> str:
        found = self.classes if self.boxes is None else self.boxes
        text = self.error or ", ".join(map(str, found)) or "nothing found"
        if self.unsure:
            text += f" (unsure: {', '.join(self.prediction_set or ()) or 'no class is probable enough'})"
        return f"{self.shown_path}: {text}" if self.path is not None else text

    def __repr__(self) -> str:
        return f"<Prediction {self}>"

    def _repr_html_(self) -> str:
        """The image beside its classes, or with its boxes, in a notebook."""
        shown = _image_html(self)
        title = f"<div><code>{escape(self.shown_path)}</code></div>" if self.path is not None else ""
        if self.error:
            body = f"<div>{escape(self.error)}</div>"
        elif self.boxes is None:
            body = "".join(_bar_html(item) for item in self.classes)
        else:
            listed = "".join(f"<li>{escape(str(box))}</li>" for box in self.boxes[:_MAX_SHOWN])
            more = len(self.boxes) - _MAX_SHOWN
            listed += f"<li>and {more} more</li>" if more > 0 else ""
            body = f"<ol>{listed}</ol>" if self.boxes else "<div>nothing found</div>"
        return (
            '<div style="display:flex;gap:1em;align-items:flex-start;margin:0.3em 0">'
            f"{shown}<div>{title}{body}</div></div>"
        )


class PredictionList(list[Prediction]):
    """Predictions of several images, in their order."""

    def _repr_html_(self) -> str:
        more = len(self) - _MAX_SHOWN
        note = f"<div>and {more} more</div>" if more > 0 else ""
        return "".join(prediction._repr_html_() for prediction in self[:_MAX_SHOWN]) + note


def image_with_boxes(image: Image.Image, boxes: Sequence[DetectedBox]) -> Image.Image:
    """A copy of the image in color with the boxes drawn on it."""
    return draw_boxes(image, [DrawnBox(b.box_xyxy, f"{b.name} {b.score:.0%}", class_color(b.index)) for b in boxes])


def _image_html(prediction: Prediction) -> str:
    """The image as an <img>, or nothing if it cannot be read any more."""
    if prediction.image is None:
        return ""
    try:
        image = to_pil(prediction.image, 3)
    except (ReconvError, OSError, ValueError):  # a file that is gone, or an object that can be read once
        return ""
    side = _THUMBNAIL_PX if prediction.boxes is None else _DETECTION_PX
    image = image_with_boxes(image, prediction.boxes) if prediction.boxes else image.copy()
    image.thumbnail((side, side))
    file = io.BytesIO()
    image.save(file, "PNG")
    return f'<img alt="" src="data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}">'


def _bar_html(item: ClassScore) -> str:
    width = f"{100 * item.score:.1f}%"
    return (
        '<div style="display:flex;gap:0.5em;align-items:center">'
        f'<div style="width:12em;text-align:right;overflow:hidden;text-overflow:ellipsis">{escape(item.name)}</div>'
        f'<div style="width:10em;background:#8882"><div style="width:{width};background:#4c78a8">&nbsp;</div></div>'
        f"<div>{item.score:.1%}</div></div>"
    )
