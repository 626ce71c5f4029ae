"""Choosing the backend of a network: the fastest whose outputs equal those of eager.

`eager` is evaluation in training, bit for bit. Any other backend is compared with it when a model is loaded, and used
within the tolerance of its precision (`precisions`); int8 is judged by accuracy or mAP on held-out images
(tests/inference/test_backends.py, test_int8_backend.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from threading import Lock

import torch

from reconv.build.model import Network
from reconv.core.errors import ReconvError, UsageError
from reconv.device import Device
from reconv.inference.backends.base import BackendName, EagerBackend, InferenceBackend, Precision
from reconv.inference.backends.fold import FoldedNetwork, fold_network
from reconv.inference.backends.precisions import (
    DTYPES,
    TOLERANCES,
    allowed_difference,
    choose_precision,
    fixed_images,
    largest_difference,
    trained_precision,
)
from reconv.inference.calibration import CalibrationSource
from reconv.precision import build_precision
from reconv.recipe.parts.code import names_code
from reconv.recipe.parts.precision import PrecisionConfig, PrecisionOps
from reconv.recipe.schema import Recipe

_FASTEST: dict[str, BackendName] = {"cuda": "fused", "cpu": "folded"}  # by kind of device
FEW_IMAGES = 512  # on a CPU, fewer are evaluated sooner than a faster network is built
_DEVICES = {"folded": ("cpu",), "fused": ("cuda",), "onnxruntime": ("cpu",)}


@dataclass(frozen=True, slots=True)
class LoadedNetwork:
    """A network with its weights, and the recipe and device it was built for."""

    recipe: Recipe
    network: Network
    device: Device
    calibration: CalibrationSource | None = None  # of int8

    @property
    def image_shape(self) -> tuple[int, int, int]:
        preprocess = self.recipe.data.preprocess
        return preprocess.channels, preprocess.size, preprocess.size

    def fold(self, precision: str) -> FoldedNetwork:
        """The network with folded norms."""
        return fold_network(self.network.model, self.image_shape, DTYPES.get(precision, torch.float32))

    def with_precision(self, precision: str) -> LoadedNetwork:
        """The same weights in another precision, by autocast."""
        section = PrecisionConfig(mode=precision)  # type: ignore[arg-type]
        policy = build_precision(section, self.device.kind)
        recipe = self.recipe.model_copy(update={"precision": section})
        return replace(self, recipe=recipe, network=replace(self.network, precision=policy))


def plain_network_recipe(recipe: Recipe) -> Recipe:
    """The recipe of a network for inference: without torch.compile and the kernels of training, which it never uses."""
    engine = recipe.engine.model_copy(update={"compile": "off", "fused_kernels": "off"})
    return recipe.model_copy(update={"engine": engine})


def choose_backend(
    loaded: LoadedNetwork, backend: BackendName, precision: Precision, log: Callable[[str], None]
) -> InferenceBackend:
    """The backend that was asked for; `auto` is the fastest whose outputs equal those of eager, else eager."""
    kind, eager = loaded.device.kind, EagerBackend(loaded.recipe, loaded.network)
    if backend != "auto" and kind not in _DEVICES.get(backend, (kind,)):
        fastest = _FASTEST.get(kind, "eager")
        raise UsageError(
            f"the backend {backend} does not run on {kind}", hint=f"--backend {fastest}, or omit --backend"
        )
    chosen = choose_precision(loaded.recipe, loaded.device, precision)
    if chosen == "int8":
        return _build_int8(loaded, backend, log)
    if backend == "eager" or (kind not in _FASTEST and backend == "auto"):
        return eager if precision == "auto" else _eager_in(loaded, chosen)
    if backend != "auto":
        return _checked(loaded, backend, chosen)
    why = _why_not_fast(loaded.recipe)
    if not why:
        try:
            found = _checked(loaded, _FASTEST[kind], chosen)
            log(f"backend: {found.describe()}")
            return found
        except ReconvError as error:
            why = error.what if not error.why else f"{error.what}: {error.why}"
        except Exception as error:  # a network of others may do anything when it is traced
            why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    log(f"backend: eager, the model as trained ({why})")
    return eager if precision == "auto" else _eager_in(loaded, chosen)


def _build_int8(loaded: LoadedNetwork, backend: BackendName, log: Callable[[str], None]) -> InferenceBackend:
    if backend not in ("auto", "onnxruntime"):
        raise UsageError(f"the backend {backend} does not compute in int8", hint="--backend onnxruntime, or omit it")
    if loaded.calibration is None:
        raise UsageError("int8 needs calibration images", hint="load the model by Predictor.load")
    from reconv.inference.backends.int8 import Int8Builder  # imports what export does

    model, source = loaded.network.model, loaded.calibration
    builder = Int8Builder(
        loaded.recipe, model, loaded.device, source, lambda: _checked(loaded, "onnxruntime", "fp32"), log
    )
    found = builder.build()
    log(f"backend: {found.describe()}")
    return found


class BackendChoice:
    """The backend of a loaded model; `auto` is built when it is first needed, which takes seconds."""

    def __init__(
        self, loaded: LoadedNetwork, backend: BackendName, precision: Precision, log: Callable[[str], None]
    ) -> None:
        self._loaded, self._log = loaded, log
        self._lock = Lock()
        self._is_auto = backend == precision == "auto"
        self._chosen = None if self._is_auto else choose_backend(loaded, backend, precision, log)

    @property
    def calibration_folder(self) -> str:
        """The folder whose images calibrate int8; empty: the data of the run."""
        source = self._loaded.calibration
        return "" if source is None or source.folder is None else str(source.folder)

    def get(self) -> InferenceBackend:
        with self._lock:
            if self._chosen is None:
                self._chosen = choose_backend(self._loaded, "auto", "auto", self._log)
            return self._chosen

    def for_evaluation(self, num_images: int) -> InferenceBackend:
        """The backend for a pass over so many images: `auto` is eager where building another would take longer."""
        if self._is_auto and self._loaded.device.kind == "cpu" and num_images < FEW_IMAGES:
            return EagerBackend(self._loaded.recipe, self._loaded.network)
        return self.get()


def _eager_in(loaded: LoadedNetwork, precision: str) -> EagerBackend:
    if precision == trained_precision(loaded.recipe):
        return EagerBackend(loaded.recipe, loaded.network)
    other = loaded.with_precision(precision)
    return EagerBackend(other.recipe, other.network)


def _why_not_fast(recipe: Recipe) -> str:
    """Reason not to try folding a network; empty if it may be folded."""
    if names_code(recipe.model.name):
        return "custom code may do something else with other images; choose another by --backend"
    if recipe.precision.ops != PrecisionOps():
        return "the recipe sets the dtype of single operations"
    return ""


def _checked(loaded: LoadedNetwork, name: BackendName, precision: str) -> InferenceBackend:
    """A backend whose outputs were compared with those of eager on a few fixed images; an error where they differ.

    Eager computes as trained, or in the precision of the backend where that rounds less.
    """
    backend = _build(loaded, name, precision)
    images = loaded.device.move(fixed_images(loaded.image_shape))
    reference = min(precision, trained_precision(loaded.recipe), key=TOLERANCES.__getitem__)
    expected = _eager_in(loaded, reference)(images)
    rounding = 0.0
    if precision in ("fp16", "bf16"):
        rounding = largest_difference(_eager_in(loaded, precision)(images), _eager_in(loaded, "fp32")(images))
    build_precision(loaded.recipe.precision, loaded.device.kind)  # sets torch's switches back
    backend.difference = largest_difference(backend(images), expected)
    limit = allowed_difference(precision, rounding)
    if not backend.difference <= limit:
        raise UsageError(
            f"the backend {name} is not equal to eager",
            why=f"its outputs differ by {backend.difference:.2g} of the largest, more than {limit:.2g} in {precision}",
            hint="--backend eager",
        )
    return backend


def _build(loaded: LoadedNetwork, name: BackendName, precision: str) -> InferenceBackend:
    # Imported here: each takes a while, and one is needed.
    if name == "folded":
        from reconv.inference.backends.fold import FoldedBackend

        return FoldedBackend(loaded.recipe, loaded.fold(precision), precision)
    if name == "fused":
        from reconv.inference.backends.fused import FusedBackend

        capture = loaded.device.graph_capture()
        assert capture is not None
        return FusedBackend(loaded.recipe, loaded.fold(precision), capture, loaded.device.torch, precision)
    if precision != "fp32":
        raise UsageError(
            f"the backend onnxruntime computes in fp32, not in {precision}", hint="--precision fp32, or omit --backend"
        )
    from reconv.inference.backends.onnxruntime import OnnxRuntimeBackend

    return OnnxRuntimeBackend(loaded.recipe, loaded.network.model)
