"""Dynamic batching, without a network: what runs together, when, and what happens to failures."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from reconv.serve.batching import MAX_FAILURES, Batcher, Job, QueueFullError

WAIT_S = 30


class Device:
    """A device that runs one batch each time it is allowed to."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.is_busy = threading.Event()
        self.allowed = threading.Semaphore(0)
        self.broken: set[str] = set()

    def __call__(self, jobs: Sequence[Job]) -> list[list[str]]:
        self.is_busy.set()
        assert self.allowed.acquire(timeout=WAIT_S)
        names = [sample for job in jobs for sample in job.samples]
        self.batches.append(names)
        if self.broken & set(names):
            raise ValueError("broken")
        return [[sample.upper() for sample in job.samples] for job in jobs]


class Client:
    """Submits jobs and waits for them."""

    def __init__(self, batcher: Batcher) -> None:
        self.batcher = batcher
        self.ended = threading.Semaphore(0)

    def submit(self, *samples: str, options: object = None) -> Job:
        self.batcher.reserve(len(samples))
        job = Job(samples, options, lambda job: self.ended.release())
        self.batcher.submit(job)
        return job

    def wait(self, num_jobs: int) -> None:
        for _ in range(num_jobs):
            assert self.ended.acquire(timeout=WAIT_S)


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def batcher(device: Device) -> Iterator[Batcher]:
    made = Batcher([device], max_batch=4, max_wait_s=WAIT_S, max_queue=8)
    yield made
    device.allowed.release(100)
    made.close(WAIT_S)


def wait_for(device: Device) -> None:
    assert device.is_busy.wait(WAIT_S)


def test_an_idle_device_starts_at_once_and_a_batch_grows_while_it_is_busy(device: Device, batcher: Batcher) -> None:
    client = Client(batcher)
    client.submit("a")  # nothing else is being read, so that it does not wait for the latency bound
    wait_for(device)
    for name in "bcdefg":
        client.submit(name)
    device.allowed.release(3)
    client.wait(7)
    assert device.batches == [["a"], ["b", "c", "d", "e"], ["f", "g"]]


def test_a_batch_waits_for_images_that_are_being_read(device: Device, batcher: Batcher) -> None:
    client = Client(batcher)
    device.allowed.release(2)
    batcher.reserve(2)  # one of another request
    client.submit("a")
    job = Job(["b", "c"], None, lambda job: client.ended.release())
    batcher.submit(job)
    client.wait(2)
    assert device.batches == [["a", "b", "c"]] and job.batch_size == 3


def test_the_wait_for_images_that_are_being_read_is_bounded(device: Device) -> None:
    batcher = Batcher([device], max_batch=4, max_wait_s=0.05, max_queue=8)
    client = Client(batcher)
    device.allowed.release(1)
    batcher.reserve(1)
    job = client.submit("a")
    client.wait(1)
    assert device.batches == [["a"]] and job.started_s - job.queued_s >= 0.05
    batcher.release(1)
    batcher.close(WAIT_S)


def test_only_jobs_with_equal_options_share_a_batch_and_none_is_split(device: Device, batcher: Batcher) -> None:
    client = Client(batcher)
    client.submit("first")
    wait_for(device)
    jobs = [
        client.submit("a", "b", options=1),
        client.submit("c", options=2),
        client.submit("d", "e", "f", options=1),
        client.submit("g", options=1),
    ]
    device.allowed.release(10)
    client.wait(5)
    assert device.batches == [["first"], ["a", "b", "g"], ["c"], ["d", "e", "f"]]
    assert [job.result for job in jobs] == [["A", "B"], ["C"], ["D", "E", "F"], ["G"]]


def test_a_job_that_fails_does_not_fail_the_others_of_its_batch(device: Device, batcher: Batcher) -> None:
    client = Client(batcher)
    client.submit("first")
    wait_for(device)
    device.broken = {"b"}
    jobs = [client.submit(name) for name in "abc"]
    device.allowed.release(10)
    client.wait(4)
    assert [job.result for job in jobs] == [["A"], None, ["C"]]
    assert isinstance(jobs[1].error, ValueError) and batcher.is_healthy and batcher.pending == 0


def test_a_device_that_only_fails_is_not_healthy(device: Device, batcher: Batcher) -> None:
    client = Client(batcher)
    device.broken = {"a"}
    device.allowed.release(100)
    for _ in range(MAX_FAILURES):
        assert batcher.is_healthy
        client.submit("a")
        client.wait(1)
    assert not batcher.is_healthy
    client.submit("b")
    client.wait(1)
    assert batcher.is_healthy


def test_a_full_queue_refuses_and_has_room_again(device: Device, batcher: Batcher) -> None:
    client = Client(batcher)
    client.submit("first")
    wait_for(device)
    client.submit(*"abcd")
    client.submit(*"ef")
    with pytest.raises(QueueFullError) as refused:
        batcher.reserve(2)
    assert refused.value.retry_after_s >= 1
    client.submit("g")  # eight are pending
    with pytest.raises(QueueFullError):
        batcher.check_room()
    device.allowed.release(10)
    client.wait(4)
    batcher.check_room(8)
    assert batcher.pending == 0


def test_cancelled_jobs_are_not_run(device: Device, batcher: Batcher) -> None:
    client = Client(batcher)
    client.submit("first")
    wait_for(device)
    client.submit("a").is_cancelled = True
    client.submit("b")
    device.allowed.release(10)
    client.wait(2)
    assert device.batches == [["first"], ["b"]] and batcher.pending == 0


def test_closing_runs_what_is_queued(device: Device) -> None:
    batcher = Batcher([device], max_batch=1, max_wait_s=0, max_queue=8)
    client = Client(batcher)
    jobs = [client.submit(name) for name in "abc"]
    device.allowed.release(10)
    batcher.close(WAIT_S)
    assert [job.result for job in jobs] == [["A"], ["B"], ["C"]]


def test_several_devices_share_the_queue() -> None:
    devices = [Device(), Device()]
    batcher = Batcher(devices, max_batch=1, max_wait_s=0, max_queue=8)
    client = Client(batcher)
    client.submit("a")
    client.submit("b")
    for device in devices:  # all first: one that may go on would take the other job, too
        wait_for(device)
    for device in devices:
        device.allowed.release(10)
    client.wait(2)
    assert sorted(name for device in devices for batch in device.batches for name in batch) == ["a", "b"]
    assert all(device.batches for device in devices)
    batcher.close(WAIT_S)


def test_times_are_recorded(device: Device, batcher: Batcher) -> None:
    client = Client(batcher)
    before_s = time.perf_counter()
    device.allowed.release(1)
    job = client.submit("a")
    client.wait(1)
    assert before_s <= job.queued_s <= job.started_s <= job.finished_s <= time.perf_counter()


def test_a_closed_queue_runs_images_that_are_still_being_read(batcher: Batcher, device: Device) -> None:
    batcher.reserve(1)
    batcher.close(timeout_s=0.2)
    client = Client(batcher)
    job = Job(("late",), None, lambda job: client.ended.release())
    batcher.submit(job)
    device.allowed.release()
    client.wait(1)
    assert job.result == ["LATE"]
