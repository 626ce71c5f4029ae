"""Generated pages and tables of the documentation agree with the code, and a page requests nothing from elsewhere."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import cli_page
import coverage_page
import events_page
import outside_requests
import pytest
import recipe_fields_page

from reconv.core.errors import ExitCode
from reconv.recipe.field_reference import FieldReference, field_references

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
# Set for other packages, or read only to tell what others have set.
INTERNAL = {"CI", "NNCF_CI", "KINETO_LOG_LEVEL", "TORCH_CPP_LOG_LEVEL", "THP_MEM_ALLOC_ENABLE"}
INTERNAL |= {"MLFLOW_DISABLE_TELEMETRY", "WANDB_ERROR_REPORTING"}


def test_every_recipe_field_is_on_its_page_with_the_options_it_replaces() -> None:
    page = recipe_fields_page.render()
    rows = dict(re.findall(r'^\| <a id="([\w.]+)"></a>(.*)$', page, re.MULTILINE))
    assert set(rows) == {name for name, field in field_references().items() if not field.is_section}
    assert "`--label-smoothing`" in rows["loss.label_smoothing"]
    assert "NV timm `--mixup`, GC torchvision `--mixup-alpha`" in rows["augment.mixup.alpha"]
    assert "(seconds)" in rows["parallel.heartbeat_timeout_s"] and "`30`" in rows["parallel.heartbeat_timeout_s"]


def test_a_field_without_a_description_fails_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = {"batch.new": FieldReference("batch.new", "", "a number", (), "1", False)}
    monkeypatch.setattr(recipe_fields_page, "field_references", lambda: {**field_references(), **silent})
    with pytest.raises(recipe_fields_page.MissingDescriptionError, match=r"batch\.new"):
        recipe_fields_page.render()


def test_every_flag_is_on_the_coverage_page_as_migrate_translates_it() -> None:
    page = coverage_page.render()
    items = [item for rows in coverage_page.outcomes().values() for item in rows]
    assert len(items) > 500
    missing = [item for item in items if item.status == "not supported"]
    for item in items:
        assert f"`{item.typed}`" in page
        assert item in missing or all(f"`{name}`" in page for name in item.flag.names)
    assert f"**{len(missing)} are not supported**" in page
    listed = page.partition("## Not supported")[2].partition("\n## ")[0]
    assert listed.count("\n| `") == len(missing)
    assert "| `--force-recompile` | no effect |" in page and "`--train_offset=4`" in listed
    [mini] = re.findall(r"^\| `--mini_imagenet` \| derived \| (.*) \|$", page, re.MULTILINE)
    assert r"data.subset\_percent=10" in mini


def test_a_capability_names_fields_and_commands_that_exist() -> None:
    rows = coverage_page.capabilities()
    assert len(rows) > 30
    fields = field_references()
    for row in rows:
        for name in re.findall(r"(?<![\w/])[a-z]+\.[a-z_.]+(?=[ ,;)]|$)", row.get("here", "")):
            assert name.rstrip(".") in fields or name.startswith("model.options"), (row["name"], name)


def test_every_command_and_event_is_on_its_page() -> None:
    commands, events = cli_page.render(), events_page.render()
    assert {"train", "serve", "data"} <= set(re.findall(r"^## reconv (\w+)$", commands, re.MULTILINE))
    assert "\\[1&lt;=x&lt;=256\\]" in commands
    assert re.search(r"^\| `--epochs N` \| Number of epochs\.", commands, re.MULTILINE)
    assert "| `lr` | `float` |" in events and "| `images_per_s` | `float \\| None` |" in events


def test_the_table_of_exit_codes_has_those_of_the_code() -> None:
    table = (DOCS / "reference" / "exit-codes.md").read_text().partition("## Exit codes")[2].partition("## ")[0]
    listed = {int(code) for cell in re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE) for code in cell.split(",")}
    assert listed == {int(code) for code in ExitCode}


def test_every_variable_that_the_code_reads_is_listed() -> None:
    page = (DOCS / "reference" / "environment-variables.md").read_text()
    source = "\n".join(file.read_text() for file in (ROOT / "reconv").rglob("*.py"))
    read = set(re.findall(r'environ(?:\.\w+\(|\[)\s*"([A-Z][A-Z0-9_]+)"', source))
    read |= set(re.findall(r'"(RECONV_[A-Z_]+)"', source))
    assert len(read) > 12
    assert sorted(name for name in read - INTERNAL if f"`{name}`" not in page) == []


def test_every_python_name_of_the_docs_exists() -> None:
    pages = [ROOT / "README.md", *DOCS.rglob("*.md"), *DOCS.glob("generators/*_page.py")]
    text = "\n".join(page.read_text() for page in pages)
    names = {name for name in re.findall(r"\breconv(?:\.[a-zA-Z_]\w*)+(?=[`(])", text) if not name.endswith(".json")}
    assert len(names) > 8
    for name in sorted(names):
        pkgutil.resolve_name(name)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.html", '<script src="https://cdn.example/x.js"></script>'),
        ("a.html", '<link rel="stylesheet" href="//fonts.example/css">'),
        ("a.html", '<img srcset="https://cdn.example/x.png 2x">'),
        ("a.html", '<pre class="mermaid"></pre>'),
        ("a.html", "<script>fetch('https://api.example/v1')</script>"),
        ("a.css", "@import url('https://fonts.example/css');"),
        ("a.css", "body { background: url(//cdn.example/x.png) }"),
        ("a.js", 'const w = new Worker("https://cdn.example/w.js")'),
    ],
)
def test_a_request_to_another_host_is_found(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "index.html").write_text('<a href="https://example.org">a link</a><img src="x.png">')
    assert outside_requests.outside_requests(tmp_path) == []
    (tmp_path / name).write_text(text)
    [found] = outside_requests.outside_requests(tmp_path)
    assert found.startswith(f"{name}: ")
