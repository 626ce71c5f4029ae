"""The code of docs/how-to/python.md runs as it stands, block after block."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs/how-to/python.md"


def test_every_code_block_of_the_python_page_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 8
    names: dict[str, object] = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"python.md, block {number + 1}", "exec"), names)
    assert names["losses"] and len(names["predictions"]) == 2
    assert names["prediction"].label in names["model"].classes
    assert names["logits"].shape == (1, 10)
    assert Path("digits.safetensors").is_file()
