"""The commands of docs/how-to/serve.md work as they stand."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from server_process import ServerProcess

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "serve.md"
COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for line in block.splitlines()
    if "curl" in line
]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("command", COMMANDS)
def test_the_curl_lines_of_the_page_succeed(
    server: ServerProcess, images: list[bytes], tmp_path: Path, command: str
) -> None:
    (tmp_path / "digit.png").write_bytes(images[0])
    (tmp_path / "other.png").write_bytes(images[1])
    (tmp_path / "token.txt").write_text("token")
    (tmp_path / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\nmax-time=20\nnoproxy=*\n")
    script = command.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")
    environment = {"CURL_HOME": str(tmp_path), "PATH": "/usr/local/bin:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0 and len(done.stdout) > 10, done.stdout + done.stderr


def test_every_endpoint_of_the_api_is_on_the_page() -> None:
    from reconv.serve.http import openapi

    text = PAGE.read_text()
    assert len(COMMANDS) >= 12
    for path in openapi.DOCUMENT["paths"]:
        assert path.replace("{name}", "quickstart") in text, path
