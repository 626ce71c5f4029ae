"""Build the first three stages of a ResNet-34 as TensorFlow's SSD does, and write weights, an image and the features.

    TENSORFLOW_PYTHON tensorflow_backbone.py FOLDER fixed|same

Needs tensorflow and nothing of Reconv. `fixed` pads strided convolutions by kernel - 1 pixels, split evenly, as
MLPerf's SSD and TensorFlow's official ResNets do; `same` leaves it to SAME, which pads more at the end. The max-pool
is SAME.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

SIDE, BLOCKS = 76, ((3, 64, 1), (4, 128, 2), (6, 256, 1))  # blocks, filters, stride of each stage
EPSILON = 1e-5


class Backbone:
    """Layers numbered in the order of creation, each with random weights."""

    def __init__(self, padding: str) -> None:
        self.variables: dict[str, np.ndarray] = {}
        self._padding = padding
        self._random = np.random.default_rng(0)

    def conv(self, x: tf.Tensor, filters: int, kernel: int, stride: int) -> tf.Tensor:
        shape = (kernel, kernel, int(x.shape[-1]), filters)
        fan_out = kernel * kernel * filters
        weights = self._add("conv2d", {"kernel": self._random.normal(0, (2 / fan_out) ** 0.5, shape)})["kernel"]
        if stride == 1 or self._padding == "same":
            return tf.nn.conv2d(x, weights, stride, "SAME")
        begin = (kernel - 1) // 2
        sides = [begin, kernel - 1 - begin]
        return tf.nn.conv2d(tf.pad(x, [[0, 0], sides, sides, [0, 0]]), weights, stride, "VALID")

    def norm(self, x: tf.Tensor) -> tf.Tensor:
        count = int(x.shape[-1])
        draw = self._random
        parts = {"gamma": draw.uniform(0.5, 1, count), "beta": draw.normal(0, 0.1, count)}
        parts |= {"moving_mean": draw.normal(0, 0.1, count), "moving_variance": draw.uniform(0.5, 1.5, count)}
        given = self._add("batch_normalization", parts)
        return tf.nn.batch_normalization(
            x, given["moving_mean"], given["moving_variance"], given["beta"], given["gamma"], EPSILON
        )

    def block(self, x: tf.Tensor, filters: int, stride: int) -> tf.Tensor:
        shortcut = x
        if stride != 1 or int(x.shape[-1]) != filters:
            shortcut = self.norm(self.conv(x, filters, 1, stride))
        x = tf.nn.relu(self.norm(self.conv(x, filters, 3, stride)))
        return tf.nn.relu(self.norm(self.conv(x, filters, 3, 1)) + shortcut)

    def features(self, image: tf.Tensor) -> tf.Tensor:
        x = tf.nn.relu(self.norm(self.conv(image, 64, 7, 2)))
        x = tf.nn.max_pool2d(x, 3, 2, "SAME")
        for blocks, filters, stride in BLOCKS:
            for number in range(blocks):
                x = self.block(x, filters, stride if number == 0 else 1)
        return x

    def _add(self, kind: str, parts: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        number = len({name.split("/")[1] for name in self.variables if name.split("/")[1].startswith(kind)})
        layer = f"resnet34/{kind}_{number}" if number else f"resnet34/{kind}"
        values = {name: value.astype(np.float32) for name, value in parts.items()}
        self.variables |= {f"{layer}/{name}": value for name, value in values.items()}
        return values


def main() -> None:
    folder, padding = Path(sys.argv[1]), sys.argv[2]
    image = np.random.default_rng(1).normal(size=(2, SIDE, SIDE, 3)).astype(np.float32)
    backbone = Backbone(padding)
    features = backbone.features(tf.constant(image))
    names = sorted(backbone.variables)
    tensors = [tf.constant(backbone.variables[name]) for name in names]
    tf.raw_ops.SaveV2(
        prefix=str(folder / "model.ckpt"), tensor_names=names, shape_and_slices=[""] * len(names), tensors=tensors
    )
    tf.raw_ops.MergeV2Checkpoints(
        checkpoint_prefixes=[str(folder / "model.ckpt")], destination_prefix=str(folder / "resnet34.ckpt")
    )
    np.savez(folder / "features.npz", image=image, features=features.numpy())


if __name__ == "__main__":
    main()
