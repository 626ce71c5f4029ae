"""All cases of `python -m benchmarks.kernels`, by name."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.kernels import conv1x1, convolutions, inception, norms, sums
from benchmarks.kernels.harness import Case

CASES: Mapping[str, Case] = {
    "norms": norms.norms,
    "norms-compiled": norms.norms_compiled,
    "projections": norms.projections,
    "max-pool": norms.max_pools,
    "norm-max-pool": norms.norm_max_pools,
    "conv1x1-statistics": conv1x1.statistics_rows,
    "conv1x1-backward": conv1x1.backward_rows,
    "expansion": conv1x1.expansion_rows,
    "sum-conv1x1": sums.backward_rows,
    "sum-conv1x1-forward": sums.forward_rows,
    "sum-conv1x1-whole": sums.whole_rows,
    "depthwise": convolutions.depthwise_rows,
    "grouped-conv": convolutions.grouped_rows,
    "stem": convolutions.stem_rows,
    "inception": inception.block_rows,
    "inception-norms": inception.norm_rows,
}
