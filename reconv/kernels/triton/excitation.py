"""Triton kernels of the small network that computes the gate of squeeze-and-excitation, and of its gradients.

gate = sigmoid(fc2(act(fc1(means)))). Separate kernels would be sixteen launches of a few microseconds each.

Shapes: means, gate, dgate, opened and dmeans [images, channels]; weight1 [hidden, channels]; weight2 [channels,
hidden]; bias1 [hidden]; bias2 [channels]; z and dz [images, HIDDEN], padded.

Hazards: padding of the hidden layer relies on act(0) = 0. Every program of `gate` computes the hidden layer again; only
those of the first block of channels store it.
"""

import triton
import triton.language as tl

from reconv.kernels.triton.batch_norm import activation_grad, apply_activation, sigmoid_of
from reconv.kernels.triton.conv_epilogue import add_product

_COUNTS = ["images", "eighths", "hidden"]


@triton.jit(do_not_specialize=_COUNTS)
def gate(
    means, weight1, bias1, weight2, bias2, z, result, images, eighths, hidden,
    ACT: tl.constexpr, ROWS: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The gate of `ROWS` images and `BLOCK` channels, and z = fc1(means) in rows of `HIDDEN`."""
    channels = eighths * 8
    image, h = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, HIDDEN)
    has_image, has_hidden = image < images, h < hidden
    total = tl.zeros([ROWS, HIDDEN], tl.float32)
    for base in tl.range(0, channels, BLOCK_K, num_stages=3):
        k = base + tl.arange(0, BLOCK_K)
        exists = k < channels
        values = tl.load(
            means + image[:, None] * channels + k[None, :], mask=has_image[:, None] & exists[None, :], other=0.0
        )  # fmt: skip
        filters = tl.load(
            weight1 + h[None, :] * channels + k[:, None], mask=has_hidden[None, :] & exists[:, None], other=0.0
        )  # fmt: skip
        total = add_product(values, filters, total)
    total += tl.load(bias1 + h, mask=has_hidden, other=0.0).to(tl.float32)[None, :]
    if tl.program_id(1) == 0:
        tl.store(z + image[:, None] * HIDDEN + h[None, :], total, mask=has_image[:, None])
    activated = apply_activation(total, ACT).to(means.dtype.element_ty)  # 0 for padding, where all activations have 0
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = channel < channels
    filters = tl.load(
        weight2 + channel[None, :] * hidden + h[:, None], mask=has_hidden[:, None] & exists[None, :], other=0.0
    )  # fmt: skip
    out = add_product(activated, filters, tl.zeros([ROWS, BLOCK], tl.float32))
    out += tl.load(bias2 + channel, mask=exists, other=0.0).to(tl.float32)[None, :]
    at = image[:, None] * channels + channel[None, :]
    tl.store(result + at, sigmoid_of(out).to(result.dtype.element_ty), mask=has_image[:, None] & exists[None, :])


@triton.jit
def _sigmoid_gradient(dgate, opened, at, mask):
    """The gradient of fc2's output, in the dtype of the gate."""
    value = tl.load(opened + at, mask=mask, other=0.0).to(tl.float32)
    dvalue = tl.load(dgate + at, mask=mask, other=0.0).to(tl.float32)
    return (dvalue * value * (1.0 - value)).to(opened.dtype.element_ty)


@triton.jit(do_not_specialize=_COUNTS)
def hidden_gradient(
    dgate, opened, weight2, z, dz, images, eighths, hidden,
    ACT: tl.constexpr, ROWS: tl.constexpr, HIDDEN: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The gradient of z of `ROWS` images."""
    channels = eighths * 8
    image, h = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, HIDDEN)
    has_image, has_hidden = image < images, h < hidden
    total = tl.zeros([ROWS, HIDDEN], tl.float32)
    for base in tl.range(0, channels, BLOCK_K, num_stages=3):
        k = base + tl.arange(0, BLOCK_K)
        exists = k < channels
        at = image[:, None] * channels + k[None, :]
        dout = _sigmoid_gradient(dgate, opened, at, has_image[:, None] & exists[None, :])
        filters = tl.load(
            weight2 + k[:, None] * hidden + h[None, :], mask=exists[:, None] & has_hidden[None, :], other=0.0
        )  # fmt: skip
        total = add_product(dout, filters, total)
    at = image[:, None] * HIDDEN + h[None, :]
    before = tl.load(z + at, mask=has_image[:, None], other=0.0)
    tl.store(dz + at, activation_grad(total, before, ACT).to(dz.dtype.element_ty), mask=has_image[:, None])


@triton.jit(do_not_specialize=_COUNTS)
def gradients(
    dgate, opened, means, weight1, z, dz, dmeans, dweight1, dbias1, dweight2, dbias2, images, eighths, hidden,
    ACT: tl.constexpr, ROWS: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradients of the means and of all parameters, of `BLOCK` channels; the first program also has fc1's bias."""
    channels = eighths * 8
    channel, h = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, HIDDEN)
    exists, has_hidden = channel < channels, h < hidden
    mask = has_hidden[:, None] & exists[None, :]
    filters = tl.load(weight1 + h[:, None] * channels + channel[None, :], mask=mask, other=0.0)
    of_weight1 = tl.zeros([HIDDEN, BLOCK], tl.float32)
    of_weight2 = tl.zeros([HIDDEN, BLOCK], tl.float32)
    of_bias1 = tl.zeros([HIDDEN], tl.float32)
    of_bias2 = tl.zeros([BLOCK], tl.float32)
    for base in tl.range(0, images, ROWS, num_stages=2):
        image = base + tl.arange(0, ROWS)
        has_image = image < images
        has_value, has_z = has_image[:, None] & exists[None, :], has_image[:, None]
        at, at_z = image[:, None] * channels + channel[None, :], image[:, None] * HIDDEN + h[None, :]
        dout = _sigmoid_gradient(dgate, opened, at, has_value)
        values = tl.load(means + at, mask=has_value, other=0.0)
        before = tl.load(z + at_z, mask=has_z, other=0.0)
        activated = apply_activation(before, ACT).to(means.dtype.element_ty)
        dbefore = tl.load(dz + at_z, mask=has_z, other=0.0)
        dvalues = add_product(dbefore, filters, tl.zeros([ROWS, BLOCK], tl.float32))
        tl.store(dmeans + at, dvalues.to(dmeans.dtype.element_ty), mask=has_value)
        of_weight1 = add_product(tl.trans(dbefore), values, of_weight1)
        of_weight2 = add_product(tl.trans(activated), dout, of_weight2)
        of_bias1 += tl.sum(dbefore.to(tl.float32), 0)
        of_bias2 += tl.sum(dout.to(tl.float32), 0)
    tl.store(
        dweight1 + h[:, None] * channels + channel[None, :], of_weight1.to(dweight1.dtype.element_ty), mask=mask
    )  # fmt: skip
    tl.store(
        dweight2 + channel[None, :] * hidden + h[:, None], of_weight2.to(dweight2.dtype.element_ty), mask=mask
    )  # fmt: skip
    tl.store(dbias2 + channel, of_bias2.to(dbias2.dtype.element_ty), mask=exists)
    if tl.program_id(0) == 0:
        tl.store(dbias1 + h, of_bias1.to(dbias1.dtype.element_ty), mask=has_hidden)
