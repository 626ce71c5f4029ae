"""Several server processes on one port: their answers, metrics, restarts and end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from server_process import START_S, ServerProcess, ask

import reconv
from reconv.core.errors import ExitCode
from reconv.serve.http_server import network_threads
from reconv.serve.processes import MAX_DEATHS

PREDICTED = 'reconv_requests_total{route="/predict",status="200"}'


@pytest.fixture(scope="module")
def two(classifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of two processes."""
    log = tmp_path_factory.mktemp("processes") / "log.txt"
    with ServerProcess(log, classifier, "--backend", "eager", "--processes", "2") as server:
        yield server


def read_metric(server: ServerProcess, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", server.request("GET", "/metrics").body.decode(), re.MULTILINE)
    return 0.0 if found is None else float(found[1])


def find_pids(server: ServerProcess) -> list[int]:
    text = server.request("GET", "/metrics").body.decode()
    return [int(pid) for pid in re.findall(r'^reconv_model_step\{.*pid="(\d+)"\}', text, re.MULTILINE)]


@contextmanager
def suspended(*pids: int) -> Iterator[None]:
    """Processes that do nothing meanwhile, so that the others answer."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def test_each_process_answers_with_the_predictions_of_one(
    two: ServerProcess, classifier: Path, images: list[bytes]
) -> None:
    predictor = reconv.load(classifier, device="cpu", backend="eager", log=lambda text: None)
    expected = [predictor.predict([image])[0].to_dict()["classes"] for image in images]
    pids = find_pids(two)
    assert len(set(pids)) == 2 and two.process.pid not in pids
    before, totals = read_metric(two, PREDICTED), []
    for pid in pids:
        with suspended(pid):
            answers = [two.predict(image) for image in images]
            totals.append(read_metric(two, PREDICTED) - before)
        assert [answer.json["predictions"][0]["classes"] for answer in answers] == expected
    assert totals == [len(images), 2 * len(images)]  # each process knows the requests of the other
    assert len(re.findall("ready: .* weights", two.log)) == 1 and len(re.findall("ready: 2 processes", two.log)) == 1


def test_a_process_that_is_killed_is_replaced_without_a_failed_request(two: ServerProcess, images: list[bytes]) -> None:
    killed, other = find_pids(two)
    before = read_metric(two, PREDICTED)
    os.kill(killed, signal.SIGKILL)
    two.wait_for_log(rf"process {killed} ended unexpectedly \(killed by SIGKILL\)")
    count, deadline = 0, time.monotonic() + START_S
    while (found := re.search(r"the new process \(pid (\d+)\) is ready", two.log)) is None:
        assert two.predict(images[0]).status == 200 and time.monotonic() < deadline, two.log
        count += 1
    with suspended(other):
        assert two.predict(images[0]).status == 200
    assert set(find_pids(two)) == {other, int(found[1])}
    assert read_metric(two, PREDICTED) == before + count + 1  # with those of the process that was killed


def test_sigterm_drains_all_processes(
    classifier: Path, tmp_path: Path, images: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: {len(images[0])}"
    with ServerProcess(tmp_path / "log.txt", classifier, "--backend", "eager", "--processes", "2") as server:
        connections = []
        pids = find_pids(server)
        for pid in pids:
            with suspended(pid):
                connection = server.connect()
                assert ask(connection, "GET", "/v2/health/ready").status == 200  # the other process has accepted it
            assert connection.sock is not None
            connection.sock.sendall(head.encode() + b"\r\n\r\n" + images[0][:100])
            connections.append(connection)
        while read_metric(server, "reconv_in_flight_requests") != 3:  # with the one that asks
            time.sleep(0.02)
        server.terminate()
        for pid in (*pids, server.process.pid):  # as systemd does, or whoever is impatient
            os.kill(pid, signal.SIGTERM)
        while _can_connect(server):
            time.sleep(0.02)
        for connection in connections:
            connection.sock.sendall(images[0][100:])
            connection.sock.settimeout(START_S)
            assert connection.sock.recv(65536).startswith(b"HTTP/1.1 200 ")
            connection.close()
        assert server.wait() == 0
        assert server.log.endswith("stopped\n")
        assert "did not finish" not in server.log and "unexpectedly" not in server.log
    assert list(temporary.glob("reconv-serve-*")) == []


def _can_connect(server: ServerProcess) -> bool:
    try:
        socket.create_connection((server.host, server.port)).close()
    except (ConnectionRefusedError, ConnectionResetError):
        return False
    return True


@pytest.mark.slow
def test_processes_that_die_again_and_again_end_the_server(classifier: Path, tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "log.txt", classifier, "--backend", "eager", "--processes", "2") as server:
        pid = find_pids(server)[0]
        for number in range(1, MAX_DEATHS + 1):
            os.kill(pid, signal.SIGKILL)
            if number < MAX_DEATHS:
                server.wait_for_log(rf"process {pid} ended unexpectedly")
                pid = int(server.wait_for_log(rf"(?s)process {pid} ended.*the new process \(pid (\d+)\)")[1])
        assert server.wait() == ExitCode.RANK_LOST
        assert f"a server process ended {MAX_DEATHS} times in a row" in server.log
        assert not _can_connect(server)


@pytest.mark.slow
def test_processes_end_with_their_parent(classifier: Path, tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "log.txt", classifier, "--backend", "eager", "--processes", "2") as server:
        server.process.kill()
        deadline = time.monotonic() + START_S
        while _can_connect(server):
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.mark.slow
def test_a_run_that_cannot_be_loaded_ends_all_processes_with_its_error() -> None:
    command = [sys.executable, "-m", "reconv", "serve", "missing", "--port", "0", "--processes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=START_S)
    assert done.returncode == 4 and done.stderr.count("no such run") == 1, done.stderr


def test_threads_of_torch_are_shared_among_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert network_threads(["cuda:0", "cuda:1"], 1, 16) == 1
    assert network_threads(["cpu"], 4, 3) == 3
    assert network_threads(["cpu"], 1, 16) is None  # all of them
    assert network_threads(["cpu", "cpu"], 1, 16) == 8
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert network_threads(["cuda"], 4, 4) is None  # what the user wants
