"""NVIDIA GPUs. Copies run beside the computation; nothing here waits unless it is called `synchronize` or `later`."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from reconv.batch import Batch
from reconv.errors import UsageError

Result = TypeVar("Result")

_MAX_PINNED_BYTES = 64 * 2**20  # of one tensor; larger ones move once, and pinned memory is not given back


class CudaGraph:
    """Records work as CUDA graphs, on a stream of its own.

    Recordings share memory: they never run at the same time, and nothing of one is read after another ran.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def run_on_stream(self, work: Callable[[], Result]) -> Result:
        """Do work on the stream that records, in order with everything else."""
        here = torch.cuda.current_stream()
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            result = work()
        here.wait_stream(self._stream)
        return result

    def capture(self, work: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
        """Record work without doing it: where its results will lie, and the call that launches it."""
        graph = torch.cuda.CUDAGraph()
        # Other threads load data and pin memory meanwhile, which a recording of all threads would forbid.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = work()
        return result, graph.replay


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
                "no CUDA device can be used",
                why="the driver shows no GPU" if has_build else f"torch {torch.__version__} is built without CUDA",
                then="use --device cpu; `reconv doctor` tells what is missing",
            )
        if index >= torch.cuda.device_count():
            raise UsageError(
                f"there is no cuda:{index}",
                why=f"this machine shows {torch.cuda.device_count()} GPUs, counted from 0",
                then="choose a smaller number; CUDA_VISIBLE_DEVICES may hide some",
            )
        self.torch = torch.device("cuda", index)
        torch.cuda.set_device(self.torch)
        self._copies = torch.cuda.Stream(self.torch)  # where batches are copied while the last one is computed with
        if threads is not None:
            torch.set_num_threads(threads)

    def move(self, tensor: Tensor) -> Tensor:
        """The tensor on this device, without waiting for what the device still has to do."""
        if tensor.device.type == "cpu" and tensor.nbytes <= _MAX_PINNED_BYTES:
            tensor = tensor.pin_memory()  # a copy from ordinary memory waits for the stream
        return tensor.to(self.torch, non_blocking=True)

    def pin(self, memory: Tensor) -> Callable[[], None]:
        """Lock host memory so that copies from it run beside the computation; the result unlocks it."""
        address, runtime = memory.data_ptr(), torch.cuda.cudart()
        torch.cuda.check_error(runtime.cudaHostRegister(address, memory.numel(), 0))

        def unpin() -> None:
            torch.cuda.check_error(runtime.cudaHostUnregister(address))

        return unpin

    def send(self, batch: Batch) -> tuple[Batch, torch.cuda.Event]:
        """The batch on this device, copied beside what is computed now and awaited by what is computed next."""
        computing, copied = torch.cuda.current_stream(self.torch), torch.cuda.Event()
        with torch.cuda.stream(self._copies):
            sent = batch.map(self._copy)
            copied.record(self._copies)
        computing.wait_event(copied)
        for tensor in (*sent.tensors.values(), sent.positions):
            tensor.record_stream(computing)  # else its memory could be given out again while it is computed with
        return sent, copied

    def _copy(self, tensor: Tensor) -> Tensor:
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        return pinned.to(self.torch, non_blocking=True)

    def set_cudnn_benchmark(self, limit: int | None) -> None:
        """Try convolution algorithms on the first input of a shape (0: all of them), and keep the fastest."""
        torch.backends.cudnn.benchmark = limit is not None
        torch.backends.cudnn.benchmark_limit = limit or 0

    def warm_up(self) -> None:
        """Load the libraries of a first step, beside what comes before it."""
        Thread(target=self._compute_once, name="wake").start()

    def _compute_once(self) -> None:
        images, filters, weight = (
            torch.zeros(shape, dtype=torch.half, device=self.torch, requires_grad=True)
            for shape in ((8, 8, 1, 1), (8, 8, 1, 1), (8, 8))
        )
        F.linear(F.conv2d(images, filters).flatten(1), weight).sum().backward()

    def copy_to_host(self, value: Tensor) -> Callable[[], Tensor]:
        """Start a copy into pinned memory; the call waits for that copy alone."""
        host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        host.copy_(value.detach(), non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()

        def wait() -> Tensor:
            copied.synchronize()
            return host

        return wait

    def graph_capture(self) -> CudaGraph:
        """What records whole steps here."""
        return CudaGraph(self.torch)

    def synchronize(self) -> None:
        """Wait until the device has done all that it was given."""
        torch.cuda.synchronize(self.torch)

    def step_boundary(self) -> None:
        """Mark the end of a step, for devices that build graphs."""

    def sgd_implementation(self) -> Literal["fused"]:
        """Torch has a fused kernel for this device."""
        return "fused"

    def release_memory(self) -> None:
        """Give back what torch holds in reserve, and forget the peak: it is that of something that is over."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.torch)

    def peak_memory_bytes(self) -> int:
        """The most that tensors have held so far."""
        return torch.cuda.max_memory_allocated(self.torch)

    def total_memory_bytes(self) -> int:
        """The device's memory."""
        return torch.cuda.get_device_properties(self.torch).total_memory

    def pci_address(self) -> str | None:
        """Where it hangs on the bus, as the system writes it."""
        found: Any = torch.cuda.get_device_properties(self.torch)  # torch's stubs do not know of these three
        return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"

    def describe(self) -> str:
        """The device in words."""
        return f"{self.torch}, {torch.cuda.get_device_name(self.torch)}"
