"""The Open Inference Protocol (version 2, REST): metadata of models, and inference on tensors in JSON or binary.

A classifier takes `images`, either UINT8 [n, size, size, channels] or BYTES [n] with encoded files (in JSON as base64),
and gives `logits` and `probabilities` FP32 [n, classes] and `labels`: BYTES [n], the best class, or of a multi-label
model BOOL [n, classes]. A detector gives `boxes` FP32 [n, k, 4] in pixels of each image, `scores` FP32 [n, k],
`labels` BYTES [n, k] and `counts` INT64 [n]; images with fewer boxes than k are padded.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from starlette.responses import Response

from reconv.api import ImageSample, Predictor
from reconv.core.version import __version__
from reconv.recipe.parts.evaluation import MULTILABEL_THRESHOLD
from reconv.serve.http.request_images import decode_base64, load_json, too_many_images
from reconv.serve.limits import ApiError, Limits

HEADER_LENGTH = "inference-header-content-length"
SERVER_METADATA = {"name": "reconv", "version": __version__, "extensions": ["binary_tensor_data"]}
_DATATYPES = {"float32": "FP32", "int64": "INT64", "bool": "BOOL"}

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class InferRequest:
    """An inference request: its images, and which outputs it wants in which form."""

    id: str | None
    images: Sequence[bytes | ImageSample]
    min_score: float | None
    outputs: Mapping[str, bool]  # by name, whether in binary; empty: all in JSON
    is_binary: bool  # all outputs, where none is named


def model_metadata(name: str, predictor: Predictor) -> dict[str, Any]:
    """Body of `GET /v2/models/NAME`."""
    preprocess = predictor.recipe.data.preprocess
    num_classes = len(predictor.classes)
    if predictor.is_detector:
        outputs = [("boxes", "FP32", [-1, -1, 4]), ("scores", "FP32", [-1, -1]), ("labels", "BYTES", [-1, -1])]
        outputs.append(("counts", "INT64", [-1]))
    else:
        is_multilabel = predictor.recipe.task == "multilabel"
        labels = ("labels", "BOOL", [-1, num_classes]) if is_multilabel else ("labels", "BYTES", [-1])
        outputs = [("logits", "FP32", [-1, num_classes]), ("probabilities", "FP32", [-1, num_classes]), labels]
    shape = [-1, preprocess.size, preprocess.size, preprocess.channels]
    return {
        "name": name,
        "versions": [version_of(predictor)],
        "platform": f"reconv_{predictor.backend.name}",
        "inputs": [{"name": "images", "datatype": "UINT8", "shape": shape}],
        "outputs": [{"name": name, "datatype": kind, "shape": shape} for name, kind, shape in outputs],
    }


def version_of(predictor: Predictor) -> str:
    """The version of a model: the training step of its checkpoint."""
    return str(predictor.step or 0)


def parse_infer(body: bytes, header_length: str | None, predictor: Predictor, limits: Limits) -> InferRequest:
    """The request of a body, which is JSON, after it the binary data of tensors."""
    length = len(body)
    if header_length is not None:
        # Python refuses to convert very long numbers.
        is_number = header_length.isdecimal() and len(header_length) < 16
        if not is_number or int(header_length) > len(body):
            raise _bad(f"{HEADER_LENGTH} is not a length within the body")
        length = int(header_length)
    document = load_json(body[:length], limits)
    inputs = document.get("inputs")
    if not isinstance(inputs, list) or len(inputs) != 1 or not isinstance(inputs[0], dict):
        raise _bad("`inputs` is a list of one tensor, `images`")
    tensor, parameters = inputs[0], _parameters(document)
    if tensor.get("name") != "images":
        raise _bad(f"there is no input {tensor.get('name')!r}; the input is `images`")
    shape = tensor.get("shape")
    if not isinstance(shape, list) or not all(type(side) is int and side >= 0 for side in shape) or not shape:
        raise _bad("the `shape` of a tensor is a list of sizes")
    if shape[0] > limits.max_images:
        raise too_many_images(limits.max_images)
    if shape[0] == 0:
        raise _bad("the request has no image")
    data = _binary_data(tensor, body[length:])
    if tensor.get("datatype") == "BYTES":
        images: Sequence[bytes | ImageSample] = _encoded_images(tensor, shape, data)
    elif tensor.get("datatype") == "UINT8":
        images = _pixel_images(tensor, shape, data, predictor)
    else:
        raise _bad("the datatype of `images` is UINT8, or BYTES for encoded files")
    request_id, min_score = document.get("id"), parameters.get("min_score")
    if request_id is not None and not isinstance(request_id, str):
        raise _bad("`id` is a string")
    if min_score is not None and (type(min_score) not in (int, float) or not 0 <= min_score <= 1):
        raise _bad("the parameter `min_score` is a number from 0 to 1")
    if min_score is not None and not predictor.is_detector:
        raise _bad("the parameter `min_score` is for detectors")
    outputs = _wanted_outputs(document.get("outputs"), predictor)
    return InferRequest(request_id, images, min_score, outputs, parameters.get("binary_data_output") is True)


def _wanted_outputs(listed: Any, predictor: Predictor) -> dict[str, bool]:
    if listed is None:
        return {}
    if not isinstance(listed, list) or not all(isinstance(output, dict) for output in listed):
        raise _bad("`outputs` is a list of {name}")
    known = [output["name"] for output in model_metadata("", predictor)["outputs"]]
    for output in listed:
        if output.get("name") not in known:
            raise _bad(f"there is no output {output.get('name')!r}; outputs: {', '.join(known)}")
    return {output["name"]: _parameters(output).get("binary_data") is True for output in listed}


def _parameters(document: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = document.get("parameters", {})
    if not isinstance(parameters, dict):
        raise _bad("`parameters` is an object")
    return parameters


def _binary_data(tensor: Mapping[str, Any], rest: bytes) -> bytes | None:
    """The binary data of the tensor, which follows the JSON; None: its data is in the JSON."""
    size = _parameters(tensor).get("binary_data_size")
    if size is None:
        if rest:
            raise _bad("there is binary data after the JSON, and no tensor has `binary_data_size`")
        return None
    if type(size) is not int or size != len(rest) or "data" in tensor:
        raise _bad(f"`binary_data_size` is {size!r}, and {len(rest):,} bytes follow the JSON")
    return rest


def _encoded_images(tensor: Mapping[str, Any], shape: Sequence[int], data: bytes | None) -> list[bytes]:
    if len(shape) != 1:
        raise _bad("the shape of BYTES `images` is [n]")
    if data is None:
        listed = tensor.get("data")
        if not isinstance(listed, list) or len(listed) != shape[0]:
            raise _bad(f"`data` is a list of {shape[0]} base64 strings")
        return [decode_base64(text) for text in listed]
    images: list[bytes] = []
    at = 0
    while at + 4 <= len(data) and len(images) < shape[0]:
        (length,) = struct.unpack_from("<I", data, at)
        images.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    if at != len(data) or len(images) != shape[0]:
        raise _bad("the binary data does not hold as many elements as the shape says")
    return images


def _pixel_images(
    tensor: Mapping[str, Any], shape: Sequence[int], data: bytes | None, predictor: Predictor
) -> list[ImageSample]:
    """Images of the network's size, as the network sees them."""
    preprocess = predictor.recipe.data.preprocess
    expected = [shape[0], preprocess.size, preprocess.size, preprocess.channels]
    if list(shape) != expected:
        raise _bad(f"the shape of UINT8 `images` is {[-1, *expected[1:]]}, not {list(shape)}")
    if data is not None:
        if len(data) != math.prod(shape):
            raise _bad(f"`images` has {len(data):,} bytes, and its shape asks for {math.prod(shape):,}")
        pixels = np.frombuffer(data, np.uint8)
    else:
        try:
            values = np.asarray(tensor.get("data"))
        except ValueError as error:  # rows of different lengths
            raise _bad("`data` does not have the shape of the tensor") from error
        if values.dtype.kind not in "iu" or values.size != math.prod(shape) or values.min() < 0 or values.max() > 255:
            raise _bad(f"`data` is {math.prod(shape):,} integers from 0 to 255")
        pixels = values.astype(np.uint8)
    images = torch.from_numpy(pixels.reshape(shape).transpose(0, 3, 1, 2).copy())
    return [ImageSample(image, preprocess.size, preprocess.size) for image in images]


def output_tensors(results: Sequence[Mapping[str, Any]], predictor: Predictor) -> dict[str, Array]:
    """The output tensors, from the result of each image."""
    if predictor.is_detector:
        return _box_tensors([result["boxes"] for result in results])
    logits = np.stack([result["logits"] for result in results])
    probabilities = np.stack([result["probabilities"] for result in results])
    if predictor.recipe.task == "multilabel":
        labels: Array = probabilities >= MULTILABEL_THRESHOLD
    else:
        names = [predictor.classes[index].encode() for index in logits.argmax(axis=1)]
        labels = np.array(names, dtype=object)
    return {
        "logits": logits.astype(np.float32),
        "probabilities": probabilities.astype(np.float32),
        "labels": labels,
    }


def _box_tensors(found: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Array]:
    counts = np.array([len(boxes) for boxes in found], dtype=np.int64)
    n, k = len(found), int(counts.max())
    boxes, scores = np.zeros((n, k, 4), np.float32), np.zeros((n, k), np.float32)
    labels = np.full((n, k), b"", dtype=object)
    for row, of_image in enumerate(found):
        for column, box in enumerate(of_image):
            boxes[row, column], scores[row, column] = box["box_xyxy"], box["score"]
            labels[row, column] = box["name"].encode()
    return {"boxes": boxes, "scores": scores, "labels": labels, "counts": counts}


def infer_response(name: str, version: str, request: InferRequest, tensors: Mapping[str, Array]) -> Response:
    """The response to an inference request."""
    wanted = request.outputs or dict.fromkeys(tensors, request.is_binary)
    outputs, chunks = [], []
    for output, is_binary in wanted.items():
        tensor = tensors[output]
        described: dict[str, Any] = {
            "name": output,
            "datatype": _DATATYPES.get(str(tensor.dtype), "BYTES"),
            "shape": list(tensor.shape),
        }
        if is_binary:
            chunks.append(_to_binary(tensor))
            described["parameters"] = {"binary_data_size": len(chunks[-1])}
        elif tensor.dtype == object:
            described["data"] = [text.decode() for text in tensor.ravel()]
        else:
            described["data"] = tensor.ravel().tolist()
        outputs.append(described)
    document: dict[str, Any] = {"model_name": name, "model_version": version}
    document |= {} if request.id is None else {"id": request.id}
    head = json.dumps(document | {"outputs": outputs}, allow_nan=False).encode()
    if not chunks:
        return Response(head, media_type="application/json")
    headers = {"Inference-Header-Content-Length": str(len(head))}
    return Response(b"".join([head, *chunks]), media_type="application/octet-stream", headers=headers)


def _to_binary(tensor: Array) -> bytes:
    if tensor.dtype != object:
        return tensor.tobytes()  # little-endian, as the protocol asks, on all machines torch runs on
    return b"".join(struct.pack("<I", len(text)) + text for text in tensor.ravel())


def _bad(message: str) -> ApiError:
    return ApiError(400, "bad_request", message)
