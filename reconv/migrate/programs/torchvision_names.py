"""The names of torchvision's image classifiers, so that a mistyped one is found without torchvision."""

from __future__ import annotations

TORCHVISION_CLASSIFIERS = (
    *("alexnet", "googlenet", "inception_v3", "maxvit_t", "mobilenet_v2", "mobilenet_v3_large", "mobilenet_v3_small"),
    *(f"convnext_{size}" for size in ("tiny", "small", "base", "large")),
    *(f"densenet{depth}" for depth in (121, 161, 169, 201)),
    *(f"efficientnet_b{number}" for number in range(8)),
    *(f"efficientnet_v2_{size}" for size in "sml"),
    *(f"mnasnet{width}" for width in ("0_5", "0_75", "1_0", "1_3")),
    *(f"regnet_x_{size}" for size in ("400mf", "800mf", "1_6gf", "3_2gf", "8gf", "16gf", "32gf")),
    *(f"regnet_y_{size}" for size in ("400mf", "800mf", "1_6gf", "3_2gf", "8gf", "16gf", "32gf", "128gf")),
    *(f"resnet{depth}" for depth in (18, 34, 50, 101, 152)),
    *("resnext50_32x4d", "resnext101_32x8d", "resnext101_64x4d", "wide_resnet50_2", "wide_resnet101_2"),
    *(f"shufflenet_v2_x{width}" for width in ("0_5", "1_0", "1_5", "2_0")),
    *("squeezenet1_0", "squeezenet1_1"),
    *(f"swin_{size}" for size in "tsb"),
    *(f"swin_v2_{size}" for size in "tsb"),
    *(f"vgg{depth}{norm}" for depth in (11, 13, 16, 19) for norm in ("", "_bn")),
    *("vit_b_16", "vit_b_32", "vit_l_16", "vit_l_32", "vit_h_14"),
)

# Those of our networks with a second set of weights, IMAGENET1K_V2.
WITH_V2_WEIGHTS = (
    *(f"resnet{depth}" for depth in (50, 101, 152)),
    *("resnext50_32x4d", "resnext101_32x8d", "wide_resnet50_2", "wide_resnet101_2", "mobilenet_v2", "efficientnet_b1"),
)
