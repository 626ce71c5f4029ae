"""The recipe section `precision`: dtypes of weights and of single operations."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from reconv.recipe.units import Listed, PositiveFloat, Section, Switch

# Torch's names. Operations of the loss may be listed too; the loss is always float32.
OperationName = Literal[
    "conv2d",
    "linear",
    "matmul",
    "mm",
    "bmm",
    "addmm",
    "mv",
    "dot",
    "t",
    "batch_norm",
    "group_norm",
    "layer_norm",
    "max_pool2d",
    "avg_pool2d",
    "adaptive_avg_pool2d",
    "mean",
    "relu",
    "relu6",
    "silu",
    "gelu",
    "sigmoid",
    "add",
    "mul",
    "cat",
    "softmax",
    "log_softmax",
    "topk",
    "cross_entropy",
    "nll_loss",
]


class PrecisionOps(Section):
    """Operations whose dtype the recipe sets; all others have the dtype of the precision mode."""

    float32: Annotated[tuple[OperationName, ...], Listed] = ()
    """Operations to run in float32."""
    low_precision: Annotated[tuple[OperationName, ...], Listed] = ()
    """Operations to run in the bfloat16 or float16 of the mode."""


def _mode(value: object) -> object:
    """YAML reads a bare 16.16 as a number; it is the name of a mode."""
    return {16.16: "16.16", 16.32: "16.32", 32.32: "32.32"}.get(value, value) if isinstance(value, float) else value


class PrecisionConfig(Section):
    """Dtypes of weights and computation. Batch norm statistics and the loss are always at least float32."""

    mode: Annotated[
        Literal["fp64", "fp32", "tf32", "bf16", "fp16", "bf16-all", "16.16", "16.32", "32.32"], BeforeValidator(_mode)
    ] = "fp32"
    """bf16 and fp16 use torch's autocast with float32 weights. bf16-all and 16.32 run the whole network on a
    half-precision copy of float32 weights. 16.16 stores the weights in half precision, too. 32.32 is fp32."""
    loss_scale: PositiveFloat | Literal["dynamic"] = "dynamic"
    """Loss scale for fp16, 16.16 and 16.32."""
    rounding: Literal["auto", "nearest", "stochastic"] = "auto"
    """Rounding of weight updates in mode 16.16; `auto` is stochastic."""
    ops: PrecisionOps = PrecisionOps()
    reduced_precision_reduction: Switch = "auto"
    """CUDA: allow reduced-precision reductions in half-precision matrix products; `auto` keeps torch's default, on."""

    @property
    def has_low_precision(self) -> bool:
        return self.mode in ("bf16", "fp16", "bf16-all", "16.16", "16.32")

    @property
    def family(self) -> Literal["half", "tf32", "fp32"]:
        """Family of modes of equal speed, by which tables of speeds are ordered."""
        return "half" if self.has_low_precision else "tf32" if self.mode == "tf32" else "fp32"

    @property
    def follows_autocast(self) -> bool:
        """True if every operation has the dtype that torch gives it."""
        return self.mode in ("fp32", "32.32", "tf32", "bf16", "fp16") and self.ops == PrecisionOps()

    @property
    def uses_loss_scale(self) -> bool:
        return self.mode in ("fp16", "16.16", "16.32")
