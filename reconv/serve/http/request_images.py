"""The encoded images in the body of a request: raw bytes, multipart or JSON. No file and no URL is ever opened."""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any

import numpy as np
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from reconv.serve.limits import ApiError, Limits

MAX_DEPTH = 32  # of JSON
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_JSON_FORM = '{"image": "<base64>"} or {"images": ["<base64>", ...]}'


def split_body(content_type: str, body: bytes | bytearray, limits: Limits) -> list[bytes]:
    """The encoded images of a request, in their order."""
    kind, options = parse_options_header(content_type)
    if kind == b"application/json":
        images = _from_json(load_json(body, limits), limits.max_images)
    elif kind == b"multipart/form-data":
        images = _from_multipart(options.get(b"boundary", b""), bytes(body), limits.max_images)
    elif kind == b"" or kind == b"application/octet-stream" or kind.startswith(b"image/"):
        images = [bytes(body)]
    else:
        # curl --data-binary sends this type by default, so the message names the option.
        raise ApiError(
            415,
            "unsupported_media_type",
            f"the content type {kind.decode('ascii', 'replace')!r} is not supported; send image/jpeg or another image "
            "type, application/octet-stream, multipart/form-data or application/json (with curl: "
            "-H 'Content-Type: image/jpeg')",
        )
    if not images or images == [b""]:
        raise ApiError(400, "no_image", "the request has no image")
    return images


def too_many_images(max_images: int) -> ApiError:
    """The error of a request with more images than allowed."""
    return ApiError(413, "too_many_images", f"a request may have at most {max_images} images")


def check_json(body: bytes | bytearray, limits: Limits) -> None:
    """Refuse JSON that would take far more memory than its text, before it is parsed.

    Brackets and commas in texts are counted too; the base64 of images has none.
    """
    num_values = body.count(b",") + body.count(b":")
    if num_values > (limit := limits.max_json_bytes // 16):
        raise ApiError(413, "json_too_large", f"the JSON has more than {limit:,} values; send tensors in binary")
    num_opened = body.count(b"[") + body.count(b"{")
    if num_opened > (limit := limits.max_json_bytes // 128):
        raise ApiError(413, "json_too_large", f"the JSON has more than {limit:,} lists; send tensors in binary")
    if num_opened > MAX_DEPTH and _depth(body) > MAX_DEPTH:
        raise ApiError(400, "bad_json", f"the JSON is nested more than {MAX_DEPTH} deep")


def _depth(body: bytes | bytearray) -> int:
    """The deepest nesting of brackets, or more where texts have some; closing ones in texts do not hide any.

    A loop over them would keep all other threads waiting.
    """
    brackets = np.frombuffer(body.translate(None, _NO_BRACKETS), np.uint8)
    levels = np.where((brackets == ord("[")) | (brackets == ord("{")), 1, -1).cumsum()
    return int((levels - np.minimum.accumulate(np.minimum(levels, 0))).max(initial=0))


def load_json(body: bytes | bytearray, limits: Limits) -> dict[str, Any]:
    """The JSON object of a body."""
    if len(body) > limits.max_json_bytes:
        raise ApiError(413, "json_too_large", f"the JSON is larger than {limits.max_json_bytes:,} bytes")
    check_json(body, limits)
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, "bad_json", f"the body is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise ApiError(400, "bad_json", "the body is not a JSON object")
    return document


def decode_base64(text: object) -> bytes:
    """The bytes of an image in JSON."""
    if not isinstance(text, str):
        raise ApiError(400, "bad_base64", f"an image in JSON is a base64 string, not {type(text).__name__}")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ApiError(
            400, "bad_base64", "an image in JSON is base64 of the encoded file; URLs and paths are never opened"
        ) from error


def _from_json(document: dict[str, Any], max_images: int) -> list[bytes]:
    if set(document) == {"image"}:
        return [decode_base64(document["image"])]
    if set(document) != {"images"} or not isinstance(document["images"], list):
        raise ApiError(400, "bad_json", f"the JSON body is {_JSON_FORM}; options are query parameters")
    if len(document["images"]) > max_images:
        raise too_many_images(max_images)
    return [decode_base64(text) for text in document["images"]]


def _from_multipart(boundary: bytes, body: bytes, max_images: int) -> list[bytes]:
    """The contents of the parts, whatever their field and file names are."""
    parts: list[bytearray] = []

    def begin() -> None:
        if len(parts) == max_images:
            raise too_many_images(max_images)
        parts.append(bytearray())

    def data(chunk: bytes, start: int, end: int) -> None:
        parts[-1] += chunk[start:end]

    is_complete = False

    def end() -> None:
        nonlocal is_complete
        is_complete = True

    try:
        parser = MultipartParser(boundary, {"on_part_begin": begin, "on_part_data": data, "on_end": end})
        parser.write(body)
        parser.finalize()
    except (FormParserError, ValueError) as error:
        raise ApiError(400, "bad_multipart", f"the multipart body cannot be read: {error}") from error
    if not is_complete:
        raise ApiError(400, "bad_multipart", "the multipart body ends before its last boundary")
    return [bytes(part) for part in parts]
