"""Malicious image files, and folders of images."""

# ruff: noqa: E501
from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from malicious_cases import CASES, DIGITS, IMAGE, Context, case, train_arguments

# Image files


def png(width: int, height: int, *chunks: bytes, data: bytes = b"", bits: int = 8, color: int = 2) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0))
    extra = b"".join(chunk(c[:4], c[4:]) for c in chunks)
    return b"\x89PNG\r\n\x1a\n" + header + extra + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def _bomb_text(kind: bytes, size: int = 300 << 20) -> bytes:
    return kind + b"key\0\0" + zlib.compress(bytes(size), 9)


def tiff(tags: list[tuple[int, int, int, int]], *, next_ifd: int = 0, tail: bytes = b"") -> bytes:
    """A little-endian TIFF of one directory."""
    entries = b"".join(struct.pack("<HHII", *tag) for tag in sorted(tags))
    return b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", len(tags)) + entries + struct.pack("<I", next_ifd) + tail


_TIFF_TAGS = [(256, 4, 1, 8), (257, 4, 1, 8), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (273, 4, 1, 0),
              (277, 3, 1, 1), (278, 4, 1, 8), (279, 4, 1, 64)]  # fmt: skip


def _with(
    tags: list[tuple[int, int, int, int]], *changes: tuple[int, int, int, int]
) -> list[tuple[int, int, int, int]]:
    changed = {tag[0] for tag in changes}
    return [tag for tag in tags if tag[0] not in changed] + list(changes)


def jpeg_of_size(width: int, height: int) -> bytes:
    """A valid JPEG whose header says another size."""
    at = IMAGE.index(b"\xff\xc0")
    return IMAGE[: at + 5] + struct.pack(">HH", height, width) + IMAGE[at + 9 :]


def bmp(width: int, height: int, bits: int = 24) -> bytes:
    return (
        b"BM"
        + struct.pack("<IHHI", 54, 0, 0, 54)
        + struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, 0, 0, 0, 0, 0, 0)
    )


IMAGES: dict[str, bytes | Callable[[], bytes]] = {
    "png-50000": png(50_000, 50_000, data=bytes(1000)),
    "png-max": png(2**31 - 1, 2**31 - 1, data=bytes(1000)),
    "png-zero": png(0, 0),
    "png-ztxt-bomb": lambda: png(4, 4, _bomb_text(b"zTXt"), data=bytes(13 * 4)),
    "png-iccp-bomb": lambda: png(4, 4, _bomb_text(b"iCCP"), data=bytes(13 * 4)),
    "png-9000-black": lambda: png(9400, 9400, data=bytes((9400 * 3 + 1) * 9400)),
    "png-many-chunks": png(4, 4, *[b"tEXta\0b"] * 100_000, data=bytes(13 * 4)),
    "jpeg-65500": jpeg_of_size(65_500, 65_500),
    "jpeg-9000": jpeg_of_size(9000, 9000),
    "jpeg-9459": jpeg_of_size(9459, 9459),
    "jpeg-many-app": b"\xff\xd8" + b"\xff\xe1\x00\x10Exif\0\0MM\0*\0\0\0\x08" * 50_000 + IMAGE[2:],
    "jpeg-cut": IMAGE[: len(IMAGE) // 2],
    "bmp-huge": bmp(2**31 - 1, 2**31 - 1),
    "bmp-negative": bmp(16, -(2**31)),
    "bmp-bits": bmp(16, 16, 77),
    "gif-huge": b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + b"," + struct.pack("<HHHHB", 0, 0, 65535, 65535, 0) + b"\x08\x00;",
    "ppm-digits": b"P6\n" + DIGITS.encode() + b" 4\n255\n" + bytes(100),
    "ppm-huge": b"P6\n99999999 99999999\n255\n" + bytes(100),
    "ppm-comment": b"P6\n#" + b"a" * 5_000_000 + b"\n4 4\n255\n" + bytes(48),
    "webp-huge": b"RIFF\x1a\0\0\0WEBPVP8L\x0d\0\0\0/\xff\xff\xff\x0f" + bytes(20),
    "tiff-loop": tiff(_TIFF_TAGS, next_ifd=8, tail=bytes(64)),
    "tiff-counts": tiff(_with(_TIFF_TAGS, (273, 4, 0xFFFFFFFF, 8), (279, 4, 0xFFFFFFFF, 8)), tail=bytes(64)),
    "tiff-huge": tiff(_with(_TIFF_TAGS, (256, 4, 1, 2**32 - 1), (257, 4, 1, 2**32 - 1)), tail=bytes(64)),
    "tiff-float-size": tiff(_with(_TIFF_TAGS, (256, 11, 1, 0x7FC00000)), tail=bytes(64)),
    "tiff-tags": tiff(_TIFF_TAGS + [(60_000, 4, 1, 0)] * 4000, tail=bytes(64)),
    "tiff-zero-tile": tiff(_with(_TIFF_TAGS, (322, 4, 1, 0), (323, 4, 1, 0), (324, 4, 1, 0)), tail=bytes(64)),
    "exif-loop": IMAGE[:2] + b"\xff\xe1" + struct.pack(">H", 2 + 6 + 26) + b"Exif\0\0II*\0\x08\0\0\0\x01\0\x69\x87\x04\0\x01\0\0\0\x08\0\0\0\x08\0\0\0" + IMAGE[2:],
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 99999 99999\n",
    "text": b"hello",
}  # fmt: skip


def made(content: bytes | Callable[[], bytes]) -> bytes:
    return content if isinstance(content, bytes) else content()


for _name, _content in IMAGES.items():

    def _check_image(context: Context, content: Any = _content) -> list[str]:
        root = context.data("folder")
        (root / "train/cat/0.jpg").write_bytes(made(content))
        return ["data", "check", str(root)]

    def _train_image(context: Context, content: Any = _content) -> list[str]:
        root = context.data("folder")
        for file in (root / "train").glob("*/*.jpg"):
            file.write_bytes(made(content))
        return train_arguments(root)

    def _predict_image(context: Context, content: Any = _content) -> list[str]:
        (context.folder / "odd.png").write_bytes(made(content))
        return ["predict", str(context.run), str(context.folder / "odd.png"), "--device", "cpu"]

    def _yolo_image(context: Context, content: Any = _content) -> list[str]:
        root = context.data("yolo")
        (root / "images/train/i0.jpg").write_bytes(made(content))
        return ["data", "check", str(root)]

    CASES[f"image-check/{_name}"] = _check_image
    CASES[f"image-train/{_name}"] = _train_image
    CASES[f"image-predict/{_name}"] = _predict_image
    CASES[f"image-yolo/{_name}"] = _yolo_image


# Folders


@case("folder/class-is-root")
def _(context: Context) -> list[str]:
    root = context.data("folder")
    (root / "train/everything").symlink_to("/")
    return ["data", "check", str(root)]


@case("folder/class-is-root-train")
def _(context: Context) -> list[str]:
    root = context.data("folder")
    (root / "train/everything").symlink_to("/")
    return train_arguments(root)


@case("folder/class-is-proc")
def _(context: Context) -> list[str]:
    root = context.data("folder")
    (root / "train/proc").symlink_to("/proc")
    return ["data", "check", str(root)]


@case("folder/inner-link-to-root")
def _(context: Context) -> list[str]:
    root = context.data("folder")
    (root / "train/cat/all").symlink_to("/")
    return train_arguments(root)


@case("folder/link-to-parent")
def _(context: Context) -> list[str]:
    root = context.data("folder")
    (root / "train/cat/up").symlink_to("..")
    return ["data", "check", str(root)]


@case("folder/link-beside-train")
def _(context: Context) -> list[str]:
    root = context.data("folder")
    (root / "all").symlink_to("/")
    return ["data", "check", str(root)]


@case("folder/data-is-root")
def _(context: Context) -> list[str]:
    return ["data", "check", "/"]


@case("folder/data-is-proc")
def _(context: Context) -> list[str]:
    return ["data", "check", "/proc"]


@case("folder/train-on-root")
def _(context: Context) -> list[str]:
    return train_arguments(Path("/"))


@case("folder/data-is-dev")
def _(context: Context) -> list[str]:
    return ["data", "check", "/dev"]


@case("folder/eval-root")
def _(context: Context) -> list[str]:
    return ["eval", str(context.run), "--data", "/", "--device", "cpu"]


@case("folder/deep")
def _(context: Context) -> list[str]:
    root = context.data("folder")
    before = os.getcwd()
    os.chdir(root / "train/cat")
    for _ in range(2500):
        os.mkdir("d")
        os.chdir("d")
    os.chdir(before)
    return ["data", "check", str(root)]


@case("folder/deep-train")
def _(context: Context) -> list[str]:
    CASES["folder/deep"](context)
    return train_arguments(context.folder / "data")


@case("folder/long-names")
def _(context: Context) -> list[str]:
    root = context.data("folder")
    (root / "train" / ("c" * 255)).mkdir()
    (root / "train" / ("c" * 255) / ("i" * 251 + ".jpg")).write_bytes(IMAGE)
    return train_arguments(root)


@case("folder/not-utf8-image")
def _(context: Context) -> list[str]:
    root = context.data("folder")
    Path(os.fsdecode(os.fsencode(root) + b"/train/cat/\xff\xfe.jpg")).write_bytes(IMAGE)
    return ["data", "check", str(root), "--json"]


@case("folder/not-utf8-class")
def _(context: Context) -> list[str]:
    root = context.data("folder")
    folder = Path(os.fsdecode(os.fsencode(root) + b"/train/\xff\xfe"))
    folder.mkdir()
    (folder / "a.jpg").write_bytes(IMAGE)
    return train_arguments(root)


@case("folder/not-utf8-root")
def _(context: Context) -> list[str]:
    root = context.data("folder")
    odd = Path(os.fsdecode(os.fsencode(root) + b"\xff\xfe"))
    root.rename(odd)
    return train_arguments(odd)


@case("folder/not-utf8-root-check")
def _(context: Context) -> list[str]:
    return ["data", "check", CASES["folder/not-utf8-root"](context)[3], "--json"]
