"""From the encoded images of a request to its predictions: read in a thread pool, run in batches, in order."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from reconv.api import ImageSample
from reconv.core.errors import DataError, ReconvError
from reconv.serve.batching import Batcher, Job, QueueFullError
from reconv.serve.limits import ApiError, BodyReader, Limits, overloaded
from reconv.serve.metrics import ServerMetrics
from reconv.serve.models import LoadedModel, PredictOptions, ServedModel
from reconv.serve.reader_pool import ReaderPool, call_in_loop

_WATCH_AFTER_S = 0.05


@dataclass(slots=True)
class RequestTimes:
    """How long each stage of a request took."""

    read_s: float = 0.0
    queue_s: float = 0.0
    network_s: float = 0.0


@dataclass(slots=True)
class Serving:
    """What all requests share."""

    models: dict[str, ServedModel]
    limits: Limits
    metrics: ServerMetrics
    num_readers: int
    readers: ReaderPool = field(init=False)
    bodies: BodyReader = field(init=False)
    is_draining: bool = False

    def __post_init__(self) -> None:
        self.readers = ReaderPool(self.num_readers)
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

    def check_room(self, loaded: LoadedModel) -> None:
        """Refuse a request before its body is read where the queue is full."""
        with _full_queue_as_api_error():
            loaded.batcher.check_room()

    async def predict(
        self, request: Request, loaded: LoadedModel, images: Sequence[bytes | ImageSample], options: PredictOptions
    ) -> tuple[list[Any], RequestTimes]:
        """The result of each image, in order; stops early when the client has gone or its time is up."""
        with _full_queue_as_api_error():
            loaded.batcher.reserve(len(images))
        loop = asyncio.get_running_loop()
        work = _RequestWork(loop, loaded, images, options)
        work.start(self.readers)
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
        loop: asyncio.AbstractEventLoop,
        loaded: LoadedModel,
        images: Sequence[bytes | ImageSample],
        options: PredictOptions,
    ) -> None:
        self.done: asyncio.Future[tuple[list[Any], RequestTimes]] = loop.create_future()
        self._loop, self._loaded, self._images, self._options = loop, loaded, images, options
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

    def start(self, readers: ReaderPool) -> None:
        """Read the images."""
        for number, part in enumerate(self._parts):
            for index in part:
                readers.submit(self._read, number, index)

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

    def _read(self, number: int, index: int) -> None:
        """Read an image; the thread that reads the last one of a part queues it."""
        failure: BaseException | None = None
        try:
            if not self._is_cancelled:
                image = self._images[index]
                self._samples[index] = self._loaded.predictor.read(image) if isinstance(image, bytes) else image
        except BaseException as error:  # of any kind: the client must get a response
            self._is_cancelled = True
            failure = self._to_api_error(error, index)
        self._count_read(number)
        if failure is not None:
            call_in_loop(self._loop, self.fail, failure)

    def _count_read(self, number: int) -> None:
        """Count an image of a part as read; queue the part after its last one, or give its places back."""
        with self._lock:
            self._unread[number] -= 1
            if self._unread[number] > 0:
                return
            part = self._parts[number]
            if self._is_cancelled:
                self._batcher.release(len(part))
                return
            self._read_s = time.perf_counter() - self._start_s
            job = Job([self._samples[at] for at in part], self._options, self._job_done)
            self._jobs[number] = job
        self._batcher.submit(job)

    def _to_api_error(self, error: BaseException, index: int) -> BaseException:
        prefix = f"image {index}: " if len(self._images) > 1 else ""
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
