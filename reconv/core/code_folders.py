"""Folders of custom code on Python's import path: after what is installed, and never for a package of `PACKAGES`.

An entry of `sys.path` with a prefix names such a folder. Only the finder below understands it, so that processes that
inherit the path, and packages that look for plug-ins in it, find nothing there.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    PathFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

PREFIX = "reconv-code:"
# Packages that may be missing and that Reconv or what it imports looks for. A file of one of these names is found only
# by the code beside it, and where a recipe names it.
PACKAGES = frozenset(
    """
    adlfs aiohttp albumentations apex azure boto3 botocore coremltools cupy cv2 datasets defusedxml dill executorch
    faster_coco_eval fsspec gcsfs google habana_frameworks hotcoco huggingface_hub intel_extension_for_pytorch
    ipykernel ipywidgets IPython matplotlib ml_dtypes mlflow mlperf_logging mpi4py nncf numba nvidia olefile onnx
    onnxconverter_common onnxruntime onnxscript onnxslim openvino opt_einsum optree optuna orjson pandas paramiko
    prometheus_client psutil pyarrow pycocotools ray requests rich s3fs safetensors scipy simplejpeg skimage sklearn
    tensorboard tensorboardX tensorflow tensorrt tflite timm torch_directml torch_tensorrt torch_xla torchao torchaudio
    torchvision tqdm transformers triton uvicorn uvloop wandb winloop xformers zstandard
    """.split()  # noqa: SIM905
)
MAX_FILES = 2_000  # of the code that one import path leads to
_MAX_BYTES = 1 << 24
_IMPORT = re.compile(rb"^[ \t]*(?:from[ \t]+(\w+)[\w.]*[ \t]+import\b|import[ \t]+([\w., \t]+))", re.MULTILINE)
_IMPORTLIB = os.path.dirname(importlib.__file__)
_SUFFIXES = (*EXTENSION_SUFFIXES, *SOURCE_SUFFIXES, *BYTECODE_SUFFIXES)


_LOADERS: Any = (  # as Python's own, in its order
    (ExtensionFileLoader, EXTENSION_SUFFIXES),
    (SourceFileLoader, SOURCE_SUFFIXES),
    (SourcelessFileLoader, BYTECODE_SUFFIXES),
)
_named: set[str] = set()  # the top-level modules that recipes name


class _CodeFolder(FileFinder):
    """A folder of custom code."""

    def find_spec(self, fullname: str, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname in PACKAGES and fullname not in _named and not _is_imported_by_code():
            return None
        return super().find_spec(fullname, target)


def _is_imported_by_code() -> bool:
    """True if the import statement that is being executed is one of custom code."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(("<frozen importlib", _IMPORTLIB, __file__)):
        frame = frame.f_back
    folders = tuple(f"{entry.removeprefix(PREFIX)}{os.sep}" for entry in sys.path if entry.startswith(PREFIX))
    return frame is not None and frame.f_code.co_filename.startswith(folders)


def _open_folder(entry: str) -> _CodeFolder:
    if not entry.startswith(PREFIX):
        raise ImportError(entry)
    return _CodeFolder(entry.removeprefix(PREFIX), *_LOADERS)


def _install() -> None:
    """Let Python open such entries, also those that it has met before this module was imported."""
    sys.path_hooks.insert(0, _open_folder)
    for entry in [entry for entry in sys.path_importer_cache if entry.startswith(PREFIX)]:
        del sys.path_importer_cache[entry]


_install()


def add_folders(folders: Sequence[str]) -> None:
    """Let imports find code in these folders, after the installed packages."""
    sys.path += [entry for entry in dict.fromkeys(map(_entry, folders)) if entry not in sys.path]


def allow_name(module: str) -> None:
    """Let a recipe name a module of custom code that has the name of a package."""
    _named.add(module.partition(".")[0])


def search_path() -> list[str]:
    """The folders in which Python looks for modules, custom code last."""
    return [entry.removeprefix(PREFIX) for entry in sys.path]


def _entry(folder: str) -> str:
    """The entry of `sys.path` for a folder: as it is if the user has put it there."""
    path = os.path.abspath(folder)
    return path if path in sys.path else f"{PREFIX}{path}"


def find_module(name: str, folders: Sequence[str] = ()) -> Path | None:
    """The file that importing a module would load, without importing anything; these folders come last."""
    top, *parts = name.split(".")
    entries = [*sys.path, *map(_entry, folders)]
    spec = PathFinder.find_spec(top, entries)
    if spec is None:  # packages that only custom code finds
        spec = _find_in([entry.removeprefix(PREFIX) for entry in entries if entry.startswith(PREFIX)], top)
    spec = spec or _find_elsewhere(top)
    for part in parts:
        spec = None if spec is None else _find_in(list(spec.submodule_search_locations or ()), part)
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None


def _find_in(folders: Sequence[str], name: str) -> ModuleSpec | None:
    """A module or package that is directly in one of these folders."""
    specs = (FileFinder(folder, *_LOADERS).find_spec(name) for folder in folders)
    return next((spec for spec in specs if spec), None)


def _find_elsewhere(name: str) -> ModuleSpec | None:
    """A module of an editable install, or a part of Python."""
    with suppress(ImportError, ValueError):
        return find_spec(name)
    return None


def is_installed(file: Path) -> bool:
    """True if a file belongs to Python or an installed package."""
    paths = sysconfig.get_paths()
    return any(file.is_relative_to(paths[name]) for name in ("purelib", "platlib", "stdlib"))


def code_files(file: Path, num_packages: int, folders: Sequence[str]) -> list[Path]:
    """The files of a module and of what it imports from folders of custom code; of packages all files.

    `num_packages` is how many packages the module is in. What a program imports by a computed name is not found.
    """
    if is_installed(file):
        return [file]
    found: dict[Path, None] = {}
    left = [file.parents[num_packages - 1] if num_packages else file]
    while left and len(found) < MAX_FILES:
        for path in _with_contents(left.pop()):
            if path not in found:
                found[path] = None
                left += _imported(path, [*folders, str(file.parent)])
    return list(found)


def _with_contents(path: Path) -> Iterator[Path]:
    """The file itself, or the importable files of the folder of a package."""
    if not path.is_dir():
        yield path
        return
    for folder, _, names in os.walk(path):  # links to folders are not followed
        if os.path.basename(folder) != "__pycache__":
            yield from (Path(folder, name) for name in sorted(names) if name.endswith(_SUFFIXES))


def _imported(path: Path, folders: Sequence[str]) -> list[Path]:
    """The files or package folders of custom code that the import statements of a file name."""
    if path.suffix not in SOURCE_SUFFIXES or not path.is_file():
        return []
    with suppress(OSError), open(path, "rb") as source:
        names: set[str] = set()
        for module, modules in _IMPORT.findall(source.read(_MAX_BYTES)):
            listed = [module] if module else modules.split(b",")
            names |= {each.split()[0].split(b".")[0].decode() for each in listed if each.split()}
        files = (find_module(name, folders) for name in sorted(names) if name.isidentifier())
        return [
            found.parent if found.stem == "__init__" else found for found in files if found and not is_installed(found)
        ]
    return []
