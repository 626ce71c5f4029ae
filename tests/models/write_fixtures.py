"""Writes fixtures/outputs.json from torchvision and timm; run it by hand where both are installed.

PYTHONPATH=.:tests/models python tests/models/write_fixtures.py
"""

from __future__ import annotations

import json

import torch
from torch import Tensor, nn

# A torchvision made for CUDA does not import beside a torch without it unless these two are declared.
if not torch.cuda.is_available():
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import timm
import torchvision
from oracle_cases import CASES, FIXTURES, NUM_CLASSES, Case, images, network, shown


def build(case: Case) -> nn.Module:
    package, name = case.oracle.split(":")
    if package == "timm":
        chans = case.options.get("in_channels", 3)
        return timm.create_model(name, num_classes=NUM_CLASSES, in_chans=chans).double()
    if name == "googlenet":
        aux, transform = case.options.get("aux_heads", True), case.options.get("transform_input", False)
        model = torchvision.models.googlenet(
            num_classes=NUM_CLASSES, aux_logits=aux, transform_input=transform, init_weights=False
        )
        return model.double()
    model = torchvision.models.get_model(name, num_classes=NUM_CLASSES).double()
    if case.options.get("version") == "v1":
        for module in model.modules():
            if isinstance(module, torchvision.models.resnet.Bottleneck):
                module.conv1.stride, module.conv2.stride = module.conv2.stride, module.conv1.stride
    return model


def renamed(ours: dict[str, Tensor], theirs: dict[str, Tensor], oracle: str) -> dict[str, Tensor]:
    """Our tensors under the other package's names."""
    if "resnetv2" in oracle:
        out = {}
        for name, tensor in ours.items():
            parts = name.split(".")
            if parts[0].startswith("layer"):
                new = f"stages.{int(parts[0][5:]) - 1}.blocks.{parts[1]}." + ".".join(parts[2:])
                new = new.replace("downsample.0", "downsample.conv").replace(".bn", ".norm")
            else:
                new = name.replace("conv1.", "stem.conv.").replace("bn_last", "norm").replace("fc.", "head.fc.")
            out[new] = tensor.view(theirs[new].shape)
        return out
    if set(ours) == set(theirs):
        return ours
    assert len(ours) == len(theirs), oracle  # the same layers in the same order, under other names
    assert all(a.shape == b.shape for a, b in zip(ours.values(), theirs.values(), strict=True)), oracle
    return dict(zip(theirs, ours.values(), strict=True))


def main() -> None:
    results = {}
    for case in CASES:
        oracle = build(case)
        oracle.load_state_dict(renamed(network(case).state_dict(), oracle.state_dict(), case.oracle))
        oracle.eval()
        with torch.no_grad():
            results[f"{case.id}-{case.side}"] = {"oracle": case.oracle, "logits": shown(oracle(images(case)))}
            if case.id == "googlenet":
                oracle.train()
                for module in oracle.modules():
                    if isinstance(module, nn.Dropout):
                        module.p = 0.0
                outputs = oracle(images(case))
                results["googlenet-train"] = {
                    "oracle": case.oracle,
                    "logits": shown(outputs.logits),
                    "aux1": shown(outputs.aux_logits1),
                    "aux2": shown(outputs.aux_logits2),
                }
        print(case.id, flush=True)
    versions = {"torch": torch.__version__, "torchvision": torchvision.__version__, "timm": timm.__version__}
    FIXTURES.write_text(json.dumps({"versions": versions, "outputs": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
