"""Manifests of `reconv submit --to kubernetes`: a real validator, and their pods as processes of this machine.

No test runs a cluster. The validator needs: pip install kubernetes-validate. The test with an object store needs what
`test_object_store.py` does.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from store_training import read_object, s3_variables, wait_for

from reconv.storage.object_stores.store import open_object_store

RECONV = [sys.executable, "-m", "reconv"]
LIMIT_S = 240
SETTINGS = ["length=400step", "schedule.warmup=0ep", "batch.group=16", "save.every=100000step", "evaluate.every=off"]
SETTINGS += ["engine.num_threads=1", "parallel.reduce=ordered", "log.every=20step"]
OPTIONS = ["--device", "cpu", *(word for setting in SETTINGS for word in ("--set", setting))]


def manifests(*options: str) -> Path:
    words = ["--to", "kubernetes", "--nodes", "2", "--devices-per-node", "2", "--image", "reconv:1.0"]
    subprocess.run([*RECONV, "submit", *words, *options, "--manifest", "job.yaml"], check=True)
    return Path("job.yaml")


def validate(file: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["kubernetes-validate", "--strict", str(file)], capture_output=True, text=True, check=False, timeout=LIMIT_S
    )


@pytest.mark.skipif(shutil.which("kubernetes-validate") is None, reason="pip install kubernetes-validate")
@pytest.mark.parametrize("place", ["volume", "store"])
def test_a_strict_validator_accepts_the_manifests_and_refuses_a_misspelled_field(place: str) -> None:
    Path("my.yaml").write_text("extends: quickstart\nseed: 3\n")
    options = ["--namespace", "ml", "--memory-per-node", "64G"]
    options += {
        "volume": ["--runs-claim", "runs", "--data-claim", "images"],
        "store": ["--out", "s3://b/runs/1", "--data", "s3://b/i", "--secret", "keys", "--service-account", "trainer"],
    }[place]
    file = manifests("my.yaml", "--set", "data.source=packed", *options)
    done = validate(file)
    assert done.returncode == 0, done.stderr
    kinds = ("configmap/my", "service/my", "job/my")
    assert all(f"passed for resource {kind}" in done.stdout + done.stderr for kind in kinds)
    text = file.read_text()
    for correct, wrong in (("backoffLimit", "backofLimit"), ("parallelism: 2", "parallelism: two")):
        file.write_text(text.replace(correct, wrong))
        assert validate(file).returncode != 0


def start_pods(file: Path, port: int, folder: Path = Path()) -> list[subprocess.Popen[bytes]]:
    """Start what the containers would run, with their variables; the pods find each other on this machine.

    Pods without a shared volume get folders of their own below `folder`.
    """
    job = next(document for document in yaml.safe_load_all(file.read_text()) if document["kind"] == "Job")
    container: dict[str, Any] = job["spec"]["template"]["spec"]["containers"][0]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    count = job["spec"]["completions"]
    folders = [folder / str(index) if "workingDir" in container else Path() for index in range(count)]
    for place in folders:
        place.mkdir(parents=True, exist_ok=True)
    variables.pop("RECONV_CACHE", None)
    return [
        subprocess.Popen(
            container["command"],
            cwd=folders[index],
            env={**os.environ, **variables, "JOB_COMPLETION_INDEX": str(index)},
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        for index in range(count)
    ]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def weights(folder: Path) -> bytes:
    return (folder / "checkpoints/step-000000400/model.safetensors").read_bytes()


def test_pods_that_are_evicted_save_and_their_replacements_finish_with_the_same_weights(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["--runs-claim", "runs", "--out", str(run), "--command", " ".join(RECONV), *OPTIONS]
    file = manifests("quickstart", *words)
    pods = start_pods(file, free_port())
    try:
        events, deadline_s = run / "events.jsonl", time.monotonic() + LIMIT_S
        while not (events.exists() and '"step":20,' in events.read_text()):
            assert time.monotonic() < deadline_s and all(pod.poll() is None for pod in pods)
            time.sleep(0.1)
        pods[1].send_signal(signal.SIGTERM)  # to one of them: all ranks stop together
        assert [pod.wait(LIMIT_S) for pod in pods] == [75, 75]
        pods = start_pods(file, free_port())
        assert [pod.wait(LIMIT_S) for pod in pods] == [0, 0]
    finally:
        for pod in pods:
            if pod.poll() is None:
                os.killpg(pod.pid, signal.SIGKILL)
    subprocess.run([*RECONV, "train", "quickstart", "--out", "one", "--quiet", *OPTIONS], check=True, timeout=LIMIT_S)
    assert weights(run) == weights(Path("one"))


def test_pods_without_a_shared_volume_take_their_run_back_from_an_object_store(
    tmp_path: Path, swift: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_variables(swift).items():  # as the keys of the Secret
        monkeypatch.setenv(name, value)
    url = "s3://runs/pods"
    file = manifests("quickstart", "--out", url, "--secret", "keys", "--command", " ".join(RECONV), *OPTIONS)
    pods = start_pods(file, free_port(), tmp_path / "first")
    local = "0/runs/s3/runs/pods"
    try:
        events = tmp_path / "first" / local / "events.jsonl"
        wait_for(lambda: events.exists() and '"step":20,' in events.read_text())
        pods[1].send_signal(signal.SIGTERM)
        assert [pod.wait(LIMIT_S) for pod in pods] == [75, 75]
        pods = start_pods(file, free_port(), tmp_path / "second")  # on other machines
        assert [pod.wait(LIMIT_S) for pod in pods] == [0, 0]
    finally:
        for pod in pods:
            if pod.poll() is None:
                os.killpg(pod.pid, signal.SIGKILL)
    subprocess.run([*RECONV, "train", "quickstart", "--out", "one", "--quiet", *OPTIONS], check=True, timeout=LIMIT_S)
    stored = read_object(open_object_store(url), "checkpoints/step-000000400/model.safetensors")
    assert stored == weights(tmp_path / "second" / local) == weights(Path("one"))
    assert not list((tmp_path / "second" / "1").rglob("*.safetensors"))  # rank 0 alone has the run
