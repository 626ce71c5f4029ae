"""Writes the TensorFlow checkpoints that the tests of the reader compare with. Run by hand, not by the tests.

    python -m venv tf && tf/bin/pip install tensorflow-cpu tf_keras      # written with 2.21.0
    TF_USE_LEGACY_KERAS=1 tf/bin/python tools/make_tf_fixture.py tests/checkpoint/fixtures/tensorflow

Five checkpoints and `expected.json`, which has for every tensor its type, shape and the sha256 of its bytes as
TensorFlow reads them back, and for the networks their logits:

- `official/model.ckpt-7`: a bottleneck ResNet v1.5 (stride on the 3x3) out of `tf.layers`, which number themselves in
  the order of creation; projections are created before their block's convolutions; SAME padding; 11 outputs, the
  first of them background. With momentum slots, tensors of other types, and two data files.
- `preactivated/model.ckpt-2`: v2 with basic blocks, in the same way: the norm first, then projection and convolutions.
- `scoped/model.ckpt-3`: a ResNeXt of two groups, whose variables are named by stage and unit.
- `partitioned/model.ckpt`: a variable stored in two slices.
- `object/ckpt-1`: the object-based form of TensorFlow 2, which adds text tensors.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

tf1 = tf.compat.v1
WIDTH = 4
DEPTHS = (2, 1, 1)
NUM_CLASSES = 11
IMAGE_SHAPE = (2, 36, 32, 3)  # 36: the SAME padding of the strided layers differs from one to the next


def images() -> np.ndarray:
    """Images that a test can make again without a file."""
    index = np.arange(np.prod(IMAGE_SHAPE), dtype=np.float64)
    return np.sin(index * 0.37 + (index % 7)).astype(np.float32).reshape(IMAGE_SHAPE)


def bottleneck(x: Any, width: int, stride: int, projects: bool, conv: Any, norm: Any) -> Any:
    """1x1, 3x3, 1x1; the projection first, as the official model creates it."""
    shortcut = norm(conv(x, 4 * width, 1, stride, "conv1sc"), "bnsc") if projects else x
    x = tf.nn.relu(norm(conv(x, width, 1, 1, "conv1"), "bn1"))
    x = tf.nn.relu(norm(conv(x, width, 3, stride, "conv2"), "bn2"))
    return tf.nn.relu(norm(conv(x, 4 * width, 1, 1, "conv3"), "bn3") + shortcut)


def numbered_conv(x: Any, filters: int, kernel: int, stride: int, _name: str = "") -> Any:
    """A convolution that numbers itself."""
    return tf1.layers.conv2d(x, filters, kernel, stride, padding="same", use_bias=False)


def numbered_norm(x: Any, _name: str = "") -> Any:
    """A batch norm that numbers itself."""
    return tf1.layers.batch_normalization(x, axis=3, epsilon=1e-5, fused=True)


def official(x: Any) -> Any:
    """The network in the names of the official model: everything numbered in order of creation."""
    with tf1.variable_scope("resnet_model"):
        x = tf.nn.relu(numbered_norm(numbered_conv(x, WIDTH, 7, 2)))
        x = tf.nn.max_pool2d(x, 3, 2, "SAME")
        for stage, depth in enumerate(DEPTHS):
            for unit in range(depth):
                stride = 2 if stage and not unit else 1
                x = bottleneck(x, WIDTH * 2**stage, stride, unit == 0, numbered_conv, numbered_norm)
        return tf1.layers.dense(tf.reduce_mean(x, [1, 2]), NUM_CLASSES)


def preactivated(x: Any) -> Any:
    """The same in the form v2, with basic blocks."""
    with tf1.variable_scope("resnet_model"):
        x = tf.nn.max_pool2d(numbered_conv(x, WIDTH, 7, 2), 3, 2, "SAME")
        for stage, depth in enumerate(DEPTHS):
            for unit in range(depth):
                stride, width = 2 if stage and not unit else 1, WIDTH * 2**stage
                y = tf.nn.relu(numbered_norm(x))
                shortcut = x if unit else numbered_conv(y, width, 1, stride)
                y = tf.nn.relu(numbered_norm(numbered_conv(y, width, 3, stride)))
                x = numbered_conv(y, width, 3, 1) + shortcut
        x = tf.nn.relu(numbered_norm(x))
        return tf1.layers.dense(tf.reduce_mean(x, [1, 2]), NUM_CLASSES)


def scoped(x: Any) -> Any:
    """The ResNeXt in names made of stage and unit; width doubled, two groups."""

    def conv(x: Any, filters: int, kernel: int, stride: int, name: str) -> Any:
        groups = 2 if kernel == 3 else 1
        with tf1.variable_scope(name):
            weight = tf1.get_variable("weight", [kernel, kernel, x.shape[3] // groups, filters])
            return tf.nn.conv2d(x, weight, stride, "SAME")

    def norm(x: Any, name: str) -> Any:
        with tf1.variable_scope(f"{name}/batch_norm"):
            beta, gamma, mean, variance = (
                tf1.get_variable(n, [x.shape[3]]) for n in ("beta", "gamma", "moving_mean", "moving_variance")
            )
            return tf1.nn.fused_batch_norm(x, gamma, beta, mean, variance, epsilon=1e-5, is_training=False)[0]

    with tf1.variable_scope("all"):
        with tf1.variable_scope("stage0"):
            x = tf.nn.relu(norm(conv(x, WIDTH, 7, 2, "conv0"), "bn0"))
            x = tf.nn.max_pool2d(x, 3, 2, "SAME")
        for stage, depth in enumerate(DEPTHS):
            for unit in range(depth):
                with tf1.variable_scope(f"stage{stage + 1}/unit{unit + 1}"):
                    stride = 2 if stage and not unit else 1
                    x = bottleneck(x, WIDTH * 2**stage, stride, unit == 0, conv, norm)
        with tf1.variable_scope("fc1"):
            x = tf.reduce_mean(x, [1, 2])
            weight = tf1.get_variable("weight", [x.shape[1], NUM_CLASSES])
            return x @ weight + tf1.get_variable("bias", [NUM_CLASSES])


def values_for(variable: Any, rng: np.random.Generator) -> np.ndarray:
    """Values that leave no two tensors alike and keep the activations near one."""
    shape = variable.shape.as_list()
    last = variable.op.name.rsplit("/", 1)[-1]
    if last in ("kernel", "weight"):
        return np.asarray(rng.normal(0, np.prod(shape[:-1]) ** -0.5 * 1.4, shape))
    if last in ("gamma", "moving_variance"):
        return np.asarray(rng.uniform(0.5, 1.5, shape))
    return np.asarray(rng.normal(0, 0.3, shape))


def other_types() -> list[Any]:
    """Variables of the remaining types, a scalar and an empty one among them."""
    ramp = np.linspace(-3, 3, 6).reshape(2, 3)
    types = {"float64": tf.float64, "float16": tf.float16, "bfloat16": tf.bfloat16, "int32": tf.int32}
    made = [tf1.Variable(tf.cast(ramp, t), name=f"other/{n}", use_resource=True) for n, t in types.items()]
    made.append(tf1.Variable(tf.zeros([0, 3]), name="other/empty", use_resource=True))
    made.append(tf1.Variable(tf.constant([True, False]), name="other/bool", use_resource=True))
    return [*made, tf1.Variable(np.int64(7), name="global_step", use_resource=True)]


def describe(prefix: Path) -> dict[str, Any]:
    """Every tensor as TensorFlow itself reads it back."""
    reader = tf.train.load_checkpoint(str(prefix))
    described = {}
    for name, shape in sorted(reader.get_variable_to_shape_map().items()):
        if reader.get_variable_to_dtype_map()[name] == tf.string:
            continue
        value = np.asarray(reader.get_tensor(name))
        digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
        described[name] = {"dtype": str(value.dtype), "shape": list(shape), "sha256": digest}
    return described


def write_network(prefix: Path, build: Any, seed: int, num_files: int) -> dict[str, Any]:
    """Save one network, with the extra variables if in several files; give back its tensors and logits."""
    rng = np.random.default_rng(seed)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with tf.Graph().as_default(), tf1.Session() as session:
        tf1.enable_resource_variables()
        logits = build(tf.constant(images()))
        weights = tf1.global_variables()
        if num_files > 1:
            other_types()
            tf1.get_variable("resnet_model/conv2d/kernel/Momentum", initializer=tf.ones([7, 7, 3, WIDTH]) * 9)
        session.run(tf1.global_variables_initializer())
        for variable in weights:
            variable.load(values_for(variable, rng), session)
        save(session, prefix, num_files)
        out = session.run(logits)
    return {"tensors": describe(prefix), "logits": np.asarray(out, np.float64).tolist()}


def save(session: Any, prefix: Path, num_files: int) -> None:
    """Save all variables dealt to `num_files` data files, which a sharded saver makes out of one for each machine."""
    parts = [f"{prefix}_part{i}" for i in range(num_files)]
    for i, part in enumerate(parts):
        saver = tf1.train.Saver(tf1.global_variables()[i::num_files])
        saver.save(session, part, write_meta_graph=False, write_state=False)
    session.run(tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=parts, destination_prefix=str(prefix)))
    tf1.train.update_checkpoint_state(str(prefix.parent), str(prefix))


def write_partitioned(prefix: Path) -> None:
    """Save one variable in two slices."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with tf.Graph().as_default(), tf1.Session() as session:
        tf1.get_variable("embedding", [4, 3], partitioner=tf1.fixed_size_partitioner(2))
        session.run(tf1.global_variables_initializer())
        tf1.train.Saver().save(session, str(prefix), write_meta_graph=False, write_state=False)


def main(folder: Path) -> None:
    """Write everything under `folder`."""
    expected = {"tensorflow": tf.__version__, "width": WIDTH, "depths": list(DEPTHS), "image_shape": list(IMAGE_SHAPE)}
    (folder / "object").mkdir(parents=True, exist_ok=True)
    tf.train.Checkpoint(w=tf.Variable([[1.5, -2.0]])).save(str(folder / "object" / "ckpt"))
    expected["object"] = {"tensors": describe(folder / "object" / "ckpt-1")}
    expected["official"] = write_network(folder / "official" / "model.ckpt-7", official, 7, num_files=2)
    prefix = folder / "preactivated" / "model.ckpt-2"
    expected["preactivated"] = write_network(prefix, preactivated, 2, num_files=1)
    expected["scoped"] = write_network(folder / "scoped" / "model.ckpt-3", scoped, 3, num_files=1)
    write_partitioned(folder / "partitioned" / "model.ckpt")
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
