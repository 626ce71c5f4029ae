"""On the CPU, by onnxruntime in float32; the exported network is kept in the cache directory, by its content."""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from reconv.core.errors import UsageError
from reconv.inference.backends.base import InferenceBackend
from reconv.inference.backends.exported import OPSET, ExportClassifier, ExportNormalize, example_images, export_onnx
from reconv.models import SSDOutput
from reconv.recipe.schema import Recipe
from reconv.storage.cache import cache_dir

_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
_OUTPUTS = {"detection": ("box_deltas", "logits")}  # by task; others: logits


class OnnxRuntimeBackend(InferenceBackend):
    """An onnxruntime session of the network, with normalization and test-time augmentation inside."""

    name = "onnxruntime"
    precision = "fp32"

    def __init__(self, recipe: Recipe, model: nn.Module, path: Path | None = None) -> None:
        """`path` is another file of the network than that of the cache."""
        check_packages("--backend onnxruntime")
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # leaves the cores to decoding
        path = path or onnx_file(recipe, model)
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self._is_detector = recipe.task == "detection"

    def __call__(self, images: Tensor) -> Any:
        pixels = images.to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
        outputs = [torch.from_numpy(output) for output in self._session.run(None, {"images": pixels})]
        return SSDOutput(*outputs) if self._is_detector else outputs[0]


def check_packages(option: str) -> None:
    """Raise `UsageError` if a package that an option needs is missing."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"{option} needs {', '.join(missing)}",
            why="not installed",
            hint=f"pip install 'reconv[onnx]', or omit {option}",
        )


class _RawDetector(nn.Module):
    """The outputs of a detector before its post-processing, from uint8 images [n, height, width, channels]."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        super().__init__()
        self.normalize = ExportNormalize(recipe.data.preprocess)
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        outputs: SSDOutput = self.model(self.normalize(images))
        return outputs.box_deltas, outputs.logits


def onnx_file(recipe: Recipe, model: nn.Module) -> Path:
    """The network as an ONNX file, exported where the cache does not have it yet."""
    path = cache_dir() / "onnx" / f"{network_digest(recipe, model)}.onnx"
    if path.is_file():
        return path
    model = copy.deepcopy(model).float().eval()
    preprocess = recipe.data.preprocess
    is_detector = recipe.task == "detection"
    module = _RawDetector(model, recipe) if is_detector else ExportClassifier(model, preprocess, recipe.evaluate.tta)
    exported = export_onnx(module.eval(), example_images(preprocess, None), _OUTPUTS.get(recipe.task, ("logits",)))
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        exported.save(str(Path(folder) / path.name))
        os.replace(Path(folder) / path.name, path)
    return path


def network_digest(recipe: Recipe, model: nn.Module) -> str:
    """The sha256 of everything that the file depends on."""
    digest = hashlib.sha256(f"{torch.__version__} {OPSET} {recipe.task} {recipe.evaluate.tta}".encode())
    digest.update(recipe.model.model_dump_json().encode() + recipe.data.preprocess.model_dump_json().encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
