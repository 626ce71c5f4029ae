"""Every classifier of timm and torchvision can be built and trained here.

Needs both packages in versions that fit torch: pip install 'reconv[timm]'. The torchvision wheels are built for CUDA;
beside a CPU torch, `torchvision::nms` and `torchvision::qnms` must be declared with torch.library before the import.
Everything is built on the meta device; one small network of each family takes a real training step. Takes about ten
minutes.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import reconv
from reconv.checkpoint.store import CheckpointStore
from reconv.core.batch import Batch
from reconv.core.errors import PreemptedError, UsageError
from reconv.logging.events import Event, TrainProgress
from reconv.logging.run_dir import RunDir
from reconv.models import build_model
from reconv.models.external import check_image_sizes, native_size
from reconv.models.layers.batch_norm import LayerState
from reconv.tasks.classification import split_outputs

timm = pytest.importorskip("timm", reason="pip install 'reconv[timm]'", exc_type=ImportError)
torchvision = pytest.importorskip("torchvision", reason="pip install 'reconv[torchvision]'", exc_type=ImportError)

pytestmark = pytest.mark.filterwarnings("default")
NUM_CLASSES = 7
# Encoders of language models: they return features and have no classifier.
ENCODERS = "_enc"
MAX_PARAMETERS = 60_000_000  # of a network that takes a real step


def classifiers() -> list[str]:
    in_timm = [f"timm:{name}" for name in timm.list_models() if not name.endswith(ENCODERS)]
    return in_timm + [f"torchvision:{name}" for name in torchvision.models.list_models(module=torchvision.models)]


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return build_model(name, num_classes=NUM_CLASSES)


def size_of(name: str, model: nn.Module) -> int:
    return 299 if name == "torchvision:inception_v3" else native_size(model) or 224


def test_every_classifier_is_built_and_returns_logits() -> None:
    names, failed = classifiers(), {}
    for name in names:
        try:
            model = on_meta(name)
            check_image_sizes(model, 3, [size_of(name, model)])
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
    assert failed == {} and len(names) > 1400


def test_other_networks_of_torchvision_are_refused() -> None:
    models = torchvision.models
    others = sorted(set(models.list_models()) - set(models.list_models(module=models)))
    assert len(others) > 35 and "fasterrcnn_resnet50_fpn" in others
    for name in others:
        with pytest.raises(UsageError, match="is not an image classifier"):
            build_model(f"torchvision:{name}")


def smallest_of_each_family() -> list[str]:
    """The smallest network of each module of both packages, by parameters."""
    smallest: dict[str, tuple[int, str]] = {}
    for name in classifiers():
        model = on_meta(name)
        size = sum(parameter.numel() for parameter in model.parameters())
        family = name.partition(":")[0] + type(model).__module__
        smallest[family] = min(smallest.get(family, (size, name)), (size, name))
    return sorted(name for size, name in smallest.values() if size <= MAX_PARAMETERS)


def generator_states() -> tuple[bytes, str, str]:
    return torch.get_rng_state().numpy().tobytes(), str(random.getstate()), str(np.random.get_state())


def take_step(name: str) -> None:
    """A training step of two samples: finite gradients, no global generator, statistics updated once, same masks."""
    model = build_model(name, num_classes=NUM_CLASSES).train()
    layers, size, before = LayerState(model, seed=1), size_of(name, model), generator_states()
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    batch = Batch({"images": images}, torch.arange(2), (2,))
    losses = []
    for _ in range(2):
        layers.set_micro_batch(batch, 1)
        outputs = split_outputs(model(images))
        losses.append(sum(output.float().logsumexp(1).mean() for output in (outputs.logits, *outputs.auxiliary)))
        layers.discard()
    assert isinstance(losses[0], Tensor) and torch.equal(losses[0], losses[1]), "the masks of a step are not repeated"
    losses[0].backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert gradients and all(bool(gradient.isfinite().all()) for gradient in gradients)
    layers.commit(torch.tensor(True))
    assert generator_states() == before, "a global generator was used"


def test_one_network_of_each_family_takes_an_exact_training_step() -> None:
    names, failed = smallest_of_each_family(), {}
    for name in names:
        try:
            take_step(name)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
    assert failed == {} and len(names) > 60


@pytest.mark.parametrize(
    ("name", "size", "options"),
    [
        ("timm:vit_tiny_patch16_224", 32, {"img_size": 32, "drop_path_rate": 0.2, "attn_drop_rate": 0.1}),
        ("timm:test_efficientnet", 64, {"drop_rate": 0.3}),
        ("timm:levit_128s", 224, {}),
        ("timm:ghostnet_050", 64, {}),
        ("torchvision:shufflenet_v2_x0_5", 64, {}),
        ("torchvision:mobilenet_v3_small", 64, {}),
    ],
)
def test_a_resumed_run_equals_the_uninterrupted_run(
    tmp_path: Path, name: str, size: int, options: dict[str, object]
) -> None:
    settings = {
        "data.source": "synthetic",
        "data.num_samples": 64,
        "data.num_classes": 4,
        "data.preprocess.size": size,
        "data.preprocess.resize": size,
        "data.preprocess.channels": 3,
        "data.preprocess.mean": [0.5, 0.5, 0.5],
        "data.preprocess.std": [0.5, 0.5, 0.5],
        "model.options": options,
        "batch.group": "all",
        "length": "4step",
        "schedule.warmup": "1step",
        "log.every": "1step",
        "save.every": "4step",
        "evaluate.every": "off",
    }

    def stop(event: Event) -> None:
        if isinstance(event, TrainProgress) and event.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    call = {"recipe": "quickstart", "model": name, "batch_size": 4, "overrides": settings}
    torch.manual_seed(1)
    reconv.train(**call, out=tmp_path / "whole")
    torch.manual_seed(2)
    with pytest.raises(PreemptedError):
        reconv.train(**call, out=tmp_path / "parts", on_event=stop)
    reconv.train(**call, out=tmp_path / "parts", resume=True)
    weights = []
    for run in ("whole", "parts"):
        newest = CheckpointStore(RunDir(tmp_path / run).checkpoints).newest().path
        assert newest is not None
        weights.append(safetensors.torch.load_file(newest / "model.safetensors"))
    whole, parts = weights
    assert whole.keys() == parts.keys() and len(whole) > 10
    assert [key for key in whole if not torch.equal(whole[key], parts[key])] == []
