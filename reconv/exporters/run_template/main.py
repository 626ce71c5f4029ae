"""Runs the exported model in this folder on image files: python run.py IMAGE...

It reads images exactly as the model was evaluated: upright, RGB, resized with Pillow's antialiased filter and center
cropped, all as in preprocess.json. `preprocess(data, settings)` and `load_model(folder, settings)` can be imported.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from reconv.exporters.run_template.with_onnxruntime import load_model

FOLDER = Path(__file__).resolve().parent
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM")
MAX_PIXELS = 89_478_485  # of one image; more is taken for a decompression bomb
BATCH_SIZE = 16
# Control characters and overrides of the direction, in text that is printed.
UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
MIN_SCORES = {"multilabel": 0.5, "detection": 0.3}
warnings.filterwarnings("ignore", module=r"PIL\.")


def read_settings(folder: Path = FOLDER) -> dict[str, Any]:
    """The content of preprocess.json."""
    settings: dict[str, Any] = json.loads((folder / "preprocess.json").read_text(encoding="utf-8"))
    return settings


def preprocess(data: bytes, settings: dict[str, Any]) -> Any:
    """The pixels [size, size, channels] in uint8 that the model takes, of an encoded image."""
    return crop(decode(data, settings["channels"]), settings)


def decode(data: bytes, channels: int) -> Image.Image:
    """The upright image in mode RGB (3 channels) or L (1 channel)."""
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(f"{image.width} x {image.height} pixels, more than {MAX_PIXELS:,}")
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
    return to_mode(image, "L" if channels == 1 else "RGB")


def to_mode(image: Image.Image, mode: str) -> Image.Image:
    """The image in a mode: 16 bits are cut to the upper 8, float gray is 0 to 255 or 0 to 1, alpha is dropped."""
    if image.mode == mode:
        return image
    if image.mode == "I" and image.format == "TIFF":
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise ValueError(f"pixel values from {values.min()} to {values.max()} have no known meaning")
        image = Image.fromarray((values if values.max() < 256 else values >> 8).astype(np.uint8))
    elif image.mode.startswith("I"):
        image = Image.fromarray((np.clip(np.asarray(image), 0, 65535).astype(np.uint16) >> 8).astype(np.uint8))
    elif image.mode == "F":
        values = np.asarray(image)
        if not np.isfinite(values).all():
            raise ValueError("some pixel values are not finite")
        image = Image.fromarray(np.clip(values * (255 if 0 < values.max() <= 1 else 1), 0, 255).astype(np.uint8))
    elif image.mode in ("P", "PA"):
        image = image.convert("RGBA")
    return image.convert(mode)


def crop(image: Image.Image, settings: dict[str, Any]) -> Any:
    """The center of the image at the model's size, [size, size, channels] in uint8."""
    size, left, top, right, bottom = settings["size"], *crop_box(image.width, image.height, settings)
    if right - left == bottom - top == size:
        image = image.crop((round(left), round(top), round(right), round(bottom)))
    else:
        resampling = Image.Resampling[settings["interpolation"].upper()]
        image = image.resize((size, size), resampling, box=(left, top, right, bottom))
    return np.asarray(image, dtype=np.uint8).reshape(size, size, settings["channels"])


def crop_box(width: int, height: int, settings: dict[str, Any]) -> tuple[float, float, float, float]:
    """The box (left, top, right, bottom) of an image that is resized to the model's size."""
    size, shorter_side = settings["size"], settings["resize"]
    if shorter_side is None:
        return 0, 0, width, height
    new_width, new_height = (max(shorter_side, shorter_side * side // min(width, height)) for side in (width, height))
    left, top = round((new_width - size) / 2), round((new_height - size) / 2)
    scale_x, scale_y = width / new_width, height / new_height
    return left * scale_x, top * scale_y, (left + size) * scale_x, (top + size) * scale_y


def run(model: Any, images: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """The model's outputs for a batch; a model with a fixed batch size gets batches of that size."""
    count, fixed = len(images), settings["batch"]
    if fixed is None:
        return dict(model(images))
    parts = []
    for start in range(0, count, fixed):
        part = images[start : start + fixed]
        padding = np.zeros((fixed - len(part), *images.shape[1:]), images.dtype)
        parts.append({name: value[: len(part)] for name, value in model(np.concatenate([part, padding])).items()})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def suppress(outputs: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """The detections in the raw boxes of a model without NMS: boxes, scores, labels and counts."""
    rules, padded = settings["nms"], []
    for boxes, scores in zip(outputs["boxes"], outputs["scores"], strict=True):
        kept = []
        for label in range(scores.shape[1]):
            order = np.argsort(-scores[:, label], kind="stable")[: rules["max_per_class"]]
            order = order[scores[order, label] > rules["score_threshold"]]
            while len(order):
                kept.append((-scores[order[0], label], order[0], label))
                order = order[1:][iou(boxes[order[0]], boxes[order[1:]]) < rules["iou_threshold"]]
        kept = sorted(kept)[: rules["max_per_image"]]
        rows, labels = [item[1] for item in kept], [item[2] for item in kept]
        found = np.clip(boxes[rows], 0, settings["size"]), scores[rows, labels], np.array(labels, np.int64)
        missing = rules["max_per_image"] - len(kept)
        padded.append([np.pad(part, [(0, missing)] + [(0, 0)] * (part.ndim - 1)) for part in found] + [len(kept)])
    names = ("boxes", "scores", "labels", "counts")
    return {name: np.stack([image[k] for image in padded]) for k, name in enumerate(names)}


def iou(box: Any, others: Any) -> Any:
    """Intersection over union of a box [4] with others [k, 4]; an empty box has 0."""
    low, high = np.maximum(box[:2], others[:, :2]), np.minimum(box[2:], others[:, 2:])
    intersection = np.maximum(high - low, 0).prod(axis=1)
    areas = [np.maximum(each[..., 2:] - each[..., :2], 0).prod(axis=-1) for each in (box, others)]
    return intersection / np.where(intersection > 0, areas[0] + areas[1] - intersection, 1)


def to_predictions(
    outputs: dict[str, Any], sizes: list[tuple[int, int]], settings: dict[str, Any], top: int | None, min_score: float
) -> Iterator[dict[str, Any]]:
    """The best classes, labels or boxes of each image; `sizes` are widths and heights of the upright images."""
    names, ids = settings["classes"], settings["class_ids"]
    if settings["task"] == "detection":
        for row, (width, height) in enumerate(sizes):
            scale = np.array([width, height, width, height], np.float64) / settings["size"]
            boxes = []
            for k in range(int(outputs["counts"][row])):
                label, score = int(outputs["labels"][row, k]), float(outputs["scores"][row, k])
                class_id = {"class_id": ids[label]} if ids else {}
                box = (outputs["boxes"][row, k] * scale).tolist()
                boxes.append({"index": label, "name": names[label], **class_id, "score": score, "box_xyxy": box})
            yield {"boxes": [box for box in boxes if box["score"] >= min_score][:top]}
        return
    logits, confidence = outputs["logits"].astype(np.float64), settings.get("confidence")
    if settings["task"] == "multilabel":
        scores, confidence = 1 / (1 + np.exp(-logits)), None
    else:
        logits = logits / (confidence["temperature"] if confidence else 1)
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        scores, top = powers / powers.sum(axis=1, keepdims=True), top or 5
    for row in scores:
        order = [int(index) for index in np.argsort(-row, kind="stable") if row[index] >= min_score][:top]
        found: dict[str, Any] = {
            "classes": [{"index": index, "name": names[index], "score": float(row[index])} for index in order]
        }
        if confidence and confidence["coverage"] is not None:
            ranked = np.argsort(-row, kind="stable")
            members = [names[index] for index in ranked if row[index] >= confidence["threshold"]]
            found |= {"unsure": len(members) != 1, "prediction_set": members}
        yield found


def printable(text: str) -> str:
    """The text with control characters escaped: class names and paths must not act on the terminal."""
    return UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Run the exported model on image files.", fromfile_prefix_chars="@", epilog="@FILE: a path per line"
    )
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="an image file")
    parser.add_argument("--top", type=int, help="print the N best classes (5), labels or boxes (all)")
    parser.add_argument("--min-score", type=float, help="omit boxes (0.3) or labels (0.5) with a lower score")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--outputs", metavar="FILE.npz", help="write the model's outputs, and a CRC-32 of the pixels")
    return parser.parse_args()


def main() -> int:
    args, settings = parse_args(), read_settings()
    model = load_model(FOLDER, settings)
    min_score = MIN_SCORES.get(settings["task"], 0.0) if args.min_score is None else args.min_score
    printed, stored, num_bad = [], [], 0
    for start in range(0, len(args.images), BATCH_SIZE):
        paths, pixels, sizes = [], [], []
        for path in args.images[start : start + BATCH_SIZE]:
            try:
                image = decode(Path(path).read_bytes(), settings["channels"])
                pixels.append(crop(image, settings))
            except Exception as error:  # damaged bytes may raise anything in a decoder
                print(printable(f"{path}: {error}"), file=sys.stderr)
                num_bad += 1
                continue
            paths.append(path)
            sizes.append(image.size)
        if not pixels:
            continue
        outputs = run(model, np.stack(pixels), settings)
        if settings["task"] == "detection" and "counts" not in outputs:
            outputs = suppress(outputs, settings)
        if args.outputs:
            crcs = np.array([zlib.crc32(image.tobytes()) for image in pixels], np.uint32)
            stored.append({**outputs, "pixels_crc32": crcs, "sizes": np.array(sizes, np.int64)})
            continue
        predictions = to_predictions(outputs, sizes, settings, args.top, min_score)
        printed += [{"path": path, **prediction} for path, prediction in zip(paths, predictions, strict=True)]
    if args.outputs and stored:
        arrays: Any = {name: np.concatenate([part[name] for part in stored]) for name in stored[0]}
        np.savez(args.outputs, **arrays)
    if args.json:
        print(json.dumps(printed, indent=2))
    else:
        for item in printed:
            print(printable(item["path"]))
            for found in item["boxes" if "boxes" in item else "classes"]:
                box = " ".join(f"{edge:8.1f}" for edge in found.get("box_xyxy", ()))
                print(printable(f"  {found['score']:7.2%}  {found['name']}  {box}".rstrip()))
            if item.get("unsure"):
                print(printable(f"  unsure: {', '.join(item['prediction_set']) or 'no class is probable enough'}"))
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
