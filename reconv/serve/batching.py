"""Dynamic batching: jobs of several requests wait in a bounded queue and run in batches, one thread per device.

A device that is idle never waits for work that is not there: a batch starts as soon as the device is free, and grows
only while the device is busy, or for at most `max_wait_s` while images that have arrived are still being decoded.

A batch has jobs with equal options, and a job is never split: the images of one request give the bits of `predict` on
an idle server (tests/serve/test_batching.py).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from reconv.serve.fairness import FairClock, Shares

MAX_FAILURES = 5  # jobs that fail one after the other, with nothing done between them, before a device counts as lost
_MIN_IMAGE_S = 1e-4  # of an image; what it takes beyond that is charged when its batch has ended
_SMOOTHING = 0.1  # of the time per image, from which Retry-After is estimated

RunBatch = Callable[[Sequence["Job"]], Sequence[Any]]


@dataclass(slots=True, eq=False)
class Job:
    """Images of one request that run in the same batch, and what became of them."""

    samples: Sequence[Any]
    options: Any  # a batch has jobs with equal options
    on_done: Callable[[Job], None]  # called in the thread of the device, unless the job was cancelled in the queue
    client: str = ""
    is_cancelled: bool = False  # the client has gone, or its time is up
    result: Any = None
    error: BaseException | None = None
    start: float = 0.0  # in the order of the clients
    batch_size: int = 0  # images of the batch it ran in
    queued_s: float = field(default_factory=time.perf_counter)
    started_s: float = 0.0
    finished_s: float = 0.0


class QueueFullError(Exception):
    """The queue has no room; `retry_after_s` is when there may be."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__("the queue is full")
        self.retry_after_s = retry_after_s


class Batcher:
    """The queue of one model and the threads that run it, one for each of `run_batches`.

    Images count against `max_queue` from `reserve` (before they are read) until their job has ended. Clients take
    turns by the time that their images take: who asks for little does not wait for all of another one's.
    """

    def __init__(
        self,
        run_batches: Sequence[RunBatch],
        *,
        max_batch: int,
        max_wait_s: float,
        max_queue: int,
        on_batch: Callable[[int, float], None] = lambda num_images, network_s: None,
    ) -> None:
        self.max_batch, self.max_wait_s = max_batch, max_wait_s
        self._on_batch = on_batch
        self._queue: deque[Job] = deque()
        self._changed = threading.Condition()
        self._pending = Shares(max_queue)  # images that were reserved and have not ended
        self._clock = FairClock()
        self._reading = 0  # images that were reserved and are not queued yet
        self._failures = [0] * len(run_batches)  # of each device, since its last success
        self._image_s = 0.0
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._work, args=(number, run), name=f"reconv-device-{number}", daemon=True)
            for number, run in enumerate(run_batches)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pending(self) -> int:
        """Images that are being read, queued or computed."""
        return self._pending.used

    @property
    def is_healthy(self) -> bool:
        """False after several failures in a row: a device is probably lost, and a restart may help."""
        return max(self._failures) < MAX_FAILURES

    def check_room(self, num_images: int = 1, client: str = "") -> None:
        """Raise `QueueFullError` where there is no room for images; a request finds room in an empty queue."""
        if not self._pending.has_room(client, num_images):
            raise QueueFullError(max(1.0, self.pending * self._image_s / len(self._threads)))

    def reserve(self, num_images: int, client: str = "") -> None:
        """Count images that are about to be read; raises `QueueFullError` where there is no room for them."""
        with self._changed:
            self.check_room(num_images, client)
            self._pending.take(client, num_images)
            self._reading += num_images

    def release(self, num_images: int, client: str = "") -> None:
        """Give back reserved images that will not be queued."""
        with self._changed:
            self._pending.give(client, num_images)
            self._reading -= num_images
            self._changed.notify_all()

    def submit(self, job: Job) -> None:
        """Queue a job whose images were reserved."""
        job.queued_s = time.perf_counter()
        with self._changed:
            self._reading -= len(job.samples)
            job.start = self._clock.stamp(job.client, _MIN_IMAGE_S * len(job.samples))
            self._queue.append(job)
            self._changed.notify_all()

    def close(self, timeout_s: float = 5.0) -> None:
        """Run what is queued, then end the threads."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self, device: int, run_batch: RunBatch) -> None:
        while (jobs := self._next_batch()) is not None:
            if jobs:
                self._run(device, run_batch, jobs)

    def _next_batch(self) -> list[Job] | None:
        """The jobs of the next batch, the oldest first; None: closed, and nothing is left to run."""
        with self._changed:
            while not self._queue:
                if self._is_closed and self.pending == 0:
                    return None
                self._changed.wait(0.5 if self._is_closed else None)
            deadline = min(job.queued_s for job in self._queue) + self.max_wait_s
            while self._queue and self._num_queued() < self.max_batch and self._reading > 0:
                left_s = deadline - time.perf_counter()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            return self._take()

    def _num_queued(self) -> int:
        return sum(len(job.samples) for job in self._queue)

    def _take(self) -> list[Job]:
        """Remove the jobs of one batch from the queue: the next one and others with its options."""
        jobs: list[Job] = []
        left: deque[Job] = deque()
        num_images = 0
        for job in sorted(self._queue, key=lambda job: job.start):
            if job.is_cancelled:
                self._pending.give(job.client, len(job.samples))
            elif jobs and (num_images + len(job.samples) > self.max_batch or job.options != jobs[0].options):
                left.append(job)
            else:
                jobs.append(job)
                num_images += len(job.samples)
        self._queue = left
        if jobs:
            self._clock.advance(jobs[0].start)
        return jobs

    def _run(self, device: int, run_batch: RunBatch, jobs: list[Job]) -> None:
        """Run a batch; if it fails, each of its jobs alone, so that none fails because of another."""
        num_images = sum(len(job.samples) for job in jobs)
        start_s = time.perf_counter()
        try:
            results = run_batch(jobs)
        except BaseException as error:  # of any kind: the thread must survive, and the clients must get a response
            if len(jobs) > 1:
                for job in jobs:
                    self._run(device, run_batch, [job])
                return
            self._failures[device] += 1
            results, jobs[0].error = [None], error
        else:
            self._failures[device] = 0
        end_s = time.perf_counter()
        if jobs[0].error is None:
            image_s = (end_s - start_s) / num_images
            self._image_s = image_s if self._image_s == 0 else self._image_s + _SMOOTHING * (image_s - self._image_s)
            self._on_batch(num_images, end_s - start_s)
        with self._changed:
            image_s = max(0.0, (end_s - start_s) / num_images - _MIN_IMAGE_S)
            for job in jobs:
                self._pending.give(job.client, len(job.samples))
                self._clock.charge(job.client, image_s * len(job.samples))
        for job, result in zip(jobs, results, strict=True):
            job.result, job.batch_size = result, num_images
            job.started_s, job.finished_s = start_s, end_s
            job.on_done(job)
