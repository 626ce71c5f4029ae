"""Train a network in PyTorch Lightning with `reconv.fuse` and `reconv.ImageLoader`.

    pip install reconv lightning torchvision
    python examples/lightning_fuse.py DATA [--model resnet50] [--steps 500] [--resume CHECKPOINT] [--plain]

DATA has a folder per class in DATA/train. Losses and images per second are printed, on a GPU or a CPU. `--plain` takes
torchvision's ImageFolder with torch's DataLoader and no fused kernels, `--plain model` or `--plain data` only one of
the two. Lightning saves the position of an ImageLoader in its checkpoints: `--resume` goes on with the next batch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

import reconv

WARMUP = 10  # steps that are not timed


class Classifier(lightning.LightningModule):
    """A network with its loss and optimizer."""

    def __init__(self, name: str, num_classes: int, lr: float) -> None:
        super().__init__()
        self.model, self.lr = reconv.build_model(name, num_classes), lr  # or any other nn.Module
        self.to(memory_format=torch.channels_last)

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        images, labels = batch
        logits = self.model(images.contiguous(memory_format=torch.channels_last))
        return nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr, momentum=0.9, weight_decay=1e-4)


class Progress(lightning.Callback):
    """Prints losses, and images per second in the end."""

    def __init__(self, batch_size: int, print_every: int) -> None:
        self.batch_size, self.print_every = batch_size, print_every
        self.num_timed, self.began_s = -WARMUP, 0.0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step % self.print_every == 0:
            print(f"step {trainer.global_step}: loss {outputs['loss'].item():.7f}", flush=True)
        self.num_timed += 1
        if self.num_timed == 0:
            synchronize()
            self.began_s = time.perf_counter()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        synchronize()
        if self.num_timed > 0:
            rate = self.num_timed * self.batch_size / (time.perf_counter() - self.began_s)
            print(f"{rate:,.1f} images/s")


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--model", default="resnet50", help="of Reconv, or timm:NAME, torchvision:NAME")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--size", type=int, default=224, help="height and width of the images")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plain", nargs="?", const="both", default="", choices=("both", "model", "data"))
    parser.add_argument("--checkpoints", help="folder to save to")
    parser.add_argument("--save-every", type=int, default=100, help="steps")
    parser.add_argument("--resume", help="a Lightning checkpoint")
    parser.add_argument("--print-every", type=int, default=50, help="steps")
    return parser.parse_args()


def make_loader(args: argparse.Namespace) -> tuple[Iterable[Any], int]:
    """Make the loader of training images; returns it and the number of classes."""
    if args.plain in ("both", "data"):
        from torchvision import datasets, transforms

        steps = [transforms.RandomResizedCrop(args.size), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
        normalize = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
        dataset = datasets.ImageFolder(f"{args.data}/train", transforms.Compose([*steps, normalize]))
        loader: Any = torch.utils.data.DataLoader(
            dataset, args.batch_size, shuffle=True, drop_last=True, num_workers=args.workers, pin_memory=True
        )
        return loader, len(dataset.classes)
    device = "cuda" if torch.cuda.is_available() else "cpu"  # under DDP: f"cuda:{LOCAL_RANK}"
    train = reconv.ImageLoader(
        args.data, args.batch_size, size=args.size, device=device, workers=args.workers, seed=args.seed
    )
    return train, len(train.classes)


def main() -> None:
    """Train for some steps."""
    args = parse()
    lightning.seed_everything(args.seed)
    train, num_classes = make_loader(args)
    classifier = Classifier(args.model, num_classes, args.lr)
    if args.plain not in ("both", "model"):
        image = (3, args.size, args.size) if torch.cuda.is_available() else None
        print(reconv.fuse(classifier.model, image=image))
    callbacks: list[Any] = [Progress(args.batch_size, args.print_every)]
    if args.checkpoints:
        callbacks.append(ModelCheckpoint(args.checkpoints, every_n_train_steps=args.save_every, save_top_k=-1))
    trainer = lightning.Trainer(
        max_steps=args.steps,
        devices=1,
        precision="bf16-mixed" if torch.cuda.is_available() else "32-true",
        callbacks=callbacks,
        enable_checkpointing=bool(args.checkpoints),
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(classifier, train, ckpt_path=args.resume)


if __name__ == "__main__":
    main()
