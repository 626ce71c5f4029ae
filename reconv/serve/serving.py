"""From the encoded images of a request to its predictions: read in a thread pool, run in batches, in order."""

from __future__ import annotations

import asyncio
import io
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from PIL import Image
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from reconv.api import ImageSample
from reconv.core.errors import DataError, ReconvError
from reconv.data.decode import native
from reconv.data.decode.pillow import formats_of
from reconv.serve.batching import Batcher, Job, QueueFullError
from reconv.serve.fairness import ByteBudget
from reconv.serve.limits import ApiError, BodyReader, Limits, overloaded
from reconv.serve.metrics import ServerMetrics
from reconv.serve.models import LoadedModel, PredictOptions, ServedModel
from reconv.serve.reader_pool import ReaderPool, call_in_loop

_WATCH_AFTER_S = 0.05
MAX_SIDE = 65_535  # pixels: JPEG has no more, and Pillow keeps a pointer per row
_LARGE_PIXELS = 1 << 20  # more takes a thread up to seconds
_LARGE_BYTES = 1 << 20  # of a file, whose segments and comments Pillow reads in Python


def decoding_bytes(num_pixels: int) -> int:
    """Most bytes that decoding an image takes: Pillow's pixels of four bytes, converted, turned upright and read."""
    return 16 * num_pixels


def image_size(data: bytes) -> tuple[int, int] | None:
    """Width and height of an encoded image, from its header; None: it is none that can be read."""
    size = None if native.problem() else native.image_size(data)
    if size is not None:
        return size
    try:
        with Image.open(io.BytesIO(data), formats=formats_of(data)) as opened:
            return opened.size
    except Image.DecompressionBombError as error:
        raise ApiError(413, "image_too_large", str(error)) from error
    except Exception:  # damaged bytes may raise anything in a decoder
        return None


@dataclass(slots=True)
class RequestTimes:
    """Seconds of each stage of a request."""

    read_s: float = 0.0
    queue_s: float = 0.0
    network_s: float = 0.0


@dataclass(slots=True)
class Serving:
    """State that all requests share."""

    models: dict[str, ServedModel]
    limits: Limits
    metrics: ServerMetrics
    num_readers: int
    readers: ReaderPool = field(init=False)
    large: ReaderPool = field(init=False)  # for images that take long, so that the others need not wait for them
    decoding: ByteBudget = field(init=False)
    bodies: BodyReader = field(init=False)
    is_draining: bool = False

    def __post_init__(self) -> None:
        self.readers = ReaderPool(self.num_readers)
        self.large = ReaderPool(self.num_readers, is_background=True)
        self.decoding = ByteBudget(max(self.limits.max_decoding_bytes, decoding_bytes(self.limits.max_pixels)))
        self.bodies = BodyReader(self.limits)

    @property
    def is_ready(self) -> bool:
        return not self.is_draining and all(model.current is not None for model in self.models.values())

    @property
    def is_healthy(self) -> bool:
        return all(model.current is None or model.current.batcher.is_healthy for model in self.models.values())

    def sample_metrics(self) -> None:
        """Update the metrics that are not counted as things happen."""
        for name, model in self.models.items():
            if model.current is not None:
                self.metrics.pending.labels(name).set(model.current.batcher.pending)

    def find_model(self, name: str | None) -> ServedModel:
        """The model of a name; without one, the first."""
        if name is None:
            return next(iter(self.models.values()))
        if name not in self.models:
            raise ApiError(404, "no_such_model", f"there is no model {name!r}; models: {', '.join(self.models)}")
        return self.models[name]

    def acquire(self, served: ServedModel) -> LoadedModel:
        """The model's current checkpoint, in use until its `release`."""
        loaded = served.acquire()
        if loaded is None:
            raise ApiError(503, "not_ready", f"the model {served.name!r} is being loaded", {"Retry-After": "1"})
        return loaded

    def check_room(self, loaded: LoadedModel, client: str) -> None:
        """Refuse a request before its body is read where the queue is full."""
        with _full_queue_as_api_error():
            loaded.batcher.check_room(client=client)

    async def predict(
        self,
        request: Request,
        loaded: LoadedModel,
        images: Sequence[bytes | ImageSample],
        options: PredictOptions,
        client: str,
    ) -> tuple[list[Any], RequestTimes]:
        """The result of each image, in order; stops early when the client has gone or its time is up."""
        with _full_queue_as_api_error():
            loaded.batcher.reserve(len(images), client)
        work = _RequestWork(self, loaded, images, options, client)
        work.start()
        loop = asyncio.get_running_loop()
        timeout = loop.call_later(self.limits.request_timeout_s, self._time_out, work)
        # Most responses are ready before it pays to watch for the end of the connection.
        watch = loop.call_later(_WATCH_AFTER_S, work.watch, request.receive)
        try:
            return await work.done
        finally:
            timeout.cancel()
            watch.cancel()
            work.cancel()

    def _time_out(self, work: _RequestWork) -> None:
        seconds = f"{self.limits.request_timeout_s:g} s"
        work.fail(ApiError(503, "timeout", f"the prediction took longer than {seconds}", {"Retry-After": "1"}))


@contextmanager
def _full_queue_as_api_error() -> Iterator[None]:
    try:
        yield
    except QueueFullError as error:
        raise overloaded("the queue is full", error.retry_after_s) from error


class _RequestWork:
    """The images of one request on their way: read in parallel, then queued in jobs of at most a batch."""

    def __init__(
        self,
        serving: Serving,
        loaded: LoadedModel,
        images: Sequence[bytes | ImageSample],
        options: PredictOptions,
        client: str,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[tuple[list[Any], RequestTimes]] = self._loop.create_future()
        self._serving, self._loaded, self._images, self._options = serving, loaded, images, options
        self._client = client
        self._num_pixels = 0  # of the images whose size is known
        self._samples: list[Any] = [None] * len(images)
        max_batch = loaded.batcher.max_batch
        self._parts = [range(at, min(at + max_batch, len(images))) for at in range(0, len(images), max_batch)]
        self._unread = [len(part) for part in self._parts]
        self._jobs: list[Job | None] = [None] * len(self._parts)
        self._watcher: asyncio.Future[Any] | None = None
        self._num_jobs_left = len(self._parts)
        self._is_cancelled = False
        self._lock = threading.Lock()
        self._start_s = time.perf_counter()
        self._read_s = 0.0

    @property
    def _batcher(self) -> Batcher:
        return self._loaded.batcher

    def start(self) -> None:
        """Read the images."""
        for number, part in enumerate(self._parts):
            for index in part:
                image = self._images[index]
                is_large = isinstance(image, bytes) and len(image) > _LARGE_BYTES
                readers = self._serving.large if is_large else self._serving.readers
                readers.submit(self._client, self._read, number, index, is_large)

    def cancel(self) -> None:
        """Do none of the work that has not begun."""
        if self._watcher is not None:
            self._watcher.cancel()
        with self._lock:
            self._is_cancelled = True
            for job in self._jobs:
                if job is not None:
                    job.is_cancelled = True

    def watch(self, receive: Receive) -> None:
        """Give up when the client has gone, which is the next thing that can be received from it."""
        self._watcher = asyncio.ensure_future(self._wait_for_end(receive))

    async def _wait_for_end(self, receive: Receive) -> None:
        await receive()
        self.fail(ClientDisconnect())

    def fail(self, error: BaseException) -> None:
        """Respond with an error, unless there is a response."""
        if not self.done.done():
            self.done.set_exception(error)

    def _read(self, number: int, index: int, is_large: bool, num_pixels: int | None = None) -> None:
        """Read an image; the thread that reads the last one of a part queues it.

        An image of many pixels is read later, by a thread for large ones, which passes its `num_pixels`.
        """
        failure: BaseException | None = None
        try:
            if not self._is_cancelled:
                image = self._images[index]
                if isinstance(image, bytes) and num_pixels is None:
                    num_pixels = self._count_pixels(image)
                    if num_pixels > _LARGE_PIXELS and not is_large:
                        self._serving.large.submit(self._client, self._read, number, index, True, num_pixels)
                        return
                self._samples[index] = self._decode(image, num_pixels) if isinstance(image, bytes) else image
        except BaseException as error:  # of any kind: the client must get a response
            self._is_cancelled = True
            failure = self._to_api_error(error, index)
        self._count_read(number)
        if failure is not None:
            call_in_loop(self._loop, self.fail, failure)

    def _count_pixels(self, image: bytes) -> int:
        """The pixels of an image, from its header; raises if they are too many, of it or of the request."""
        limits, size = self._serving.limits, image_size(image)
        if size is None:  # it does not decode, and the decoder says why
            return 0
        width, height = size
        if max(width, height) > MAX_SIDE or width * height > limits.max_pixels:
            allowed = f"at most {limits.max_pixels:,} pixels and {MAX_SIDE:,} on a side are allowed"
            raise ApiError(413, "image_too_large", f"an image has {width:,} x {height:,} pixels; {allowed}")
        with self._lock:
            self._num_pixels += width * height
            if self._num_pixels > limits.max_request_pixels:
                message = f"the images of a request may have at most {limits.max_request_pixels:,} pixels together"
                raise ApiError(413, "too_many_pixels", message)
        return width * height

    def _decode(self, image: bytes, num_pixels: int | None) -> ImageSample:
        if num_pixels is None or num_pixels <= _LARGE_PIXELS:
            return self._loaded.predictor.read(image)
        num_bytes = self._serving.decoding.acquire(decoding_bytes(num_pixels))
        try:
            return self._loaded.predictor.read(image)
        finally:
            self._serving.decoding.release(num_bytes)

    def _count_read(self, number: int) -> None:
        """Count an image of a part as read; queue the part after its last one, or give its places back."""
        with self._lock:
            self._unread[number] -= 1
            if self._unread[number] > 0:
                return
            part = self._parts[number]
            if self._is_cancelled:
                self._batcher.release(len(part), self._client)
                return
            self._read_s = time.perf_counter() - self._start_s
            job = Job([self._samples[at] for at in part], self._options, self._job_done, self._client)
            self._jobs[number] = job
        self._batcher.submit(job)

    def _to_api_error(self, error: BaseException, index: int) -> BaseException:
        prefix = f"image {index}: " if len(self._images) > 1 else ""
        if isinstance(error, ApiError):
            return ApiError(error.status, error.code, f"{prefix}{error.message}")
        if isinstance(error, DataError):
            why = f": {error.why}" if error.why else ""
            return ApiError(400, "bad_image", f"{prefix}{error.what}{why}")
        if isinstance(error, ReconvError):
            return ApiError(400, "bad_image", f"{prefix}{error.what}")
        if isinstance(error, MemoryError):
            return overloaded(f"{prefix}there is not enough memory to decode the image")
        return error

    def _job_done(self, job: Job) -> None:
        call_in_loop(self._loop, self._finish, job)

    def _finish(self, job: Job) -> None:
        self._num_jobs_left -= 1
        if job.error is not None:
            self.fail(job.error)
        elif self._num_jobs_left == 0 and not self.done.done():
            jobs = [job for job in self._jobs if job is not None]
            times = RequestTimes(
                self._read_s,
                max(job.started_s - job.queued_s for job in jobs),
                sum(job.finished_s - job.started_s for job in jobs),
            )
            self.done.set_result(([result for job in jobs for result in job.result], times))
