"""torchvision's ResNet-50 behind LitServe: the baseline of `benchmarks.serve.throughput`, in its own environment.

    python benchmarks/serve/litserve_resnet50.py WEIGHTS --port 8001 [--device cuda] [--workers 2] [--max-batch 8]
                                                 [--compile]

As its documentation advises: one raw image per request, decoded by Pillow in the workers, dynamic batching, several
workers; channels_last, torch.inference_mode, and as many torch threads in all as there are cores.
"""

import argparse
import io
import os
from typing import Annotated, Any

import litserve
import torch
from fastapi import Body
from PIL import Image
from torch import Tensor

TOP = 5


def import_torchvision() -> Any:
    """torchvision; beside a torch without CUDA its extension cannot be loaded, and declaring its operators suffices."""
    if torch.version.cuda is None:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision

    return torchvision


class ResNet50(litserve.LitAPI):  # type: ignore[misc]
    """From the bytes of an image to its best classes."""

    def __init__(self, options: argparse.Namespace) -> None:
        batched = {"max_batch_size": options.max_batch, "batch_timeout": options.batch_timeout_ms / 1000}
        super().__init__(**(batched if options.max_batch > 1 else {}))
        self.options = options

    def setup(self, device: str) -> None:
        options = self.options
        # On a GPU, too: with the default of one thread per core in each worker it served a tenth.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // options.workers))
        torchvision = import_torchvision()
        from torchvision.transforms import v2 as transforms

        self.dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.precision]
        model = torchvision.models.resnet50()
        model.load_state_dict(torch.load(options.weights, weights_only=True))
        model = model.eval().to(device, self.dtype, memory_format=torch.channels_last)
        self.model = torch.compile(model, dynamic=True) if options.compile else model
        self.torch_device = torch.device(device)
        self.read = transforms.Compose(
            [transforms.Resize(256, antialias=True), transforms.CenterCrop(224), transforms.PILToTensor()]
        )
        self.mean = 255 * torch.tensor([0.485, 0.456, 0.406], device=device).view(1, 3, 1, 1)
        self.std = 255 * torch.tensor([0.229, 0.224, 0.225], device=device).view(1, 3, 1, 1)
        for size in {1, 2, options.max_batch} if options.max_batch > 1 else {1}:
            self._classify(torch.zeros(size, 3, 224, 224, dtype=torch.uint8))

    def decode_request(self, request: Annotated[bytes, Body(media_type="image/jpeg")]) -> Tensor:
        pixels: Tensor = self.read(Image.open(io.BytesIO(request)).convert("RGB"))
        return pixels

    def batch(self, inputs: list[Tensor]) -> Tensor:
        return torch.stack(inputs)

    def predict(self, x: Tensor) -> Any:
        return self._classify(x[None])[0] if x.dim() == 3 else self._classify(x)

    def _classify(self, images: Tensor) -> list[list[tuple[float, int]]]:
        """Score and label of the best classes of each image."""
        with torch.inference_mode():
            images = (images.to(self.torch_device).float() - self.mean) / self.std
            logits = self.model(images.to(self.dtype, memory_format=torch.channels_last))
            scores, labels = logits.float().softmax(1).topk(TOP)
        return [list(zip(*row, strict=True)) for row in zip(scores.tolist(), labels.tolist(), strict=True)]

    def unbatch(self, output: Any) -> Any:
        return output

    def encode_response(self, output: list[tuple[float, int]]) -> dict[str, Any]:
        return {"classes": [{"index": label, "score": score} for score, label in output]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--max-batch", type=int, default=1)
    parser.add_argument("--batch-timeout-ms", type=float, default=5)
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    server = litserve.LitServer(
        ResNet50(options),
        accelerator=options.device,
        devices=1,
        workers_per_device=options.workers,
        timeout=60,
        fast_queue=True,
    )
    server.run(host="127.0.0.1", port=options.port, generate_client_file=False, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
