"""Backends give the outputs of eager, for every batch size, and `auto` falls back to eager where one does not."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from reconv.bench.infer import open_network
from reconv.core.errors import UsageError
from reconv.inference.backends import choose
from reconv.inference.backends.base import EagerBackend
from reconv.inference.backends.choose import LoadedNetwork, choose_backend
from reconv.inference.backends.fold import FoldedBackend
from reconv.inference.backends.fused import FusedBackend, graph_batch
from reconv.inference.backends.onednn import PackedConvolution
from reconv.inference.backends.precisions import fixed_images, largest_difference
from reconv.inference.predictor import Predictor


class FakeCapture:
    """Replays work like a CUDA graph: it reads and writes the tensors of the capture."""

    def run_on_stream(self, work: Callable[[], Any]) -> Any:
        return work()

    def capture(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        outputs = tree_map(torch.clone, work())

        def replay() -> None:
            with torch.inference_mode():
                tree_map(lambda old, new: old.copy_(new), outputs, work())

        return outputs, replay


def load_network(name: str = "quickstart", **settings: object) -> LoadedNetwork:
    overrides = [(field.replace("__", "."), value, "test") for field, value in settings.items()]
    recipe, network, device = open_network(name, overrides, "cpu")
    network.model.eval()
    return LoadedNetwork(recipe, network, device)


def images_of(loaded: LoadedNetwork, num: int) -> Tensor:
    generator = torch.Generator().manual_seed(num)
    return torch.randint(0, 256, (num, *loaded.image_shape), generator=generator, dtype=torch.uint8)


def fused_backend(loaded: LoadedNetwork) -> FusedBackend:
    return FusedBackend(loaded.recipe, loaded.fold("fp32"), FakeCapture(), loaded.device.torch, "fp32")


@pytest.mark.parametrize("tta", ["none", "flip"])
def test_fused_graphs_pad_and_split_batches_of_any_size(tta: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("reconv.inference.backends.fused.MAX_BATCH", 8)
    loaded = load_network(evaluate__tta=tta)
    eager, fused = EagerBackend(loaded.recipe, loaded.network), fused_backend(loaded)
    sizes = (3, 1, 5, 8 + 2)
    kept = [(fused(images_of(loaded, num)), images_of(loaded, num)) for num in sizes]
    for found, images in kept:  # a later run must not overwrite what an earlier one returned
        expected = eager(images)
        assert found.shape == expected.shape and not found.is_inference()
        assert largest_difference(found, expected) < 1e-5
    assert sorted(fused._graphs) == [1, 2, 4, 8] and not fused.notes


def test_a_graph_holds_the_next_power_of_two() -> None:
    assert [graph_batch(num) for num in (1, 2, 3, 4, 5, 200, 256)] == [1, 2, 4, 4, 8, 256, 256]


def test_folded_network_packs_every_convolution_and_equals_eager() -> None:
    loaded = load_network()
    backend = choose_backend(loaded, "folded", "auto", print)
    assert isinstance(backend, FoldedBackend) and backend.difference is not None and backend.difference < 1e-5
    assert isinstance(backend._forward, torch.nn.Module)
    assert sum(isinstance(module, PackedConvolution) for module in backend._forward.modules()) == 7
    eager = EagerBackend(loaded.recipe, loaded.network)
    for num in (1, 7):
        assert largest_difference(backend(images_of(loaded, num)), eager(images_of(loaded, num))) < 1e-5


def test_a_precision_that_rounds_less_than_training_is_compared_with_eager_in_that_precision() -> None:
    loaded = load_network(precision__mode="bf16")
    backend = choose_backend(loaded, "folded", "fp32", print)
    assert backend.difference is not None and backend.difference < 1e-5
    as_trained = EagerBackend(loaded.recipe, loaded.network)
    images = fixed_images(loaded.image_shape)
    assert largest_difference(backend(images), as_trained(images)) > 1e-4


@pytest.mark.parametrize(
    "model",
    [
        "mobilenet_v2",
        pytest.param("efficientnet_b0", marks=pytest.mark.slow),
        pytest.param("googlenet", marks=pytest.mark.slow),
    ],
)
def test_other_activations_and_gates_are_packed_too(model: str) -> None:
    loaded = load_network("resnet50", model__name=model, data__preprocess__size=64, precision__mode="fp32")
    backend = choose_backend(loaded, "folded", "auto", print)
    assert backend.difference is not None and backend.difference < 1e-3
    assert isinstance(backend, FoldedBackend) and isinstance(backend._forward, torch.nn.Module)
    assert sum(isinstance(module, PackedConvolution) for module in backend._forward.modules()) > 40


def test_onnxruntime_equals_eager_and_its_export_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECONV_CACHE", str(tmp_path))
    loaded = load_network(evaluate__tta="flip")
    backend = choose_backend(loaded, "onnxruntime", "auto", print)
    assert backend.difference is not None and backend.difference < 1e-5
    [file] = tmp_path.rglob("*.onnx")
    written = file.stat().st_mtime_ns
    again = choose_backend(loaded, "onnxruntime", "auto", print)
    assert file.stat().st_mtime_ns == written and list(tmp_path.rglob("*.onnx")) == [file]
    images = images_of(loaded, 3)
    assert torch.equal(again(images), backend(images))
    assert largest_difference(again(images), EagerBackend(loaded.recipe, loaded.network)(images)) < 1e-5


class WrongBackend(FoldedBackend):
    """A backend whose outputs are wrong by a hundredth."""

    def __call__(self, images: Tensor) -> Any:
        return super().__call__(images) * 1.01


def test_a_backend_that_differs_from_eager_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, said = load_network(), list[str]()
    monkeypatch.setattr("reconv.inference.backends.fold.FoldedBackend", WrongBackend)
    assert choose_backend(loaded, "auto", "auto", said.append).name == "eager"
    assert len(said) == 1 and "differ by 0.01 of the largest, more than 0.001 in fp32" in said[0]
    with pytest.raises(UsageError, match="folded is not equal to eager"):
        choose_backend(loaded, "folded", "auto", said.append)


def test_a_network_that_cannot_be_traced_runs_as_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, said = load_network(), list[str]()
    forward = loaded.network.model.forward
    monkeypatch.setattr(
        loaded.network.model, "forward", lambda x: forward(x) if float(x[0, 0, 0, 0]) > 1e9 or True else x
    )
    assert choose_backend(loaded, "auto", "auto", said.append).name == "eager"
    assert said and said[0].startswith("backend: eager, the model as trained (")


def test_what_a_device_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_network()
    with pytest.raises(UsageError, match="fused does not run on cpu"):
        choose_backend(loaded, "fused", "auto", print)
    with pytest.raises(UsageError, match="onnxruntime computes in fp32"):
        choose_backend(load_network(precision__mode="fp64"), "onnxruntime", "auto", print)
    with pytest.raises(UsageError, match="no fp16 instructions"):
        choose_backend(loaded, "auto", "fp16", print)


def test_own_code_runs_as_trained_unless_a_backend_is_chosen() -> None:
    loaded, said = load_network(), list[str]()
    own = loaded.recipe.model_copy(update={"model": loaded.recipe.model.model_copy(update={"name": "mine:Net"})})
    assert choose_backend(replace(loaded, recipe=own), "auto", "auto", said.append).name == "eager"
    assert "custom code" in said[0]


def test_fixed_images_are_the_same_each_time_and_use_the_whole_range() -> None:
    images = fixed_images((3, 32, 40))
    assert images.shape == (2, 3, 32, 40) and images.dtype == torch.uint8
    assert torch.equal(images, fixed_images((3, 32, 40)))
    assert images.min() < 40 and images.max() > 215


def test_eager_and_auto_predict_the_same_classes(classifier: Path) -> None:
    images = list(torch.randint(0, 256, (20, 1, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8))
    fast, eager = Predictor.load(classifier), Predictor.load(classifier, backend="eager")
    assert (fast.backend.name, eager.backend.name) == ("folded", "eager")
    for one, other in zip(fast.predict(images), eager.predict(images), strict=True):
        assert one.label == other.label and one.score == pytest.approx(other.score, abs=1e-5)


def test_detectors_fold_too(detector: Path) -> None:
    fast, eager = Predictor.load(detector), Predictor.load(detector, backend="eager")
    assert fast.backend.name == "folded"
    images = fixed_images(fast.read.shape)
    assert largest_difference(fast.backend(images), eager.backend(images)) < 1e-4
    assert choose._why_not_fast(fast.recipe) == ""


def test_auto_is_built_when_it_is_needed_and_small_evaluations_stay_eager(classifier: Path) -> None:
    messages: list[str] = []
    fast = Predictor.load(classifier, log=messages.append)
    result = fast.evaluate(samples=20)
    assert messages == []
    assert result.metrics == Predictor.load(classifier, backend="eager").evaluate(samples=20).metrics
    assert fast.backend_choice.for_evaluation(choose.FEW_IMAGES).name == "folded"
    assert len(messages) == 1 and messages[0].startswith("backend: folded")


def test_a_forked_process_reads_images_in_threads_of_its_own(classifier: Path) -> None:
    predictor = Predictor.load(classifier, backend="eager")
    image = torch.zeros(1, 8, 8, dtype=torch.uint8)
    expected = predictor(image).label
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # without threads it would wait without end
        os._exit(0 if predictor(image).label == expected else 1)
    assert os.waitpid(pid, 0)[1] == 0
