"""The commands of docs/tutorials/endpoint.md run as they stand, in order, on a small set of generated photos."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from page_reader import ROOT, page_reader, write_flowers

PAGE = ROOT / "docs/tutorials/endpoint.md"


@pytest.mark.slow
def test_every_command_of_the_endpoint_page_works() -> None:
    assert shutil.which("curl"), "the page calls the endpoint with curl; install it, as in: apt-get install curl"
    write_flowers()
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    assert len(lines) == 12
    with page_reader() as reader:
        printed = {line: reader.type(line) for line in lines}
        reader.stop()
    answers = [json.loads(text) for line, text in printed.items() if line.startswith("curl") and "/predict" in line]
    found = [answer["predictions"][0]["classes"][0]["name"] for answer in answers]
    assert found == ["rose", "daisy"]
    assert "rose" in printed["python flowers-onnx/run.py new/rose.jpg"]
    assert {"model.onnx", "report.json", "run.py"} <= {file.name for file in Path("flowers-onnx").iterdir()}


def test_the_endpoint_page_shows_no_command_outside_of_the_blocks_that_are_run() -> None:
    text = re.sub(r"^```sh\n.*?^```", "", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert re.findall(r"^(?: {4})?(?:reconv|curl|python) .*", text, re.MULTILINE) == []
