"""The proofs of what answers are made of, for `prove_kernels.py`: passes over images, and the forms of convolutions.

Nothing here has a gradient. Values are compared with those of plain operations in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from proof_values import TOLERANCES, draw, error

from reconv.kernels.conv_bias_act.candidates import Form, Given, Shape, by_filters, forms_for, plain
from reconv.kernels.pointwise import ops as passes

HALVES = (torch.float16, torch.bfloat16)  # cuDNN may multiply float32 in TF32
GATED = ((32, 112), (96, 56), (144, 56), (240, 28), (672, 14), (1152, 7), (2048, 7), (72, 13))  # channels, side
FILTERED = (  # channels, side, filter, stride
    (32, 112, 3, 1), (96, 112, 3, 2), (144, 56, 3, 1), (144, 56, 5, 2), (240, 28, 5, 1), (672, 14, 5, 2),
    (1152, 7, 5, 1), (72, 13, 3, 1), (48, 95, 3, 1),
)  # fmt: skip
PRODUCTS: tuple[tuple[int, int, int, passes.Ending], ...] = (  # channels, outputs, side, end
    (16, 96, 112, "silu"), (96, 24, 56, "none"), (144, 40, 28, "none"), (40, 240, 28, "silu"), (672, 192, 7, "none"),
    (320, 1280, 7, "silu"), (64, 256, 56, "relu"), (1024, 2048, 7, "relu"), (32, 192, 28, "relu6"),
    (72, 104, 13, "relu"), (2048, 16, 1, "relu"), (10, 240, 1, "sigmoid"), (240, 10, 1, "silu"),
)  # fmt: skip


def prove_passes() -> bool:
    """Print the worst errors of an answer's means, gates and concatenations, of EfficientNet-B0 and SE-ResNeXt."""

    def errors(dtype: torch.dtype) -> Iterator[float]:
        for channels, side in GATED:
            x, other = (draw(8, channels, side, side, dtype=dtype) for _ in range(2))
            gate = draw(8, channels, 1, 1, dtype=dtype)
            yield error(passes.means(x), x.double().mean((2, 3), keepdim=True))
            yield error(passes.excited(x, gate, None, "none"), x.double() * gate.double())
            gated = F.relu(x.double() * gate.double() + other.double())
            yield error(passes.excited(x, gate, other, "relu"), gated)
            parts = [x, other[:, :24].contiguous(memory_format=torch.channels_last), other]
            yield error(passes.side_by_side(parts), torch.cat(parts, 1))

    return _proven("passes", errors, TOLERANCES)


def prove_product() -> bool:
    """Print the worst errors of every form of an answer's 1x1 convolutions but cuDNN's own, of the half types."""

    def errors(dtype: torch.dtype) -> Iterator[float]:
        for channels, outputs, side, act in PRODUCTS:
            for adds, gates in ((False, False), (True, False), (True, True)):
                given = _convolution(channels, outputs, side, adds, gates, dtype)
                shape = Shape((1, 1), (0, 0), (1, 1), 1, act)
                forms = [form for form in forms_for(given, shape) if "by_cudnn" not in repr(form)]
                yield from _of_forms(forms, given, shape)

    return _proven("product", errors, HALVES)


def prove_filters() -> bool:
    """Print the worst errors of an answer's depthwise convolutions over shapes of EfficientNet-B0."""

    def errors(dtype: torch.dtype) -> Iterator[float]:
        for channels, side, kernel, stride in FILTERED:
            weight, bias = draw(channels, 1, kernel, kernel, dtype=dtype), draw(1, channels, 1, 1, dtype=dtype)
            given = Given(draw(8, channels, side, side, dtype=dtype), weight, bias.flatten())
            shape = Shape((stride, stride), (kernel // 2, kernel // 2), (1, 1), channels, "silu")
            yield from _of_forms([by_filters], given, shape)

    return _proven("filters", errors, TOLERANCES)


def prove_answer_stem() -> bool:
    """Print the worst errors of an answer's stem, plainly and over blocks of pixels, of the half types."""

    def errors(dtype: torch.dtype) -> Iterator[float]:
        for kernel, outputs in ((3, 32), (3, 48), (7, 64)):
            x, weight = draw(8, 3, 224, 224, dtype=dtype), draw(outputs, 3, kernel, kernel, dtype=dtype)
            given = Given(x, weight, draw(1, outputs, 1, 1, dtype=dtype).flatten())
            shape = Shape((2, 2), (kernel // 2, kernel // 2), (1, 1), 1, "silu")
            forms = forms_for(given, shape)
            assert len(forms) == 2
            yield from _of_forms(forms, given, shape)

    return _proven("stem_end", errors, HALVES)


def _proven(name: str, errors: Callable[[torch.dtype], Iterator[float]], dtypes: Iterable[torch.dtype]) -> bool:
    """Print the worst error of each type; whether all are within the tolerance."""
    is_right = True
    for dtype in dtypes:
        found, tolerance = list(errors(dtype)), TOLERANCES[dtype]
        is_right &= max(found) <= tolerance
        print(f"{name:10} {str(dtype)[6:]:9} {len(found):6}  y {max(found):.1e} ({tolerance:.0e})", flush=True)
    return is_right


def _of_forms(forms: Iterable[Form], given: Given, shape: Shape) -> Iterator[float]:
    """The error of each form, against plain operations in float64."""
    exact = Given(*(None if t is None else t.double() for t in given))  # type: ignore[arg-type]
    expected = plain(exact, shape)
    return (error(form(given, shape), expected) for form in forms)


def _convolution(channels: int, outputs: int, side: int, adds: bool, gates: bool, dtype: torch.dtype) -> Given:
    x, weight = draw(8, channels, side, side, dtype=dtype), draw(outputs, channels, 1, 1, dtype=dtype)
    other = draw(8, outputs, side, side, dtype=dtype) if adds else None
    gate = draw(8, channels, 1, 1, dtype=dtype) if gates else None
    return Given(x, weight, draw(1, outputs, 1, 1, dtype=dtype).flatten(), other, gate)


ANSWER_PROOFS: dict[str, Callable[[], bool]] = {
    "passes": prove_passes,
    "product": prove_product,
    "filters": prove_filters,
    "stem_end": prove_answer_stem,
}
