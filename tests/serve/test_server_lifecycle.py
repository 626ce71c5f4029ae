"""Starting, draining after SIGTERM, and taking over new checkpoints under load."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from server_process import START_S, ServerProcess, ask, json_images

import reconv
from reconv.cli import main
from reconv.core.errors import ResourceError, UsageError
from reconv.logging.run_dir import RunDir
from reconv.models import build_model
from reconv.serve.http.access import read_tokens
from reconv.serve.models import name_models
from reconv.serve.server import open_port


def test_sigterm_finishes_what_has_begun_and_exits_with_zero(
    classifier: Path, tmp_path: Path, images: list[bytes]
) -> None:
    with (
        ServerProcess(tmp_path / "log.txt", classifier, "--backend", "eager", "--drain-s", "2") as server,
        socket.create_connection((server.host, server.port)) as begun,
        socket.create_connection((server.host, server.port)) as endless,
        closing(server.connect()) as idle,
    ):
        head = (
            f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: {len(images[0])}"
        )
        for connection in (begun, endless):
            connection.sendall(head.encode() + b"\r\n\r\n" + images[0][:100])
        assert ask(idle, "GET", "/v2/health/ready").status == 200  # the server has seen what was sent before
        server.terminate()
        while _can_connect(server):
            time.sleep(0.02)
        begun.sendall(images[0][100:])
        received = _receive(begun)
        assert received.startswith(b"HTTP/1.1 200 ") and b'"predictions"' in received
        assert server.wait() == 0  # although the other request never ends
        assert _receive(endless).startswith(b"HTTP/1.1 503 ")
        assert server.log.endswith("stopped\n") and "Traceback" not in server.log


def test_sigterm_while_models_are_loaded_exits_with_zero(classifier: Path, tmp_path: Path) -> None:
    runs = [f"model{number}={classifier}" for number in range(16)]
    with ServerProcess(tmp_path / "log.txt", *runs, wait_until_ready=False) as server:
        server.wait_for_log("ready: model0")
        server.terminate()
        assert server.wait() == 0
        assert "ready: model15" not in server.log and server.log.endswith("stopped\n")


def test_sigterm_during_a_batch_whose_client_has_gone_exits_with_zero(tmp_path: Path, images: list[bytes]) -> None:
    """The batch takes half a second and nothing waits for it, so the process ends while a thread is in torch."""
    weights = tmp_path / "weights.pth"
    torch.save(build_model("resnet18").state_dict(), weights)
    args = (f"slow={weights}", "--recipe", "resnet18", "--backend", "eager", "--max-batch", "64")
    with ServerProcess(tmp_path / "log.txt", *args) as server:
        connection = server.connect()
        body = json_images([images[0]] * 16)
        connection.request("POST", "/predict", body, {"Content-Type": "application/json"})
        while 'reconv_pending_images{model="slow"} 16.0' not in server.request("GET", "/metrics").body.decode():
            time.sleep(0.02)
        connection.close()
        server.terminate()
        assert server.wait() == 0
        assert server.log.endswith("stopped\n")


def _can_connect(server: ServerProcess) -> bool:
    try:
        socket.create_connection((server.host, server.port)).close()
    except ConnectionError:  # refused, or reset while the port is being closed
        return False
    return True


def _receive(connection: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    connection.settimeout(START_S)
    received = b""
    while data := connection.recv(65536):
        received += data
    return received


def copy_run(run: Path, target: Path) -> RunDir:
    """A copy of a run without its checkpoints."""
    shutil.copytree(run, target, ignore=shutil.ignore_patterns("step-*"))
    return RunDir(target)


def add_checkpoint(run: Path, copy: RunDir, step: int, is_damaged: bool = False) -> None:
    name = f"step-{step:09d}"
    shutil.copytree(run / "checkpoints" / name, copy.path / "new")
    if is_damaged:
        weights = copy.path / "new" / "ema.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    (copy.path / "new").rename(copy.checkpoints / name)  # as the trainer does


def test_a_server_whose_log_is_not_read_any_more_takes_over_new_checkpoints(classifier: Path, tmp_path: Path) -> None:
    copy = copy_run(classifier, tmp_path / "run")
    add_checkpoint(classifier, copy, 22)
    command = [sys.executable, "-m", "reconv", "serve", str(copy.path), "--follow", "--backend", "eager", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        address = process.stderr.readline().removeprefix("listening on ").strip()
        while not process.stderr.readline().startswith("ready: "):
            pass
        process.stderr.close()
        add_checkpoint(classifier, copy, 66)
        deadline = time.monotonic() + START_S
        while " 66.0" not in _model_step(address):
            assert time.monotonic() < deadline, _model_step(address)
            time.sleep(0.1)
        process.terminate()
        assert process.wait() == 0


def _model_step(address: str) -> str:
    with urllib.request.urlopen(f"{address}/metrics", timeout=START_S) as page:
        lines = page.read().decode().splitlines()
    return next(line for line in lines if line.startswith("reconv_model_step{"))


def test_new_checkpoints_are_taken_over_without_a_dropped_or_wrong_answer(
    classifier: Path, tmp_path: Path, images: list[bytes]
) -> None:
    copy = copy_run(classifier, tmp_path / "run")
    expected: dict[int, Any] = {}
    for step in (22, 66):
        predictor = reconv.load(
            classifier / "checkpoints" / f"step-{step:09d}", device="cpu", backend="eager", log=lambda text: None
        )
        expected[step] = [predictor.predict([image])[0].to_dict()["classes"] for image in images]
    assert expected[22] != expected[66]
    answers: list[tuple[int, int, Any]] = []
    stop = threading.Event()

    def client(server: ServerProcess) -> None:
        connection = server.connect()
        number = 0
        while not stop.is_set():
            number = (number + 1) % len(images)
            answer = ask(connection, "POST", "/predict", images[number])
            answers.append((answer.status, number, answer.json))
        connection.close()

    log = tmp_path / "log.txt"
    args = (copy.path, "--follow", "--backend", "eager", "--max-batch", "1")
    with ServerProcess(log, *args, wait_until_ready=False) as server:
        check_that_it_waits(server, images[0])
        add_checkpoint(classifier, copy, 22)
        server.wait_until_ready()
        threads = [threading.Thread(target=client, args=(server,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            add_checkpoint(classifier, copy, 44, is_damaged=True)
            server.wait_for_log("skipped step-000000044, which cannot be used")
            add_checkpoint(classifier, copy, 66)
            server.wait_for_log("ready: .*step 66")
            num_before = len(answers)
            while len(answers) < num_before + 20:
                time.sleep(0.01)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert server.request("GET", "/models").json["models"][0]["step"] == 66
        metrics = server.request("GET", "/metrics").body.decode()
        assert 'reconv_model_reloads_total{model="run",result="loaded"} 1.0' in metrics
        assert 'reconv_model_step{model="run"} 66.0' in metrics
    assert {status for status, _, _ in answers} == {200}
    assert {answer["step"] for _, _, answer in answers} == {22, 66}
    for _, number, answer in answers:
        assert answer["predictions"][0]["classes"] == expected[answer["step"]][number]


def check_that_it_waits(server: ServerProcess, image: bytes) -> None:
    """A server whose run has no checkpoint yet is live and not ready."""
    server.wait_for_log("waiting for a checkpoint")
    assert server.request("GET", "/v2/health/live").status == 200
    assert server.request("GET", "/v2/health/ready").status == 503
    assert server.request("GET", "/v2/models/run/ready").status == 503
    assert server.request("GET", "/models").json == {"models": [{"name": "run", "ready": False}]}
    refused = server.predict(image)
    assert (refused.status, refused.json["error"]["code"]) == (503, "not_ready") and refused.headers["retry-after"]


def test_a_run_that_cannot_be_loaded_ends_the_server_with_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["serve", "missing", "--port", "0"])
    assert end.value.code == 4 and "no such run" in capsys.readouterr().err


def test_models_have_different_names() -> None:
    assert list(name_models(["runs/quickstart/1", "other=runs/quickstart/1", "a/b.safetensors"])) == [
        "quickstart",
        "other",
        "b",
    ]
    for runs in (["a=x", "a=y"], ["=x"], ["a/b=x"]):
        with pytest.raises(UsageError, match=r"named 'a'|not a name"):
            name_models(runs)


def test_a_token_file_without_tokens_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "two.txt").write_text(" first \n\nsecond")
    assert read_tokens(tmp_path / "two.txt") == (b"first", b"second")
    for name in ("empty.txt", "missing.txt"):
        with pytest.raises(UsageError, match="token file"):
            read_tokens(tmp_path / name)


def test_a_port_in_use_is_an_error() -> None:
    with open_port("127.0.0.1", 0) as taken, pytest.raises(ResourceError, match="cannot listen"):
        open_port("127.0.0.1", taken.getsockname()[1])
