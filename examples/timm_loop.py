"""Train a network of timm in a plain PyTorch loop with `reconv.fuse`, `reconv.ImageLoader` and `reconv.Checkpointer`.

    pip install 'reconv[timm]'
    python examples/timm_loop.py DATA [--model resnet50d] [--steps 500] [--graph] [--checkpoints FOLDER] [--plain]

DATA has a folder per class in DATA/train. The loop prints losses and images per second, on a GPU or a CPU. `--plain`
takes timm's loader and no fused kernels, `--plain model` or `--plain data` only one of the two. Started again with the
same `--checkpoints`, the loop goes on with the batch behind the last checkpoint.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from typing import Any

import timm
import timm.data
import timm.optim
import torch
from torch import nn

import reconv

WARMUP = 10  # steps that are not timed


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--model", default="resnet50d")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--size", type=int, default=224, help="height and width of the images")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--graph", action="store_true", help="capture forward and backward pass as CUDA graphs, on a GPU"
    )
    parser.add_argument("--plain", nargs="?", const="both", default="", choices=("both", "model", "data"))
    parser.add_argument("--checkpoints", help="folder to save to, and to continue from")
    parser.add_argument("--save-every", type=int, default=100, help="steps")
    parser.add_argument("--print-every", type=int, default=50, help="steps")
    return parser.parse_args()


def make_loader(args: argparse.Namespace, device: torch.device) -> tuple[Iterable[Any], int]:
    """Make the loader of training images; returns it and the number of classes."""
    if args.plain in ("both", "data"):
        dataset = timm.data.create_dataset("", root=args.data, split="train")
        loader = timm.data.create_loader(
            dataset,
            input_size=(3, args.size, args.size),
            batch_size=args.batch_size,
            is_training=True,
            num_workers=args.workers,
            persistent_workers=args.workers > 0,
            use_prefetcher=device.type == "cuda",
            device=device,
        )
        return loader, len(dataset.reader.class_to_idx)
    train = reconv.ImageLoader(
        args.data, args.batch_size, size=args.size, device=device, workers=args.workers, seed=args.seed
    )
    return train, len(train.classes)


def make_model(args: argparse.Namespace, num_classes: int, device: torch.device) -> nn.Module:
    """Make the network, fused unless it is to be plain."""
    model: nn.Module = timm.create_model(args.model, num_classes=num_classes)
    model = model.to(device, memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    if args.plain not in ("both", "model"):
        print(reconv.fuse(model, image=(3, args.size, args.size) if device.type == "cuda" else None))
    if args.graph:
        sample = torch.zeros(args.batch_size, 3, args.size, args.size, device=device)
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):  # a graph must not keep cast weights
            torch.cuda.make_graphed_callables(model, (sample.to(memory_format=torch.channels_last),))
    return model


def main() -> None:
    """Train for some steps."""
    args = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    train, num_classes = make_loader(args, device)
    model = make_model(args, num_classes, device)
    optimizer = timm.optim.create_optimizer_v2(model, opt="sgd", lr=args.lr, momentum=0.9, weight_decay=1e-4)
    objects: dict[str, Any] = {"model": model, "optimizer": optimizer}
    if isinstance(train, reconv.ImageLoader):  # timm's loader has no state: its epoch begins again
        objects["train"] = train
    checkpointer = reconv.Checkpointer(args.checkpoints) if args.checkpoints else None
    step = start = checkpointer.restore(**objects) if checkpointer else 0
    began_s = time.perf_counter()
    while step < args.steps:
        for images, labels in train:
            images = images.to(device, memory_format=torch.channels_last)
            with torch.autocast(
                device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=not args.graph
            ):
                loss = nn.functional.cross_entropy(model(images), labels.to(device), label_smoothing=0.1)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % args.print_every == 0:
                print(f"step {step}: loss {loss.item():.7f}", flush=True)
            if checkpointer and step % args.save_every == 0:
                checkpointer.save(step, **objects)
            if step == start + WARMUP or step == args.steps:
                if device.type == "cuda":
                    torch.cuda.synchronize()
                if step == args.steps:
                    break
                began_s = time.perf_counter()
    num_timed = step - start - WARMUP
    if num_timed > 0:
        print(f"{num_timed * args.batch_size / (time.perf_counter() - began_s):,.1f} images/s")
    if checkpointer:
        checkpointer.close()


if __name__ == "__main__":
    main()
