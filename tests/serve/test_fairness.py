"""What clients share: parts of limits, turns in queues, and memory for decoding."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from reconv.serve.batching import Batcher, Job, QueueFullError
from reconv.serve.fairness import ByteBudget, FairClock, FairQueue, FairTurns, Shares
from reconv.serve.http.access import peer_client
from reconv.serve.http.request_images import check_json, load_json
from reconv.serve.limits import ApiError, Limits
from reconv.serve.metrics import ServerMetrics
from reconv.serve.models import PredictOptions
from reconv.serve.reader_pool import ReaderPool
from reconv.serve.serving import Serving, _RequestWork, image_size

WAIT_S = 30


def test_a_client_alone_may_use_all_and_another_still_gets_its_part() -> None:
    shares = Shares(8)
    shares.take("greedy", 8)
    assert not shares.has_room("greedy")
    assert shares.has_room("small", 4) and not shares.has_room("small", 5)
    shares.take("small", 4)
    assert not shares.has_room("small") and shares.has_room("third", 2) and not shares.has_room("third", 3)
    shares.give("greedy", 8)
    assert shares.has_room("greedy", 4)  # 4 of 8 are free


def test_all_clients_together_use_at_most_twice_the_limit() -> None:
    shares = Shares(16)
    shares.take("greedy", 16)
    admitted = 0
    for number in range(100):
        if shares.has_room(str(number)):
            shares.take(str(number))
            admitted += 1
    assert admitted == 16 and shares.used == 32


def test_anything_fits_into_an_empty_limit() -> None:
    assert Shares(8).has_room("client", 64)


def test_work_of_a_client_that_asks_for_little_comes_before_that_of_one_that_asks_for_much() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(4):
        queue.push("greedy", 10, f"greedy {number}")
    assert queue.pop() == "greedy 0"
    queue.push("small", 1, "small 0")
    queue.push("small", 1, "small 1")
    assert [queue.pop() for _ in range(len(queue))] == ["small 0", "small 1", "greedy 1", "greedy 2", "greedy 3"]


def test_what_work_really_took_counts_for_what_comes_next() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("slow", 1, "slow 0")
    queue.pop()
    queue.charge("slow", 100)
    queue.push("slow", 1, "slow 1")
    for number in range(3):
        queue.push("fast", 1, f"fast {number}")
    assert [queue.pop() for _ in range(4)] == ["fast 0", "fast 1", "fast 2", "slow 1"]


def test_requests_begin_by_turns_one_in_each_round_of_the_loop() -> None:
    turns, begun = FairTurns(), list[str]()

    async def ask(client: str) -> None:
        await turns.take(client)
        begun.append(client)

    async def ask_all() -> None:
        first = [asyncio.create_task(ask("greedy")) for _ in range(5)]
        await asyncio.sleep(0)  # the first one has begun
        last = [asyncio.create_task(ask(name)) for name in ("small", "other")]
        first[3].cancel()
        await asyncio.gather(*first, *last, return_exceptions=True)
        await turns.take("greedy")  # an idle loop has no one to wait for

    asyncio.run(asyncio.wait_for(ask_all(), WAIT_S))
    assert sorted(begun) == ["greedy"] * 4 + ["other", "small"]
    assert max(begun.index("small"), begun.index("other")) < 4, "they do not wait for all of the greedy one"


def test_a_clock_forgets_clients_whose_work_has_ended() -> None:
    clock = FairClock()
    for number in range(5000):
        clock.advance(clock.stamp(str(number), 0.0))
    assert len(clock._ends) <= 1001


def test_threads_wait_for_memory_and_one_that_needs_more_than_all_gets_all() -> None:
    budget, got = ByteBudget(10), list[int]()
    held = budget.acquire(8)
    thread = threading.Thread(target=lambda: got.append(budget.acquire(100)))
    thread.start()
    thread.join(0.05)
    assert got == []
    budget.release(held)
    thread.join(WAIT_S)
    assert got == [10]


def test_readers_take_turns_between_clients() -> None:
    pool, order, done = ReaderPool(1), list[str](), threading.Semaphore(0)
    is_busy, go_on = threading.Event(), threading.Event()

    def block() -> None:
        is_busy.set()
        assert go_on.wait(WAIT_S)

    def note(name: str) -> None:
        order.append(name)
        done.release()

    pool.submit("greedy", block)
    assert is_busy.wait(WAIT_S)
    for number in range(5):
        pool.submit("greedy", note, f"greedy {number}")
    pool.submit("small", note, "small")
    go_on.set()
    for _ in range(6):
        assert done.acquire(timeout=WAIT_S)
    pool.close()
    assert order[0] == "small"


@pytest.fixture
def gate() -> threading.Semaphore:
    return threading.Semaphore(0)


@pytest.fixture
def batcher(gate: threading.Semaphore) -> Iterator[Batcher]:
    def run(jobs: Sequence[Job]) -> list[Any]:
        assert gate.acquire(timeout=WAIT_S)
        return [job.samples for job in jobs]

    made = Batcher([run], max_batch=2, max_wait_s=0, max_queue=8)
    yield made
    gate.release(100)
    made.close(WAIT_S)


def test_a_full_queue_has_room_for_a_client_with_nothing_in_it_which_comes_next(
    batcher: Batcher, gate: threading.Semaphore
) -> None:
    order: list[str] = []
    ended = threading.Semaphore(0)

    def on_done(job: Job) -> None:
        order.append(job.client)
        ended.release()

    for _ in range(4):
        batcher.reserve(2, "greedy")
        batcher.submit(Job("ab", None, on_done, "greedy"))
    with pytest.raises(QueueFullError):
        batcher.reserve(1, "greedy")
    batcher.reserve(1, "small")
    batcher.submit(Job("c", None, on_done, "small"))
    gate.release(5)
    for _ in range(5):
        assert ended.acquire(timeout=WAIT_S)
    assert order.index("small") <= 2 and batcher.pending == 0  # behind what was running, or about to


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_a_client_is_an_address_or_the_network_of_an_ipv6_host(address: str, client: str) -> None:
    assert peer_client(address) == client


LIMITS = Limits(max_json_bytes=16_000)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"x": [' + b"[]," * 500 + b"[]]}", 413),
        (b'{"x": [' + b"{}," * 500 + b"{}]}", 413),
        (b'{"x": [' + b"1," * 1001 + b"1]}", 413),
        (b'{"x": ' + b"[" * 40 + b"]" * 40 + b"}", 400),
        (b'{"text": "' + b"]" * 100 + b'", "x": ' + b"[" * 40 + b"]" * 40 + b"}", 400),
        (b" " * 16_001, 413),
    ],
    ids=["lists", "objects", "numbers", "depth", "hidden depth", "length"],
)
def test_json_is_counted_before_it_is_parsed(body: bytes, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("it was parsed")

    monkeypatch.setattr("json.loads", refuse)
    with pytest.raises(ApiError) as error:
        load_json(body, LIMITS)
    assert error.value.status == status


def test_json_of_a_tensor_of_an_image_is_within_the_limits() -> None:
    row = b"[" + b",".join([b"[255,255,255]"] * 224) + b"]"
    check_json(b'{"inputs": [{"data": [[' + b",".join([row] * 224) + b"]]}]}", Limits())


def test_the_size_of_an_image_is_read_from_its_header(images: list[bytes]) -> None:
    assert image_size(images[0]) == (30, 20) and image_size(images[0][:60]) == (30, 20)
    assert image_size(b"no image") is None


def test_large_files_do_not_take_the_threads_of_small_ones() -> None:
    """Segments and comments of a file are read in Python, so that a large one of few pixels takes seconds, too."""
    read, blocked = list[int](), threading.Event()
    done = threading.Semaphore(0)

    def run(jobs: Sequence[Job]) -> list[Any]:
        return [[None] * len(job.samples) for job in jobs]

    def decode(image: bytes) -> None:
        read.append(len(image))
        done.release()

    batcher = Batcher([run], max_batch=4, max_wait_s=0.0, max_queue=16)
    loaded: Any = SimpleNamespace(batcher=batcher, predictor=SimpleNamespace(read=decode))

    async def send() -> None:
        serving = Serving({}, Limits(), ServerMetrics(), 1)
        serving.readers.submit("other", blocked.wait)
        for size in (2 << 20, 10):
            batcher.reserve(1)
            _RequestWork(serving, loaded, [bytes(size)], PredictOptions(), "client").start()
        assert await asyncio.to_thread(done.acquire, timeout=WAIT_S)
        assert read == [2 << 20]
        blocked.set()
        assert await asyncio.to_thread(done.acquire, timeout=WAIT_S)
        assert read == [2 << 20, 10]

    asyncio.run(send())
    batcher.close()
