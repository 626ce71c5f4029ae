"""The table of `reconv recipes` has one line per preset on any terminal."""

from __future__ import annotations

from reconv.cli.commands.recipes import fit

TABLE = [
    ["recipe", "network", "length", "batch", "published", "measured by us", "published by"],
    ["a" * 42, "resnet50", "90ep", "2048", "top1 77.23 % ± 0.04", "not yet", "someone; " * 12],
    ["quickstart", "resnet8_cifar", "64000step", "32", "-", "top1 99.44 % ± 0.23 (n=7, 2026-11-15)", "-"],
]


def test_rows_fit_the_terminal_and_keep_name_and_results() -> None:
    for width in range(80, 260, 5):
        fitted = fit(TABLE, width)
        widths = [max(map(len, column)) for column in zip(*fitted, strict=True)]
        assert sum(widths) + 2 * (len(widths) - 1) <= width, width
        assert {"recipe", "published", "measured by us"} <= set(fitted[0])
        assert fitted[1][0] == "a" * 42, "names are never shortened"


def test_a_wide_terminal_shows_everything_and_a_narrower_one_cuts_the_source_first() -> None:
    assert fit(TABLE, 400) == TABLE
    cut = fit(TABLE, 180)
    assert cut[0] == TABLE[0]
    assert cut[1][-1].endswith("\N{HORIZONTAL ELLIPSIS}")
    assert [line[:-1] for line in cut] == [line[:-1] for line in TABLE]
    assert fit(TABLE, 100)[0] == ["recipe", "length", "batch", "published", "measured by us"]
