"""Import paths: which are valid, what is imported when, and what errors say."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from reconv.core.custom_code import (
    CustomCodeError,
    anchor,
    build_object,
    code_errors,
    find_source,
    is_import_path,
    load_object,
    name_object,
    provide,
    require_trust,
    source_digests,
)
from reconv.core.errors import ExitCode, UsageError


@pytest.fixture(autouse=True)
def unchanged_imports() -> Iterator[None]:
    """Modules and search folders of one test are not those of the next."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def write(file: str, text: str) -> Path:
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize("text", ["a:b", "a.b_1:C.d", "./n.py:make", "/x y/n.py:make", "python:Net"])
def test_a_module_or_a_file_with_an_attribute_is_an_import_path(text: str) -> None:
    assert is_import_path(text)


@pytest.mark.parametrize("text", ["a", "a:", ":b", "a.:b", "1a:b", "a:b c", "a-b:c", "a:b:c", "n.py", "https://x"])
def test_other_text_is_not_an_import_path(text: str) -> None:
    assert not is_import_path(text)


def test_a_module_in_the_current_folder_and_a_file_anywhere_are_imported(tmp_path: Path) -> None:
    write("pkg_a/nets.py", "VALUE = 3")
    write(str(tmp_path / "elsewhere" / "nets_b.py"), "class Holder:\n    value = 4")
    assert load_object("pkg_a.nets:VALUE") == 3
    assert load_object(f"{tmp_path}/elsewhere/nets_b.py:Holder.value") == 4
    assert anchor("./nets_b.py:f", tmp_path) == f"{tmp_path}/nets_b.py:f"


def test_a_missing_module_is_an_error_that_lists_the_folders_searched(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no module no_such_pkg") as caught:
        load_object("no_such_pkg.nets:make")
    assert str(Path.cwd()) in caught.value.where
    with pytest.raises(UsageError, match="there is no file"):
        load_object(f"{tmp_path}/none.py:make")


def test_a_missing_attribute_is_an_error_that_lists_the_others() -> None:
    write("names_c.py", "def build(): ...")
    with pytest.raises(UsageError, match="no make in names_c") as caught:
        load_object("names_c:make")
    assert "build" in caught.value.why


def test_a_file_named_like_another_module_is_refused() -> None:
    write("json.py", "make = 1")
    with pytest.raises(UsageError, match="another module is called json"):
        load_object(f"{Path.cwd()}/json.py:make")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("x = 1\nraise KeyError('boo')", ":2 in <module>: raise KeyError('boo')"),
        ("import nothing_like_this_d", ":1 in <module>: import nothing_like_this_d"),
        ("x = = 1", "broken_d.py:1: x = = 1"),
    ],
)
def test_an_exception_during_the_import_shows_the_line_and_exits_with_2(text: str, line: str) -> None:
    write("broken_d.py", text)
    with pytest.raises(CustomCodeError) as caught:
        load_object("broken_d:make")
    assert line in caught.value.where
    assert caught.value.code == ExitCode.USAGE


def test_an_exception_in_loaded_code_is_reported_and_others_pass() -> None:
    write("pkg_e/__init__.py", "")
    write("pkg_e/inner.py", "def fail():\n    raise ValueError('inside')")
    write("pkg_e/nets.py", "from pkg_e import inner\ndef make():\n    inner.fail()")
    make = load_object("pkg_e.nets:make")
    with pytest.raises(CustomCodeError, match="raised ValueError: inside") as caught, code_errors():
        make()
    assert "inner.py:2 in fail: raise ValueError('inside')" in caught.value.where
    with pytest.raises(ZeroDivisionError), code_errors():
        1 / 0  # noqa: B018


def test_classes_are_called_with_options_and_functions_bound_to_them() -> None:
    write(
        "objects_f.py",
        "class Scale:\n    def __init__(self, by=1): self.by = by\ndef add(x, amount=1): return x + amount",
    )
    assert build_object("objects_f:Scale", {"by": 3}, "a thing").by == 3
    assert build_object("objects_f:add", {"amount": 5}, "a thing")(1) == 6
    with pytest.raises(UsageError, match="cannot be called with too"):
        build_object("objects_f:Scale", {"too": 3}, "a thing")


def test_a_source_is_found_without_importing_it() -> None:
    write("pkg_g/__init__.py", "raise SystemExit('imported')")
    write("pkg_g/deep/nets.py", "raise SystemExit('imported')")
    assert find_source("pkg_g.deep.nets:make") == Path.cwd() / "pkg_g/deep/nets.py"
    assert find_source("pkg_g.none:make") is None
    assert "pkg_g" not in sys.modules


def test_code_of_a_saved_recipe_is_trusted_only_when_the_user_says_so() -> None:
    source = write("nets_h.py", "raise SystemExit('imported')")
    references, asked = [("model.name", "nets_h:make")], []
    with pytest.raises(UsageError, match="names code that would be imported") as caught:
        require_trust(references, (), False, "runs/1")
    assert str(source) in caught.value.why and "--trust-code" in caught.value.hint
    require_trust(references, (), True, "runs/1")
    require_trust(references, (), lambda sources: not asked.extend(sources), "runs/1")
    assert [(s.field, s.file) for s in asked] == [("model.name", Path.cwd() / "nets_h.py")]
    with pytest.raises(UsageError):
        require_trust(references, (), lambda sources: False, "runs/1")


def test_an_object_from_python_replaces_the_import() -> None:
    class Local:
        pass

    name = name_object(Local, {})
    assert name == "python:Local"
    with pytest.raises(UsageError, match="was passed from Python"):
        load_object(name)
    provide({name: Local})
    assert load_object(name) is Local
    require_trust([("model.name", name)], (), False, "runs/1")
    assert name_object(Path, {}) == f"{Path.__module__}:Path"
    first, second = Local(), Local()
    assert name_object(second, {name_object(first, {}): first}) == "python:Local_2"


def test_digests_cover_the_loaded_files_of_the_package() -> None:
    write("pkg_i/__init__.py", "")
    write("pkg_i/nets.py", "from pkg_i import parts\nmake = 1")
    parts = write("pkg_i/parts.py", "x = 1")
    write("pkg_i/unused.py", "")
    load_object("pkg_i.nets:make")
    before = source_digests(["pkg_i.nets:make"])
    assert sorted(before) == ["pkg_i/__init__.py", "pkg_i/nets.py", "pkg_i/parts.py"]
    parts.write_text("x = 2")
    after = source_digests(["pkg_i.nets:make"])
    assert [name for name in before if before[name] != after[name]] == ["pkg_i/parts.py"]


def test_digests_are_of_files_behind_links() -> None:
    """The folder of the package is a link, and one of its files is a link to a file elsewhere."""
    write("real/nets.py", "from pkg_j import linked, parts\nmake = 1")
    write("real/parts.py", "")
    Path("real/linked.py").symlink_to(write("elsewhere.py", "").absolute())
    Path("pkg_j").symlink_to("real")
    load_object("pkg_j.nets:make")
    assert sorted(source_digests(["pkg_j.nets:make"])) == ["real/nets.py", "real/parts.py"]
