"""Kernels run in Triton's interpreter here, on CPU tensors. It must be chosen before a kernel is defined."""

import os

os.environ["TRITON_INTERPRET"] = "1"
