"""NVIDIA GPUs, and the capture of CUDA graphs. Copies overlap with computation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from reconv.core.batch import Batch
from reconv.core.errors import UsageError
from reconv.device.load_kernels import load_classifier_kernels
from reconv.device.pack_tensors import pack_tensors, unpack_tensors

Result = TypeVar("Result")

_MAX_PACKED_BYTES = 2**16  # of a tensor that is copied together with others
_POSITIONS = "positions of the batch"  # beside the names of its tensors
_MAX_PINNED_BYTES = 64 * 2**20  # of one tensor: larger ones are moved once, and pinned memory is never returned
_invalid_captures: list[torch.cuda.CUDAGraph] = []  # torch's allocator of pinned memory refers to them until the end


class CudaGraph:
    """Captures work as CUDA graphs, on a stream of its own.

    All graphs share one memory pool: they never run at the same time, and the outputs of one are not read after
    another was replayed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def run_on_stream(self, work: Callable[[], Result]) -> Result:
        """Run work on the capture stream, in order with the current stream."""
        here = torch.cuda.current_stream()
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            result = work()
        here.wait_stream(self._stream)
        return result

    def capture(self, work: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
        """Capture work without running it; returns its static outputs and the call that replays it.

        After an error everything else still works: earlier graphs, later captures, and operations one by one.
        """
        graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        try:
            # thread_local: other threads load data and pin memory meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                result = work()
        except BaseException:
            torch.cuda.set_stream(here)  # torch.cuda.graph does not, if CUDA has invalidated the capture
            if not _has_ended(graph):
                self._leave_pool(graph)
            raise
        return result, graph.replay

    def _leave_pool(self, graph: torch.cuda.CUDAGraph) -> None:
        """Undo what torch leaves undone when CUDA has invalidated a capture.

        The allocator still takes the capture for running: it would keep every block that several streams have used,
        and refuse the next capture into this pool.
        """
        _invalid_captures.append(graph)
        with suppress(RuntimeError):  # the capture had not begun
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
            torch._C._cuda_releasePool(self._device.index, self._pool)
        self._pool = torch.cuda.graph_pool_handle()  # that of pinned memory has no such call: use another pool


class Cuda:
    """One GPU of this machine."""

    kind = "cuda"
    channels_last = True
    compile_backend: str | None = "inductor"
    raises_oom = True

    def __init__(self, index: int = 0, threads: int | None = None) -> None:
        if not torch.cuda.is_available():
            has_build = torch.version.cuda is not None
            raise UsageError(
                "no CUDA device is available",
                why="the driver reports no GPU" if has_build else f"torch {torch.__version__} is built without CUDA",
                hint="use --device cpu; `reconv doctor` shows what is missing",
            )
        if index >= torch.cuda.device_count():
            raise UsageError(
                f"there is no cuda:{index}",
                why=f"{torch.cuda.device_count()} GPUs are visible, counted from 0",
                hint="use a smaller index; CUDA_VISIBLE_DEVICES may hide some GPUs",
            )
        self.torch = torch.device("cuda", index)
        torch.cuda.set_device(self.torch)
        self._copy_stream = torch.cuda.Stream(self.torch)  # batches are copied while the previous one is trained on
        if threads is not None:
            torch.set_num_threads(threads)

    def move(self, tensor: Tensor) -> Tensor:
        """The tensor on this device, without waiting for the work in its queue."""
        if tensor.device.type == "cpu" and tensor.nbytes <= _MAX_PINNED_BYTES:
            tensor = tensor.pin_memory()  # a copy from pageable memory waits for the stream
        return tensor.to(self.torch, non_blocking=True)

    def pin(self, memory: Tensor) -> Callable[[], None]:
        """Page-lock host memory, so that copies from it overlap with computation. Returns the call that unlocks it."""
        address, runtime = memory.data_ptr(), torch.cuda.cudart()
        torch.cuda.check_error(runtime.cudaHostRegister(address, memory.numel(), 0))

        def unpin() -> None:
            torch.cuda.check_error(runtime.cudaHostUnregister(address))

        return unpin

    def send(self, batch: Batch) -> tuple[Batch, torch.cuda.Event]:
        """Start to copy the batch on a stream of its own: what is computed with it must wait for the event.

        Small tensors are copied together. A copy of each would take the host longer than a step of a small network.
        """
        compute_stream, copied = torch.cuda.current_stream(self.torch), torch.cuda.Event()
        tensors = {**batch.tensors, _POSITIONS: batch.positions}
        small = {name: tensor for name, tensor in tensors.items() if _is_packed(tensor)}
        with torch.cuda.stream(self._copy_stream):
            packed = pack_tensors(list(small.values())).pin_memory().to(self.torch, non_blocking=True)
            sent = {name: self._copy(tensor) for name, tensor in tensors.items() if name not in small}
            copied.record(self._copy_stream)
        for tensor in (packed, *sent.values()):
            tensor.record_stream(compute_stream)  # else the allocator could reuse its memory while it is in use
        sent |= dict(zip(small, unpack_tensors(packed, list(small.values())), strict=True))
        positions = sent.pop(_POSITIONS)
        return Batch({name: sent[name] for name in batch.tensors}, positions, batch.groups), copied

    def _copy(self, tensor: Tensor) -> Tensor:
        pinned = tensor if tensor.is_cuda or tensor.is_pinned() else tensor.pin_memory()
        return pinned.to(self.torch, non_blocking=True)

    def set_cudnn_benchmark(self, limit: int | None) -> None:
        torch.backends.cudnn.benchmark = limit is not None
        torch.backends.cudnn.benchmark_limit = limit or 0

    def cudnn_benchmark_limit(self) -> int | None:
        return torch.backends.cudnn.benchmark_limit if torch.backends.cudnn.benchmark else None

    def warm_up(self) -> None:
        """Load cuBLAS and the kernels of a classifier in a thread, once its algorithms are configured."""
        load_classifier_kernels(self.torch)

    def copy_to_host(self, value: Tensor) -> Callable[[], Tensor]:
        """Start a copy to pinned memory; the returned call waits for that copy only."""
        host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        host.copy_(value.detach(), non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()

        def wait() -> Tensor:
            copied.synchronize()
            return host

        return wait

    def record_event(self) -> torch.cuda.Event:
        """An event after the work that was launched so far, to be timed."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def graph_capture(self) -> CudaGraph:
        return CudaGraph(self.torch)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch)

    def step_boundary(self) -> None:
        """Work is launched as it comes."""

    def sgd_implementation(self) -> Literal["fused"]:
        return "fused"

    def release_memory(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.torch)

    def peak_memory_bytes(self) -> int:
        """The peak of allocated tensors."""
        return torch.cuda.max_memory_allocated(self.torch)

    def total_memory_bytes(self) -> int:
        return torch.cuda.get_device_properties(self.torch).total_memory

    def pci_address(self) -> str | None:
        """The PCI address in the format of /sys/bus/pci."""
        properties: Any = torch.cuda.get_device_properties(self.torch)  # the stubs lack the attributes used here
        return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"

    def describe(self) -> str:
        return f"{self.torch}, {torch.cuda.get_device_name(self.torch)}"


def _has_ended(graph: torch.cuda.CUDAGraph) -> bool:
    """True if the capture of a graph has ended as it should, so that the graph could be replayed."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


def _is_packed(tensor: Tensor) -> bool:
    """True if a tensor is copied to the device together with others."""
    return not tensor.is_cuda and tensor.is_contiguous() and tensor.nbytes <= _MAX_PACKED_BYTES
