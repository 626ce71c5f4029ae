"""SSD is the published network, and can use any ResNet as backbone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from reconv.checkpoint.load_weights import load_weights
from reconv.core.errors import UsageError
from reconv.models import build_model, init_weights, model_spec, stages_of
from reconv.models.architecture import SSDOutput
from reconv.models.frozen import freeze_except, head_patterns
from reconv.models.ssd import SSDSpec

NARROW = {"backbone": "resnet10", "width": 8, "extra_widths": [16, 16, 16], "boxes_per_cell": [4, 6, 6, 4]}


def parameters(model: nn.Module, prefix: str = "") -> int:
    return sum(p.numel() for name, p in model.named_parameters() if name.startswith(prefix))


def spec(**options: object) -> SSDSpec:
    found = model_spec("ssd_resnet34", **options)  # type: ignore[arg-type]
    assert isinstance(found, SSDSpec)
    return found


def test_ssd_resnet34_has_the_published_parameters() -> None:
    with torch.device("meta"):
        model = build_model("ssd_resnet34", num_classes=81)
    added = ("extras", "class_heads", "box_heads")
    extras, classes, boxes = (parameters(model, prefix) for prefix in added)
    assert parameters(model) == 19_972_534
    assert (extras, classes + boxes) == (3_574_400, 8_227_830)


def test_ssd_resnet34_has_8732_default_boxes_and_its_stages_equal_its_forward_pass() -> None:
    model = build_model("ssd_resnet34", num_classes=81).eval()
    images = torch.rand(1, 3, 300, 300)
    with torch.no_grad():
        outputs, value = model(images), images
        for _, stage in stages_of(model):
            value = stage(value)
    assert outputs.box_deltas.shape == (1, 8732, 4) and outputs.logits.shape == (1, 8732, 81)
    assert isinstance(value, SSDOutput)
    assert torch.equal(value.box_deltas, outputs.box_deltas) and torch.equal(value.logits, outputs.logits)


@pytest.mark.parametrize(
    ("size", "options", "sides", "pitches_px"),
    [
        (300, {}, (38, 19, 10, 5, 3, 1), (8, 16, 32, 64, 100, 300)),
        (512, {}, (64, 32, 16, 8, 6, 4), (8, 16, 32, 64, 512 / 6, 128)),
        (128, NARROW, (16, 8, 4, 2), (8, 16, 32, 64)),
    ],
)
def test_map_sides_equal_those_of_the_network(
    size: int, options: dict[str, object], sides: tuple[int, ...], pitches_px: tuple[float, ...]
) -> None:
    found = spec(**options)
    assert found.map_sides(size) == sides
    assert [pitch * size for pitch in found.map_pitches(size)] == pytest.approx(pitches_px)
    narrow = {**options, "width": 8, "extra_widths": [8] * (len(sides) - 1)}
    model = build_model("ssd_resnet34", 3, **narrow).eval()
    with torch.no_grad():
        codes = model(torch.rand(1, 3, size, size)).box_deltas
    per_cell = found.boxes_per_cell
    assert codes.shape[1] == sum(side * side * number for side, number in zip(sides, per_cell, strict=True))


def test_outputs_are_ordered_by_map_shape_row_and_column() -> None:
    model = build_model("ssd_resnet34", 3, **NARROW).eval()
    head = model.get_submodule("box_heads.1")
    assert isinstance(head, nn.Conv2d) and head.bias is not None
    with torch.no_grad():
        head.weight.zero_()
        head.bias.copy_(torch.arange(24.0))
        codes = model(torch.rand(1, 3, 128, 128)).box_deltas
    first = 4 * 16 * 16
    shapes = codes[0, first : first + 6 * 64].view(6, 8, 8, 4)
    assert torch.equal(shapes[:, 3, 5], torch.arange(24.0).view(6, 4))


def test_extras_and_heads_use_keras_init_and_the_backbone_the_published_one() -> None:
    model = build_model("ssd_resnet34", num_classes=81)
    init_weights(model, seed=5)
    modules = dict(model.named_modules())
    added = [name for name in modules if name.startswith(("extras.", "class_heads.", "box_heads."))]
    convs = {name: m for name in added if isinstance(m := modules[name], nn.Conv2d)}
    assert len(convs) == 10 + 12
    for name, conv in convs.items():
        fan_in = conv.in_channels * conv.kernel_size[0] ** 2
        fan_out = conv.out_channels * conv.kernel_size[0] ** 2
        bound = math.sqrt(6 / (fan_in + fan_out))
        assert 0.98 * bound < conv.weight.abs().max() <= bound, name
        assert conv.bias is not None and not conv.bias.any()
    backbone = model.get_parameter("layer3.1.conv1.weight")
    assert backbone.std().item() == pytest.approx(math.sqrt(1 / (256 * 9)), rel=0.01)
    blocks = [f"layer{i + 1}.{j}" for i, depth in enumerate((3, 4, 6)) for j in range(depth)]
    assert not any(model.get_parameter(f"{block}.bn2.weight").any() for block in blocks)
    assert all(bool(model.get_parameter(f"{block}.bn1.weight").all()) for block in blocks)


def test_extra_norms_keep_the_activation_scale_and_the_other_parameter_names() -> None:
    images = torch.randn(4, 3, 264, 264, generator=torch.Generator().manual_seed(0))
    names, last = [], []
    for is_on in (False, True):
        network = build_model("ssd_resnet34", num_classes=3, depths=[1, 1, 1], width=8, extra_norms=is_on)
        init_weights(network, 0)
        values: list[float] = []
        network.extras[4].register_forward_hook(lambda _module, _given, x, into=values: into.append(float(x.std())))
        with torch.no_grad():
            network(images)
        names.append(set(network.state_dict()))
        last += values
    assert last[0] < 0.05 and 0.3 < last[1] < 3
    added = names[1] - names[0]
    assert names[0] < names[1] and len(added) == 5 * 2 * 5
    assert all(name.startswith("extras.") for name in added)


@pytest.mark.parametrize("backbone", ["resnet18", "resnet50", "resnext14_32x4d", "resnet8_cifar"])
def test_resnet_weights_load_into_the_backbone(backbone: str) -> None:
    classifier = build_model(backbone, num_classes=7)
    init_weights(classifier, seed=9)
    detector = build_model("ssd_resnet34", 4, backbone=backbone, extra_widths=[8], boxes_per_cell=[2, 2])
    report = load_weights(detector, classifier.state_dict(), strict=False)
    new = [name for name in report.missing if not name.startswith(("extras.", "class_heads.", "box_heads."))]
    assert new == [] and report.reshaped == ()
    assert {name.partition(".")[0] for name in report.unexpected} <= {"layer4", "fc"}
    assert torch.equal(
        detector.get_parameter("layer3.0.conv1.weight"), classifier.get_parameter("layer3.0.conv1.weight")
    )


def test_freezing_the_backbone_trains_extras_and_heads() -> None:
    model = build_model("ssd_resnet34", 3, **NARROW)
    trained = freeze_except(model, head_patterns(model))
    assert trained.num_trained == sum(parameters(model, part) for part in ("extras", "class_heads", "box_heads"))
    assert trained.num_frozen == parameters(model) - trained.num_trained > 0


@pytest.mark.parametrize(
    "options",
    [
        {"backbone": "mobilenet_v2"},
        {"depths": [1, 1]},
        {"num_classes": 1},
        {"extra_widths": [8]},
        {"boxes_per_cell": [4, 0, 6, 6, 4, 4]},
        {"pool": "caffe"},
    ],
)
def test_invalid_options_are_rejected(options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        spec(**options)


def test_inputs_too_small_for_the_maps_are_rejected() -> None:
    with pytest.raises(UsageError, match="too small for 6 maps"):
        spec().map_sides(128)
