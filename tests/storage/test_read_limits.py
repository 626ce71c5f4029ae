"""The table of limits in docs/how-to/data.md."""

from __future__ import annotations

import re
from pathlib import Path

from reconv.data.decode.pillow import MAX_PIXELS
from reconv.logging.json_lines import MAX_FILE_BYTES, MAX_LINE_BYTES, MAX_LINES
from reconv.storage import read_limits

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "data.md"
_UNITS = {"MiB": 1 << 20, "GiB": 1 << 30}


def test_the_table_has_exactly_the_limits_of_the_code() -> None:
    table = _PAGE.read_text(encoding="utf-8").partition("## Limits")[2].partition("\n## ")[0]
    found = re.findall(r"([\d,]+)(?: (MiB|GiB))?", "\n".join(re.findall(r"\| ([^|]+) \|$", table, re.MULTILINE)))
    listed = {int(number.replace(",", "")) * _UNITS.get(unit, 1) for number, unit in found if number.strip(",")}
    own = {value for name, value in vars(read_limits).items() if name.isupper() and isinstance(value, int)}
    assert listed == (own - {read_limits.MIB, read_limits.GIB}) | {MAX_FILE_BYTES, MAX_LINES, MAX_LINE_BYTES, 1 << 20}
    assert MAX_PIXELS == read_limits.IMAGE_PIXELS
