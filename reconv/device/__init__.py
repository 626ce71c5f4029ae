"""Devices (CPU, CUDA, MPS, Gaudi) behind one protocol; vendor libraries are imported only in this package."""

from __future__ import annotations

from reconv.device.base import (
    Device,
    configure_algorithms,
    count_devices,
    device_kind,
    is_out_of_memory,
    open_device,
    without_cudnn_benchmark,
)
from reconv.device.cpu import Cpu
from reconv.device.cuda import Cuda, CudaGraph
from reconv.device.faults import device_error
from reconv.device.hpu import Hpu, load_backend
from reconv.device.load_kernels import load_cuda_kernels
from reconv.device.mps import Mps

__all__ = [
    "Cpu",
    "Cuda",
    "CudaGraph",
    "Device",
    "Hpu",
    "Mps",
    "configure_algorithms",
    "count_devices",
    "device_error",
    "device_kind",
    "is_out_of_memory",
    "load_backend",
    "load_cuda_kernels",
    "open_device",
    "without_cudnn_benchmark",
]
