from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reconv.recipe.load import document

PLAIN = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text()
KEYS = st.text(min_size=1, max_size=8)
NESTED = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=6
)
TREES = st.dictionaries(KEYS, NESTED, max_size=4)


@settings(max_examples=60, deadline=None)
@given(TREES)
def test_written_trees_are_read_back(tree: dict) -> None:
    read = document.read(document.write(tree))
    assert read.problems == []
    assert read.tree == tree


@settings(max_examples=60, deadline=None)
@given(st.text())
def test_the_reader_never_raises(text: str) -> None:
    document.read(text)
    document.read_value(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4), ("1.e3", 1000.0), (".5", 0.5), ("-.inf", -math.inf), ("0x1F", 31), ("0o17", 15), ("017", 17),
        ("1_000", "1_000"), ("12:30:45", "12:30:45"), ("2020-01-01", "2020-01-01"), ("no", "no"), ("Off", "Off"),
        ("y", "y"), ("true", True), ("~", None), ("", None), ("90ep", "90ep"), ("10%", "10%"), ("[1, a]", [1, "a"]),
        ("a: b", "a: b"), ("- 1", "- 1"), ("'1'", "1"), ("*x", "*x"), ("1\nvalue2: 3", "1\nvalue2: 3"),
    ],
)  # fmt: skip
def test_a_value_is_read_as_yaml(text: str, value: object) -> None:
    read = document.read_value(text)
    assert read == value
    assert type(read) is type(value)


def test_every_key_has_its_line_number() -> None:
    read = document.read("# c\na:\n  b: 1\n\n  c: [1,\n    2]\nd: {e: 2}\n")
    assert read.lines == {
        ("a",): 2, ("a", "b"): 3, ("a", "c"): 5, ("d",): 7, ("d", "e"): 7
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "given twice (first on line 1)"),
        ("a: &x 1\nb: *x\n", 2, "aliases"),
        ("a:\n  b: !!python/name:os.system x\n", 2, "tags"),
        ("a: !!int x\n", 1, "cannot be read as int"),
        ("a: 1\n- b\n", 2, "not YAML"),
        ("a:\n\tb: 1\n", 2, "indent with spaces"),
        ("a: {b: 1", 1, "got the end of the file"),
        ("- a\n", 1, "key: value"),
        ("a: 1\n? [x]\n: 2\n", 2, "a key must be text"),
        ("a: 1\n---\nb: 2\n", 2, "not YAML"),
        ("a: 1\nb: \x01\n", 2, "not YAML"),
        ("a: " + "[" * 5000, 1, "nested too deeply"),
        ("a: " + "9" * 5000, 1, "cannot be read as int"),
    ],
)
def test_a_syntax_problem_has_its_line_number(text: str, line: int, words: str) -> None:
    (problem,) = document.read(text).problems
    assert problem.line == line
    assert words in problem.text
